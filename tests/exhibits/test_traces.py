"""Traced trainings: what thresholds and local selection do, balance, lazy selection, and the adaptation of h."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import choices
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.claims import judging
from scripts.exhibits.claims.catalogue import load_all
from scripts.exhibits.claims.judging import Verdict
from scripts.exhibits.kinds import balance, traces, trainings, watched
from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather, OkTopk
from spardl.compressors import ReusedThreshold, TopK
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, PartialResidual
from spardl.protocol.programs import Worker
from spardl.vector.layout import Layout
from spardl.vector.packing import Slot, message_bytes
from spardl.vector.sparse import SparseVector
from tests.support import harness, shown

TINY = ("model=resnet20", "dataset=digits", "training.batch_size=1", "cluster.workers=2")
CASE = trainings.Case("Digits", ("a=1",), "digits")
OWN = {"name": "x.y", "title": "T", "source": "", "shows": ""}
EXACT_OKTOPK = Method(ReusedThreshold(0.1, period=1), OkTopk(threshold_period=1), PartialResidual())


def oktopk() -> Method:
    return Method(ReusedThreshold(0.1), OkTopk(), PartialResidual())


def drawn(workers: int, length: int, source: torch.Generator) -> list[Tensor]:
    return [torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)]


def steps(method: Method, count: int, workers: int = 3, length: int = 200) -> list[Any]:
    bench, source = harness.Bench.build(method, workers, length), torch.Generator().manual_seed(7)
    return [bench.step(drawn(workers, length, source)) for _ in range(count)]


def smoke(name: str, data: Any) -> Any:
    """An exhibit, and results of its only job at scale smoke."""
    exhibit = catalogue()[name]
    (job,) = exhibit.jobs("smoke")
    return exhibit, shown.results({job: data})


def values(row: Any) -> list[float | None]:
    return [cell.value for cell in row.cells]


def test_to_watch_changes_nothing() -> None:
    class Looks(watched.Trace):  # type: ignore[misc, name-defined]
        seen: Sequence[tuple[int, int, int]] = ()

        def before(self, method: Method, worker: Worker, state: Any) -> None:
            chosen = watched.selection(method, worker, state)
            self.seen = (*self.seen, (worker.rank, state.step, chosen.numel()))

    looks = Looks()
    for pair in zip(steps(oktopk(), 4), steps(watched.Watched.of(oktopk(), looks), 4), strict=True):
        assert all(harness.same_bits(*averages) for averages in zip(*pair, strict=True))
    assert {(rank, step) for rank, step, _ in looks.seen} == {(rank, step) for rank in range(3) for step in range(4)}
    assert [count for _, step, count in looks.seen if step == 0] == [20] * 3


def test_a_watcher_receives_all_or_some_averages() -> None:
    each, some = traces._Counts(), traces._Counts(every=3)
    averages, _ = (steps(watched.Watched.of(oktopk(), counts), 5) for counts in (each, some))
    assert each.sums == [len(average[0]) for average in averages]
    assert each.wanted == 20
    assert [len(found) for found in each.local] == [3] * 5
    assert some.sums == each.sums[::3]
    assert some.local == each.local[::3]


def test_only_single_entries_are_selected() -> None:
    method = harness.dense()
    with pytest.raises(ConfigError, match="compressor=none does not send single entries"):
        watched.selection(method, Worker(0, 1), method.init_state(Layout.flat(4), torch.float32))
    assert watched.sparse(Method(TopK(0.1), AllGather(), LocalResidual())).density == 0.1


def test_thresholds_by_hand() -> None:
    assert traces.deviations([50, 100, 120, 110], 100) == pytest.approx((0.95, 0.5, 1.2, 0.8 / 4, 0.5))
    methods = {"limited": (("b=1",), True), "local": (("b=2",), False)}
    plans = {"smoke": watched.TracePlan((CASE,), ("c=1",), 2, "")}
    made = traces.Thresholds(**OWN, methods=methods, plans=plans)
    job, _ = made.jobs("smoke")
    assert dict(job.arguments) == {"words": ("c=1", "a=1", "b=1"), "steps": 2}
    found = shown.results({job: {"k": 10, "local": [[10, 20], [12, 14]], "sums": [10, 5]}})
    (table,) = made.tables("smoke", found)
    assert [row.name for row in table.rows] == ["limited, own", "limited, sums", "local, own"]
    assert values(table.rows[0]) == pytest.approx([1.4, 1.0, 2.0, 0.4, 0.75, 0.3])
    assert values(table.rows[1]) == pytest.approx([0.75, 0.5, 1.0, 0.25, 0.5, 0.5])
    assert table.rows[2].cells[0].text == "not run yet"
    own, sums = (shown.axes(picture) for picture in made.pictures("smoke", found))
    assert list(own.lines[0].get_ydata()) == pytest.approx([1.5, 1.3])
    assert (len(own.collections), len(sums.collections)) == (1, 0)  # a band over the workers
    assert own.get_yscale() == "log"


@pytest.mark.parametrize(
    ("scale", "complaint"), [("laptop", "too short: 96 steps where 1000 are needed"), ("evening", "")]
)
def test_what_is_watched_for_too_short_a_time_is_not_judged(scale: str, complaint: str, composing: None) -> None:
    exhibit = catalogue()["oktopk.thresholds"]
    data = {"k": 100, "local": [[300, 100]] * 4, "sums": [100] * 4}
    claim = next(each for each in load_all() if each.name == "Ok-Topk: thresholds")
    found = shown.results(dict.fromkeys(exhibit.jobs(scale), data))
    finding = judging.judge(claim, {exhibit.name: exhibit}, scale, found).finding
    assert finding.verdict is (Verdict.UNJUDGED if complaint else Verdict.NOT)
    assert complaint in finding.reason
    assert ": 0% (" in finding.ours  # three models, each with the entries of a worker and the sums
    assert finding.ours.count("100% (") == 3  # and as often in the remarks on early evaluation


def test_thresholds_are_judged_per_model(composing: None) -> None:
    exhibit = catalogue()["oktopk.thresholds"]
    exact, few = ({"k": 100, "local": [[count] * 2] * 4, "sums": [count] * 4} for count in (100, 50))
    model = set(exhibit.plans["evening"].cases[0].words)
    jobs = exhibit.jobs("evening")
    done = {job: few if model <= set(dict(job.arguments)["words"]) else exact for job in jobs}
    claim = next(each for each in load_all() if each.name == "Ok-Topk: thresholds")
    found = judging.judge(claim, {exhibit.name: exhibit}, "evening", shown.results(done))
    assert [task.finding.verdict for task in found.tasks] == [Verdict.NOT, Verdict.DIRECTION, Verdict.DIRECTION]
    assert found.finding.verdict is Verdict.MIXED


@pytest.mark.slow
def test_exact_thresholds_select_what_is_wanted() -> None:
    words = (*TINY, "compressor=oktopk", "compressor.period=1", "communicator.threshold_period=1")
    found = traces.count_selected(words, 2)
    assert found["local"] == [[found["k"]] * 2] * 2
    assert found["sums"] == [found["k"]] * 2
    assert json.loads(json.dumps(found)) == found


@pytest.mark.slow
def test_loads_of_a_training() -> None:
    found = balance.record_loads((*TINY, "compressor=oktopk"), 2)
    loads = {name: sum(way["loads"]) for name, way in found["ways"].items()}
    assert loads["equal"] == loads["balanced"] > found["k"]
    assert loads["plain"] == loads["levelled"] == found["k"]


def test_loads_by_hand() -> None:
    """Two workers with four entries each, all but one of which are in the first half of the vector."""
    own = [
        SparseVector(torch.tensor([0, 1, 2, 9]), torch.tensor([9.0, 8.0, 7.0, 1.0]), 16),
        SparseVector(torch.tensor([0, 1, 3, 7]), torch.tensor([9.0, 8.0, 1.0, 6.0]), 16),
    ]
    found = balance.compare(balance.Snapshot(own, [0, 2, 16], 4))
    # Both propose to cut at position 2, or 3: the mean is 2. The four largest sums: 18 and 16 at the positions 0 and 1,
    # 7 and 6 at 2 and 7.
    loads = {"equal": [7, 1], "balanced": [4, 4], "fresh": [4, 4], "plain": [2, 2], "levelled": [2, 2]}
    assert {name: sent.loads for name, sent in found.items()} == loads
    assert found["equal"].rounds == 2  # numbers, and entries
    assert found["plain"].rounds == 2
    # A number of 8 bytes, and the four entries that the second worker has for the first.
    assert found["equal"].busiest == 8 + message_bytes(Slot(4, 8), torch.float32)


def test_levelled_blocks_are_gathered_as_they_were() -> None:
    six, one = torch.arange(6), torch.ones(1)
    own = [SparseVector(six, six + 1.0, 8), SparseVector(torch.tensor([6]), one, 8)]
    found = balance.compare(balance.Snapshot(own, [0, 6, 8], 7))
    assert found["plain"].loads == [6, 1]
    assert found["levelled"].loads == [3, 4]
    assert found["levelled"].rounds == found["plain"].rounds + 1
    blocks = [SparseVector(six, six + 1.0, 6), SparseVector(torch.tensor([1]), one, 2)]
    for gather in (balance._plain, balance._levelled):
        gathered, _, _ = balance._run([lambda team, b=block, g=gather: g(b, [0, 6, 8], team) for block in blocks])
        for vector in gathered:
            assert vector.indices.tolist() == [0, 1, 2, 3, 4, 5, 7]
            assert vector.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0]


def test_balance_by_hand() -> None:
    plans = {"smoke": watched.TracePlan((CASE,), (), 2, "")}
    made = balance.Balance(**OWN, plans=plans, network="ethernet_1g", entries={"Digits": 2000})
    (job,) = made.jobs("smoke")
    ways = {
        "equal": {"loads": [6, 2], "rounds": 2, "busiest": 3000},
        "balanced": {"loads": [4, 4], "rounds": 2, "busiest": 2000},
        "fresh": {"loads": [5, 3], "rounds": 2, "busiest": 2500},
        "plain": {"loads": [3, 1], "rounds": 2, "busiest": 1000},
        "levelled": {"loads": [2, 2], "rounds": 3, "busiest": 500},
    }
    found = shown.results({job: {"length": 1000, "k": 4, "ways": ways}})
    split, gather, anew = made.tables("smoke", found)
    seconds = [2 * 50e-6 + 2 * size * 8e-9 for size in (3000, 2000)]
    assert values(split.rows[0])[:-1] == pytest.approx([1.5, 1.0, 3.0, 2.0, 1.5, *seconds, seconds[0] / seconds[1]])
    assert split.columns[-5:-1] == ["gain", "seconds, equal", "seconds, balanced", "gain with latency"]
    assert gather.rows[0].cells[4].value == 2
    assert gather.rows[0].cells[6].value == pytest.approx(3 * 50e-6 + 2 * 500 * 8e-9)
    assert anew.rows[0].cells[1].value == 1.25
    assert "from memory" in split.rows[0].cells[-1].text
    assert made.tables("smoke", shown.NOTHING)[0].rows[0].cells[0].text == "not run yet"
    bars = shown.axes(made.pictures("smoke", found)[0]).patches
    assert [bar.get_height() for bar in bars] == [1.5, 0.5, 1.0, 1.0]


def test_the_published_cases_are_as_large_as_published() -> None:
    exhibit = catalogue()["oktopk.balance"]
    for plan in exhibit.plans.values():
        sizes = [exhibit.entries[case.name] for case in plan.cases]
        assert sizes == [14_728_266, 27_569_568, 133_547_324][: len(sizes)]


def test_every_comparison_names_what_is_not_published_of_it() -> None:
    """Wherever Ok-Topk is among the methods that run, at any scale, and nowhere else."""
    known = catalogue()
    with choices.composing():
        jobs = {name: [*exhibit.jobs("smoke"), *exhibit.jobs("laptop")] for name, exhibit in known.items()}
    runs = {name for name, found in jobs.items() if any("oktopk" in repr(job).replace(name, "") for job in found)}
    assert len(runs) == 16
    assert runs == {name for name, exhibit in known.items() if "reevaluate_beyond" in exhibit.what_ran("laptop")}


def test_distances_and_thresholds_of_vectors_by_hand() -> None:
    vectors = torch.tensor([[4.0, 0, 3, 0], [0, -4.0, 3, 0]])
    average, gradient = torch.tensor([0.0, 0.0, 3.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 2.0])
    # The largest of the mean (2, -2, 3, 0) is 3; alone, each worker selects a 4, of whose means 2 one is kept.
    assert traces.distance(vectors, average, gradient, 1) == (pytest.approx((3**2 + 2**2) ** 0.5 / 2), 0)
    vector = torch.tensor([0.5, -3.0, 2.0, 1.0])
    found = traces.thresholds_of(vector, torch.tensor([1, 2, 3]), 2)
    assert (found["exact"], found["used again"]) == (2.0, 1.0)
    # Half of the entries lie beyond 0.6745 standard deviations of a normal distribution.
    assert found["normal fit"] == pytest.approx(0.125 + 0.67449 * vector.std().item(), rel=1e-4)


def test_gradients_differ_from_residuals() -> None:
    """Equal workers lose nothing by selecting alone; and the norm is the gradient's, whatever waits."""
    trace, source = traces._Selections(last=2), torch.Generator().manual_seed(1)
    bench = harness.Bench.build(watched.Watched.of(EXACT_OKTOPK, trace), 3, 100)
    for step in range(3):
        (gradient,) = drawn(1, 100, source)
        bench.step([gradient.clone() for _ in range(3)])
        waiting = trace.vectors[0] - gradient
        assert torch.count_nonzero(waiting) == (0 if step == 0 else pytest.approx(90, abs=10))
    assert trace.wanted == 10
    assert [own for own, _ in trace.xi] == pytest.approx([0, 0, 0])
    assert [sent for _, sent in trace.xi] == pytest.approx([0, 0, 0], abs=1e-9)
    assert sum(trace.picture["counts"]) == 100
    apart, before = drawn(3, 100, source), [state.memory.clone() for state in bench.states]
    bench.step(apart)
    vectors, gradients = torch.stack(before) + torch.stack(apart), torch.stack(apart).mean(0)
    expected, _ = traces.distance(vectors, torch.zeros(100, dtype=torch.float64), gradients, 10)
    assert trace.xi[3][0] == pytest.approx(expected)
    assert expected > 0


def test_of_some_steps_only_of_xi() -> None:
    """Figures of a step do not depend on whether earlier steps were traced."""
    each, some = traces._Selections(last=7), traces._Selections(last=7, every=3)
    for watcher in (each, some):
        steps(watched.Watched.of(EXACT_OKTOPK, watcher), 8, length=100)
    assert (len(each.xi), len(some.xi)) == (8, 3)
    assert some.xi == each.xi[::3]
    assert some.picture == each.picture


def test_xi_by_hand() -> None:
    cuts, selected = (dict(zip(traces.THRESHOLDS, each, strict=True)) for each in ((2.0, 1.0, 3.0), (10, 15, 5)))
    last = {"scale": 0.5, "counts": [1.0] * traces.BINS, "cuts": cuts, "selected": selected}
    data = {"k": 10, "xi": [0.1, 0.2, 0.3, 0.4], "sent": [0.2, 0.2, 0.4, 0.6], "last": last}
    exhibit, found = smoke("oktopk.xi", data)
    losses, places = exhibit.tables("smoke", found)
    assert values(losses.rows[0]) == pytest.approx([0.25, 0.4, 0.35, 0.5])
    assert values(places.rows[0]) == [10, 2.0, 1.0, 3.0, 1.0, 1.5, 0.5]
    assert losses.rows[0].name.startswith("ResNet-20 on digits")
    lines, bars = (shown.axes(picture) for picture in exhibit.pictures("smoke", found))
    assert [list(line.get_ydata()) for line in lines.lines] == [data["xi"], data["sent"]]
    assert sorted(line.get_xdata()[0] for line in bars.lines) == [-6, -4, -2, 2, 4, 6]
    assert exhibit.tables("smoke", shown.NOTHING)[0].rows[0].cells[0].text == "not run yet"


@pytest.mark.slow
def test_a_training() -> None:
    (job,) = catalogue()["oktopk.xi"].jobs("smoke")
    found = job.function(**dict(job.arguments))
    assert json.loads(json.dumps(found)) == found
    assert len(found["xi"]) == 3
    assert all(0 < value < 2 for value in found["xi"])
    assert found["last"]["selected"]["exact"] >= found["k"]
