"""Checks of values that come from a configuration, or from a caller."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError

__all__ = [
    "AVERAGED",
    "check_choice",
    "check_flag",
    "check_kind",
    "check_real",
    "check_seconds",
    "check_whole",
    "is_a",
    "is_finite",
]

# Types of numbers that can be averaged.
AVERAGED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

# Eleven days. Libraries count milliseconds in 31 bits.
_LONGEST = 1_000_000


def is_a(kind: type[int | float], value: Any) -> bool:
    """Whether a value is a whole number (``int``), or any number (``float``); a truth value is neither."""
    return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number, and neither NaN nor infinite."""
    return is_a(float, value) and math.isfinite(value)


def check_whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    """Accepts a whole number.

    Args:
        name: of the setting.
        value: what was given.
        least: the smallest number that is accepted; ``None``: any.
        most: the largest accepted number; ``None``: any.

    Raises:
        ConfigError: if it is something else, smaller or larger.
    """
    inside = is_a(int, value) and (least is None or value >= least) and (most is None or value <= most)
    if not inside:
        limit = "" if least is None else f", at least {least}"
        limit += "" if most is None else f" and at most {most}"
        raise ConfigError(f"{name} must be a whole number{limit}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Accepts a truth value.

    Args:
        name: of the setting.
        value: what was given.

    Raises:
        ConfigError: if it is something else; 0 and 1 are numbers.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def check_kind(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Accepts an object of a class.

    Args:
        name: of the argument.
        value: what was given.
        kind: its class, or a base of it.
        optional: whether ``None`` will do.

    Raises:
        ConfigError: if it is something else, the class itself included.
    """
    if not isinstance(value, kind) and not (optional and value is None):
        wanted, given = kind.__name__ + " or None" * optional, " ".join(repr(value).split())
        raise ConfigError(f"{name} must be a {wanted}, got {given}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Accepts one of some texts.

    Args:
        name: of the setting.
        value: what was given.
        choices: what it may be.

    Raises:
        ConfigError: if it is something else.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_real(named: Iterable[tuple[str, Tensor]]) -> None:
    """Accepts parameters whose gradients can be averaged.

    Args:
        named: the parameters, of any shape, with their names; those that are not trained do not matter.

    Raises:
        ConfigError: if one of them is not of ``AVERAGED``.
    """
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in AVERAGED:
            raise ConfigError(
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}, and only floating-point gradients of at "
                "least 16 bits are averaged; keep a complex parameter as torch.view_as_real(...) of it"
            )


def check_seconds(name: str, value: Any) -> None:
    """Accepts a time to wait.

    Args:
        name: of the setting.
        value: seconds.

    Raises:
        ConfigError: if it is not a number above 0, or too long for what waits.
    """
    if not is_a(float, value) or not 0 < value <= _LONGEST:
        raise ConfigError(f"{name} must be above 0 seconds, and at most {_LONGEST}, got {value!r}")
