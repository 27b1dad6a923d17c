"""SparDL: its rounds, its h, and a reference implementation."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators.spardl import Blocks, SparDL, SparDLState, srs_rounds
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench, context, divisors, spardl


@pytest.mark.parametrize("size", range(1, 65))
def test_every_contribution_reaches_its_owner_once(size: int) -> None:
    """Spar-Reduce-Scatter: ceil(log2 m) rounds, m-1 blocks sent, each worker's block arrives exactly once."""
    rounds = srs_rounds(size)
    assert len(rounds) == math.ceil(math.log2(size))
    assert sum(bag for _, bag in rounds) == size - 1
    # holds[r][b] = how often each worker's part of block b is in worker r's hands
    holds = [[{rank: 1} for _ in range(size)] for rank in range(size)]
    for distance, bag in rounds:
        moving = []
        for rank in range(size):
            for offset in range(bag):
                block = (rank + distance + offset) % size
                moving.append(((rank + distance) % size, block, holds[rank][block]))
                holds[rank][block] = {}
        for target, block, parts in moving:
            for source, count in parts.items():
                holds[target][block][source] = holds[target][block].get(source, 0) + count
    assert all(holds[rank][rank] == dict.fromkeys(range(size), 1) for rank in range(size))


def reference(inputs: list[Tensor], k: int, teams: int, h: int) -> tuple[Tensor, list[Tensor]]:
    """One SparDL synchronization with B-SAG and global residuals, all workers in plain arrays.

    Follows the published description block by block, with whole copies instead of an undo log.

    Returns:
        The sum, and every worker's new residual.
    """
    workers, length = len(inputs), inputs[0].numel()
    size = workers // teams
    k_block = -(-k // size)
    work = [vector.clone() for vector in inputs]
    bounds = [(b * length // size, (b + 1) * length // size) for b in range(size)]

    def cut(rank: int, block: int, count: int) -> dict[int, float]:
        start, stop = bounds[block]
        order = sorted(range(start, stop), key=lambda i: (-abs(work[rank][i].item()), i))[:count]
        taken = {i: work[rank][i].item() for i in order}
        for i in order:
            work[rank][i] = 0
        return taken

    distance = 1 << max(0, (size - 1).bit_length() - 1)
    while distance and size > 1:
        moving = []
        for rank in range(workers):
            first, position = rank - rank % size, rank % size
            for offset in range(min(distance, size - distance)):
                block = (position + distance + offset) % size
                moving.append((first + (position + distance) % size, cut(rank, block, k_block)))
        for target, entries in moving:
            for i, value in entries.items():
                work[target][i] += value
        distance //= 2
    total = torch.zeros(length, dtype=inputs[0].dtype)
    final: set[int] = set()
    for block in range(size):
        merged: dict[int, float] = {}
        for team in range(teams):
            for i, value in cut(team * size + block, block, h).items():
                merged[i] = merged.get(i, 0.0) + value
        for i in sorted(merged, key=lambda i: (-abs(merged[i]), i))[:k_block]:
            total[i] = merged[i]
            final.add(i)
    residuals = [vector.clone() for vector in inputs]
    for residual, left in zip(residuals, work, strict=True):
        for i in final:
            residual[i] = left[i]
    return total, residuals


@given(st.integers(1, 14), st.data(), st.integers(0, 10**6))
def test_equals_the_reference(workers: int, data: st.DataObject, seed: int) -> None:
    teams = data.draw(st.sampled_from(divisors(workers)))
    length = data.draw(st.integers(workers, 90))
    method = Method(TopK(0.2), SparDL(teams), GlobalResidual())
    k = method.compressor.count(context(length))
    source = torch.Generator().manual_seed(seed)
    common = torch.randn(length, generator=source, dtype=torch.float64)
    gradients = [common + torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)]
    bench = Bench.build(method, workers, length)
    average = bench.step(gradients)[0]
    # All first blocks are longer than what is kept of them here, so h starts at its lowest.
    total, residuals = reference(gradients, k, teams, h=math.ceil(math.ceil(k / (workers // teams)) / teams))
    assert isinstance(average, SparseVector)
    shortest = length // (workers // teams)
    if shortest > -(-k // (workers // teams)):
        torch.testing.assert_close(average.dense() * workers, total)
        for state, residual in zip(bench.states, residuals, strict=True):
            torch.testing.assert_close(state.memory, residual)


def test_h_stays_in_its_range_and_meets_k() -> None:
    """h must also adapt for small blocks."""
    for k, teams in ((30, 2), (60, 4), (7, 7), (1, 3), (4000, 4)):
        state, merged = SparDLState(), []
        lowest = math.ceil(k / teams)
        for _ in range(400):
            h = state.start(k, teams)
            assert lowest <= h <= k
            # A model of overlapping selections: the union of d teams holds 60% of what they send.
            union = max(h, round(0.6 * h * teams))
            merged.append(union)
            state.adapt(union, k, teams)
            assert lowest <= state.h <= k
        reachable = min(k, max(k, round(0.6 * k * teams)))
        assert abs(sum(merged[-100:]) / 100 - reachable) <= 0.2 * reachable + 1


@pytest.mark.parametrize(
    ("step", "inertia", "merged", "then_step", "then_inertia"),
    [
        (3, False, 90, 3, True),  # too few entries and growing: right, for the first time
        (3, True, 90, 6, False),  # right twice: twice the step
        (-3, False, 110, -3, True),  # too many and shrinking
        (-3, True, 110, -6, False),
        (6, True, 110, -3, False),  # wrong: half of it, the other way
        (-7, False, 90, 3, False),
        (1, False, 110, -1, False),  # never 0
        (-1, True, 100, 1, False),
        (80, True, 90, 100, False),  # no larger than k
    ],
)
def test_adaptation_of_h(step: int, inertia: bool, merged: int, then_step: int, then_inertia: bool) -> None:
    state = SparDLState(h=60, step=step, inertia=inertia)
    state.adapt(merged, k=100, teams=4)
    assert (state.step, state.inertia) == (then_step, then_inertia)
    assert state.h == min(max(60 + then_step, 25), 100)


def test_h_adapts_on_real_selections() -> None:
    """B-SAG over small blocks: the resulting density is close to the configured one."""
    workers, length, density = 6, 1200, 0.05
    bench = Bench.build(spardl(density, teams=3), workers, length)
    source = torch.Generator().manual_seed(3)
    common = torch.randn(length, generator=source, dtype=torch.float64)
    counts = []
    for _ in range(80):
        noise = [torch.randn(length, generator=source, dtype=torch.float64) for _ in range(workers)]
        average = bench.step([common + part for part in noise])[0]
        assert isinstance(average, SparseVector)
        counts.append(len(average))
    assert sum(counts[-30:]) / 30 >= 0.85 * density * length
    assert max(counts) <= density * length


def test_peers_agree_on_h() -> None:
    bench = Bench.build(spardl(0.1, teams=4), 8, 400)
    for step in range(10):
        source = torch.Generator().manual_seed(step)
        bench.step([torch.randn(400, generator=source, dtype=torch.float64) for _ in range(8)])
        states = [state.communication.state_dict() for state in bench.states]
        for position in range(2):
            assert all(states[rank] == states[position] for rank in range(position, 8, 2))


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 60))
def test_blocks_cover_the_vector(length: int, count: int, capacity: int) -> None:
    blocks = Blocks(length, count, capacity)
    bounds = [(part.start, part.stop) for part in blocks.parts]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(one[1] == other[0] for one, other in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert all(blocks.slots[b].capacity == min(capacity, sizes[b]) for b in range(count))
    around = [*blocks.parts, *blocks.parts]
    for first in range(count):
        assert all(list(blocks.cyclic(first, size)) == around[first : first + size] for size in range(1, count + 1))


def test_bad_options() -> None:
    for teams in (0, 1.5, "two", True):
        with pytest.raises(ConfigError, match=f"teams must be an integer, at least 1, got {teams!r}"):
            SparDL(teams=teams)
    with pytest.raises(ConfigError, match="must be one of bruck, recursive, got 'ring'"):
        SparDL(gather="ring")
    with pytest.raises(ConfigError, match=r"power of two as communicator.teams, got 3; use gather=bruck"):
        SparDL(teams=3, gather="recursive")
    with pytest.raises(ConfigError, match=r"teams=4 does not divide 6 workers; use one of 1, 2, 3, 6"):
        SparDL(teams=4).check_workers(6)
    SparDL(teams=3).check_workers(6)
    assert [workers for workers in range(1, 10) if SparDL(teams=4).runs_on(workers)] == [4, 8]
