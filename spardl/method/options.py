"""The options of a method, as its parts declare and describe them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from spardl.method.names import MethodName
from spardl.method.recipes import MOMENTUM_OPTIONS, Recipe, find_recipe

__all__ = ["Option", "method_options"]


class Option(NamedTuple):
    """What can be chosen of a method.

    Attributes:
        name: of the keyword argument.
        part: whose it is: of the ``compressor``, of the ``communicator`` or of the whole ``method``.
        type: as annotated; empty if another package has not said it.
        default: what holds if it is left out; ``inspect.Parameter.empty`` if another package wants it to be given.
        about: what it does, in one line; empty if another package has not said it.
    """

    name: str
    part: str
    type: str
    default: Any
    about: str


def method_options(method: MethodName | str) -> list[Option]:
    """The options of a method, those that set it apart first.

    One that both compressor and communicator have is there twice, with the default of each; what is given goes to both.

    Args:
        method: a name of ``method_names()``.

    Returns:
        Its options.

    Raises:
        ConfigError: if there is no such method.

    Example:
        >>> for option in spardl.method_options("spardl"):
        ...     print(f"{option.name}: {option.type} = {option.default!r}")
        density: float = 0.01
        scope: str = 'auto'
        bucket_entries: int = 1048576
        warmup_steps: int = 0
        warmup_density: float = 0.25
        teams: int = 1
        gather: str = 'bruck'
        communicator: str | None = 'spardl'
        residual: str | None = 'global'
        residual_decay: float | None = None
        wire: str = 'exact'
        dense_steps: int | None = 0
        beta2: float | None = None
        update_scale: str | None = 'none'
        recipe: str = 'recommended'
    """
    recipe = find_recipe(method)
    return list(_of_recipe(recipe) if isinstance(recipe, Recipe) else _of_call(recipe))


def _of_recipe(recipe: Recipe) -> Iterator[Option]:
    for part, kind, values in (
        ("compressor", recipe.compressor, recipe.compressor_options),
        ("communicator", recipe.communicator, recipe.communicator_options),
    ):
        about = _described(*reversed(kind.__mro__))
        for each in fields(kind):  # type: ignore[arg-type]
            if each.init:
                default = values.get(each.name, each.default)
                yield Option(each.name, part, str(each.type), default, about.get(each.name, ""))
    defaults: dict[str, Any] = {
        "communicator": recipe.communicator.name,
        "residual": recipe.residual.name,
        "dense_steps": recipe.dense_steps,
    }
    for name, only in MOMENTUM_OPTIONS.items():
        if hasattr(recipe.momentum, only.field):
            defaults[name] = getattr(recipe.momentum, only.field)
    for option in _of_call(recipe.__call__):
        if option.name not in MOMENTUM_OPTIONS or option.name in defaults:
            yield option._replace(default=defaults.get(option.name, option.default))


def _of_call(make: Callable[..., Any]) -> Iterator[Option]:
    """What a function says of its own arguments."""
    about = _described(make)
    for each in inspect.signature(make).parameters.values():
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            kind = "" if each.annotation is each.empty else inspect.formatannotation(each.annotation)
            yield Option(each.name, "method", kind.strip("'"), each.default, about.get(each.name, ""))


def _described(*targets: Any) -> dict[str, str]:
    """What docstrings in Google's style say of arguments, a line for each; later ones have the last word."""
    found: dict[str, str] = {}
    for target in targets:
        text = inspect.cleandoc(vars(target).get("__doc__") or "" if inspect.isclass(target) else target.__doc__ or "")
        section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", text, flags=re.MULTILINE)
        entries = re.findall(
            r"^    \**(\w+)(?: \(.*?\))?: (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE
        )
        found |= {name: " ".join(words.split()) for name, words in entries}
    return found
