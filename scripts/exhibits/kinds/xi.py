"""Exhibits of the error of local selection: the xi of Ok-Topk's assumption, and thresholds in the distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist, mean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import palette
from scripts.exhibits.kinds.watched import (
    Trace,
    TracedExhibit,
    TracePlan,
    basis_of_trace,
    selection,
    sparse,
    train_watched,
)
from scripts.exhibits.outcomes import row_of
from scripts.exhibits.tables import Cell, Table
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Context, Worker
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["Selections", "distance", "largest_of", "measure_selections", "thresholds_of"]

BASIS = basis_of_trace("gradients, residuals, selections and averages of every worker, in every step of real trainings")
BINS, REACH = 80, 8.0  # bins of the distribution, and its range in standard deviations
THRESHOLDS = ("exact", "used again", "normal fit")
# Lines of the figure of xi by name, and their keys in the results.
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
    best = largest_of(vectors.mean(0), k)
    local = torch.stack([largest_of(vector, k) for vector in vectors]).mean(0)
    norm = gradient.norm().item() or 1.0
    return (best - largest_of(local, k)).norm().item() / norm, (best - average).norm().item() / norm


def largest_of(vector: Tensor, k: int) -> Tensor:
    """Vector with its k entries of largest magnitude; all others are zero."""
    kept = torch.zeros_like(vector)
    chosen = vector.abs().topk(k).indices
    kept[chosen] = vector[chosen]
    return kept


def thresholds_of(vector: Tensor, chosen: Tensor, k: int) -> dict[str, float]:
    """Selection thresholds by name of the method that determines them.

    Args:
        vector: Sum of gradient and residual of one worker, shape (n,).
        chosen: At least one position, as selected by a reused threshold.
        k: Target number of entries.
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
    """Trains and measures the error of local selection.

    Args:
        words: Arguments of train.py, with a method that sends single entries and keeps momentum in the optimizer.
        steps: Number of training steps.
        every: Steps between two observations, from the first step on.

    Returns:
        ``k``; by observed step ``xi``, and ``sent``, the same distance with the sent average; and ``last``, the vector
        of one worker in the last step: its standard deviation ``scale``, ``counts`` of entries in equal bins,
        thresholds by name as ``cuts``, and the number of entries that each has ``selected``.

    Raises:
        ConfigError: if the method does not send single entries.
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
    basis: Basis = field(default=BASIS, kw_only=True)
    traced = "selections"
    trace = measure_selections

    def variants(self, plan: TracePlan) -> Mapping[str, tuple[str, ...]]:
        return {"": self.method}

    def caption(self, scale: str) -> str:
        plan = at(scale, self.plans)
        return (
            f"{plan.titles}. {plan.length}. xi: the distance of the k largest entries of the mean of all workers' "
            "vectors (gradient and residual) from the k largest of the mean of their separate selections, over the "
            "norm of the mean gradient; with the average: from the average that Ok-Topk computed. Thresholds: of the "
            "first worker in the last step; a normal fit takes the mean and the standard deviation of all entries. "
            f"{' '.join((*plan.words, *self.method))}"
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        found = [(case.title, job, results.of(job)) for case in plan.cases for job in [self.job(plan, case, "")]]
        return [
            Table(f"{self.title}: {title}", columns, [row_of(*each, len(columns) - 1, cells) for each in found])
            for title, columns, cells in (("xi", XI, _xi_cells), ("thresholds", CUTS, _cut_cells))
        ]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        good, every = self.finished(scale, results), at(scale, self.plans).every
        xi = "xi by step, of exact selections and of the entries sent instead"
        distribution = "Entries of one worker's gradient and residual in the last step, and where thresholds cut"
        lines, cuts = palette.looks(XI_LINES), palette.looks(THRESHOLDS)
        return [
            *(Picture(f"xi {case.name}", xi, partial(_draw_xi, data, every), case.title, lines) for case, data in good),
            *(
                Picture(f"distribution {case.name}", distribution, partial(_draw_cuts, data["last"]), case.title, cuts)
                for case, data in good
            ),
        ]


def _xi_cells(data: Mapping[str, Any]) -> list[Cell]:
    xi, sent = data["xi"], data["sent"]
    figures = (mean(xi), max(xi), mean(xi[len(xi) // 2 :]), mean(sent[len(sent) // 2 :]))
    return [Cell(f"{figure:.3g}", figure) for figure in figures]


def _cut_cells(data: Mapping[str, Any]) -> list[Cell]:
    k, last = data["k"], data["last"]
    shares = [last["selected"][name] / k for name in THRESHOLDS]
    return [Cell(str(k), k), *(Cell(f"{value:.3g}", value) for value in (*last["cuts"].values(), *shares))]


def _draw_xi(data: Mapping[str, Any], every: int, figure: Any) -> None:
    axes, lines = figure.subplots(), {name: data[key] for name, key in XI_LINES.items()}
    axes_of.plain(axes, "step", "xi, logarithmic")
    looks = palette.looks(lines)
    for name, values in lines.items():
        axes.plot(range(0, every * len(values), every), values, color=looks[name].color, linestyle=looks[name].dash)
    axes_of.logarithmic(axes.yaxis, [value for values in lines.values() for value in values])


def _draw_cuts(last: Mapping[str, Any], figure: Any) -> None:
    axes, looks = figure.subplots(), palette.looks(THRESHOLDS)
    axes_of.plain(axes, "entry / standard deviation", "entries, logarithmic")
    edges = [-REACH + 2 * REACH * number / BINS for number in range(BINS + 1)]
    axes.stairs(last["counts"], edges, fill=True, color=palette.LINE)
    for name, cut in last["cuts"].items():
        for place in (-cut / last["scale"], cut / last["scale"]):
            axes.axvline(place, color=looks[name].color, linestyle=looks[name].dash)
    axes.set_yscale("log")
