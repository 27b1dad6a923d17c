"""A gradient is added to a vector block by block, so that who looks at its entries next finds them in the cache."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Adding", "block_of"]

_BLOCK = 1 << 17


def block_of(values: Tensor) -> int:
    """How many entries of ``values``, shape (n,), fit into a cache; on a GPU, all, and at least 1."""
    return _BLOCK if values.device.type == "cpu" else max(1, values.numel())


class Adding:
    """Goes no further than others need it next.

    Args:
        values: shape (n,), changed in place.
        gradient: shape (n,), or ``None``: there is nothing to add.
        clear: whether the gradient becomes zero.
    """

    def __init__(self, values: Tensor, gradient: Tensor | None, clear: bool) -> None:
        self._values, self._gradient, self._clear, self._done = values, gradient, clear, 0

    def reach(self, stop: int) -> None:
        """Goes on to the position ``stop`` at least."""
        length = self._values.numel()
        while self._gradient is not None and self._done < stop:
            end = min(self._done + block_of(self._values), length)
            more = self._gradient[self._done : end]
            self._values[self._done : end].add_(more)
            if self._clear:
                more.zero_()
            self._done = end
