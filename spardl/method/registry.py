"""Registry of all parts: compressors, communicators, residual rules and momentum rules, by name.

The registry imports every module of the packages, so a new file needs no registration.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

import spardl.communicators
import spardl.compressors
from spardl.basics.checks import check_dtypes
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor, Mass, Output
from spardl.method import momentum, residuals
from spardl.method.momentum import Momentum, OptimizerMomentum
from spardl.method.residuals import Residual
from spardl.protocol.programs import Combination

__all__ = [
    "check_averages_gradients",
    "check_loss_scale",
    "check_weights",
    "combinations",
    "communicators",
    "compressors",
    "incompatibility",
    "momentum_rules",
    "residual_rules",
]


T = TypeVar("T")


@cache
def compressors() -> dict[str, type[Compressor]]:
    """Returns all compressor classes by name."""
    return _concrete(_modules(spardl.compressors), Compressor)


@cache
def communicators() -> dict[str, type[Communicator[Any, Any]]]:
    """Returns all communicator classes by name."""
    return _concrete(_modules(spardl.communicators), Communicator)  # type: ignore[type-abstract]


@cache
def residual_rules() -> dict[str, type[Residual]]:
    """Returns all residual rules by name."""
    return _concrete([residuals], Residual)  # type: ignore[type-abstract]


@cache
def momentum_rules() -> dict[str, type[Momentum]]:
    """Returns all momentum rules by name."""
    return _concrete([momentum], Momentum)  # type: ignore[type-abstract]


@cache
def combinations() -> dict[str, Combination]:
    """Returns all methods by name, as declared in ``METHODS`` of the compressors' and communicators' modules.

    Raises:
        ConfigError: If two modules declare the same name.
    """
    found: dict[str, Combination] = {}
    places: dict[str, str] = {}
    for module in (*_modules(spardl.compressors), *_modules(spardl.communicators)):
        for each in getattr(module, "METHODS", ()):
            if each.name in found:
                raise ConfigError(
                    f"{module.__name__} and {places[each.name]} both declare a method {each.name!r}; rename one of them"
                )
            found[each.name], places[each.name] = each, module.__name__
    return found


def _modules(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.iter_modules(package.__path__, package.__name__ + ".")
    return [importlib.import_module(module.name) for module in found]


def _concrete(modules: list[ModuleType], base: type[T]) -> dict[str, type[T]]:
    found = [
        member
        for module in modules
        for _, member in inspect.getmembers(module, inspect.isclass)
        # Check the module first: for Python 3.10, aliases such as list[int] are classes, but ``issubclass`` fails.
        if member.__module__ == module.__name__ and issubclass(member, base) and "name" in vars(member)
    ]
    return {vars(kind)["name"]: kind for kind in sorted(found, key=lambda kind: kind.__name__)}


# Compatibility of parts, derived from what each of them declares.


def incompatibility(
    compressor: type[Compressor],
    communicator: type[Communicator[Any, Any]],
    residual: type[Residual],
    momentum: type[Momentum] = OptimizerMomentum,
) -> str | None:
    """Explains why a compressor, a communicator, a residual and a momentum cannot be combined.

    Args:
        compressor: Compressor class of the method.
        communicator: Communicator class of the method.
        residual: Residual rule of the method.
        momentum: Momentum rule of the method.

    Returns:
        One sentence that names compatible parts; ``None`` if the given ones are compatible.
    """
    if compressor.output not in communicator.sums:
        legal = [name for name, kind in communicators().items() if compressor.output in kind.sums]
        others = [name for name, kind in compressors().items() if kind.output in communicator.sums]
        return (
            f"communicator={communicator.name} cannot sum {compressor.output.value}, the output of compressor="
            f"{compressor.name}; use communicator={' or '.join(legal)} with this compressor, or compressor="
            f"{' or '.join(others)} with this communicator"
        )
    if not _residual_fits(compressor, residual):
        rules = [name for name, rule in residual_rules().items() if _residual_fits(compressor, rule)]
        return (
            f"residual={residual.name} does not fit compressor={compressor.name} ({_nature(compressor)}); "
            f"use residual={' or '.join(rules)}"
        )
    if momentum.masks and not compressor.sparsifies:
        return (
            f"momentum={momentum.name} resets the velocity of sent entries, but compressor={compressor.name} sends no "
            "single entries; use momentum=local or momentum=optimizer"
        )
    return None


def _residual_fits(compressor: type[Compressor], residual: type[Residual]) -> bool:
    return not (
        (residual.remembers and compressor.mass is not Mass.LEFT)
        or (residual.needs_entries and not compressor.sparsifies)
        or (residual.needs_count and compressor.output is Output.ANY_COUNT)
    )


def _nature(compressor: type[Compressor]) -> str:
    entries = "sends single entries" if compressor.sparsifies else "sends no single entries"
    number = ", any number of them" if compressor.output is Output.ANY_COUNT else ""
    return f"it {entries}{number}; unsent part: {compressor.mass.value}"


def check_averages_gradients(compressor: Compressor, rule: Momentum, place: str) -> None:
    """Checks that a compressor suits the averaged vectors: gradients, or updates that each worker computes.

    Args:
        compressor: Compressor of the method.
        rule: Resolved momentum rule of the method.
        place: Part that averages, as in ``"schedule=wfbp"``.

    Raises:
        ConfigError: If the compressor compares changes of weights with the weights, but gradients are averaged.
    """
    if compressor.needs_weights and not rule.moved:
        raise ConfigError(
            f"compressor={compressor.name} compares changes of weights with the weights, but {place} averages "
            "gradients; use attach(..., optimizer=...) with AdamW, Muon, or SGD with momentum (in the trainer: "
            "momentum=auto), spardl.Outer (schedule=outer), or another compressor such as topk"
        )


def check_weights(compressor: Compressor, named: Iterable[tuple[str, Tensor]]) -> None:
    """Checks that gradients can be averaged, and that weights can store the average of a change of one worker.

    Args:
        compressor: Compressor of the method.
        named: Names and parameters, of any shape.

    Raises:
        ConfigError: If a dtype is not supported, or the compressor compares changes with weights of fewer than 32 bits.
    """
    named = list(named)
    check_dtypes(named)
    for name, parameter in named if compressor.needs_weights else ():
        if parameter.itemsize < torch.float32.itemsize:
            raise ConfigError(
                f"compressor={compressor.name} needs weights in float32, but {name} is {parameter.dtype}, which would "
                "round averages of few changes to nothing; keep weights in float32 and compute in torch.autocast"
            )


def check_loss_scale(compressor: Compressor, way: str) -> None:
    """Checks that a compressor works with losses whose scale changes during training.

    Args:
        compressor: Compressor of the method.
        way: Advice for the error message.

    Raises:
        ConfigError: If the compressor compares entries with a fixed threshold.
    """
    if compressor.absolute:
        raise ConfigError(
            f"compressor={compressor.name} uses a fixed threshold, which does not work with a changing loss scale; "
            f"{way}"
        )
