"""What tests of claims have in common; scripts/ is on the path while they run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from scripts.exhibits.claims import base, bounds, seeds


def module(name: str) -> ModuleType:
    """A module of the scripts."""
    return importlib.import_module(name)


def figures(*values: Any, against: Any = None) -> list[Any]:
    """Figures named a, b, ...; a number is a single value."""
    made = base.Figure
    rivals = against if against is not None else [()] * len(values)
    return [
        made(chr(ord("a") + number), _seeds(one), _seeds(other))
        for number, (one, other) in enumerate(zip(values, rivals, strict=True))
    ]


def _seeds(value: Any) -> Sequence[float]:
    return (float(value),) if isinstance(value, int | float) else tuple(value)


def verdict(rule: Any, found: Sequence[Any]) -> str:
    return str(rule.judge(found).verdict.name)


def bound(name: str, *words: Any) -> Any:
    return getattr(bounds, name)(*words)


def seeded(name: str) -> Any:
    return getattr(seeds, name)()
