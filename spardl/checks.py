"""Checks of values that come from a configuration."""

from __future__ import annotations

from typing import Any

from spardl.errors import ConfigError

__all__ = ["check_seconds", "is_a"]

# Eleven days. Libraries count milliseconds in 31 bits.
_LONGEST = 1_000_000


def is_a(kind: type[int | float], value: Any) -> bool:
    """Whether a value is a whole number (``int``), or any number (``float``); a truth value is neither."""
    return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)


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
