"""No compression."""

from __future__ import annotations

import torch

from spardl.compressors import NoCompression
from spardl.compressors.base import Output
from spardl.protocol.programs import Program, State
from spardl.vector.accumulator import Accumulator
from tests.support.harness import context


def test_hands_the_vector_to_one_dense_sum() -> None:
    seen = []

    def total(tensor: torch.Tensor) -> Program[torch.Tensor]:
        seen.append(tensor)
        return tensor * 3
        yield

    vector = torch.tensor([1.0, 2.0])
    program = NoCompression().rounds(Accumulator(vector), context(2), total, State())
    try:
        next(program)
    except StopIteration as stop:
        assert stop.value.tolist() == [3.0, 6.0]
    assert seen == [vector]
    assert NoCompression.output is Output.DENSE
