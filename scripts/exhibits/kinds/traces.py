"""Selections in every step of real trainings: entries that thresholds select, and the error of local selection (xi)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist, mean
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import style
from scripts.exhibits.charts.curves import draw_steps
from scripts.exhibits.charts.style import plain
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.watched import (
    Trace,
    TracedExhibit,
    TracePlan,
    Variants,
    basis_of_trace,
    selection,
    sparse,
    train_watched,
)
from scripts.exhibits.tables import Cell, Table
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Context, Worker
from spardl.vector.sparse import SparseVector, Sum

PUBLISHED = 0.11
# Counted selections, with their names in figures.
KINDS: Mapping[str, str] = MappingProxyType({"own": "own entries", "sums": "sums that are kept"})
COLUMNS = (
    "method, selection",
    "selected / wanted",
    "least",
    "most",
    "mean deviation",
    f"off by over {PUBLISHED:.0%}",
    "mean deviation, second half",
)


@dataclass
class _Counts(Trace):
    """Counts the entries that each worker selects, and the sums."""

    local: list[list[int]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def start(self, method: Method, worker: Worker, state: MethodState) -> None:
        if len(self.local) == self.looked:
            self.local.append([])
        self.local[-1].append(selection(method, worker, state).numel())

    def look(self, vectors: Sequence[Tensor], average: Sum) -> None:
        self.sums.append(len(average) if isinstance(average, SparseVector) else average.numel())


def count_selected(words: Sequence[str], steps: int, every: int = 1) -> dict[str, Any]:
    """Trains a method that sends single entries, and counts those it selects in every step, or one in ``every``.

    Returns:
        ``k``, the wanted number of entries; by counted step ``local``, the entries that each worker selected, and
        ``sums``, the number of sums in the result.
    """
    counts = _Counts(every=every)
    train_watched(words, steps, counts)
    return {"k": counts.wanted, "local": counts.local, "sums": counts.sums}


class Spread(NamedTuple):
    """Ratios of counts to the wanted number.

    Attributes:
        mean: Mean ratio.
        least: Smallest ratio.
        most: Largest ratio.
        deviation: Mean distance of the ratios from 1.
        off: Share of ratios that differ from 1 by more than the published mean.
    """

    mean: float
    least: float
    most: float
    deviation: float
    off: float


def deviations(counts: Sequence[int], wanted: int) -> Spread:
    """Statistics of at least one count."""
    ratios = [count / wanted for count in counts]
    away = [abs(ratio - 1) for ratio in ratios]
    off = sum(distance > PUBLISHED for distance in away) / len(away)
    return Spread(mean(ratios), min(ratios), max(ratios), mean(away), off)


@dataclass(frozen=True)
class Thresholds(TracedExhibit):
    """Methods x cases, with one table and two panels per case.

    Attributes:
        methods: Words of train.py by name, and whether the result is limited to about k sums.
    """

    methods: Mapping[str, tuple[tuple[str, ...], bool]]
    basis: Basis = field(
        default=basis_of_trace(
            "entries that every worker selects and sums that are kept, in every step of real trainings"
        ),
        kw_only=True,
    )
    traced = "selected"
    trace = count_selected
    about = (
        "{plan.titles}. {plan.length}, without the dense warm-up of the papers: residuals build up in the first steps, "
        "so the second half is given separately. Own: entries that workers select of their gradients, over all workers "
        "and steps; sums: entries kept of the total. {words}"
    )

    def variants(self, plan: TracePlan) -> Variants:
        return {name: words for name, (words, _) in self.methods.items()}

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        rows = [
            [
                self.row(results, self.job(plan, case, name), f"{name}, {kind}", COLUMNS, partial(_cells, kind))
                for name in self.methods
                for kind in self._kinds(name)
            ]
            for case in plan.cases
        ]
        return [Table(f"{self.title}: {case.title}", COLUMNS, own) for case, own in zip(plan.cases, rows, strict=True)]

    def _kinds(self, method: str) -> list[str]:
        return ["own", "sums"] if self.methods[method][1] else ["own"]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan, looks, pictures = at(scale, self.plans), style.looks(self.methods), []
        caption = (
            "Selected / wanted by step; bands from the minimum to the maximum over the workers; grey: the published "
            f"deviation, within {PUBLISHED:.0%}"
        )
        draw = partial(draw_steps, styles=looks, up="selected / wanted", every=plan.every, near=PUBLISHED, ratios=True)
        for case in plan.cases:
            good = self.finished(plan, case, results)
            for kind, words in KINDS.items():
                key = {name: look for name, look in looks.items() if kind in self._kinds(name)}
                lines = {
                    name: [[count / data["k"] for count in step] for step in _by_step(data, kind)]
                    for name, data in good.items()
                    if name in key
                }
                own = partial(draw, lines=lines)
                pictures.append(Picture(f"{case.name} {kind}", caption, own, f"{case.title}: {words}", key))
        return pictures


def _by_step(data: Mapping[str, Any], kind: str) -> list[list[int]]:
    """Counts of every step, one per worker or one of the sums."""
    found: list[list[int]] = data["local"] if kind == "own" else [[count] for count in data["sums"]]
    return found


def _cells(kind: str, data: Mapping[str, Any]) -> list[Cell]:
    steps = _by_step(data, kind)
    found, later = (
        deviations([count for step in part for count in step], data["k"]) for part in (steps, steps[len(steps) // 2 :])
    )
    shares = (found.deviation, found.off, later.deviation)
    return [*(number(value, ".3f") for value in found[:3]), *(number(value, ".1%") for value in shares)]


# What the exhibit of xi shows: bins of the distribution and its range in standard deviations, thresholds, and the lines
# of its figure with their keys in the results.
BINS, REACH = 80, 8.0
THRESHOLDS = ("exact", "used again", "normal fit")
XI_LINES = MappingProxyType({"exact": "xi", "sent": "sent"})
XI = ("case", "xi, mean", "xi, most", "xi, second half", "with the average, second half")
CUTS = ("case", "k", *THRESHOLDS, *(f"selected / k, {name}" for name in THRESHOLDS))


def distance(vectors: Tensor, average: Tensor, gradient: Tensor, k: int) -> tuple[float, float]:
    """Distance between global and local selection, relative to the norm of the gradient.

    Args:
        vectors: Sums of gradient and residual of all workers, shape (P, n).
        average: Sent and averaged entries, shape (n,).
        gradient: Mean gradient of all workers, shape (n,).
        k: Number of entries to keep.

    Returns:
        xi = ||Topk(mean of vectors) - Topk(mean of Topk(vector))|| / ||gradient||, and the same distance with the
        average in place of the second term.
    """
    best = _largest_of(vectors.mean(0), k)
    local = torch.stack([_largest_of(vector, k) for vector in vectors]).mean(0)
    norm = gradient.norm().item() or 1.0
    return (best - _largest_of(local, k)).norm().item() / norm, (best - average).norm().item() / norm


def _largest_of(vector: Tensor, k: int) -> Tensor:
    """Vector with its k entries of largest magnitude; all others are zero."""
    chosen = vector.abs().topk(k).indices
    return torch.zeros_like(vector).index_copy_(0, chosen, vector[chosen])


def thresholds_of(vector: Tensor, chosen: Tensor, k: int) -> dict[str, float]:
    """Thresholds that select k of a worker's sums of gradient and residual, by name of the method that finds them.

    ``chosen`` are the positions, at least one, that a reused threshold selects.
    """
    tail = NormalDist().inv_cdf(1 - k / vector.numel() / 2)
    found = (
        vector.abs().topk(k).values.min().item(),
        vector[chosen].abs().min().item(),
        abs(vector.mean().item()) + tail * vector.std().item(),
    )
    return dict(zip(THRESHOLDS, found, strict=True))


@dataclass
class _Selections(Trace):
    """Keeps both distances by observed step, and the distribution of the first worker's vector in the last step."""

    last: int = 0
    residuals: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, MethodState] = field(default_factory=dict)
    xi: list[tuple[float, float]] = field(default_factory=list)
    picture: dict[str, Any] = field(default_factory=dict)

    def before(self, method: Method, worker: Worker, state: MethodState) -> None:
        super().before(method, worker, state)
        self.states[worker.rank] = state
        if state.step == self.last and worker.rank == 0:
            vector, chosen = state.memory, selection(method, worker, state)
            cuts = thresholds_of(vector, chosen, sparse(method).count(Context(worker, state.layout, state.step)))
            scale = vector.std().item() or 1.0
            self.picture = {
                "scale": scale,
                "counts": torch.histc(vector / scale, BINS, -REACH, REACH).tolist(),
                "cuts": cuts,
                "selected": {name: int((vector.abs() >= cut).sum()) for name, cut in cuts.items()},
            }

    def after(self, worker: Worker, step: int, average: Sum) -> None:
        super().after(worker, step, average)
        if self.observes(step + 1):
            self.residuals[worker.rank] = self.states[worker.rank].memory.clone()

    def look(self, vectors: Sequence[Tensor], average: Sum) -> None:
        sums = average.dense() if isinstance(average, SparseVector) else average
        before = [self.residuals.get(rank, torch.zeros_like(sums)) for rank in range(len(vectors))]
        every = torch.stack(list(vectors))
        self.xi.append(distance(every, sums, (every - torch.stack(before)).mean(0), self.wanted))


def measure_selections(words: Sequence[str], steps: int, every: int = 1) -> dict[str, Any]:
    """Trains a method that sends single entries without own momentum, and measures the error of local selection.

    Returns:
        ``k``; by observed step ``xi``, and ``sent``, the same distance with the sent average; and ``last``, the vector
        of one worker in the last step: its standard deviation ``scale``, ``counts`` of entries in equal bins,
        thresholds by name as ``cuts``, and the number of entries that each has ``selected``.
    """
    trace = _Selections(last=steps - 1, every=every)
    train_watched(words, steps, trace)
    xi, sent = zip(*trace.xi, strict=True)
    return {"k": trace.wanted, "xi": list(xi), "sent": list(sent), "last": trace.picture}


@dataclass(frozen=True)
class Selections(TracedExhibit):
    """Trainings with one method: xi by step, and the thresholds in a distribution.

    Attributes:
        method: Arguments of train.py that select the method.
    """

    method: tuple[str, ...]
    basis: Basis = field(
        default=basis_of_trace(
            "gradients, residuals, selections and averages of every worker, in every step of real trainings"
        ),
        kw_only=True,
    )
    traced = "selections"
    trace = measure_selections
    about = (
        "{plan.titles}. {plan.length}. xi: the distance of the k largest entries of the mean of all workers' vectors "
        "(gradient and residual) from the k largest of the mean of their separate selections, over the norm of the "
        "mean gradient; with the average: from the average that Ok-Topk computed. Thresholds: of the first worker in "
        "the last step; a normal fit takes the mean and the standard deviation of all entries. {words}"
    )

    def variants(self, plan: TracePlan) -> Variants:
        return {"": self.method}

    def caption(self, scale: str) -> str:
        return f"{super().caption(scale)} {' '.join(self.method)}"

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        jobs = {case.title: self.job(plan, case) for case in plan.cases}
        return [
            Table(
                f"{self.title}: {title}",
                columns,
                [self.row(results, job, case, columns, cells) for case, job in jobs.items()],
            )
            for title, columns, cells in (("xi", XI, _xi_cells), ("thresholds", CUTS, _cut_cells))
        ]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan, lines, cuts = at(scale, self.plans), style.looks(XI_LINES), style.looks(THRESHOLDS)
        xi = "xi by step, of exact selections and of the entries sent instead"
        distribution = "Entries of one worker's gradient and residual in the last step, and where thresholds cut"
        by_step, places = [], []
        for case in plan.cases:
            for data in self.finished(plan, case, results).values():
                own = {name: [[value] for value in data[key]] for name, key in XI_LINES.items()}
                draw = partial(draw_steps, lines=own, styles=lines, up="xi", every=plan.every, ratios=True)
                by_step.append(Picture(f"xi {case.name}", xi, draw, case.title, lines))
                draw = partial(_draw_cuts, data["last"])
                places.append(Picture(f"distribution {case.name}", distribution, draw, case.title, cuts))
        return [*by_step, *places]


def _xi_cells(data: Mapping[str, Any]) -> list[Cell]:
    xi, sent = data["xi"], data["sent"]
    return [number(each) for each in (mean(xi), max(xi), mean(xi[len(xi) // 2 :]), mean(sent[len(sent) // 2 :]))]


def _cut_cells(data: Mapping[str, Any]) -> list[Cell]:
    k, last = data["k"], data["last"]
    shares = [last["selected"][name] / k for name in THRESHOLDS]
    return [number(k, ""), *map(number, (*last["cuts"].values(), *shares))]


def _draw_cuts(last: Mapping[str, Any], figure: Any) -> None:
    axes, looks = figure.subplots(), style.looks(THRESHOLDS)
    plain(axes, "entry / standard deviation", "entries, logarithmic")
    edges = [-REACH + 2 * REACH * place / BINS for place in range(BINS + 1)]
    axes.stairs(last["counts"], edges, fill=True, color=style.LINE)
    for name, cut in last["cuts"].items():
        for place in (-cut / last["scale"], cut / last["scale"]):
            axes.axvline(place, color=looks[name].color, linestyle=looks[name].dash)
    axes.set_yscale("log")
