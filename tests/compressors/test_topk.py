"""Top-k as a compressor."""

from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.compressors import TopK
from spardl.method.recipes import make_method
from spardl.protocol.programs import State
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Range
from tests.support.harness import Bench, context, same_bits


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
    assert select(Accumulator(values), [Range(100, 104, 2)]).tolist() == [101, 102]


@pytest.mark.parametrize(("scope", "index"), [("chunk", 1), ("model", 9 / 8)])
@pytest.mark.parametrize("wire", ["exact", "int4"])
@pytest.mark.parametrize("name", ["topka", "spardl"])
def test_of_chunks_an_index_takes_8_bits_in_the_ledger(name: str, scope: str, index: float, wire: str) -> None:
    """At 64 of 4,096 entries, where other scopes need 9."""
    method = make_method(name, density=1 / 64, scope=scope, wire=wire)
    found = Bench.build(method, 4, 4096 * 64, torch.float32)
    averages = found.step([torch.randn(4096 * 64, generator=torch.Generator().manual_seed(rank)) for rank in range(4)])
    assert all(same_bits(average, averages[0]) for average in averages)
    # With int4, two limits for 256 values each.
    value = 4 if wire == "exact" else 0.5 + 2 * 4 / 256
    for ledger in found.cluster.ledgers:
        assert ledger.bytes_sent / (ledger.words / 2) == pytest.approx(value + index, rel=0.001)
