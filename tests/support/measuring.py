"""Measurements of time and bandwidth that other work on this machine disturbs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def undisturbed(measure: Callable[[], T], holds: Callable[[T], bool], *, times: int = 6, seconds: float = 150.0) -> T:
    """Repeats a measurement until one is within its bounds: a busy core disturbs some of them, a defect all.

    Args:
        measure: Measures once.
        holds: Returns whether a measurement is within its bounds.
        times: Largest number of measurements.
        seconds: Time after which no further measurement starts, in seconds; the first always does.

    Returns:
        The first measurement within its bounds. If there is none, the test fails and shows all measurements.
    """
    found, until = [measure()], time.monotonic() + seconds
    while not holds(found[-1]):
        if len(found) == times or time.monotonic() > until:
            pytest.fail(f"none of {len(found)} measurements is within the bounds: {found}")
        found.append(measure())
    return found[-1]
