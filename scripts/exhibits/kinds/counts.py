"""Exhibits that count rounds and words and compare them with the published formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, NamedTuple, TypeAlias

from scripts import choices, complexity
from scripts.exhibits.base import Basis, ByScale, Exhibit, Results, at
from scripts.exhibits.jobs import Computation, Outcome
from scripts.exhibits.outcomes import failed
from scripts.exhibits.tables import Cell, Row, Table
from spardl.clusters import SimulatedCluster
from spardl.method.method import Method
from spardl.protocol.programs import Context, Cost, Worker
from spardl.schedules.fusion import Linear
from spardl.vector.layout import Layout

# Costs of each kind of step as JSON data.
Cycle: TypeAlias = list[dict[str, Any]]

# A common multiple of all periods of the published methods.
CYCLE, REPEATED = 128, 3

BASIS = Basis(
    simulated="nothing: every message is made and delivered, in one process",
    measured="rounds and words, counted by the ledger on random gradients (a common part and noise), no residual",
    assumed="nothing",
)


def count_costs(name: str, overrides: Sequence[str], workers: int) -> dict[str, Any]:
    """Counts the costs of synchronizations.

    Args:
        name: Choice of ``compressor=``.
        overrides: Arguments of train.py.
        workers: Number of workers (P).

    Returns:
        ``kinds``, for each kind of step: its ``share`` of all steps; ``k``, the number of kept entries; minimum and
        maximum of the ``rounds``, of the mean ``words`` over all workers, and of the words on the longest ``path``; the
        published ``bounds``; and whether all counts are ``within`` the bounds.
    """
    with choices.composing():
        density = [f"compressor.density={complexity.DENSITY}"] if name != "none" else []
        method = choices.build(name, "warmup.steps=0", *density, *overrides)
        groups = _kinds_of_steps(method, workers, complexity.layout_for(workers))
        lines = list(complexity.measure(name, method, workers, [steps[0] for steps in groups]))
    kinds = [
        {
            "share": len(steps) / CYCLE,
            "k": complexity.DENSITY * line.length,
            "rounds": list(line.rounds),
            "words": list(line.mean),
            "bounds": list(line.published.words),
            "path": list(line.path),
            "within": line.holds,
        }
        for line, steps in zip(lines, groups, strict=True)
    ]
    return {"kinds": kinds}


def count_cycle(
    name: str, overrides: Sequence[str], workers: int, density: float, kept: int, settle: int
) -> dict[str, Cycle]:
    """Counts the costs of a cycle of steps, including steps with periodic work.

    Gradients of two sizes are synchronized, because messages also contain counts whose number does not depend on the
    gradient. A linear fit separates them from the part that grows with the gradient.

    Args:
        name: Choice of ``compressor=``.
        overrides: Arguments of train.py.
        workers: Number of workers (P).
        density: Density of the sent entries.
        kept: Entries sent of the larger gradient; the smaller gradient has a quarter.
        settle: Steps before the first counted one, for methods that adapt.

    Returns:
        ``kinds``, for each kind of step: its ``share`` of all steps; the maximum ``rounds`` of a worker; and, as linear
        functions (constant, and per entry), the mean ``words`` sent per worker and the ``bytes`` on the longest path,
        which determine the duration at full bandwidth.

    Raises:
        ConfigError: if the method does not support this number of workers.
    """
    with choices.composing():
        method = choices.build(name, "warmup.steps=0", *_density(name, density), *overrides)
    lengths = [round(size / density) for size in (kept // 4, kept)]
    sizes = [_counted(method, workers, Layout.flat(length), settle) for length in lengths]
    kinds = [
        {
            "share": large["share"],
            "rounds": large["rounds"],
            **{key: asdict(Linear.fit(lengths, [small[key], large[key]])) for key in ("words", "bytes")},
        }
        for small, large in zip(*sizes, strict=True)
    ]
    return {"kinds": kinds}


def _counted(method: Method, workers: int, layout: Layout, settle: int) -> list[dict[str, float]]:
    """Share, rounds, words and bytes of each kind of step."""
    groups = _kinds_of_steps(method, workers, layout)
    chosen = [steps[settle:][: REPEATED if len(steps) > CYCLE / 2 else 1] for steps in groups]
    run = sorted({*range(settle), *(step for steps in chosen for step in steps)})
    found = {step: _figures(cluster) for step, cluster in complexity.synchronized(method, layout, workers, run)}
    return [
        {"share": len(group) / CYCLE, **{key: mean(found[step][key] for step in steps) for key in found[steps[0]]}}
        for group, steps in zip(groups, chosen, strict=True)
    ]


def _kinds_of_steps(method: Method, workers: int, layout: Layout) -> list[list[int]]:
    """Steps of a cycle grouped by equal formulas, in the order of their first occurrence."""
    groups: dict[tuple[Cost, Cost], list[int]] = {}
    for step in range(CYCLE):
        context = Context(Worker(0, workers), layout, step)
        groups.setdefault((method.published_cost(context), method.cost(context)), []).append(step)
    return list(groups.values())


def _density(name: str, density: float) -> list[str]:
    """Override that sets the density of a method, if it has one."""
    return [f"compressor.density={density}"] if hasattr(choices.build(name).compressor, "density") else []


def _figures(cluster: SimulatedCluster) -> dict[str, float]:
    return {
        "rounds": max(ledger.rounds for ledger in cluster.ledgers),
        "words": mean(ledger.words for ledger in cluster.ledgers),
        "bytes": cluster.seconds() * complexity.BYTES_PER_SECOND,
    }


class Counted(NamedTuple):
    """A method whose messages are counted.

    Attributes:
        choice: Choice of ``compressor=``.
        words: Arguments of train.py.
    """

    choice: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class CountedCosts(Exhibit):
    """Methods x numbers of workers: rounds, and words in units of k.

    Attributes:
        methods: Counted methods by name.
        workers: Numbers of workers by size preset.
    """

    methods: Mapping[str, Counted]
    workers: ByScale[tuple[int, ...]]
    basis: Basis = field(default=BASIS, kw_only=True)

    def job(self, method: str, workers: int) -> Computation:
        """Job of one method with one number of workers."""
        choice, words = self.methods[method]
        arguments = (("name", choice), ("overrides", words), ("workers", workers))
        shell = f"python scripts/complexity.py --methods {choice} --workers {workers}"
        return Computation("costs", count_costs, arguments, f"{shell} (with {' '.join(words)})" if words else shell, 2)

    def jobs(self, scale: str) -> Sequence[Computation]:
        return [self.job(method, workers) for method in self.methods for workers in self._sizes(method, scale)]

    def _sizes(self, method: str, scale: str) -> list[int]:
        """Numbers of workers that a method supports: teams must divide them."""
        words = self.methods[method][1]
        teams = max((int(word.split("=")[1]) for word in words if word.startswith("communicator.teams=")), default=1)
        return [workers for workers in at(scale, self.workers) if workers % teams == 0]

    def cost(self, scale: str) -> str:
        return f"{len(self.jobs(scale))} counts, seconds to a few minutes"

    def caption(self, scale: str) -> str:
        return (
            "Rounds, and words that a worker sends on average, in units of k; an index or a value is a word, k "
            f"is {complexity.DENSITY:.0%} of the entries. In brackets what the formula allows; path: words that are "
            "sent one after the other, on the longest path: in a tree most workers send little, and wait. Kinds "
            f"of steps apart; then the mean over a cycle of {CYCLE} steps, in which each kind has its share."
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        sizes = at(scale, self.workers)
        rows = []
        for method in self.methods:
            possible = self._sizes(method, scale)
            cells = [
                _cell(results.of(self.job(method, size))) if size in possible else Cell("teams do not divide P")
                for size in sizes
            ]
            rows.append(Row(method, cells, [self.job(method, size) for size in possible]))
        return [Table(self.title, ("method", *(f"P = {size}" for size in sizes)), rows)]


def _cell(outcome: Outcome) -> Cell:
    if outcome.reason is not None:
        return failed([outcome], 1)[0]
    kinds = outcome.data["kinds"]
    text = "; ".join(_kind(kind) for kind in kinds)
    if len(kinds) > 1:
        text += f"; over a cycle {amortized(kinds):.3g} k"
    wrong = not all(kind["within"] for kind in kinds)
    return Cell(text + (" LEAVES ITS FORMULA" if wrong else ""), bad=wrong)


def _kind(kind: Mapping[str, Any]) -> str:
    k = kind["k"]
    words, bounds, path = (_span(kind[name], k) for name in ("words", "bounds", "path"))
    return f"{_span(kind['rounds'], 1)} rounds, {words} k [{bounds} k], path {path} k"


def amortized(kinds: Sequence[Mapping[str, Any]]) -> float:
    """Mean words per worker and step in units of k, over a cycle of all kinds of steps; see :func:`count_costs`."""
    return float(sum(kind["share"] * max(kind["words"]) / kind["k"] for kind in kinds))


def _span(bounds: Sequence[float], unit: float) -> str:
    return "..".join(f"{bound / unit:.3g}" for bound in dict.fromkeys(bounds))
