"""Lazy block-wise sparsification on and off: the laws of a method, by hand, and of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from scripts.exhibits import base, jobs
from scripts.exhibits.kinds import lazy, watched
from scripts.exhibits.papers.catalogue import catalogue
from spardl.basics.errors import ConfigError
from spardl.compressors import RandomK, TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.vector.wire import EXACT, Wire
from tests.support import harness


def at_once(density: float, wire: Wire = EXACT) -> Method:
    return Method(TopK(density), lazy.EagerSparDL(), GlobalResidual(), wire=wire)


def gradients(workers: int, length: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    common = torch.randn(length, generator=source, dtype=dtype)
    return [common + torch.randn(length, generator=source, dtype=dtype) for _ in range(workers)]


@pytest.mark.parametrize("workers", [*range(1, 9), 14])
@pytest.mark.parametrize(
    ("dtype", "wire", "tolerance"),
    [
        (torch.float64, EXACT, 1e-12),
        (torch.float32, EXACT, 1e-4),
        (torch.float32, Wire("bfloat16"), 1e-4),
    ],
    ids=str,
)
def test_replicas_are_bit_identical_and_mass_is_conserved(
    workers: int, dtype: torch.dtype, wire: Wire, tolerance: float
) -> None:
    bench = harness.Bench.build(at_once(0.1, wire), workers, 61 + 5 * workers, dtype)
    for step in range(4):
        given = gradients(workers, 61 + 5 * workers, dtype, step)
        before = bench.residuals() + torch.stack(given).sum(0)
        averages = bench.step(given)
        assert all(harness.same_bits(average, averages[0]) for average in averages)
        after = bench.residuals() + workers * harness.to_dense(averages[0])
        torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance * workers)


@pytest.mark.parametrize(("workers", "length"), [(1, 30), (2, 30), (5, 3), (7, 100), (14, 333)])
def test_cost_is_that_of_spardl(workers: int, length: int) -> None:
    """Fewer entries than workers, too."""
    found = []
    for method in (at_once(0.2), harness.spardl(0.2)):
        bench = harness.Bench.build(method, workers, length)
        bench.step(gradients(workers, length, torch.float64, 1))
        found.append([(ledger.rounds, ledger.words) for ledger in bench.cluster.ledgers])
        rounds, words = method.cost(harness.context(length, bench.cluster.local_workers[0]))
        assert all(each[0] in rounds and each[1] in words for each in found[-1])
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_where_nothing_is_left_out_both_are_equal(workers: int) -> None:
    found = []
    for method in (at_once(1.0), harness.spardl(1.0)):
        bench = harness.Bench.build(method, workers, 50)
        found.append(harness.to_dense(bench.step(gradients(workers, 50, torch.float64, 1))[0]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_what_was_cut_off_does_not_come_back() -> None:
    """Two workers, blocks of two entries, one of which is kept: of block 0, 3 and 2 here, 2 there."""
    given = [torch.tensor([3.0, 2.0, 0.0, 0.0]), torch.tensor([0.0, 2.0, 5.0, 0.0])]
    benches = {}
    for name, method in (("lazy", harness.spardl(0.5)), ("at once", at_once(0.5))):
        benches[name] = harness.Bench.build(method, 2, 4, torch.float32)
    averages = {name: bench.step([each.clone() for each in given])[0] for name, bench in benches.items()}
    assert harness.to_dense(averages["lazy"]).tolist() == [0, 2, 2.5, 0]
    assert harness.to_dense(averages["at once"]).tolist() == [1.5, 0, 2.5, 0]
    left = [state.memory.tolist() for state in benches["at once"].states]
    assert left == [[0, 2, 0, 0], [0, 2, 0, 0]]


@pytest.mark.parametrize("workers", [1, 2, 6, 14])
def test_selections_are_counted(workers: int) -> None:
    """One for each block; and one for each addition more."""
    length = 280
    found = lazy.ways(TopK(0.1))
    for name, expected in ((lazy.LAZY, workers), (lazy.EAGER, 2 * workers - 1)):
        way = found[name]
        given = gradients(workers, length, torch.float32, 1)
        average = way.average(harness.layout_of(length), [each.clone() for each in given])
        assert way.tally.selections == workers * expected
        more = 2 * (workers - 1) * -(-28 // workers) if name == lazy.EAGER else 0
        assert way.tally.entries == pytest.approx(workers * (length + more))
        plain = at_once(0.1) if name == lazy.EAGER else harness.spardl(0.1)
        assert harness.same_bits(
            average, harness.Bench.build(plain, workers, length, torch.float32).step(given)[0]
        )  # to count changes nothing


def test_what_is_not_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"for one team, got communicator\.teams=2; use teams=1"):
        lazy.EagerSparDL(teams=2)
    with pytest.raises(ConfigError, match="compressor=random_k is not compared here; use compressor=spardl"):
        lazy.ways(RandomK(0.1))


def test_both_get_what_the_workers_have() -> None:
    """So the lazy way's average is the training's, in every step; and mass is told of the most that is possible."""
    trace = lazy._Both()
    seen = []
    look = trace.look

    def looked(vectors: list[Tensor], average: Any) -> None:
        seen.append([each.clone() for each in vectors])
        look(vectors, average)

    trace.look = looked  # type: ignore[method-assign, assignment]
    bench = harness.Bench.build(watched.Watched.of(harness.spardl(0.1), trace), 3, 120)
    for step in range(3):
        average = harness.to_dense(bench.step(gradients(3, 120, torch.float64, step))[0])
        best = torch.zeros(120, dtype=torch.float64)
        mean = torch.stack(seen[step]).mean(0)
        chosen = mean.abs().topk(12).indices
        best[chosen] = mean[chosen]
        way = trace.ways[lazy.LAZY]
        assert way.mass[step] == pytest.approx((average.abs().sum() / best.abs().sum()).item(), rel=1e-9)
        assert way.distance[step] == pytest.approx(((average - best).norm() / best.norm()).item(), rel=1e-9)
    assert len(trace.same) == 3
    assert all(0 < share < 1 for share in trace.same)
    assert sum(trace.ways[lazy.EAGER].mass) < sum(trace.ways[lazy.LAZY].mass)


def test_tables_and_pictures_by_hand() -> None:
    exhibit = catalogue()["spardl.lazy"]
    (job,) = exhibit.jobs("smoke")
    data = {
        "same": [0.5, 0.7],
        lazy.LAZY: {"selections": 3.0, "entries": 1.0, "mass": [0.8, 0.9], "distance": [0.4, 0.3]},
        lazy.EAGER: {"selections": 5.0, "entries": 1.02, "mass": [0.6, 0.7], "distance": [0.5, 0.6]},
    }
    results = base.Results(Path("x"), {job: jobs.Outcome(Path("x"), data)})
    (table,) = exhibit.tables("smoke", results)
    late, early = ([cell.value for cell in row.cells] for row in table.rows)
    assert late == pytest.approx([3, 1, 0.85, 0.9, 0.3, 1])
    assert early == pytest.approx([5, 1.02, 0.65, 0.7, 0.6, 0.6])
    (picture,) = exhibit.pictures("smoke", results)
    figure = Figure(layout="constrained")
    picture.draw(figure)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0.8, 0.9], [0.6, 0.7]]
    assert set(picture.key) == {"lazily", "at once"}
    (missing,) = exhibit.tables("smoke", base.Results(Path("x"), {}))
    assert missing.rows[0].cells[0].text == "not run yet"
    assert exhibit.pictures("smoke", base.Results(Path("x"), {})) == []


@pytest.mark.slow
def test_a_training() -> None:
    (job,) = catalogue()["spardl.lazy"].jobs("smoke")
    found = job.function(**dict(job.arguments))
    assert json.loads(json.dumps(found)) == found
    assert [found[name]["selections"] for name in (lazy.LAZY, lazy.EAGER)] == [3, 5]
    assert found[lazy.LAZY]["entries"] == 1
    assert len(found["same"]) == len(found[lazy.EAGER]["mass"]) == 2
