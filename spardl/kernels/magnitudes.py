"""The largest magnitude of a vector in compiled form, found among its bits as whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["largest"]


@njit(nogil=True, cache=True, error_model="numpy")
def largest(bits: Any, mask: Any) -> Any:
    """The bits of the largest magnitude; a NaN is larger than any number.

    Args:
        bits: integers of the entries' size, shape (n,).
        mask: removes the sign.
    """
    found = np.int64(0)
    for signed in bits:
        found = max(found, np.int64(signed & mask))
    return found
