"""Counted rounds and words: compared with the published formulas, and as the time of an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any, NamedTuple, TypeAlias

from scripts import choices, complexity
from scripts.exhibits.base import Basis, ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts import style
from scripts.exhibits.charts.style import SIZE, SMALL, plain, rows_from_the_top
from scripts.exhibits.jobs import Computation, Outcome
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.gpu import MODELS, Model, seconds_to_compress
from scripts.exhibits.tables import Cell, Row, Table, failed
from spardl.clusters import SimulatedCluster
from spardl.clusters.network import PRESETS, Network
from spardl.diagnostics.timeline.model import Work
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
    """Counts the costs of synchronizations of a choice of ``compressor=``, with arguments of train.py.

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
    gradient. A linear fit separates them from the part that grows with the gradient. Of the larger gradient ``kept``
    entries are sent, of the smaller one a quarter. ``settle`` steps come before the first counted one, for methods that
    adapt.

    Returns:
        ``kinds``, for each kind of step: its ``share`` of all steps; the maximum ``rounds`` of a worker; and, as linear
        functions (constant, and per entry), the mean ``words`` sent per worker and the ``bytes`` on the longest path,
        which determine the duration at full bandwidth.
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
    """A choice of ``compressor=`` with arguments of train.py, and the steps until its adaptation has converged."""

    choice: str
    words: tuple[str, ...] = ()
    settle: int = 0


@dataclass(frozen=True)
class CountedCosts(Exhibit):
    """Methods x numbers of workers: rounds, and words in units of k."""

    methods: Mapping[str, Counted]
    workers: ByScale[tuple[int, ...]]
    basis: Basis = field(default=BASIS, kw_only=True)

    def job(self, method: str, workers: int) -> Computation:
        """Job of one method with one number of workers."""
        choice, words, _ = self.methods[method]
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


BREAKDOWN = Basis(
    simulated="seconds of messages: counted rounds and bytes on a modelled network, one after the other",
    measured="rounds, and bytes on the longest path, counted in synchronizations of random gradients (a common part "
    "and noise, equally strong); steps with periodic work have their share",
    assumed="what each model and each compressor takes on an RTX 2080 Ti (scripts/exhibits/kinds/gpu.py), the network, "
    "that nothing overlaps, and that bytes grow in proportion to the model",
)
PARTS = ("computation", "compression", "latency", "bandwidth")
CUT = "\u2192"  # mark of a bar that exceeds its axis


class Parts(NamedTuple):
    """Seconds of one update without overlap, by :data:`PARTS`; computation is both passes and the optimizer."""

    computation: float
    compression: float
    latency: float
    bandwidth: float

    @property
    def communication(self) -> float:
        """Seconds of messages."""
        return self.latency + self.bandwidth

    @property
    def total(self) -> float:
        """Total seconds."""
        return sum(self)


def predict(model: Model, choice: str, kinds: Cycle, workers: int, network: Network) -> Parts:
    """Seconds of an update of a model by part, from the kinds of steps of :func:`count_cycle`."""
    rounds = sum(kind["share"] * kind["rounds"] for kind in kinds)
    words, path = (
        sum(kind["share"] * Linear(**kind[key])(model.entries) for kind in kinds) for key in ("words", "bytes")
    )
    compress = seconds_to_compress(choice, model.entries, workers, words)
    return Parts(model.seconds, *Work.of(compress, rounds, path, network))


@dataclass(frozen=True)
class UpdatePlan:
    """Plan of one size preset: numbers of workers by key of ``gpu.MODELS``, entries to keep, and approximate cost."""

    workers: Mapping[str, tuple[int, ...]]
    kept: int
    cost: str


@dataclass(frozen=True)
class UpdateBreakdown(Exhibit):
    """Models x methods x numbers of workers on one network, with one table and one panel per model.

    Speedups refer to the method ``baseline``; densities are by model.
    """

    methods: Mapping[str, Counted]
    plans: ByScale[UpdatePlan]
    network: str
    density: Mapping[str, float]
    baseline: str
    basis: Basis = field(default=BREAKDOWN, kw_only=True)

    def job(self, plan: UpdatePlan, model: str, method: str, workers: int) -> Computation:
        """Job that counts one method at the density of a model; exhibits with equal settings share it."""
        choice, words, settle = self.methods[method]
        density = self.density[model]
        setting = {"workers": workers, "density": density, "kept": plan.kept, "settle": settle}
        method_words = " ".join((f"compressor={choice}", *words))
        shell = f"python scripts/reproduce.py {self.name} ({method_words}, {workers} workers, density {density})"
        arguments = (("name", choice), ("overrides", words), *setting.items())
        return Computation("cycle", count_cycle, arguments, shell)

    def jobs(self, scale: str) -> Sequence[Computation]:
        plan = at(scale, self.plans)
        choices = ((model, *choice) for model, sizes in plan.workers.items() for choice in product(self.methods, sizes))
        return list(dict.fromkeys(self.job(plan, *choice) for choice in choices))

    def cost(self, scale: str) -> str:
        return f"{len(self.jobs(scale))} counts, {at(scale, self.plans).cost}"

    def caption(self, scale: str) -> str:
        assumed = "; ".join(
            f"{model.title}: {model.seconds:.3g} s ({model.batch} examples a worker, {model.rate:.2g} operations/s: "
            f"{model.certainty})"
            for model in map(MODELS.__getitem__, at(scale, self.plans).workers)
        )
        return f"Seconds of an update on {self.network}. Computation is assumed: {assumed}."

    def predicted(self, plan: UpdatePlan, model: str, results: Results) -> dict[tuple[str, int], Parts]:
        """Parts of an update by method and number of workers; without those whose counting failed."""
        found = {
            (method, workers): results.of(self.job(plan, model, method, workers))
            for method, workers in product(self.methods, plan.workers[model])
        }
        network = PRESETS[self.network]
        return {
            (method, workers): predict(
                MODELS[model], self.methods[method].choice, outcome.data["kinds"], workers, network
            )
            for (method, workers), outcome in found.items()
            if outcome.reason is None
        }

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        return [self._table(plan, model, results) for model in plan.workers]

    def _table(self, plan: UpdatePlan, model: str, results: Results) -> Table:
        sizes, found, rows = plan.workers[model], self.predicted(plan, model, results), []
        parts = ("computation", "compression", "communication", "of it latency", "of it bandwidth", "update")
        columns = ["method", *parts, f"speed-up over {self.baseline}", f"of the communication, over {self.baseline}"]
        columns += ["weak scaling efficiency"] if len(sizes) > 1 else []
        for method, workers in product(self.methods, sizes):
            job, base = (self.job(plan, model, name, workers) for name in (method, self.baseline))
            own = found.get((method, workers))
            if own is None:
                cells = failed([results.of(job)], len(columns) - 1)
            else:
                alone = [_ratio(found.get((method, sizes[0])), own)] if len(sizes) > 1 else []
                cells = [*_seconds(own), *_ratios(own, found.get((self.baseline, workers))), *alone]
            rows.append(Row(_row_name(method, workers, sizes), cells, list(dict.fromkeys((job, base)))))
        title = f"{self.title}: {MODELS[model].title}, {self.network}, P = {', '.join(map(str, sizes))}"
        return Table(title, columns, rows)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan, pictures = at(scale, self.plans), []
        caption = f"Where an update's seconds go on {self.network}; the figures are those of whole updates"
        for model, sizes in plan.workers.items():
            found = self.predicted(plan, model, results)
            bars = {_row_name(*place, sizes): parts for place, parts in found.items()}
            title = f"{MODELS[model].title}, modelled"
            pictures.append(Picture(f"parts {model}", caption, partial(draw_parts, bars), title, style.looks(PARTS)))
        return pictures


def _row_name(method: str, workers: int, sizes: Sequence[int]) -> str:
    return f"{method}, P = {workers}" if len(sizes) > 1 else method


def _seconds(found: Parts) -> list[Cell]:
    messages = (found.communication, found.latency, found.bandwidth)
    return [*map(number, (found.computation, found.compression, *messages, found.total))]


def _ratios(found: Parts, baseline: Parts | None) -> list[Cell]:
    """Speedups of an update and of its messages over the baseline."""
    if baseline is None:
        return [Cell("baseline failed", bad=True)] * 2
    return [_ratio(baseline, found), _over(baseline.communication, found.communication)]


def _ratio(one: Parts | None, other: Parts) -> Cell:
    return Cell("first failed", bad=True) if one is None else _over(one.total, other.total)


def _over(one: float, other: float) -> Cell:
    return number(one / other) if other else Cell("no messages")


def draw_parts(bars: Mapping[str, Parts], figure: Any) -> None:
    """Draws stacked bars, the first on top; bars that exceed the axis are cut off and marked with an arrow."""
    figure.set_size_inches(SIZE[0], 0.7 + 0.2 * len(bars))
    axes = figure.subplots()
    plain(axes, "seconds", grid="x")
    below, looks = [0.0] * len(bars), style.looks(PARTS)
    for place, part in enumerate(PARTS):
        lengths = [found[place] for found in bars.values()]
        axes.barh(range(len(bars)), lengths, left=below, color=looks[part].color, height=0.72)
        below = [low + length for low, length in zip(below, lengths, strict=True)]
    # At most three times the median bar, so that small bars remain readable.
    limit = 1.05 * min(max(below), 3 * median(below)) if below else 1.0
    for place, total in enumerate(below):
        axes.text(limit, place, f" {CUT if total > limit else ''}{total:.3g}", va="center", fontsize=SMALL)
    axes.set_xlim(0, limit)
    rows_from_the_top(axes, list(bars))
    axes.locator_params(axis="x", nbins=4)
