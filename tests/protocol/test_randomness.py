from __future__ import annotations

import torch

from spardl.protocol.programs import derive_seed, seeded_generator


def test_seeds_are_fixed_for_ever() -> None:
    """Other values would break every run that is to be continued."""
    assert derive_seed(1, "order", 0) == 433034383059858670
    assert derive_seed(1, "order", 0) == derive_seed("1/order/0")


def test_seeds_differ_and_fit() -> None:
    seeds = {derive_seed(seed, what, step) for seed in range(10) for what in "ab" for step in range(10)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    one, other = (torch.rand(3, generator=seeded_generator(1, "x")) for _ in range(2))
    assert torch.equal(one, other)
