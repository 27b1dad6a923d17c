"""Top-k as a compressor."""

from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.compressors import TopK
from spardl.protocol.state import State
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Part
from tests.harness import context


@pytest.mark.parametrize("density", [0, -1, 2, 1.0001, float("nan"), "abc", True, None])
def test_densities_that_make_no_sense(density: object) -> None:
    with pytest.raises(ConfigError, match="density must be above 0 and at most 1"):
        TopK(density)


@pytest.mark.parametrize(
    ("density", "length", "count"),
    [(0.01, 14_700_000, 147_000), (0.01, 10, 1), (0.01, 0, 0), (1.0, 7, 7), (0.5, 3, 2), (1e-9, 5, 1)],
)
def test_count(density: float, length: int, count: int) -> None:
    assert TopK(density).count(context(length)) == count


def test_selects_the_largest() -> None:
    compressor = TopK(0.5)
    select = compressor.selector(context(104), State())
    values = torch.cat([torch.full((100,), 5.0), torch.tensor([1.0, -3.0, 2.0, 0.0])])
    assert select(Accumulator(values), [Part(100, 104, 2)]).tolist() == [101, 102]
