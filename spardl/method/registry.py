"""Finds the parts of the library by looking: a new file in a package is a new choice."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import spardl.communicators
import spardl.compressors
from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor, Mass, Output
from spardl.method import momentum, residuals
from spardl.method.momentum import Momentum, OptimizerMomentum
from spardl.method.residuals import Residual
from spardl.protocol.programs import Combination

__all__ = ["combinations", "communicators", "compressors", "momentum_rules", "residual_rules", "why_not"]


T = TypeVar("T")


@cache
def compressors() -> dict[str, type[Compressor]]:
    """Every compressor, by name."""
    return _concrete(_modules(spardl.compressors), Compressor)


@cache
def communicators() -> dict[str, type[Communicator[Any]]]:
    """Every communicator, by name."""
    return _concrete(_modules(spardl.communicators), Communicator)  # type: ignore[type-abstract]


@cache
def residual_rules() -> dict[str, type[Residual]]:
    """Every residual rule, by name."""
    return _concrete([residuals], Residual)  # type: ignore[type-abstract]


@cache
def momentum_rules() -> dict[str, type[Momentum]]:
    """Every place for momentum, by name."""
    return _concrete([momentum], Momentum)  # type: ignore[type-abstract]


@cache
def combinations() -> dict[str, Combination]:
    """Every method that a file of a compressor or a communicator declares in its ``METHODS``, by name.

    Raises:
        ConfigError: if two files declare the same name.
    """
    found: dict[str, Combination] = {}
    places: dict[str, str] = {}
    for module in (*_modules(spardl.compressors), *_modules(spardl.communicators)):
        for each in getattr(module, "METHODS", ()):
            if each.name in found:
                raise ConfigError(f"{module.__name__} and {places[each.name]} both declare a method {each.name!r}")
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
        # The module first: Python 3.10 takes aliases like list[int], which modules import, for classes.
        if member.__module__ == module.__name__ and issubclass(member, base) and "name" in vars(member)
    ]
    return {vars(kind)["name"]: kind for kind in sorted(found, key=lambda kind: kind.__name__)}


# Which parts fit together: what their declarations say of one another.


def why_not(
    compressor: type[Compressor],
    communicator: type[Communicator[Any]],
    residual: type[Residual],
    momentum: type[Momentum] = OptimizerMomentum,
) -> str | None:
    """Why parts do not fit together.

    Args:
        compressor: what one worker sends.
        communicator: how the sent is added up.
        residual: where the rest goes.
        momentum: what is compressed.

    Returns:
        One sentence, naming those that would fit; ``None`` if these do.
    """
    if compressor.output not in communicator.sums:
        legal = [name for name, kind in communicators().items() if compressor.output in kind.sums]
        others = [name for name, kind in compressors().items() if kind.output in communicator.sums]
        return (
            f"communicator={communicator.name} cannot add up {compressor.output.value}, which compressor="
            f"{compressor.name} makes; with it use communicator={' or '.join(legal)}, or with "
            f"communicator={communicator.name} use compressor={' or '.join(others)}"
        )
    if not _residual_fits(compressor, residual):
        rules = [name for name, rule in residual_rules().items() if _residual_fits(compressor, rule)]
        return (
            f"residual={residual.name} does not fit compressor={compressor.name} ({_nature(compressor)}); "
            f"with it use residual={' or '.join(rules)}"
        )
    if momentum.masks and not compressor.sparsifies:
        return (
            f"momentum={momentum.name} stops the velocity at the entries that were sent, and compressor="
            f"{compressor.name} sends no single entries; use momentum=local or momentum=optimizer"
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
    return f"it {entries}{number}; what it leaves out: {compressor.mass.value}"
