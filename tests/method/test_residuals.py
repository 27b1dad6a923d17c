"""Residual rules, on a worked example."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather, SparDL
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import (
    ErrorFeedback,
    GlobalResidual,
    LocalResidual,
    NoResidual,
    PartialResidual,
    RescaledResidual,
    Residual,
)
from spardl.vector.accumulator import Accumulator
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Range
from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench


def select_first(accumulated: Accumulator, parts: Sequence[Range]) -> torch.Tensor:
    return torch.cat([torch.arange(part.start, part.start + part.k) for part in parts])


def accumulated() -> Accumulator:
    """Vector 1..6: positions 0 and 1 are taken, 10 and 20 are added at 1 and 4, then 4 is taken."""
    vector = Accumulator(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    vector.take([Range(0, 3, 2)], select_first)
    vector.add(0, SparseVector(torch.tensor([1, 4]), torch.tensor([10.0, 20.0]), 6))
    vector.take([Range(4, 6, 1)], select_first)
    return vector


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # final result: positions 1 and 3
        (LocalResidual(), [0.0, 0.0, 3.0, 4.0, 0.0, 6.0]),
        (PartialResidual(), [1.0, 0.0, 3.0, 4.0, 5.0, 6.0]),
        (GlobalResidual(), [1.0, 10.0, 3.0, 4.0, 5.0, 6.0]),
    ],
    ids=["LRES", "PRES", "GRES"],
)
def test_worked_example(rule: Residual, expected: list[float]) -> None:
    vector = accumulated()
    rule.keep(vector, torch.tensor([1, 3]))
    assert vector.values.tolist() == expected


def test_take_and_add_are_logged() -> None:
    vector = Accumulator(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    block = vector.take([Range(2, 4, 1)], select_first)
    assert (block.indices.tolist(), block.values.tolist(), block.length) == ([0], [3.0], 2)
    assert vector.values.tolist() == [1.0, 2.0, 0.0, 4.0]
    assert vector.taken().tolist() == [2]
    vector.restore()
    assert vector.values.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_position_touched_twice_is_restored() -> None:
    vector = accumulated()
    vector.restore()
    assert vector.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_accumulate() -> None:
    memory, gradient = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    GlobalResidual().accumulate(memory, gradient, Candidates())
    assert memory.tolist() == [4.0, 6.0]
    GlobalResidual().accumulate(memory, None, Candidates())
    assert memory.tolist() == [4.0, 6.0]
    NoResidual().accumulate(memory, gradient, Candidates())
    assert memory.tolist() == [3.0, 4.0]
    NoResidual().accumulate(memory, None, Candidates())
    assert memory.tolist() == [0.0, 0.0]


def test_rescaled_is_unbiased() -> None:
    rule = RescaledResidual()
    average = Bench.build(Method(TopK(0.5), AllGather(), rule), 1, 2).step([torch.tensor([1.0, 3.0]).double()])[0]
    assert isinstance(average, SparseVector)
    assert average.values.tolist() == [6.0]
    total = SparseVector(torch.tensor([1, 4, 9]), torch.tensor([1.0, 1.0, 1.0]), 10)
    # 2 of the first 4 entries, 1 of the 6 others.
    assert rule.scale(total, [Range(0, 4, 2), Range(4, 10, 1)]).values.tolist() == [2.0, 6.0, 6.0]


def test_each_rule_keeps_more_than_the_previous_one() -> None:
    """LRES, PRES, GRES lose less in this order, and GRES loses nothing."""
    source = torch.Generator().manual_seed(0)
    common = torch.randn(400, generator=source, dtype=torch.float64)
    gradients = [common + torch.randn(400, generator=source, dtype=torch.float64) for _ in range(16)]
    lost = []
    for rule in (NoResidual(), LocalResidual(), PartialResidual(), GlobalResidual()):
        bench = Bench.build(Method(TopK(0.2), SparDL(), rule), 16, 400)
        average = bench.step(gradients)[0]
        assert isinstance(average, SparseVector)
        missing = torch.stack(gradients).sum(0) - bench.residuals() - 16 * average.dense()
        lost.append(missing.abs().sum().item())
    assert lost[0] > lost[1] > lost[2] > lost[3]
    assert lost[3] < 1e-10


@pytest.mark.parametrize("rule", [LocalResidual, PartialResidual, GlobalResidual])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_decay_of_late_entries(rule: type[ErrorFeedback], workers: int) -> None:
    """The residual is multiplied before the next gradient is added."""
    plain, decayed = (Bench.build(Method(TopK(0.1), SparDL(), rule(decay)), workers, 40) for decay in (None, 0.75))
    first = [torch.randn(40, dtype=torch.float64) for _ in range(workers)]
    for bench in (plain, decayed):
        bench.step(first)
    torch.testing.assert_close(plain.residuals(), decayed.residuals(), rtol=0, atol=0)
    late = [state.memory.clone() for state in decayed.states]
    second = [torch.randn(40, dtype=torch.float64) for _ in range(workers)]
    for own, gradient, state in zip(late, second, decayed.states, strict=True):
        decayed.method.accumulate(gradient, state)
        torch.testing.assert_close(state.memory, 0.75 * own + gradient, rtol=1e-15, atol=0)


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, "a", True, float("nan")])
def test_invalid_decays(decay: object) -> None:
    with pytest.raises(ConfigError, match=r"residual\.decay must be above 0 and below 1"):
        GlobalResidual(decay)
