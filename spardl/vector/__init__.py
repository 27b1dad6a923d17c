"""Gradients as vectors: layouts, selection of entries, sparse sums, and the bytes of messages."""

from spardl.vector.flat import FlatGradient
from spardl.vector.wire import Wire

__all__ = ["FlatGradient", "Wire"]
