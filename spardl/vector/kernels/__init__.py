"""Inner loops in compiled form: what touches every entry of a gradient, and every entry that is sent.

Each has a portable twin in torch, with the same results to the last bit, for other devices and types, and for
installations without numba. The environment variable ``SPARDL_KERNELS=portable`` turns the compiled ones off.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

from torch import Tensor

__all__ = ["compiled", "runs_triton"]


@lru_cache
def _is_there(library: str) -> bool:
    return find_spec(library) is not None


def _wanted() -> bool:
    return os.environ.get("SPARDL_KERNELS") != "portable"


def compiled(tensor: Tensor) -> bool:
    """Whether compiled kernels work on a ``tensor``, of any shape."""
    return tensor.is_cpu and _wanted() and _is_there("numba")


def runs_triton(tensor: Tensor) -> bool:
    """Whether Triton's kernels work on a ``tensor``, of any shape."""
    return tensor.device.type == "cuda" and _wanted() and _is_there("triton")
