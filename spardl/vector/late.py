"""Conditions that are computed on a GPU and read by the host later, so that the host does not wait for them.

The host should not wait in every step for a condition that nearly always holds, such as "all entries are finite". The
device therefore acts on the condition itself, and the host reads it later, for counts and reports.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Conditions", "LateConditions"]


class Conditions(NamedTuple):
    """Conditions of one step, as read by the host.

    Attributes:
        step: Number of the step, counted from 1.
        values: Whether each condition holds, in the order in which they were sent.
    """

    step: int
    values: list[bool]


class _Copy(NamedTuple):
    step: int
    host: Tensor
    event: torch.cuda.Event | None


class LateConditions:
    """Queue of conditions of several steps that are being copied from the device to the host."""

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque()
        # The communication thread sends, and the main thread reads.
        self._lock = threading.Lock()

    # Locks do not support pickling, and copies that are under way belong to one process.
    def __reduce__(self) -> tuple[type[LateConditions], tuple[()]]:
        return LateConditions, ()

    @property
    def waiting(self) -> int:
        """Number of steps whose conditions were sent and have not been read."""
        return len(self._copies)

    def send(self, step: int, conditions: Sequence[Tensor]) -> None:
        """Starts the copy of a step's conditions to the host, and returns at once.

        Args:
            step: Number of the step, counted from 1.
            conditions: Bool tensors of shape () on the device, at least one.
        """
        stacked = torch.stack(list(conditions))
        # Only a copy to pinned memory returns before the device is done.
        host = torch.empty(len(conditions), dtype=torch.bool, pin_memory=stacked.is_cuda)
        host.copy_(stacked, non_blocking=True)
        event = None
        if stacked.is_cuda:
            stream, event = torch.cuda.current_stream(stacked.device), torch.cuda.Event()
            event.record(stream)
            # Conditions on the gradient may come from the stream of the backward pass.
            for each in conditions:
                each.record_stream(stream)
        with self._lock:
            self._copies.append(_Copy(step, host, event))

    def read(self, *, wait: bool) -> Iterator[Conditions]:
        """Yields the conditions that have arrived on the host, in the order of the steps, and each step only once.

        Args:
            wait: Whether to wait for all conditions that were sent; otherwise stops at the first that has not arrived
                yet.
        """
        while True:
            with self._lock:
                if not self._copies:
                    return
                step, host, event = self._copies[0]
                if event is not None and not wait and not event.query():
                    return
                self._copies.popleft()
            if event is not None:
                event.synchronize()
            yield Conditions(step, host.tolist())
