"""Random numbers that depend on nothing but what they are for: no state of theirs needs to be saved."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["derive_seed", "seeded_generator"]


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) for a purpose, such as ``derive_seed(seed, "order", epoch)``."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seeded_generator(*parts: int | str) -> torch.Generator:
    """A CPU generator with such a seed: the same on every worker that asks for the same, and after a restart.

    Args:
        *parts: what the numbers are for, such as a seed, the number of a step, and a rank where workers should differ.

    Returns:
        The generator; nobody else has it.
    """
    return torch.Generator().manual_seed(derive_seed(*parts))
