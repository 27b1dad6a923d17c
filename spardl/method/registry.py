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
from spardl.compressors.base import Compressor
from spardl.method import adam, momentum, residuals
from spardl.method.momentum import Momentum
from spardl.method.residuals import Residual
from spardl.protocol.combination import Combination

__all__ = ["combinations", "communicators", "compressors", "momentum_rules", "residual_rules"]

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
    return _concrete([momentum, adam], Momentum)  # type: ignore[type-abstract]


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
