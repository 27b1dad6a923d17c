"""Breakdown of the time of an update: computation, compression, latency and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from scripts.exhibits.base import Basis, ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts import palette
from scripts.exhibits.charts.axes import SIZE, SMALL, plain
from scripts.exhibits.jobs import Computation, Outcome
from scripts.exhibits.kinds.counts import Cycle, count_cycle
from scripts.exhibits.kinds.gpu import MODELS, Model, basis_of, measured_models, seconds_to_compress
from scripts.exhibits.outcomes import failed
from scripts.exhibits.passes import MeasuredPasses
from scripts.exhibits.tables import Cell, Row, Table
from spardl.clusters.network import PRESETS, Network
from spardl.diagnostics.timeline.model import Work
from spardl.schedules.fusion import Linear

BASIS = Basis(
    simulated="seconds of messages: counted rounds and bytes on a modelled network, one after the other",
    measured="rounds, and bytes on the longest path, counted in synchronizations of random gradients (a common part "
    "and noise, equally strong); steps with periodic work have their share",
    assumed="what each model and each compressor takes on an RTX 2080 Ti (scripts/exhibits/kinds/gpu.py), the network, "
    "that nothing overlaps, and that bytes grow in proportion to the model",
)
GROWING = ("words", "bytes")
PARTS = ("computation", "compression", "latency", "bandwidth")
CUT = "\u2192"  # mark of a bar that exceeds its axis


class Contender(NamedTuple):
    """A method to compare.

    Attributes:
        choice: Choice of ``compressor=``.
        words: Arguments of train.py.
        settle: Steps until its adaptation has converged.
    """

    choice: str
    words: tuple[str, ...] = ()
    settle: int = 0


class Parts(NamedTuple):
    """Seconds of one update.

    Attributes:
        computation: Seconds of both passes and the optimizer.
        compression: Seconds of selecting, packing and merging.
        latency: Seconds from the latency of messages.
        bandwidth: Seconds from the bandwidth of messages.
    """

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
        """Total seconds without overlap."""
        return sum(self)


def cycle_of(exhibit: str, contender: Contender, workers: int, density: float, kept: int) -> Computation:
    """Job that counts one method, shared by all exhibits with equal settings.

    Args:
        exhibit: Name of the exhibit, for the command.
        contender: Method to count.
        workers: Number of workers (P).
        density: Density of the sent entries.
        kept: Number of sent entries, see :func:`count_cycle`.
    """
    arguments = (
        ("name", contender.choice),
        ("overrides", contender.words),
        ("workers", workers),
        ("density", density),
        ("kept", kept),
        ("settle", contender.settle),
    )
    words = " ".join((f"compressor={contender.choice}", *contender.words))
    shell = f"python scripts/reproduce.py {exhibit} ({words}, {workers} workers, density {density})"
    return Computation("cycle", count_cycle, arguments, shell)


def predict(model: Model, choice: str, kinds: Cycle, workers: int, network: Network) -> Parts:
    """Seconds of an update by part.

    Args:
        model: Model whose gradients are sent.
        choice: Choice of ``compressor=``.
        kinds: Kinds of steps from :func:`count_cycle`.
        workers: Number of workers (P).
        network: Network of the messages.
    """
    rounds = sum(kind["share"] * kind["rounds"] for kind in kinds)
    words, path = (sum(kind["share"] * Linear(**kind[key])(model.entries) for kind in kinds) for key in GROWING)
    compress = seconds_to_compress(choice, model.entries, workers, words)
    return Parts(model.seconds, *Work.of(compress, rounds, path, network))


@dataclass(frozen=True)
class UpdatePlan:
    """Plan of one size preset.

    Attributes:
        workers: Numbers of workers by key of ``gpu.MODELS``.
        kept: Entries sent of the larger counted gradient.
        cost: Approximate duration of all runs.
    """

    workers: Mapping[str, tuple[int, ...]]
    kept: int
    cost: str


@dataclass(frozen=True)
class UpdateBreakdown(Exhibit):
    """Models x methods x numbers of workers on one network, with one table and one panel per model.

    Attributes:
        methods: Methods by name; those whose teams do not divide the number of workers are omitted.
        plans: Plan by size preset.
        network: Preset of the network.
        density: Density by model.
        baseline: Method that speedups refer to.
        models: Costs of the models by key of ``gpu.MODELS``.
    """

    methods: Mapping[str, Contender]
    plans: ByScale[UpdatePlan]
    network: str
    density: Mapping[str, float]
    baseline: str
    basis: Basis = field(default=BASIS, kw_only=True)
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)

    def assumes(self, scale: str) -> Sequence[str]:
        return [name for name in at(scale, self.plans).workers if not self.models[name].measured]

    def with_passes(self, given: Mapping[str, MeasuredPasses]) -> UpdateBreakdown:
        known = {name for plan in self.plans.values() for name in plan.workers}
        own = {name: passes for name, passes in given.items() if name in known}
        return replace(self, models=measured_models(self.models, own), basis=basis_of(self.basis, own))

    def job(self, plan: UpdatePlan, model: str, method: str, workers: int) -> Computation:
        """Job that counts one method at the density of a model."""
        return cycle_of(self.name, self.methods[method], workers, self.density[model], plan.kept)

    def jobs(self, scale: str) -> Sequence[Computation]:
        plan = at(scale, self.plans)
        choices = ((model, *choice) for model, sizes in plan.workers.items() for choice in product(self.methods, sizes))
        return list(dict.fromkeys(self.job(plan, *choice) for choice in choices))

    def cost(self, scale: str) -> str:
        return f"{len(self.jobs(scale))} counts, {at(scale, self.plans).cost}"

    def caption(self, scale: str) -> str:
        models = [self.models[name] for name in at(scale, self.plans).workers]
        assumed = "; ".join(
            f"{model.title}: {model.seconds:.3g} s ({model.batch} examples a worker, {model.rate:.2g} operations/s: "
            f"{model.certainty})"
            for model in models
            if not model.measured
        )
        measured = "; ".join(f"{model.title}: {model.measured.words}" for model in models if model.measured)
        parts = [f" Computation is assumed: {assumed}."] * bool(assumed) + [f" Measured: {measured}."] * bool(measured)
        return f"Seconds of an update on {self.network}.{''.join(parts)}"

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        return [self._table(plan, model, results) for model in plan.workers]

    def _table(self, plan: UpdatePlan, model: str, results: Results) -> Table:
        sizes = plan.workers[model]
        several = len(sizes) > 1
        rows = []
        for method, workers in product(self.methods, sizes):
            job, base = (self.job(plan, model, name, workers) for name in (method, self.baseline))
            found = self._predicted(plan, model, method, workers, results)
            if found is None:
                cells = failed([results.of(job)], len(self._columns(several)) - 1)
            else:
                against = self._predicted(plan, model, self.baseline, workers, results)
                alone = self._predicted(plan, model, method, sizes[0], results)
                cells = [*_seconds(found), *_ratios(found, against), *([_ratio(alone, found)] if several else [])]
            rows.append(Row(_row_name(method, workers, several), cells, list(dict.fromkeys((job, base)))))
        title = f"{self.title}: {self.models[model].title}, {self.network}, P = {', '.join(map(str, sizes))}"
        return Table(title, self._columns(several), rows)

    def _columns(self, several: bool) -> list[str]:
        return [
            "method",
            "computation",
            "compression",
            "communication",
            "of it latency",
            "of it bandwidth",
            "update",
            f"speed-up over {self.baseline}",
            f"of the communication, over {self.baseline}",
            *(["weak scaling efficiency"] if several else []),
        ]

    def _predicted(self, plan: UpdatePlan, model: str, method: str, workers: int, results: Results) -> Parts | None:
        """Parts of an update; ``None`` if counting failed."""
        outcome: Outcome = results.of(self.job(plan, model, method, workers))
        if outcome.reason is not None:
            return None
        return predict(
            self.models[model], self.methods[method].choice, outcome.data["kinds"], workers, PRESETS[self.network]
        )

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan = at(scale, self.plans)
        caption = f"Where an update's seconds go on {self.network}; the figures are those of whole updates"
        looks = palette.looks(PARTS)
        return [
            Picture(
                f"parts {model}",
                caption,
                partial(self._draw, plan, model, results),
                f"{self.models[model].title}, modelled",
                looks,
            )
            for model in plan.workers
        ]

    def _draw(self, plan: UpdatePlan, model: str, results: Results, figure: Any) -> None:
        sizes = plan.workers[model]
        bars = {
            _row_name(method, workers, len(sizes) > 1): found
            for method, workers in product(self.methods, sizes)
            if (found := self._predicted(plan, model, method, workers, results))
        }
        figure.set_size_inches(SIZE[0], 0.7 + 0.2 * len(bars))
        _draw_bars(figure.subplots(), bars)


def _row_name(method: str, workers: int, several: bool) -> str:
    return f"{method}, P = {workers}" if several else method


def _seconds(found: Parts) -> list[Cell]:
    figures = (
        found.computation,
        found.compression,
        found.communication,
        found.latency,
        found.bandwidth,
        found.total,
    )
    return [Cell(f"{figure:.3g}", figure) for figure in figures]


def _ratios(found: Parts, baseline: Parts | None) -> list[Cell]:
    """Speedups of an update and of its messages over the baseline."""
    if baseline is None:
        return [Cell("baseline failed", bad=True)] * 2
    return [_ratio(baseline, found), _over(baseline.communication, found.communication)]


def _ratio(one: Parts | None, other: Parts) -> Cell:
    return Cell("first failed", bad=True) if one is None else _over(one.total, other.total)


def _over(one: float, other: float) -> Cell:
    return Cell(f"{one / other:.3g}", one / other) if other else Cell("no messages")


def _draw_bars(axes: Any, bars: Mapping[str, Parts]) -> None:
    """Stacked bars, the first on top; bars that exceed the axis are cut off and marked with an arrow."""
    plain(axes, "seconds", grid="x")
    below, looks = [0.0] * len(bars), palette.looks(PARTS)
    for number, part in enumerate(PARTS):
        lengths = [found[number] for found in bars.values()]
        axes.barh(range(len(bars)), lengths, left=below, color=looks[part].color, height=0.72)
        below = [low + length for low, length in zip(below, lengths, strict=True)]
    limit = _limit(below)
    for place, total in enumerate(below):
        axes.text(limit, place, f" {CUT if total > limit else ''}{total:.3g}", va="center", fontsize=SMALL)
    axes.set_xlim(0, limit)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=4)


def _limit(totals: Sequence[float]) -> float:
    """Upper end of the axis: at most three times the median bar, so that small bars remain readable."""
    return 1.05 * min(max(totals), 3 * median(totals)) if totals else 1.0
