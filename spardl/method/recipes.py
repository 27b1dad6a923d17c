"""Methods by name: which compressor, communicator and residual rule a published method consists of.

The same names choose them on the command line of the trainer. Other packages add theirs as entry points of the group
``spardl.methods``: a name, and something that makes a :class:`Method` from keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from spardl import communicators as ways
from spardl import compressors as kinds
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor
from spardl.method import registry
from spardl.method.method import Method
from spardl.method.momentum import CorrectedMomentum, Momentum, OptimizerMomentum
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual, PartialResidual, Residual
from spardl.method.warmup import Warmup
from spardl.vector.wire import Wire

__all__ = ["GROUP", "RECIPES", "Recipe", "make_method", "method_names"]

# Entry points of other packages.
GROUP = "spardl.methods"


@dataclass(frozen=True)
class Recipe:
    """The parts of a method.

    Args:
        compressor: what one worker sends.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed.
        values: options that differ from the parts' own defaults.
    """

    compressor: type[Compressor]
    communicator: type[Communicator[Any]]
    residual: type[Residual]
    momentum: type[Momentum] = OptimizerMomentum
    values: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        *,
        residual: str | None = None,
        wire: str = "exact",
        dense_steps: int = 0,
        momentum_factor: float | None = None,
        **options: Any,
    ) -> Method:
        """Makes the method.

        Args:
            residual: another rule, by name.
            wire: type of values in sparse messages: ``exact``, ``float32``, ``bfloat16`` or ``float16``.
            dense_steps: how many steps are dense at first.
            momentum_factor: share of each worker's velocity that is left in the next step, at least 0 and below 1, for
                methods with a momentum of their own (``dgc``); ``None`` is the rule's default. Not to be mixed up with
                ``factor``, an option of some compressors.
            options: of the compressor and the communicator, such as ``density`` and ``teams``.

        Returns:
            The method.

        Raises:
            ConfigError: if an option is unknown or out of range, or the parts do not fit.
        """
        given = {**self.values, **options}
        parts = [_make(kind, given) for kind in (self.compressor, self.communicator)]
        known = sorted({*_options(self.compressor), *_options(self.communicator)})
        unknown = sorted(set(options) - set(known))
        if unknown:
            more = ["momentum_factor"] if _has_factor(self.momentum) else []
            has = ", ".join([*known, *more, "residual", "wire"])
            raise ConfigError(f"{', '.join(unknown)} is no option of this method; it has {has} and dense_steps")
        rule = self.residual if residual is None else _residual(residual)
        return Method(
            parts[0], parts[1], rule(), _momentum(self.momentum, momentum_factor), Warmup(dense_steps), Wire(wire)
        )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "none": Recipe(kinds.NoCompression, ways.Dense, NoResidual),
        "fp16": Recipe(kinds.Cast, ways.Dense, NoResidual, values={"format": "fp16"}),
        "bf16": Recipe(kinds.Cast, ways.Dense, NoResidual, values={"format": "bf16"}),
        "spardl": Recipe(kinds.TopK, ways.SparDL, GlobalResidual),
        "oktopk": Recipe(kinds.ReusedThreshold, ways.OkTopk, PartialResidual),
        "gtopk": Recipe(kinds.TopK, ways.GTopk, PartialResidual),
        "topkdsa": Recipe(kinds.TopK, ways.TopkDSA, LocalResidual),
        "topka": Recipe(kinds.TopK, ways.AllGather, LocalResidual),
        "dgc": Recipe(kinds.SampledTopK, ways.AllGather, LocalResidual, CorrectedMomentum, {"scope": "layer"}),
        "gaussiank": Recipe(kinds.GaussianK, ways.AllGather, LocalResidual),
        "threshold": Recipe(kinds.Threshold, ways.AllGather, LocalResidual, values={"threshold": 0.07}),
        "random_k": Recipe(kinds.RandomK, ways.Dense, NoResidual, values={"density": 0.1}),
        "random_block": Recipe(kinds.RandomBlock, ways.Dense, NoResidual, values={"density": 0.1, "scope": "layer"}),
        "count_sketch": Recipe(kinds.CountSketch, ways.Dense, LocalResidual),
        "powersgd": Recipe(kinds.PowerSGD, ways.Dense, LocalResidual),
        "qsgd": Recipe(kinds.QSGD, ways.AllGatherCodes, NoResidual),
        "terngrad": Recipe(kinds.TernGrad, ways.AllGatherCodes, NoResidual),
        "signsgd": Recipe(kinds.SignSGD, ways.AllGatherCodes, LocalResidual),
    }
)


def method_names() -> list[str]:
    """Every method that ``make_method`` knows, those of other packages included.

    Example:
        >>> print(*spardl.method_names())
        bf16 count_sketch dgc fp16 gaussiank gtopk none oktopk powersgd qsgd random_block random_k signsgd spardl
        terngrad threshold topka topkdsa
    """
    return sorted({*RECIPES, *(point.name for point in entry_points(group=GROUP))})


def make_method(method: str | Method, **options: Any) -> Method:
    """A method by its name, or the very method that is given.

    Args:
        method: a name of ``method_names()``, or a method.
        options: of its parts, for instance ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The method.

    Raises:
        ConfigError: if the name or an option is unknown, a value out of range, or a whole method has options.

    Example:
        >>> spardl.make_method("spardl", density=0.01, teams=2).communicator
        SparDL(teams=2, gather='bruck')
    """
    if isinstance(method, Method):
        if options:
            raise ConfigError(f"{', '.join(sorted(options))}: a method that is given whole takes no options")
        return method
    return _recipe(method)(**options)


def _recipe(name: str) -> Callable[..., Method]:
    if name in RECIPES:
        return RECIPES[name]
    for point in entry_points(group=GROUP, name=name):
        recipe: Callable[..., Method] = point.load()
        return recipe
    raise ConfigError(f"there is no method {name!r}; use one of {', '.join(method_names())}")


def _options(kind: type[Any]) -> list[str]:
    return [each.name for each in fields(kind) if each.init]


def _make(kind: type[Any], given: Mapping[str, Any]) -> Any:
    return kind(**{name: given[name] for name in _options(kind) if name in given})


def _has_factor(rule: type[Momentum]) -> bool:
    return hasattr(rule, "factor")


def _momentum(rule: type[Any], factor: float | None) -> Momentum:
    if factor is None:
        made: Momentum = rule()
    elif _has_factor(rule):
        made = rule(factor=factor)
    else:
        raise ConfigError(
            f"momentum_factor={factor!r}: the momentum of this method, {rule.name}, has no factor; leave it out, and "
            "set the optimizer's"
        )
    return made


def _residual(name: str) -> type[Residual]:
    rules = registry.residual_rules()
    if name not in rules:
        raise ConfigError(f"residual={name!r} is unknown; use one of {', '.join(rules)}")
    return rules[name]
