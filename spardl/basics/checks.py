"""Validation of configuration values and function arguments."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError

__all__ = [
    "AVERAGED_DTYPES",
    "check_bool",
    "check_choice",
    "check_dtypes",
    "check_integer",
    "check_seconds",
    "check_type",
    "is_finite",
    "is_number",
]

# Dtypes of gradients that can be averaged.
AVERAGED_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

# About eleven days: libraries count timeouts in milliseconds, in 31 bits.
_MAX_SECONDS = 1_000_000


def is_number(kind: type[int | float], value: Any) -> bool:
    """Returns whether ``value`` is an integer (``kind=int``) or a real number (``kind=float``); rejects booleans."""
    # bool is a subclass of int.
    return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Returns whether ``value`` is a number other than NaN and infinity."""
    return is_number(float, value) and math.isfinite(value)


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    """Checks that a value is an integer within limits.

    Args:
        name: Name of the setting, for the message.
        value: Value to check.
        least: Smallest accepted number; ``None`` for no lower limit.
        most: Largest accepted number; ``None`` for no upper limit.

    Raises:
        ConfigError: If ``value`` is not an integer or is out of range.
    """
    inside = is_number(int, value) and (least is None or value >= least) and (most is None or value <= most)
    if not inside:
        limit = "" if least is None else f", at least {least}"
        limit += "" if most is None else f" and at most {most}"
        raise ConfigError(f"{name} must be an integer{limit}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Checks that a value is a boolean.

    Args:
        name: Name of the setting, for the message.
        value: Value to check.

    Raises:
        ConfigError: If ``value`` is not a boolean; 0 and 1 are rejected.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def check_type(name: str, value: Any, kind: type, *, optional: bool = False) -> None:
    """Checks that a value is an instance of a class.

    Args:
        name: Name of the argument, for the message.
        value: Value to check.
        kind: Class that ``value`` must be an instance of.
        optional: Whether ``None`` is accepted as well.

    Raises:
        ConfigError: If ``value`` is anything else, including the class itself.
    """
    if not isinstance(value, kind) and not (optional and value is None):
        # Representations of modules span several lines, but a message is one line.
        wanted, given = kind.__name__ + " or None" * optional, " ".join(repr(value).split())
        raise ConfigError(f"{name} must be a {wanted}, got {given}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Checks that a value is one of several strings.

    Args:
        name: Name of the setting, for the message.
        value: Value to check.
        choices: Accepted strings.

    Raises:
        ConfigError: If ``value`` is not one of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_dtypes(named: Iterable[tuple[str, Tensor]]) -> None:
    """Checks that the gradients of all trainable parameters can be averaged.

    Args:
        named: Names and parameters, of any shape; frozen parameters are ignored.

    Raises:
        ConfigError: If the dtype of a trainable parameter is not in ``AVERAGED_DTYPES``.
    """
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in AVERAGED_DTYPES:
            raise ConfigError(
                f"{name} has dtype {str(parameter.dtype).removeprefix('torch.')}, but only floating-point gradients of "
                "at least 16 bits can be averaged; store a complex parameter as torch.view_as_real(parameter)"
            )


def check_seconds(name: str, value: Any) -> None:
    """Checks that a value is a valid timeout.

    Args:
        name: Name of the setting, for the message.
        value: Timeout in seconds.

    Raises:
        ConfigError: If ``value`` is not a number, is not above 0, or is too large for the libraries that use the
            timeout.
    """
    if not is_number(float, value) or not 0 < value <= _MAX_SECONDS:
        raise ConfigError(f"{name} must be above 0 seconds, and at most {_MAX_SECONDS}, got {value!r}")
