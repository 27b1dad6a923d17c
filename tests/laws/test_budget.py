"""Densities, their warm-up, and the parts they apply to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators import SparDL
from spardl.compressors import Budget, Output, PiecewiseCompressor, TopK, budget
from spardl.compressors.budget import Piece
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.protocol.programs import Context, State, Worker, seeded_generator
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Layout, Range
from spardl.vector.selection import top_k
from tests.support.harness import Bench, selected

LAYOUT = Layout.of([(20, 10), (5,), (0,), (300,)])


def at(step: int, layout: Layout = LAYOUT) -> Context:
    return Context(Worker(0, 1), layout, step)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scope", "tensor"),
        ("scope", None),
        ("bucket_entries", 0),
        ("warmup_steps", -1),
        ("warmup_steps", 1.5),
        ("warmup_density", 0),
    ],
)
def test_values_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"compressor.{field} must be"):
        Budget(**{field: value})


def test_the_density_falls_as_in_dgc() -> None:
    """75%, 93.75%, 98.4375%, 99.6%, 99.9% sparsity, one step each."""
    budget = Budget(density=0.25 / 4**4, warmup_steps=4, warmup_density=0.25)
    expected = [0.25, 0.0625, 0.015625, 0.00390625, 0.0009765625, 0.0009765625]
    assert [budget.density_at(step) for step in range(6)] == pytest.approx(expected)


def test_parts() -> None:
    assert Budget(density=0.1).parts(at(0)) == [Range(0, 505, 50)]
    by_layer = [Range(0, 200, 20), Range(200, 205, 1), Range(205, 505, 30)]
    assert Budget(density=0.1, scope="layer").parts(at(0)) == by_layer
    assert TopK(density=0.1, scope="layer").count(at(0)) == 51
    by_bucket = [Range(0, 205, 20), Range(205, 505, 30)]
    assert Budget(density=0.1, scope="bucket", bucket_entries=201).parts(at(0)) == by_bucket
    chunks = Budget(density=0.2, scope="chunk").parts(at(0, Layout.of([(3, 13), (1,)])))
    assert chunks == [Range(0, 15, 3), Range(15, 30, 3), Range(30, 40, 2)]


def test_each_layer_sends_its_own_largest() -> None:
    layout = Layout.of([(3,), (3,)])
    compressor = TopK(0.3, scope="layer")
    assert selected(compressor, torch.tensor([1.0, 2.0, 3.0, 100.0, 300.0, 200.0]), 2, at(0, layout)) == [2, 4]


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Fifteen entries, not thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "CHUNK", 15)
        forget_cuts()
        yield
    forget_cuts()


def forget_cuts() -> None:
    budget._budgets.cache_clear()
    budget._pieces.cache_clear()


@given(
    shapes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    density=st.floats(0.01, 1),
    scope=st.sampled_from(["model", "layer", "bucket", "chunk"]),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    k=st.integers(0, 40),
)
def test_every_block_gets_exactly_its_entries(
    shapes: list[int], density: float, scope: str, cut: tuple[float, float], k: int
) -> None:
    layout = Layout.of([(size,) for size in shapes])
    start, stop = sorted(int(fraction * layout.length) for fraction in cut)
    compressor = TopK(density, scope=scope, bucket_entries=10)
    vector = Accumulator(torch.randn(layout.length))
    chosen = compressor.selector(at(0, layout), State())(vector, [Range(start, stop, k)])
    assert chosen.dtype is torch.int64
    assert len(chosen) == min(k, stop - start)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert all(start <= position < stop for position in chosen.tolist())


@given(
    shapes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    scope=st.sampled_from(["model", "layer", "bucket", "chunk"]),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    k=st.integers(0, 40),
)
def test_of_several_blocks_each_is_chosen_as_if_alone(shapes: list[int], scope: str, cuts: list[float], k: int) -> None:
    """In the order asked for, which may go around the end of the vector."""
    layout = Layout.of([(size,) for size in shapes])
    borders = sorted({0, layout.length, *(int(cut * layout.length) for cut in cuts)})
    blocks = [Range(start, stop, k) for start, stop in pairwise(borders)]
    blocks = blocks[len(blocks) // 2 :] + blocks[: len(blocks) // 2]
    values = torch.randn(layout.length)
    select = TopK(0.1, scope=scope, bucket_entries=10).selector(at(0, layout), State())
    expected = [position for block in blocks for position in select(Accumulator(values), [block]).tolist()]
    assert select(Accumulator(values), blocks).tolist() == expected


@given(shapes=st.lists(st.integers(0, 30), min_size=1, max_size=6), density=st.floats(0.01, 1))
def test_of_the_whole_vector_each_layer_gets_its_budget(shapes: list[int], density: float) -> None:
    layout = Layout.of([(size,) for size in shapes])
    compressor = TopK(density, scope="layer")
    parts = compressor.parts(at(0, layout))
    whole = compressor.whole(at(0, layout))
    chosen = selected(compressor, torch.randn(layout.length), whole.k, at(0, layout))
    for part in parts:
        assert sum(part.start <= position < part.stop for position in chosen) == part.k


@dataclass(frozen=True)
class Watched(PiecewiseCompressor):
    """Top-k that notes who asks for which piece of which part, and the first number drawn for it."""

    asked: list[tuple[int, int, int, float]] = field(default_factory=list)

    name = "watched"
    output = Output.AT_MOST_K

    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        draw = torch.rand((), generator=seeded_generator(context.step, context.worker.rank, part)).item()
        self.asked.append((context.worker.rank, part, values.numel(), draw))
        return top_k(values, k)


def test_custom_part_needs_only_documented_interface() -> None:
    """Each once, in an order of the worker's own; pieces of a part draw the same numbers."""
    compressor = Watched(0.1, scope="layer")
    bench = Bench.build(Method(compressor, SparDL(), GlobalResidual()), 4, 80, torch.float32)
    bench.step([torch.randn(80) for _ in range(4)])
    sizes = {rank: [(part, size) for who, part, size, _ in compressor.asked if who == rank] for rank in range(4)}
    assert all(sorted(asked) == sorted(sizes[0]) for asked in sizes.values())
    assert len({tuple(asked) for asked in sizes.values()}) > 1
    assert sum(size for _, size in sizes[0]) == 80
    pieces = Counter(part for part, _ in sizes[0])
    assert pieces[0] > 1
    draws = {(rank, part): draw for rank, part, _, draw in compressor.asked}
    assert all(draws[rank, part] == draw for rank, part, _, draw in compressor.asked)
    assert len(set(draws.values())) == len(draws)


def test_pieces_are_read_one_by_one_and_in_columns() -> None:
    compressor = TopK(0.5, scope="layer")
    pieces = compressor.pieces([Range(2, 9, 3), Range(9, 9, 0), Range(0, 2, 1)], at(0, Layout.of([(4,), (5,)])))
    assert list(pieces) == [Piece(0, 2, 4, 1), Piece(1, 4, 9, 2), Piece(0, 0, 2, 1)]
    assert (len(pieces), pieces[1], list(pieces[1:])) == (3, Piece(1, 4, 9, 2), list(pieces)[1:])
    assert list(pieces.ranges) == [Range(*piece[1:]) for piece in pieces]
    whole = TopK(0.5).pieces([Range(2, 9, 30), Range(9, 9, 0)], at(0, Layout.of([(4,), (5,)])))
    assert list(whole) == [Piece(0, 2, 9, 7)]
