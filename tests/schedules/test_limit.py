"""The limit on the norm of a worker's own gradient."""

from __future__ import annotations

import math

import pytest
import torch

from spardl.schedules.scaling import Limit


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_parts_do_not_prevent_clipping_the_rest(bad: float) -> None:
    """The non-finite part is left out later, without the others."""
    whole, harmed = [torch.full((4,), 3.0)], [torch.full((4,), 3.0), torch.tensor([bad, 1.0])]
    for vectors in (whole, harmed):
        Limit(1.0, first=True).clip(vectors, 6, 1.0)
    assert torch.equal(whole[0], harmed[0])
    assert float(whole[0].norm()) == pytest.approx(1)
    assert harmed[1][1] == 1


def test_where_nothing_is_finite_nothing_changes() -> None:
    vector = torch.tensor([math.inf, 1.0])
    Limit(1.0, first=True).clip([vector], 2, 1.0)
    assert vector.tolist() == [math.inf, 1.0]
