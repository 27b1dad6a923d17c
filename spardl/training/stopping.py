"""Leaving in good order: when one worker is asked to stop, all leave after the same step.

Schedulers announce the end of a job, or its pre-emption, with a signal some time before they kill it. Not all workers
need get it, nor get it in the same step. So they agree on a step that none of them has passed, without a message in the
steps before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spardl.basics.errors import PeerError

__all__ = ["Stopping"]

# Seconds between two looks at the store.
_EVERY = 0.2


class Stopping:
    """One worker's part of the agreement.

    A thread of its own looks whether some worker was asked. If so, it promises a bound: its worker will not pass the
    end of the step that it is in. When all have promised, they leave at the highest bound; who comes to its own before
    that waits there.

    Args:
        connect: makes a connection to the workers' store, for this alone.
        rank: of this worker.
        size: how many workers there are.
        patience: seconds that a worker waits for the promises of the others.
        orphaned: whether the process that started this worker has died, which also asks the worker to stop.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        rank: int,
        size: int,
        patience: float,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connect, self._rank, self._size, self._patience = connect, rank, size, patience
        self._orphaned = orphaned
        self._asked = False
        self._lock = threading.Lock()
        self._step = 0
        self._bound: int | None = None
        self._last: int | None = None
        self._decided, self._over = threading.Event(), threading.Event()

    def ask(self) -> bool:
        """Asks this worker to stop; called from a signal's handler.

        Returns:
            Whether it had been asked before.
        """
        before, self._asked = self._asked, True
        return before

    def after(self, step: int) -> bool:
        """Whether all workers leave now, with ``step`` steps done.

        Raises:
            PeerError: if not all workers answer in time.
        """
        if self._size == 1:
            return self._asked or self._orphaned()
        with self._lock:
            self._step, bound = step, self._bound
        if bound is None or step < bound:
            return False
        if not self._decided.wait(self._patience):
            raise PeerError(f"rank {self._rank} was asked to stop, and not all workers answered")
        return self._last is not None and step >= self._last

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Takes part in the agreement while inside."""
        thread = threading.Thread(target=self._watch, name="spardl-stopping", daemon=True)
        if self._size > 1:
            thread.start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self) -> None:
        try:
            store = self._connect()
            while not (self._asked or self._orphaned() or store.check(["stop"])):
                if self._over.wait(_EVERY):
                    return
            self._agree(store)
        except RuntimeError:
            return  # rank 0, which has the store, is gone: the others notice by themselves

    def _agree(self, store: Any) -> None:
        store.set("stop", "")
        with self._lock:
            self._bound = self._step + 1
        store.set(f"stop/{self._rank}", str(self._bound))
        self._last = max(int(store.get(f"stop/{rank}")) for rank in range(self._size))
        self._decided.set()
