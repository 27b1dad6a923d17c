"""A thread that communicates while the main thread computes."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from spardl.protocol.programs import Boundary
from spardl.vector.sparse import SparseVector

__all__ = ["Background"]

T = TypeVar("T")

# Seconds that a thread which waits for a peer may take to hear that all is over; it is a daemon after that.
_PATIENCE = 5.0


class Background:
    """Works off jobs one after the other. After one that failed, all others fail like it.

    On a GPU the jobs have a stream of their own: a job begins when what the caller's stream held at ``submit`` is
    done, and the caller's stream goes on after ``result`` when the job's work is done.

    Args:
        device: where the jobs' tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], torch.cuda.Event | None] | None]
        self._jobs = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="spardl-communication", daemon=True)
        self._thread.start()
        # A daemon that still runs when the interpreter is taken down can abort the process.
        atexit.register(self.close)

    def submit(self, job: Callable[[], T]) -> Future[tuple[T, torch.cuda.Event | None]]:
        """Queues a job; ``result`` of this class reads what is returned."""
        future: Future[tuple[T, torch.cuda.Event | None]] = Future()
        self._jobs.put((future, job, self._mark()))
        return future

    def result(self, future: Future[tuple[T, torch.cuda.Event | None]]) -> T:
        """What a job returned, once it is done; raises what the job raised."""
        value, event = future.result()
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in _tensors(value):
                tensor.record_stream(current)
        return value

    def close(self) -> None:
        """Ends the thread, unless it still waits for somebody."""
        self.leave()
        self._thread.join(_PATIENCE)

    def leave(self) -> None:
        """Lets the thread end when it has done its jobs, and waits for nothing: may be called while memory is freed."""
        atexit.unregister(self.close)
        self._jobs.put(None)

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _work(self) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while self._next():
                pass

    def _next(self) -> bool:
        # Of its own, so that nothing here keeps a job, and all that belongs to it, until there is another.
        entry = self._jobs.get()
        if entry is not None:
            self._do(*entry)
        return entry is not None

    def _do(self, future: Future[Any], job: Callable[[], Any], after: torch.cuda.Event | None) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        try:
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            value = job()
            future.set_result((value, self._mark()))
        except BaseException as error:
            self._failure = error
            future.set_exception(error)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Boundary):
        return _tensors(value.shard)
    if isinstance(value, SparseVector):
        return [value.indices, value.values]
    return [value] if isinstance(value, Tensor) else []
