"""Methods by name: ``make_method``, and the parts and default options of each published method.

The modules of compressors and communicators declare their methods (``spardl.protocol.programs.Combination``); the
command line of the trainer uses the same names. Other packages add methods as entry points of the group
``spardl.methods``: a name, and a callable that returns a :class:`Method` for keyword arguments.
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
    "muon_defaults",
    "published",
    "recipes",
]


# Group of the entry points in other packages.
GROUP = "spardl.methods"
# Variants of a method: with the improvements of this library, or as published.
RECIPES = ("recommended", "published")

# Arguments of handles, and which have them; misspelled ones are passed on as options of the method.
_HANDLE_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("bucket_mb", "ranks_per_node", "scaler", "schedule"), "attach() and Synchronizer()"),
        **dict.fromkeys(("clip_norm", "optimizer", "timeout"), "attach(), attach_fsdp() and Synchronizer()"),
        "find_unused": "Synchronizer(); with attach(), pass find_unused_parameters=True to DistributedDataParallel",
        "group": "attach_fsdp() and Synchronizer(); with attach(), pass process_group= to DistributedDataParallel",
    }
)

T = TypeVar("T")


class _MomentumOption(NamedTuple):
    """An option that only some momentum rules have.

    Attributes:
        field: Attribute of the rule that the option sets.
        lacks: End of the error message for rules without it, such as ``has no factor``.
    """

    field: str
    lacks: str


MOMENTUM_OPTIONS: Mapping[str, _MomentumOption] = MappingProxyType(
    {
        "momentum_factor": _MomentumOption("factor", "has no factor"),
        "beta2": _MomentumOption("beta2", "never uses Adam"),
        "update_scale": _MomentumOption("update_scale", "never uses Adam"),
    }
)


@dataclass(frozen=True)
class Recipe:
    """The parts of a method and their default options; calling a recipe with options returns a :class:`Method`.

    Args:
        compressor: Compressor of each worker's gradient.
        communicator: Algorithm that sums the compressed gradients.
        residual: Rule for the entries that are not sent: which of them are added to the next gradient.
        momentum: Rule for the vector to compress: the gradient, or a momentum of it.
        dense_steps: Default number of uncompressed (dense) synchronizations at the beginning.
        compressor_options: Options that differ from the defaults of the compressor.
        communicator_options: Options that differ from the defaults of the communicator.
        faster: Name of a faster communicator, which sums in another order. Handles (``attach`` and others) use it
            unless the caller names a communicator; ``None`` if there is none.
        muon_options: Options that replace the defaults in handles whose ``optimizer=`` contains Muon.
    """

    compressor: type[Compressor]
    communicator: type[Communicator[Any, Any]]
    residual: type[Residual]
    momentum: type[Momentum] = OptimizerMomentum
    dense_steps: int = 0
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    communicator_options: Mapping[str, Any] = field(default_factory=dict)
    faster: str | None = None
    muon_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, declared: Combination) -> Recipe:
        """Returns the recipe of a ``declared`` method: looks up the classes of the parts that it names.

        Raises:
            ConfigError: If a part does not exist.
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
            declared.muon_options,
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
        """Makes the method with the given options.

        Args:
            communicator: Name of another communicator; ``None`` uses that of the method.
            residual: Name of another residual rule; ``None`` uses that of the method.
            residual_decay: Share of the residual that is added to the next gradient; ``None`` adds all of it, except
                with local updates of Adam or Muon (0.98).
            wire: Number format of the values in sparse messages: ``exact``, ``float32``, ``bfloat16``, ``float16``,
                ``int8``, ``int4`` or ``int2``; see :class:`Wire`.
            dense_steps: Number of uncompressed (dense) steps at the beginning; ``None`` uses that of the method.
            momentum_factor: Momentum factor (share of the velocity that remains in the next step) that each worker
                applies before compression, at least 0 and below 1. Only ``dgc`` and methods with ``momentum=auto``
                accept it, the latter if ``optimizer=`` is SGD. There, it must not exceed the optimizer's momentum, and
                a smaller value is compensated by larger updates (:class:`SgdMomentum`). ``None`` uses the default of
                the momentum rule. Not to be confused with ``factor``, an option of some compressors.
            beta2: Adam's beta2 (share of the running mean of squared gradients that remains in the next step) on each
                worker, if ``optimizer=`` is Adam or AdamW. ``None`` uses the optimizer's, but at most 0.99 if
                ``scope=auto`` means chunks or Muon's updates are sent as codes, and at most 0.95 otherwise.
            update_scale: Whether to multiply each worker's update by a factor if ``optimizer=`` is Adam, AdamW or Muon:
                ``none`` does not; ``measured`` does, so that the learning rate of dense training is suitable (see
                :class:`AdamMomentum`). ``None`` means ``measured`` in handles (``attach`` and others).
            recipe: ``recommended`` (the library's default), or ``published``: as in the paper, with momentum in the
                optimizer, after averaging.
            options: Options of the compressor and the communicator, such as ``density`` and ``teams``; an option that
                both parts have is passed to both.

        Returns:
            The method.

        Raises:
            ConfigError: If an option is unknown, has a wrong type or is out of range, or parts are incompatible.
        """
        summing = self._communicator(communicator)
        self._check_known(options, summing)
        check_choice("recipe", recipe, RECIPES)
        rule = self.residual
        if residual is not None:
            rules = registry.residual_rules()
            check_choice("residual", residual, rules)
            rule = rules[residual]
        return Method(
            _make(self.compressor, {**self.compressor_options, **options}),
            _make(summing, {**(self.communicator_options if summing is self.communicator else {}), **options}),
            _residual(rule, residual_decay),
            _momentum(
                published(self.momentum) if recipe == "published" else self.momentum,
                {"momentum_factor": momentum_factor, "beta2": beta2, "update_scale": update_scale},
            ),
            Warmup(self.dense_steps if dense_steps is None else dense_steps),
            Wire(wire),
        )

    def _communicator(self, name: str | None) -> type[Communicator[Any, Any]]:
        if name is None:
            return self.communicator
        known = registry.communicators()
        check_choice("communicator", name, known)
        return known[name]

    def _check_known(self, options: Mapping[str, Any], communicator: type[Communicator[Any, Any]]) -> None:
        known = sorted({*_options(self.compressor), *_options(communicator)})
        more = [option for option, each in MOMENTUM_OPTIONS.items() if hasattr(self.momentum, each.field)]
        general = ("communicator", "residual", "residual_decay", "wire", "dense_steps", "recipe")
        _reject_unknown(set(options) - set(known), [*known, *more, *general])


def _part(declared: Combination, group: str, parts: Mapping[str, T]) -> T:
    name = getattr(declared, group)
    check_choice(f"{group} of the method {declared.name}", name, parts)
    return parts[name]


@cache
def recipes() -> Mapping[str, Recipe]:
    """Returns the recipes of this library's methods by name.

    Raises:
        ConfigError: If two modules declare the same name, or a method declares parts that do not exist.
    """
    return MappingProxyType({name: Recipe.of(declared) for name, declared in registry.combinations().items()})


def method_names() -> list[str]:
    """Returns the names of all methods that ``make_method`` knows, including those of other packages.

    Example:
        >>> [name for name in spardl.method_names() if name.startswith("oktopk")]
        ['oktopk', 'oktopk_bert', 'oktopk_lstm', 'oktopk_vgg']
    """
    return sorted({*recipes(), *(point.name for point in entry_points(group=GROUP))})


def make_method(method: MethodName | str | Method, **options: Any) -> Method:
    """Makes a method by its name.

    Args:
        method: Name of a method (``method_names()`` lists them); or a method, which is returned unchanged.
        options: Options of its parts, for instance ``density=0.01``, ``teams=2``; ``method_options`` lists them.

    Returns:
        The method.

    Raises:
        ConfigError: If the name or an option is unknown, a value has a wrong type or is out of range, or options are
            given for a ``method`` that is not a name.

    Example:
        >>> spardl.make_method("spardl", density=0.01, teams=2).communicator
        SparDL(teams=2, gather='bruck')
    """
    if isinstance(method, Method):
        if options:
            raise ConfigError(
                f"a spardl.Method takes no options, got {', '.join(sorted(options))}; set them on its parts"
            )
        return method
    recipe = find_recipe(method)
    return recipe(**options) if isinstance(recipe, Recipe) else _make_foreign(method, recipe, options)


def muon_defaults(recipe: Callable[..., Method], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options that replace the defaults of a method if an optimizer of the handle is Muon.

    Args:
        recipe: Result of ``find_recipe``.
        options: Options that the caller has set.

    Returns:
        The options by name. Empty if the caller has set one of them, if ``recipe=published`` is set (it compresses
        gradients, not updates), or if the method belongs to another package.
    """
    if not isinstance(recipe, Recipe) or options.get("recipe", RECIPES[0]) != RECIPES[0]:
        return {}
    # These options belong together: if the caller sets one of them, the others keep their usual defaults.
    return {} if recipe.muon_options.keys() & options.keys() else recipe.muon_options


def find_recipe(name: str) -> Callable[..., Method]:
    """Returns the callable that makes a method from its options.

    Args:
        name: Name of the method.

    Returns:
        A :class:`Recipe`, or the callable of another package.

    Raises:
        ConfigError: If no method has this name, or its package cannot be imported.
    """
    if isinstance(name, (Compressor, Communicator)):
        raise ConfigError(
            f"method must be a name or a spardl.Method, got {name!r}; combine parts with spardl.Method(compressor, "
            "communicator, residual)"
        )
    if isinstance(name, str):
        if own := recipes().get(name):
            return own
        # Last: this reads the metadata of every installed package.
        if points := entry_points(group=GROUP, name=name):
            return _load(next(iter(points)))
    known = method_names()
    raise ConfigError(f"unknown method {name!r}; use one of {', '.join(known)}{_did_you_mean(name, known)}")


def _load(point: EntryPoint) -> Callable[..., Method]:
    try:
        recipe: Callable[..., Method] = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"method {point.name} cannot be loaded from {point.value}: {error}") from error
    return recipe


def _make_foreign(name: str, recipe: Callable[..., Method], options: Mapping[str, Any]) -> Method:
    parameters = signature(recipe).parameters.values()
    # A callable of another package need not check its arguments, and its TypeError would not name the valid ones.
    if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        known = [each.name for each in parameters]
        _reject_unknown(set(options) - set(known), known)
    made = recipe(**options)
    if not isinstance(made, Method):
        raise ConfigError(
            f"method {name} returned a {type(made).__name__}, expected a spardl.Method; report this to its authors"
        )
    return made


def _reject_unknown(unknown: set[str], known: list[str]) -> None:
    if unknown:
        *most, last = known or ["none"]
        listed = f"{', '.join(most)} and {last}" if most else last
        hint = next(filter(None, (_hint_at(each, known) for each in sorted(unknown))), "")
        plural = "s" * (len(unknown) > 1)
        raise ConfigError(f"unknown option{plural} {', '.join(sorted(unknown))}; this method has {listed}{hint}")


def _hint_at(option: str, known: list[str]) -> str:
    if option in _HANDLE_ARGUMENTS:
        return f"; {option} is an argument of {_HANDLE_ARGUMENTS[option]}"
    return _did_you_mean(option, [*known, *_HANDLE_ARGUMENTS])


def _did_you_mean(word: Any, known: Iterable[str]) -> str:
    """Returns a hint at the most similar known word; empty if none is similar."""
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
    raise ConfigError(f"residual_decay={decay!r} has no effect: residual={rule.name} keeps nothing; remove it")


def published(rule: type[Momentum]) -> type[Momentum]:
    """Returns the momentum rule that ``recipe=published`` uses instead of ``rule``.

    This is ``OptimizerMomentum`` instead of ``momentum=auto``, because papers keep momentum in the optimizer; any other
    rule is returned unchanged.
    """
    return OptimizerMomentum if issubclass(rule, AutoMomentum) else rule


def _momentum(rule: type[Any], given: Mapping[str, float | str | None]) -> Momentum:
    values = {}
    for option, value in given.items():
        if value is None:
            continue
        field_name, lacks = MOMENTUM_OPTIONS[option]
        if not hasattr(rule, field_name):
            raise ConfigError(
                f"{option}={value!r} has no effect, because momentum={rule.name} of this method {lacks}; remove it, "
                "and set the optimizer's instead"
            )
        values[field_name] = value
    made: Momentum = rule(**values)
    return made


# Options of methods, as declared and described by their parts.


class Option(NamedTuple):
    """An option of a method.

    Attributes:
        name: Name of the keyword argument.
        part: Owner of the option: ``compressor``, ``communicator`` or the whole ``method``.
        type: Annotated type; empty if another package does not annotate it.
        default: Default value; ``inspect.Parameter.empty`` for a required argument of another package.
        about: Description in one line; empty if another package does not describe it.
    """

    name: str
    part: str
    type: str
    default: Any
    about: str


def method_options(method: MethodName | str) -> list[Option]:
    """Returns the options of a method: those of its compressor and communicator, then those common to all methods.

    An option that both compressor and communicator have is listed twice, with the default of each. A value that the
    caller sets is passed to both.

    Args:
        method: Name of a method, see ``method_names()``.

    Returns:
        Options of the method.

    Raises:
        ConfigError: If no method has this name.

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
        momentum_factor: float | None = None
        beta2: float | None = None
        update_scale: str | None = None
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
    """Options that a function declares as its arguments."""
    about = _described(make)
    for each in inspect.signature(make).parameters.values():
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            kind = "" if each.annotation is each.empty else inspect.formatannotation(each.annotation)
            yield Option(each.name, "method", kind.strip("'"), each.default, about.get(each.name, ""))


def _described(*targets: Any) -> dict[str, str]:
    """Descriptions of arguments in Google-style docstrings, in one line each; later targets override earlier ones."""
    found: dict[str, str] = {}
    for target in targets:
        text = inspect.cleandoc(vars(target).get("__doc__") or "" if inspect.isclass(target) else target.__doc__ or "")
        section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", text, flags=re.MULTILINE)
        entries = re.findall(
            r"^    \**(\w+)(?: \(.*?\))?: (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE
        )
        found |= {name: " ".join(words.split()) for name, words in entries}
    return found
