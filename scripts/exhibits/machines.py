"""Machines that results were measured on; times are compared only within one machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scripts.exhibits.jobs import Outcome

__all__ = ["UNKNOWN", "by_machine", "common", "machine_of", "machines"]

UNKNOWN = "unknown machine"


def machine_of(made: Mapping[str, Any]) -> str:
    """Returns the processor and torch version of an environment; both change how long local work takes."""
    torch = str(made.get("torch") or "").partition("+")[0]
    parts = [str(made.get("cpu") or ""), f"torch {torch}" if torch else ""]
    return ", ".join(part for part in parts if part) or UNKNOWN


def by_machine(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes that succeeded, by machine in alphabetical order."""
    good = [outcome for outcome in outcomes if outcome.reason is None]
    names = machines(good)
    return {name: [outcome for outcome in good if machine_of(outcome.made) == name] for name in names}


def machines(outcomes: Iterable[Outcome]) -> list[str]:
    """Returns the names of the machines of outcomes, in alphabetical order."""
    return sorted({machine_of(outcome.made) for outcome in outcomes})


def common(one: Sequence[Outcome], other: Sequence[Outcome]) -> tuple[Sequence[Outcome], Sequence[Outcome]] | None:
    """Returns the outcomes of both on the machine that they share with most results; ``None`` if they share none."""
    ours, theirs = by_machine(one), by_machine(other)
    shared = [name for name in ours if name in theirs]
    if not shared:
        return None
    most = max(shared, key=lambda name: min(len(ours[name]), len(theirs[name])))
    return ours[most], theirs[most]
