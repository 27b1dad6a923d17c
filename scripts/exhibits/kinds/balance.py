"""Exhibits of the gain of balanced regions and blocks, computed from the selections of real trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import style
from scripts.exhibits.charts.style import SIZE, plain
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.watched import Trace, TracedExhibit, TracePlan, selection, train_watched
from scripts.exhibits.tables import Cell, Table
from spardl.clusters import Network, SimulatedCluster
from spardl.clusters.network import PRESETS
from spardl.communicators.oktopk import OkTopk, OkTopkState, Region, consensus_borders
from spardl.communicators.steps.split import balance, equal_regions, joined, split_and_reduce
from spardl.communicators.steps.transfer import BlockExchange, all_gather_counts
from spardl.diagnostics.timeline.model import Work
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Program, Team, Worker, whole_team
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import Typed

BASIS = Basis(
    simulated="the cluster; seconds of messages, from rounds and the busiest worker's bytes on a modelled network",
    measured="entries that the workers of a real training select, their positions, and the entries sent",
    assumed="the network; that the published model's entries lie as the small model's do",
)


class Snapshot(NamedTuple):
    """Selections of all workers in one step, and the borders of the regions that Ok-Topk uses in it."""

    own: Sequence[SparseVector]
    borders: Sequence[int]
    k: int

    @property
    def length(self) -> int:
        """Number of entries of the gradient."""
        return self.own[0].length


@dataclass
class _Recorder(Trace):
    """Copies the selections of all workers, and the regions."""

    own: list[SparseVector] = field(default_factory=list)
    borders: list[int] = field(default_factory=list)

    def start(self, method: Method, worker: Worker, state: MethodState) -> None:
        assert isinstance(state.communication, OkTopkState)
        chosen = selection(method, worker, state)
        self.own.append(SparseVector(chosen, state.memory[chosen], state.memory.numel()))
        self.borders = state.communication.borders.tolist()


class Sent(NamedTuple):
    """Costs of one way of sending.

    Attributes:
        loads: Entries that each worker has to add up or to send to all others.
        rounds: Maximum number of rounds over the workers.
        busiest: Maximum number of bytes that a worker sends or receives.
    """

    loads: list[int]
    rounds: int
    busiest: int

    def on(self, network: Network, scale: float) -> float:
        """Seconds on a network, for a gradient scaled by a factor."""
        work = Work.of(0.0, self.rounds, self.busiest, network)
        return work.latency + work.bandwidth * scale


def record_loads(words: Sequence[str], steps: int) -> dict[str, Any]:
    """Trains with Ok-Topk for at least 2 steps; compares ways to send the entries selected in the last one.

    Returns ``length`` of the gradient, ``k``, and the result of :func:`compare`.
    """
    recorder = _Recorder(first=steps - 1)
    train_watched(words, steps, recorder)
    snapshot = Snapshot(recorder.own, recorder.borders, recorder.wanted)
    ways = {name: sent._asdict() for name, sent in compare(snapshot).items()}
    return {"length": snapshot.length, "k": snapshot.k, "ways": ways}


def compare(snapshot: Snapshot) -> dict[str, Sent]:
    """Costs of every way to split and to gather, by name.

    Returns:
        Entries are added up in ``equal`` regions, in ``fresh`` regions with equal load in this step, and in
        ``balanced`` regions as Ok-Topk last chose them. The k largest sums in the latter are gathered in ``plain`` and
        in ``levelled`` blocks.
    """
    proposed, _, _ = _run([partial(_borders, own) for own in snapshot.own])
    borders = {
        "equal": equal_regions(snapshot.length, len(snapshot.own)),
        "fresh": proposed[0],
        "balanced": snapshot.borders,
    }
    found = {}
    sums: Sequence[SparseVector] = ()
    for name, cuts in borders.items():
        sums, rounds, busiest = _run([partial(_split, own, cuts) for own in snapshot.own])
        found[name] = Sent(_arriving(snapshot.own, cuts), rounds, busiest)
    kept = _largest(sums, snapshot.k)
    for name, gather in (("plain", _plain), ("levelled", _levelled)):
        _, rounds, busiest = _run([partial(gather, block, snapshot.borders) for block in kept])
        found[name] = Sent([len(block) for block in kept], rounds, busiest)
    after = [stop - start for start, stop in pairwise(equal_regions(sum(map(len, kept)), len(kept)))]
    return {**found, "levelled": found["levelled"]._replace(loads=after)}


T = TypeVar("T")


def _run(programs: Sequence[Callable[[Team], Program[T]]]) -> tuple[list[T], int, int]:
    """Results, rounds, and bytes of the busiest worker."""
    cluster = SimulatedCluster(len(programs), Network(alpha=0, gbit=1), count_local=False)
    pairs = zip(programs, cluster.local_workers, strict=True)
    results = cluster.run([program(whole_team(worker)) for program, worker in pairs])
    ledgers = cluster.ledgers
    busiest = max(max(ledger.bytes_sent, ledger.bytes_received) for ledger in ledgers)
    return results, max(ledger.rounds for ledger in ledgers), busiest


def _courier(block: SparseVector) -> BlockExchange:
    return BlockExchange(Typed(block.values.dtype, block.values.dtype))


def _borders(own: SparseVector, team: Team) -> Program[list[int]]:
    return consensus_borders(team, own)


def _split(own: SparseVector, borders: Sequence[int], team: Team) -> Program[SparseVector]:
    return split_and_reduce(team, own, borders, OkTopk().bucket, _courier(own))


def _plain(block: SparseVector, borders: Sequence[int], team: Team) -> Program[SparseVector]:
    return Region(team, borders, _courier(block), block).gathered()


def _levelled(block: SparseVector, borders: Sequence[int], team: Team) -> Program[SparseVector]:
    region = Region(team, borders, _courier(block), block)
    counts = [count for (count,) in (yield from all_gather_counts(team, [len(block)], block.indices.device))]
    level = yield from balance(team, region.in_vector(), counts, region.transport)
    slots = [Slot(stop - start, level.length) for start, stop in pairwise(equal_regions(sum(counts), team.size))]
    return joined((yield from region.transport.all_gather(team, level, slots)))


def _arriving(own: Sequence[SparseVector], borders: Sequence[int]) -> list[int]:
    """Entries of all workers in each region."""
    cuts = torch.stack([torch.searchsorted(each.indices, torch.tensor(borders)) for each in own])
    loads: list[int] = cuts.diff(dim=1).sum(0).tolist()
    return loads


def _largest(sums: Sequence[SparseVector], k: int) -> list[SparseVector]:
    """Sums of all regions that are among the k largest."""
    magnitudes = torch.cat([block.values.abs() for block in sums])
    least = magnitudes.topk(min(k, magnitudes.numel())).values.min()
    chosen = [(block, block.values.abs() >= least) for block in sums]
    return [SparseVector(block.indices[large], block.values[large], block.length) for block, large in chosen]


class Kind(NamedTuple):
    """A comparison of the ways without and with balancing in :func:`compare`, and the published gain."""

    title: str
    ways: tuple[str, str]
    paper: str


KINDS = (
    Kind("Adding up: regions", ("equal", "balanced"), "1.13 to 1.75 (from memory, medium)"),
    Kind("Gathering: blocks", ("plain", "levelled"), "1.12 to 1.43 (from memory, medium)"),
    Kind("Adding up: new regions", ("equal", "fresh"), "1.13 to 1.75 (from memory, medium)"),
)


@dataclass(frozen=True)
class Balance(TracedExhibit):
    """Three comparisons with one row per case, and the loads of all workers as figures; the last step is observed.

    Attributes:
        network: Preset of the network that determines the seconds.
        entries: Parameters of the published models, to which bytes are scaled, by name of the case.
    """

    network: str
    entries: Mapping[str, int]
    basis: Basis = field(default=BASIS, kw_only=True)
    traced = "loads"
    trace = record_loads

    def caption(self, scale: str) -> str:
        plan = at(scale, self.plans)
        cases = "; ".join(f"{case.name} ({self.entries[case.name]:,} entries): {case.what}" for case in plan.cases)
        return (
            f"{cases}. Selections in step {plan.steps - 1}, with the regions of that step, which Ok-Topk chose up to "
            "64 steps before, or with new ones. Busiest worker: the most KB that a worker sends or receives, of the "
            f"small model; seconds: of these KB, scaled to the published model, on {self.network}. Levelled: "
            f"including the messages that make blocks equal. {' '.join(plan.words)}"
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        return [self._table(at(scale, self.plans), kind, results) for kind in KINDS]

    def _table(self, plan: TracePlan, kind: Kind, results: Results) -> Table:
        compared = ("most / mean", "busiest worker, KB", "gain", "seconds", "gain with latency")
        parts = [[each] if each.startswith("gain") else [f"{each}, {way}" for way in kind.ways] for each in compared]
        columns, rows = ["case", *chain.from_iterable(parts), "paper"], []
        for case in plan.cases:
            cells = partial(self._cells, self.entries[case.name], kind)
            rows.append(self.row(results, self.job(plan, case), case.title, columns, cells))
        return Table(f"{self.title}, {kind.title}", columns, rows)

    def _cells(self, entries: int, kind: Kind, data: Mapping[str, Any]) -> list[Cell]:
        ways = [Sent(**data["ways"][name]) for name in kind.ways]
        network, scale = PRESETS[self.network], entries / data["length"]
        unequal = [max(way.loads) * len(way.loads) / sum(way.loads) for way in ways]
        bare = [way.busiest / 1e3 for way in ways]
        full = [way.on(network, scale) for way in ways]
        figures = [*unequal, *bare, bare[0] / bare[1], *full, full[0] / full[1]]
        return [*map(number, figures), Cell(kind.paper)]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan = at(scale, self.plans)
        caption = "Entries of each worker over the mean of all, without (grey) and with balancing (blue)"
        return [
            Picture(
                f"loads {case.name} {kind.ways[1]}",
                caption,
                partial(_draw_loads, results.of(self.job(plan, case)).data.get("ways", {}), kind.ways),
                f"{case.title}; {kind.title.lower()}, {' and '.join(kind.ways)}",
            )
            for kind in KINDS
            for case in plan.cases
        ]


def _draw_loads(ways: Mapping[str, Mapping[str, Any]], names: Sequence[str], figure: Any) -> None:
    """Grouped bars on a linear axis, because some loads are zero and the bars have equal sums; none after a failure."""
    figure.set_size_inches(SIZE[0], 2.0)
    axes, looks = figure.subplots(), style.looks(name for name in names if name in ways)
    plain(axes, "worker", "load / mean", grid="y")
    for side, (name, look) in enumerate(looks.items()):
        loads = ways[name]["loads"]
        mean = sum(loads) / len(loads)
        places = [worker + 0.4 * side - 0.2 for worker in range(len(loads))]
        axes.bar(places, [load / mean for load in loads], 0.4, color=look.color)
    axes.axhline(1, color=style.SOFT, linewidth=0.9)
    axes.locator_params(axis="x", integer=True, nbins=9)
    axes.locator_params(axis="y", nbins=5)
