"""What tests of claims have in common; scripts/ is on the path while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.exhibits.base import Basis, Results
from scripts.exhibits.claims import judging, rules
from scripts.exhibits.jobs import Outcome
from scripts.exhibits.kinds import trainings

LONG = 200  # steps: ten sweeps at a density of 5%
DIGITS = trainings.Case(
    "VGG on CIFAR", ("cluster.workers=2",), "a small network on digits", known=trainings.Known(0.5, "a book")
)


def figures(*values: Any, against: Any = None) -> list[Any]:
    """Figures named a, b, ...; a number is a single value."""
    rivals = against if against is not None else [()] * len(values)
    return [
        judging.Figure(chr(ord("a") + number), _seeds(one), _seeds(other))
        for number, (one, other) in enumerate(zip(values, rivals, strict=True))
    ]


def _seeds(value: Any) -> Sequence[float]:
    return (float(value),) if isinstance(value, int | float) else tuple(value)


def verdict(found: Sequence[Any], name: str, *words: Any) -> str:
    """Name of the verdict that a rule gives."""
    return str(rule(name, *words).judge(found).verdict.name)


def rule(name: str, *words: Any) -> Any:
    return getattr(rules, name)(*words)


def claim(made: Any, find: Callable[..., Any], limits: Sequence[Any] = (), construction: str = "") -> Any:
    published = judging.Published("much", judging.Known.LOW, "a note")
    return judging.Claim("X: name", "It is so.", published, "x.y", find, made, "seconds", tuple(limits), construction)


def exhibit_of(*cases: Any) -> Any:
    basis = Basis("nothing: it ran", "seconds", "a < b")
    plan = trainings.Plan(cases, (), (1, 2, 3), "", sparse=("compressor.density=0.05",))
    methods = {"one": ("compressor=topka",), "two": trainings.DENSE}
    return trainings.MethodComparison(
        "x.y", "T", "", "", methods, dict.fromkeys(("smoke", "laptop", "paper"), plan), basis=basis
    )


def judged(made: Any, scale: str = "laptop", found: Any = None, exhibit: Any = None) -> Any:
    exhibit = exhibit or exhibit_of(DIGITS)
    outcomes = dict(zip(exhibit.jobs(scale), found or [], strict=False))
    results = Results(Path("runs"), outcomes)
    return judging.judge(made, {"x.y": exhibit}, scale, results)


def outcome(value: float, reason: str | None = None, metric: str = "accuracy", steps: int = LONG) -> Any:
    figures = {"metric": metric, "final": {metric: value}, "best": value}
    data = {**figures, "cluster_seconds": 10 * value, "steps": steps}
    return Outcome(Path("run"), {} if reason else data, reason)
