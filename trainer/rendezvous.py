"""Connects the workers through a key-value store, and stops them after the same step."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spardl.basics.errors import ConfigError, PeerError, first_line
from spardl.clusters.workers.membership import Membership, address_of
from spardl.clusters.workers.store import enable_keepalive, hold_store
from spardl.method.provenance import first_difference

__all__ = ["Rendezvous", "Stopping"]


# Interval at which a worker polls the store for a request to stop, in seconds.
_POLL_SECONDS = 0.2


class Stopping:
    """Stops all workers after the same step; one object per worker.

    Schedulers send a signal some time before they end or preempt a job, but not to all workers, nor in the same step.
    A thread therefore polls the workers' store for a request to stop. After a request, each worker publishes the number
    of its current step as its bound, and does not continue past that step before it knows the bounds of all workers.
    All workers stop after the step with the highest bound. Without a request, steps need no messages.

    Args:
        connect: Function that opens a separate connection to the workers' store.
        rank: Rank of this worker.
        size: Number of workers.
        patience: Time to wait for the bounds of the other workers, in seconds.
        orphaned: Function that returns whether the process that started this worker has died, which also requests a
            stop.
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
        """Requests a stop; called from a signal handler.

        Returns:
            Whether this worker was asked before.
        """
        before, self._asked = self._asked, True
        return before

    def after(self, step: int) -> bool:
        """Returns whether all workers stop now, after ``step`` steps.

        Raises:
            PeerError: If not all workers publish their bound in time.
        """
        # A single worker needs no agreement.
        if self._size == 1:
            return self._asked or self._orphaned()
        with self._lock:
            self._step, bound = step, self._bound
        if bound is None or step < bound:
            return False
        if not self._decided.wait(self._patience):
            raise PeerError(
                f"rank {self._rank} was asked to stop, but not all workers responded; see the output of the others "
                "(resume=auto continues from the last checkpoint)"
            )
        return self._last is not None and step >= self._last

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Polls the store for stop requests inside the ``with`` statement."""
        # A daemon: it may wait for the store when the process ends.
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
                if self._over.wait(_POLL_SECONDS):
                    return
            self._agree(store)
        except RuntimeError:
            return  # rank 0, which holds the store, has ended; collectives report that to the other ranks

    def _agree(self, store: Any) -> None:
        # The key wakes the threads of all other ranks.
        store.set("stop", "")
        # Under the lock, so that the worker cannot finish a step between the two accesses.
        with self._lock:
            self._bound = self._step + 1
        store.set(f"stop/{self._rank}", str(self._bound))
        self._last = max(int(store.get(f"stop/{rank}")) for rank in range(self._size))
        self._decided.set()


# Key in the store of torchrun's agent for the port, address and token of rank 0's own store.
_KEY = "spardl/port"
# Seconds to try to connect to a port that may belong to workers of an earlier attempt.
_TRY = 2.0


class Rendezvous:
    """Connects the workers through a key-value store that rank 0 hosts at the configured address.

    With torchrun, the store at that address belongs to torchrun's agent. It survives a restart of the workers, so that
    keys of earlier workers, such as their addresses, would mislead new workers. Rank 0 then hosts a separate store, and
    publishes its port in the store of the agent.

    The store of rank 0 listens on one address only, and all keys have a prefix that only the workers know.

    Args:
        member: Rank, world size and address of this worker.
        timeout: Time to wait for the other workers, in seconds.
        listener: Listening socket for rank 0, if there already is one.
        secret: Text that only the workers of the job know.
        interface: Network interface on which rank 0 hosts a separate store; ``None`` for the configured address.
    """

    def __init__(
        self,
        member: Membership,
        timeout: float,
        listener: socket.socket | None = None,
        secret: str = "",
        interface: str | None = None,
    ) -> None:
        self._member, self._timeout, self._listener = member, timeout, listener
        self._host, self._port, self._secret = member.host, member.port, secret
        self._interface, self._token = interface, ""
        self._found: Any = None

    @property
    def store(self) -> Any:
        """The key-value store. It is opened at the first access; rank 0 then waits until all other ranks connect.

        Raises:
            ConfigError: If the store or some rank cannot be reached.
        """
        if self._found is None:
            try:
                self._found = self._open_by_agent() if self._member.served else self._open()
            except OSError as error:
                reason = f"{error.strerror}; MASTER_ADDR and MASTER_PORT set the address"
                raise self._failure(reason) from error
            except RuntimeError as error:
                raise self._failure(first_line(error)) from error
            self._greet(self._found)
        return self._found

    def _greet(self, store: Any) -> None:
        if self._member.rank:
            store.set(f"here/{self._member.rank}", "")
            return
        # Without this check, a missing rank would only show as a timeout of a later collective.
        others = [f"here/{rank}" for rank in range(1, self._member.size)]
        try:
            store.wait(others, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            missing = self.missing("here", others)
            raise self._failure(f"rank {missing} did not connect within {self._timeout:g} seconds") from error

    def missing(self, name: str, keys: Sequence[str] = ()) -> str:
        """Lists the ranks that have not set their key in the store.

        Args:
            name: Common part of the keys, which have the form ``NAME/RANK``.
            keys: Keys to check; by default those of all ranks.

        Returns:
            The ranks, separated by commas; empty if the store has ended.
        """
        keys = keys or [f"{name}/{rank}" for rank in range(self._member.size)]
        try:
            return ", ".join(key.partition("/")[2] for key in keys if not self.store.check([key]))
        except RuntimeError:
            return ""

    def tell(self, given: Mapping[str, str]) -> None:
        """Publishes this rank's settings, ``given``, for comparison by rank 0."""
        self.store.set(f"given/{self._member.rank}", json.dumps(dict(given)))

    def compare(self, given: Mapping[str, str]) -> None:
        """Compares the settings of rank 0 with those of all other ranks; only rank 0 calls this.

        Args:
            given: Settings of rank 0 by name; if empty, nothing is compared.

        Raises:
            ConfigError: If settings differ, or a rank does not publish them in time.
        """
        if not given:
            return
        keys = [f"given/{rank}" for rank in range(1, self._member.size)]
        try:
            self.store.wait(keys, timedelta(seconds=self._timeout))
            rows = [given, *(json.loads(self.store.get(key)) for key in keys)]
        except RuntimeError as error:
            missing = self.missing("given", keys)
            if not missing:
                raise self._failure(f"a rank did not send its configuration: {first_line(error)}") from error
            reason = f"rank {missing} connected, but did not send its configuration within {self._timeout:g} seconds"
            raise self._failure(reason) from error
        difference = first_difference(rows)
        if difference:
            raise ConfigError(difference)

    def _failure(self, reason: str) -> ConfigError:
        where = f"{self._host}:{self._port}"
        return ConfigError(f"rank {self._member.rank} cannot connect to the other workers at {where}: {reason}")

    def connect(self) -> Any:
        """Opens another connection to the store, for use in another thread."""
        return self._within(self._join(self._host, self._port, self._timeout))

    def _open(self) -> Any:
        member = self._member
        if member.rank:
            return self.connect()
        return self._within(hold_store(member.host, member.port, self._timeout, member.alone, self._listener))

    def _open_by_agent(self) -> Any:
        agent = self._join(self._member.host, self._member.port, self._timeout)
        if self._member.rank:
            return self._find(agent)
        host = (address_of(self._interface) if self._interface else None) or self._member.host
        # Port 0 selects a free port, which the agent's store then announces.
        own = hold_store(host, 0, self._timeout, self._member.alone)
        self._host, self._port, self._token = host, own.port, secrets.token_hex(16)
        agent.set(_KEY, f"{self._port} {self._host} {self._token}")
        return self._within(own)

    def _find(self, agent: Any) -> Any:
        """Connects to the store of rank 0, and retries while its key still names the port of an earlier attempt."""
        until = time.monotonic() + self._timeout
        while True:
            fields: list[str] = [*agent.get(_KEY).decode().split(), self._member.host, ""]
            self._port, self._host, self._token = int(fields[0]), fields[1], fields[2]
            try:
                return self._within(self._join(self._host, self._port, _TRY))
            except RuntimeError:
                if time.monotonic() > until:
                    raise

    def _within(self, store: Any) -> Any:
        # The prefix keeps clients of other jobs that reach this port from reading or changing keys.
        word = hashlib.sha256(f"{self._secret} {self._token}".encode()).hexdigest()[:32]
        return dist.PrefixStore(word, store)  # type: ignore[attr-defined]

    def _join(self, host: str, port: int, patience: float) -> Any:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, False, timeout=timedelta(seconds=patience), wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=self._timeout))
        enable_keepalive(port, self._timeout)
        return store
