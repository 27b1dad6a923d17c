"""What every part of a method may know about the synchronization it takes part in."""

from __future__ import annotations

from typing import NamedTuple

from spardl.protocol.programs import Worker
from spardl.vector.layout import Layout

__all__ = ["Context"]


class Context(NamedTuple):
    """One synchronization, seen by one worker.

    Attributes:
        worker: who looks.
        layout: the tensors in the vector.
        step: synchronizations with this method before this one (dense warm-up not counted); equal on all workers.
    """

    worker: Worker
    layout: Layout
    step: int
