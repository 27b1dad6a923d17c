"""Methods by name: which compressor, communicator and residual rule a published method consists of.

The files of compressors and communicators declare them (``spardl.protocol.programs``), and the same names choose
them on the command line of the trainer. Other packages add theirs as entry points of the group ``spardl.methods``: a
name, and something that makes a :class:`Method` from keyword arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from spardl.basics.checks import check_choice
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor
from spardl.method import registry
from spardl.method.method import Method
from spardl.method.momentum import AutoMomentum, Momentum, OptimizerMomentum
from spardl.method.names import MethodName
from spardl.method.residuals import ErrorFeedback, Residual
from spardl.method.warmup import Warmup
from spardl.protocol.programs import Combination
from spardl.vector.wire import Wire

__all__ = [
    "GROUP",
    "MOMENTUM_OPTIONS",
    "RECIPES",
    "Option",
    "Recipe",
    "find_recipe",
    "make_method",
    "method_names",
    "method_options",
    "published",
    "recipes",
]


# Entry points of other packages.
GROUP = "spardl.methods"
# What is chosen where papers leave a choice, or can be bettered.
RECIPES = ("recommended", "published")

# Arguments of attach() and Synchronizer, whose misspelt forms arrive among a method's options.
_OF_HANDLES = ("bucket_mb", "clip_norm", "find_unused", "group", "optimizer", "scaler", "schedule", "timeout")

T = TypeVar("T")


class _Only(NamedTuple):
    """An option that only some momenta have.

    Attributes:
        field: of theirs.
        lacks: what is said of others.
    """

    field: str
    lacks: str


MOMENTUM_OPTIONS: Mapping[str, _Only] = MappingProxyType(
    {
        "momentum_factor": _Only("factor", "has no factor"),
        "beta2": _Only("beta2", "never is Adam's"),
        "update_scale": _Only("update_scale", "never is Adam's"),
    }
)


@dataclass(frozen=True)
class Recipe:
    """The parts of a method.

    Args:
        compressor: what one worker sends.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed.
        dense_steps: synchronizations that are dense at first, unless it is called with another number.
        compressor_options: those that differ from the compressor's own defaults.
        communicator_options: those that differ from the communicator's own defaults.
        faster: another communicator, for handles; see :class:`Combination`.
    """

    compressor: type[Compressor]
    communicator: type[Communicator[Any]]
    residual: type[Residual]
    momentum: type[Momentum] = OptimizerMomentum
    dense_steps: int = 0
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    communicator_options: Mapping[str, Any] = field(default_factory=dict)
    faster: str | None = None

    @classmethod
    def of(cls, declared: Combination) -> Recipe:
        """The parts that a ``declared`` method names.

        Raises:
            ConfigError: if there is no such part.
        """
        return cls(
            _part(declared, "compressor", registry.compressors()),
            _part(declared, "communicator", registry.communicators()),
            _part(declared, "residual", registry.residual_rules()),
            _part(declared, "momentum", registry.momentum_rules()),
            declared.dense_steps,
            declared.compressor_options,
            declared.communicator_options,
            declared.faster,
        )

    def __call__(
        self,
        *,
        communicator: str | None = None,
        residual: str | None = None,
        residual_decay: float | None = None,
        wire: str = "exact",
        dense_steps: int | None = None,
        momentum_factor: float | None = None,
        beta2: float | None = None,
        update_scale: str | None = None,
        recipe: str = "recommended",
        **options: Any,
    ) -> Method:
        """Makes the method.

        Args:
            communicator: another one, by name; ``None``: the method's own.
            residual: another rule, by name; ``None``: the method's own.
            residual_decay: share of the residual that is left in the next step; ``None``: all of it.
            wire: how values travel in sparse messages: ``exact``, ``float32``, ``bfloat16``, ``float16``, ``int8``,
                ``int4`` or ``int2``; see :class:`Wire`.
            dense_steps: how many steps are dense at first; ``None``: as many as the method has.
            momentum_factor: share of each worker's velocity that is left in the next step, at least 0 and below 1, for
                methods with a momentum of their own (``dgc``); ``None`` is the rule's default. Not to be mixed up with
                ``factor``, an option of some compressors.
            beta2: share of the squares that each worker keeps in a step, where ``optimizer=`` is Adam or AdamW;
                ``None``: the optimizer's, at most 0.99 where ``scope=auto`` takes a share of each chunk, else 0.95.
            update_scale: what each worker's update is multiplied by, where ``optimizer=`` is Adam or AdamW:
                ``none``, or ``measured``, so that dense training's learning rate fits; see :class:`AdamMomentum`.
            recipe: ``recommended``, or ``published``: as its paper has it, with the optimizer's state left after
                averaging.
            options: of the compressor and the communicator, such as ``density`` and ``teams``; one that both have goes
                to both.

        Returns:
            The method.

        Raises:
            ConfigError: if an option is unknown, of a wrong type or out of range, or the parts do not fit.
        """
        adds_up = self._communicator(communicator)
        self._check_known(options, adds_up)
        check_choice("recipe", recipe, RECIPES)
        rule = self.residual
        if residual is not None:
            rules = registry.residual_rules()
            check_choice("residual", residual, rules)
            rule = rules[residual]
        return Method(
            _make(self.compressor, {**self.compressor_options, **options}),
            _make(adds_up, {**(self.communicator_options if adds_up is self.communicator else {}), **options}),
            _residual(rule, residual_decay),
            _momentum(
                published(self.momentum) if recipe == "published" else self.momentum,
                {"momentum_factor": momentum_factor, "beta2": beta2, "update_scale": update_scale},
            ),
            Warmup(self.dense_steps if dense_steps is None else dense_steps),
            Wire(wire),
        )

    def _communicator(self, name: str | None) -> type[Communicator[Any]]:
        if name is None:
            return self.communicator
        known = registry.communicators()
        check_choice("communicator", name, known)
        return known[name]

    def _check_known(self, options: Mapping[str, Any], communicator: type[Communicator[Any]]) -> None:
        known = sorted({*_options(self.compressor), *_options(communicator)})
        more = [option for option, each in MOMENTUM_OPTIONS.items() if hasattr(self.momentum, each.field)]
        general = ("communicator", "residual", "residual_decay", "wire", "dense_steps", "recipe")
        _refuse(set(options) - set(known), [*known, *more, *general])


def _part(declared: Combination, group: str, parts: Mapping[str, T]) -> T:
    name = getattr(declared, group)
    check_choice(f"{group} of the method {declared.name}", name, parts)
    return parts[name]


@cache
def recipes() -> Mapping[str, Recipe]:
    """The methods of this library, by name.

    Raises:
        ConfigError: if two files declare the same name, or one declares parts that are not there.
    """
    return MappingProxyType({name: Recipe.of(declared) for name, declared in registry.combinations().items()})


def method_names() -> list[str]:
    """Every method that ``make_method`` knows, those of other packages included.

    Example:
        >>> [name for name in spardl.method_names() if name.startswith("oktopk")]
        ['oktopk', 'oktopk_bert', 'oktopk_lstm', 'oktopk_vgg']
    """
    return sorted({*recipes(), *(point.name for point in entry_points(group=GROUP))})


def make_method(method: MethodName | str | Method, **options: Any) -> Method:
    """A method by its name, or the very method that is given.

    Args:
        method: a name of ``method_names()``, or a method.
        options: of its parts, for instance ``density=0.01``, ``teams=2``; ``method_options`` lists them.

    Returns:
        The method.

    Raises:
        ConfigError: if the name or an option is unknown, a value of a wrong type or out of range, or a whole method has
            options.

    Example:
        >>> spardl.make_method("spardl", density=0.01, teams=2).communicator
        SparDL(teams=2, gather='bruck')
    """
    if isinstance(method, Method):
        if options:
            raise ConfigError(f"{', '.join(sorted(options))}: a method that is given whole takes no options")
        return method
    recipe = find_recipe(method)
    return recipe(**options) if isinstance(recipe, Recipe) else _theirs(method, recipe, options)


def find_recipe(name: str) -> Callable[..., Method]:
    """What makes a method from its options.

    Args:
        name: of the method.

    Returns:
        A :class:`Recipe`, or what another package has under that name.

    Raises:
        ConfigError: if there is no such method, or that package cannot be imported.
    """
    if isinstance(name, (Compressor, Communicator)):
        raise ConfigError(
            f"method must be a name or a spardl.Method, got {name!r}; combine parts with spardl.Method(compressor, "
            "communicator, residual)"
        )
    points = entry_points(group=GROUP, name=name) if isinstance(name, str) else ()
    if not isinstance(name, str) or (name not in recipes() and not points):
        hint = _did_you_mean(name, method_names())
        raise ConfigError(f"there is no method {name!r}; use one of {', '.join(method_names())}{hint}")
    return recipes()[name] if name in recipes() else _loaded(next(iter(points)))


def _loaded(point: EntryPoint) -> Callable[..., Method]:
    try:
        recipe: Callable[..., Method] = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the method {point.name} cannot be loaded from {point.value}: {error}") from error
    return recipe


def _theirs(name: str, recipe: Callable[..., Method], options: Mapping[str, Any]) -> Method:
    """A method of another package, which need not check what it is called with."""
    parameters = signature(recipe).parameters.values()
    if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        known = [each.name for each in parameters]
        _refuse(set(options) - set(known), known)
    made = recipe(**options)
    if not isinstance(made, Method):
        raise ConfigError(f"the method {name} made a {type(made).__name__}, not a spardl.Method; ask who provides it")
    return made


def _refuse(unknown: set[str], known: list[str]) -> None:
    if unknown:
        *most, last = known or ["none"]
        listed = f"{', '.join(most)} and {last}" if most else last
        hint = next(filter(None, (_did_you_mean(each, [*known, *_OF_HANDLES]) for each in sorted(unknown))), "")
        raise ConfigError(f"{', '.join(sorted(unknown))} is no option of this method; it has {listed}{hint}")


def _did_you_mean(word: Any, known: Iterable[str]) -> str:
    """A hint at the known word that is most similar; empty if none is."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.75) if isinstance(word, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def _options(kind: type[Any]) -> list[str]:
    return [each.name for each in fields(kind) if each.init]


def _make(kind: type[Any], given: Mapping[str, Any]) -> Any:
    return kind(**{name: given[name] for name in _options(kind) if name in given})


def _residual(rule: type[Residual], decay: float | None) -> Residual:
    if decay is None:
        return rule()
    if issubclass(rule, ErrorFeedback):
        return rule(decay=decay)
    raise ConfigError(f"residual_decay={decay!r}: residual={rule.name} carries nothing over; leave it out")


def published(rule: type[Momentum]) -> type[Momentum]:
    """What a recommended ``rule`` is in the method's paper: there, the optimizer keeps its state."""
    return OptimizerMomentum if issubclass(rule, AutoMomentum) else rule


def _momentum(rule: type[Any], given: Mapping[str, float | str | None]) -> Momentum:
    values = {}
    for option, value in given.items():
        if value is None:
            continue
        field_of, lacks = MOMENTUM_OPTIONS[option]
        if not hasattr(rule, field_of):
            raise ConfigError(
                f"{option}={value!r}: the momentum of this method, {rule.name}, {lacks}; leave it out, and set the "
                "optimizer's"
            )
        values[field_of] = value
    made: Momentum = rule(**values)
    return made


# The options of a method, as its parts declare and describe them.


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
