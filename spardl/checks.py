"""Checks of values that come from a configuration."""

from __future__ import annotations

from typing import Any

__all__ = ["is_a"]


def is_a(kind: type[int | float], value: Any) -> bool:
    """Whether a value is a whole number (``int``), or any number (``float``); a truth value is neither."""
    return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
