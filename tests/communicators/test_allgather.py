"""TopkA: the sum of all selected entries."""

from __future__ import annotations

import torch

from spardl.vector.sparse import SparseVector
from tests.support.harness import Bench, topka


def test_sums_all_selected_entries() -> None:
    gradients = [torch.tensor([5.0, 1.0, 0.0, 4.0]), torch.tensor([1.0, -7.0, 0.5, 3.0])]
    bench = Bench.build(topka(0.5), 2, 4, torch.float32)
    average = bench.step(gradients)[0]
    assert isinstance(average, SparseVector)
    assert average.indices.tolist() == [0, 1, 3]
    assert average.values.tolist() == [2.5, -3.5, 3.5]
    assert [state.memory.tolist() for state in bench.states] == [[0, 1, 0, 0], [1, 0, 0.5, 0]]
