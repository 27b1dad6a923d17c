"""What Ok-Topk's thresholds select, and what balancing gains: watched trainings, and figures by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from scripts import choices
from scripts.exhibits import base
from scripts.exhibits import jobs as exhibit_jobs
from scripts.exhibits.claims import judging
from scripts.exhibits.claims.base import Verdict
from scripts.exhibits.claims.catalogue import load_all
from scripts.exhibits.kinds import balance, thresholds, trainings, watched
from scripts.exhibits.papers.catalogue import catalogue
from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather, OkTopk
from spardl.compressors import ReusedThreshold, TopK
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, PartialResidual
from spardl.protocol.programs import Worker
from spardl.vector.layout import Layout
from spardl.vector.packing import Slot, message_bytes
from spardl.vector.sparse import SparseVector
from tests.support import harness

TINY = ("model=resnet20", "dataset=digits", "training.batch_size=1", "cluster.workers=2")


def oktopk(density: float = 0.1) -> Method:
    return Method(ReusedThreshold(density), OkTopk(), PartialResidual())


def steps(method: Method, count: int, workers: int = 3, length: int = 200) -> list[Any]:
    bench = harness.Bench.build(method, workers, length)
    source = torch.Generator().manual_seed(7)
    return [
        bench.step([torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)])
        for _ in range(count)
    ]


def test_to_watch_changes_nothing() -> None:
    class Looks(watched.Trace):  # type: ignore[misc, name-defined]
        seen: Sequence[tuple[int, int, int]] = ()

        def before(self, method: Method, worker: Worker, state: Any) -> None:
            chosen = watched.selection(method, worker, state)
            self.seen = (*self.seen, (worker.rank, state.step, chosen.numel()))

    looks = Looks()
    plain, shown = (steps(method, 4) for method in (oktopk(), watched.Watched.of(oktopk(), looks)))
    for one, other in zip(plain, shown, strict=True):
        assert all(harness.same_bits(*pair) for pair in zip(one, other, strict=True))
    assert {(rank, step) for rank, step, _ in looks.seen} == {(rank, step) for rank in range(3) for step in range(4)}
    assert [count for _, step, count in looks.seen if step == 0] == [20] * 3


def test_a_watcher_is_told_of_every_average() -> None:
    counts = thresholds._Counts()
    averages = steps(watched.Watched.of(oktopk(), counts), 3)
    assert counts.sums == [len(average[0]) for average in averages]
    assert counts.wanted == 20
    assert [len(found) for found in counts.local] == [3, 3, 3]


def test_of_some_steps_only() -> None:
    each, some = thresholds._Counts(), thresholds._Counts(every=3)
    for counts in (each, some):
        steps(watched.Watched.of(oktopk(), counts), 5)
    assert some.sums == each.sums[::3]
    assert some.local == each.local[::3]


def test_only_single_entries_are_selected() -> None:
    method = harness.dense()
    with pytest.raises(ConfigError, match="compressor=none does not send single entries"):
        watched.selection(method, Worker(0, 1), method.init_state(Layout.flat(4), torch.float32))


def test_deviations_by_hand() -> None:
    found = thresholds.deviations([50, 100, 120, 110], 100)
    assert found.mean == pytest.approx(0.95)
    assert (found.least, found.most) == (0.5, 1.2)
    assert found.deviation == pytest.approx((0.5 + 0 + 0.2 + 0.1) / 4)
    assert found.off == 0.5


def results(folder: Path, job: Any, data: dict[str, Any]) -> Any:
    outcome = exhibit_jobs.Outcome(folder, data)
    return base.Results(folder, {job: outcome})


def test_the_table_of_thresholds_by_hand(tmp_path: Path) -> None:
    case = trainings.Case("Digits", ("a=1",), "digits")
    made = thresholds.Thresholds(
        name="x.y",
        title="T",
        source="",
        shows="",
        methods={"limited": (("b=1",), True), "local": (("b=2",), False)},
        plans={"smoke": watched.TracePlan((case,), ("c=1",), 2, "")},
    )
    job, _ = made.jobs("smoke")
    assert dict(job.arguments) == {"words": ("c=1", "a=1", "b=1"), "steps": 2}
    found = results(tmp_path, job, {"k": 10, "local": [[10, 20], [12, 14]], "sums": [10, 5]})
    (table,) = made.tables("smoke", found)
    assert [row.name for row in table.rows] == ["limited, own", "limited, sums", "local, own"]
    assert [cell.value for cell in table.rows[0].cells] == pytest.approx([1.4, 1.0, 2.0, 0.4, 0.75, 0.3])
    assert [cell.value for cell in table.rows[1].cells] == pytest.approx([0.75, 0.5, 1.0, 0.25, 0.5, 0.5])
    assert table.rows[2].cells[0].text == "not run yet"
    figure = Figure(layout="constrained")
    own, _ = made.pictures("smoke", found)
    own.draw(figure)
    assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx([1.5, 1.3])


@pytest.mark.parametrize(("scale", "told"), [("laptop", "too short: 96 steps where 1000 are needed"), ("evening", "")])
def test_what_is_watched_for_too_short_a_time_is_not_judged(scale: str, told: str, composing: None) -> None:
    exhibit = catalogue()["oktopk.thresholds"]
    data = {"k": 100, "local": [[300, 100]] * 4, "sums": [100] * 4}
    done = {job: exhibit_jobs.Outcome(Path("x"), data) for job in exhibit.jobs(scale)}
    claim = next(each for each in load_all() if each.name == "Ok-Topk: thresholds")
    finding = judging.judge(claim, {exhibit.name: exhibit}, scale, base.Results(Path("x"), done)).finding
    assert finding.verdict is (Verdict.UNJUDGED if told else Verdict.NOT)
    assert told in finding.reason
    assert ": 0% (" in finding.ours  # three models, each with the entries of a worker and the sums
    assert finding.ours.count("100% (") == 3  # and as often in the remarks on early evaluation


def test_thresholds_are_judged_per_model(composing: None) -> None:
    exhibit = catalogue()["oktopk.thresholds"]
    jobs = exhibit.jobs("evening")
    exact = {"k": 100, "local": [[100, 100]] * 4, "sums": [100] * 4}
    few = {"k": 100, "local": [[50, 50]] * 4, "sums": [50] * 4}
    model = next(iter(exhibit.plans["evening"].cases)).words
    done = {
        job: exhibit_jobs.Outcome(Path("x"), few if set(model) <= set(dict(job.arguments)["words"]) else exact)
        for job in jobs
    }
    claim = next(each for each in load_all() if each.name == "Ok-Topk: thresholds")
    found = judging.judge(claim, {exhibit.name: exhibit}, "evening", base.Results(Path("x"), done))
    assert [task.finding.verdict for task in found.tasks] == [Verdict.NOT, Verdict.DIRECTION, Verdict.DIRECTION]
    assert found.finding.verdict is Verdict.MIXED


@pytest.mark.slow
def test_exact_thresholds_select_what_is_wanted() -> None:
    words = (*TINY, "compressor=oktopk", "compressor.period=1", "communicator.threshold_period=1")
    found = thresholds.count_selected(words, 2)
    assert found["local"] == [[found["k"]] * 2] * 2
    assert found["sums"] == [found["k"]] * 2
    assert json.loads(json.dumps(found)) == found


@pytest.mark.slow
def test_loads_of_a_training() -> None:
    found = balance.record_loads((*TINY, "compressor=oktopk"), 2)
    selected = sum(found["ways"]["equal"]["loads"])
    assert selected == sum(found["ways"]["balanced"]["loads"]) > found["k"]
    kept = found["ways"]["plain"]["loads"]
    assert sum(kept) == found["k"] == sum(found["ways"]["levelled"]["loads"])


def clustered() -> Any:
    """Two workers with four entries each, all but one of which are in the first half of the vector."""
    own = [
        SparseVector(torch.tensor([0, 1, 2, 9]), torch.tensor([9.0, 8.0, 7.0, 1.0]), 16),
        SparseVector(torch.tensor([0, 1, 3, 7]), torch.tensor([9.0, 8.0, 1.0, 6.0]), 16),
    ]
    return balance.Snapshot(own, [0, 2, 16], 4)


def test_loads_by_hand() -> None:
    found = balance.compare(clustered())
    assert found["equal"].loads == [7, 1]
    assert found["balanced"].loads == [4, 4]
    # Both propose to cut at position 2, or 3: the mean is 2.
    assert found["fresh"].loads == [4, 4]
    # The four largest sums: 18 and 16 at the positions 0 and 1, 7 and 6 at 2 and 7.
    assert found["plain"].loads == [2, 2]
    assert found["levelled"].loads == [2, 2]
    assert found["equal"].rounds == 2  # numbers, and entries
    assert found["plain"].rounds == 2
    # A number of 8 bytes, and the four entries that the second worker has for the first.
    assert found["equal"].busiest == 8 + message_bytes(Slot(4, 8), torch.float32)


def test_levelled_blocks_are_gathered_as_they_were() -> None:
    own = [SparseVector(torch.arange(6), torch.arange(6.0) + 1, 8), SparseVector(torch.tensor([7]), torch.ones(1), 8)]
    snapshot = balance.Snapshot([own[0], SparseVector(torch.tensor([6]), torch.ones(1), 8)], [0, 6, 8], 7)
    found = balance.compare(snapshot)
    assert found["plain"].loads == [6, 1]
    assert found["levelled"].loads == [3, 4]
    assert found["levelled"].rounds == found["plain"].rounds + 1
    blocks = [SparseVector(own[0].indices, own[0].values, 6), SparseVector(torch.tensor([1]), torch.ones(1), 2)]
    for gather in (balance._plain, balance._levelled):
        gathered, _, _ = balance._run([lambda team, b=block, g=gather: g(b, [0, 6, 8], team) for block in blocks])
        for vector in gathered:
            assert vector.indices.tolist() == [0, 1, 2, 3, 4, 5, 7]
            assert vector.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0]


def test_the_tables_of_balance_by_hand(tmp_path: Path) -> None:
    case = trainings.Case("Digits", ("a=1",), "digits")
    plan = watched.TracePlan((case,), (), 2, "")
    made = balance.Balance("x.y", "T", "", "", {"smoke": plan}, "ethernet_1g", {"Digits": 2000})
    (job,) = made.jobs("smoke")
    ways = {
        "equal": {"loads": [6, 2], "rounds": 2, "busiest": 3000},
        "balanced": {"loads": [4, 4], "rounds": 2, "busiest": 2000},
        "fresh": {"loads": [5, 3], "rounds": 2, "busiest": 2500},
        "plain": {"loads": [3, 1], "rounds": 2, "busiest": 1000},
        "levelled": {"loads": [2, 2], "rounds": 3, "busiest": 500},
    }
    found = results(tmp_path, job, {"length": 1000, "k": 4, "ways": ways})
    split, gather, anew = made.tables("smoke", found)
    seconds = [2 * 50e-6 + 2 * size * 8e-9 for size in (3000, 2000)]
    expected = [1.5, 1.0, 3.0, 2.0, 1.5, *seconds, seconds[0] / seconds[1]]
    assert [cell.value for cell in split.rows[0].cells[:-1]] == pytest.approx(expected)
    assert gather.rows[0].cells[4].value == 2
    assert gather.rows[0].cells[6].value == pytest.approx(3 * 50e-6 + 2 * 500 * 8e-9)
    assert anew.rows[0].cells[1].value == 1.25
    assert "from memory" in split.rows[0].cells[-1].text
    failing, *_ = made.tables("smoke", replace(found, found={}))
    assert failing.rows[0].cells[0].text == "not run yet"
    figure = Figure(layout="constrained")
    made.pictures("smoke", found)[0].draw(figure)
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1.5, 0.5, 1.0, 1.0]


def test_the_published_cases_are_as_large_as_published() -> None:
    exhibit = catalogue()["oktopk.balance"]
    for plan in exhibit.plans.values():
        sizes = [exhibit.entries[case.name] for case in plan.cases]
        assert sizes == [14_728_266, 27_569_568, 133_547_324][: len(sizes)]


def test_topk_is_sparse_enough() -> None:
    compressor = watched.sparse(Method(TopK(0.1), AllGather(), LocalResidual()))
    assert compressor.density == 0.1


def test_every_comparison_names_what_is_not_published_of_it() -> None:
    """Wherever Ok-Topk is among the methods that run, at any scale, and nowhere else."""
    known = catalogue()
    with choices.composing():
        jobs = {name: [*exhibit.jobs("smoke"), *exhibit.jobs("laptop")] for name, exhibit in known.items()}
    runs = {name for name, found in jobs.items() if any("oktopk" in repr(job).replace(name, "") for job in found)}
    named = {name for name, exhibit in known.items() if "reevaluate_beyond" in exhibit.what_ran("laptop")}
    assert len(runs) == 17
    assert runs == named
