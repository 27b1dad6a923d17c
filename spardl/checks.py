"""Checks of values that come from a configuration."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["is_a", "is_finite"]


def is_a(kind: type[int | float], value: Any) -> bool:
    """Whether a value is a whole number (``int``), or any number (``float``); a truth value is neither."""
    return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number, and neither NaN nor infinite."""
    return is_a(float, value) and math.isfinite(value)
