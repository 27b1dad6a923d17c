"""Single entries of a long vector: read, replace, cut out, add to.

Everywhere ``values`` has shape (n,), and ``positions`` are int64, shape (k,), in ``[0, n)``, no two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spardl.vector.kernels import compiled
from spardl.vector.norms import Magnitudes, largest

__all__ = ["add", "cut", "cut_to_bfloat16", "gather", "put", "undo"]

_BITS: Mapping[int, torch.dtype] = MappingProxyType({2: torch.int16, 4: torch.int32, 8: torch.int64})


def gather(values: Tensor, positions: Tensor) -> Tensor:
    """The entries, shape (k,)."""
    if not compiled(values):
        return values[positions]
    from spardl.vector.kernels import entries  # noqa: PLC0415 - takes seconds to import

    out = values.new_empty(positions.numel())
    entries.gather(_raw(values), positions.numpy(), _raw(out))
    return out


def put(values: Tensor, positions: Tensor, new: Tensor) -> None:
    """Replaces the entries by others, shape (k,), of the same type."""
    if not compiled(values):
        values[positions] = new
        return
    from spardl.vector.kernels import entries  # noqa: PLC0415

    entries.put(_raw(values), positions.numpy(), _raw(new))


def undo(values: Tensor, changes: Sequence[tuple[Tensor, Tensor]], kept: Tensor) -> float:
    """Takes changes back, the last one first, but for some positions, where everything stays.

    Args:
        values: the vector.
        changes: the positions of each, fastest if they increase, or fall only a few times; and what was there before,
            shape (k,), of the vector's type.
        kept: int64, shape (l,), strictly increasing: positions that stay.

    Returns:
        The largest magnitude of what stayed: of all that had changed, at least; NaN if there is one.
    """
    if not compiled(values):
        stays = values[kept]
        for positions, before in reversed(changes):
            values[positions] = before
        values[kept] = stays
        return largest([stays])
    from spardl.vector.kernels import entries  # noqa: PLC0415

    raw, own, magnitudes = _raw(values), kept.numpy(), Magnitudes.of(values.dtype)
    mask, most = magnitudes.mask, 0
    for positions, before in reversed(changes):
        most = max(most, entries.put_others(raw, mask, positions.numpy(), _raw(before), own))
    return magnitudes.number_of(most)


def cut(values: Tensor, positions: Tensor) -> Tensor:
    """The entries, shape (k,), which become zero."""
    if not compiled(values):
        out = values[positions]
        values[positions] = 0
        return out
    from spardl.vector.kernels import entries  # noqa: PLC0415

    out = values.new_empty(positions.numel())
    entries.cut(_raw(values), positions.numpy(), _raw(out))
    return out


def cut_to_bfloat16(values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves of float32 entries what bfloat16 lacks of them; only where kernels are ``compiled``.

    Returns:
        The entries, what bfloat16 makes of them, as ``Wire.rounded`` does, and the difference, which they become.
    """
    from spardl.vector.kernels import entries  # noqa: PLC0415

    before, sent, errors = (values.new_empty(positions.numel()) for _ in range(3))
    entries.cut_to_bfloat16(values.detach().numpy(), positions.numpy(), before.numpy(), sent.numpy(), errors.numpy())
    return before, sent, errors


def add(values: Tensor, positions: Tensor, amounts: Tensor) -> tuple[Tensor, float]:
    """Adds amounts, shape (k,), of the same type, to the entries.

    Returns:
        What they were before, shape (k,), and the largest magnitude of the amounts; NaN if there is one.
    """
    if not compiled(values) or values.itemsize == 2:
        before = values[positions]
        values[positions] = before + amounts
        return before, largest([amounts])
    from spardl.vector.kernels import entries  # noqa: PLC0415

    before = values.new_empty(positions.numel())
    peak = entries.add(values.detach().numpy(), positions.numpy(), amounts.numpy(), before.numpy())
    return before, float(peak)


def _raw(values: Tensor) -> Any:
    # Copied as they are: numpy has no bfloat16.
    return values.detach().view(_BITS[values.itemsize]).numpy()
