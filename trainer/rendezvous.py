"""The store through which workers find one another."""

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
from spardl.clusters.workers.store import end_when_silent, hold_store
from spardl.method.provenance import first_difference

__all__ = ["Rendezvous", "Stopping"]


# Leaving in good order: when one worker is asked to stop, all leave after the same step.
#
# Schedulers announce the end of a job, or its pre-emption, with a signal some time before they kill it. Not all
# workers need get it, nor get it in the same step. So they agree on a step that none of them has passed, without a
# message in the steps before.


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
            raise PeerError(f"rank {self._rank} was asked to stop, but not all workers responded")
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


# Where rank 0 tells, in the store of torchrun's agent, the port, the address and the secret of its own.
_KEY = "spardl/port"
# Seconds to try a port that may be that of workers who are gone.
_TRY = 2.0


class Rendezvous:
    """A store that rank 0 holds, on the host and port that all were told.

    With torchrun that port is its agent's, whose store outlives restarts: what former workers left there, such as their
    addresses, would mislead the next. So rank 0 then holds a store of its own, too, and tells its port there.

    Rank 0's store listens on one address, and all keys begin with a word that only the workers know.

    Args:
        member: this worker.
        timeout: seconds that a worker waits for the others.
        listener: a socket that listens already, for rank 0.
        secret: what all workers know, and nobody else.
        interface: network interface on which rank 0 holds a store of its own; ``None`` for the one that the others were
            told.
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
        """The store; the first time, it is made or connected to, and rank 0 waits for all.

        Raises:
            ConfigError: if the others cannot be met.
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
        others = [f"here/{rank}" for rank in range(1, self._member.size)]
        try:
            store.wait(others, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            missing = self.missing("here", others)
            raise self._failure(f"rank {missing} did not connect within {self._timeout:g} seconds") from error

    def missing(self, name: str, keys: Sequence[str] = ()) -> str:
        """The ranks whose key under a name is not in the store, as words; empty if the store has ended.

        Args:
            name: of the keys, before the slash and the rank.
            keys: the keys to look for; by default those of all ranks.
        """
        keys = keys or [f"{name}/{rank}" for rank in range(self._member.size)]
        try:
            return ", ".join(key.partition("/")[2] for key in keys if not self.store.check([key]))
        except RuntimeError:
            return ""

    def tell(self, given: Mapping[str, str]) -> None:
        """Tells rank 0 what this rank was given (``given``), for ``compare``."""
        self.store.set(f"given/{self._member.rank}", json.dumps(dict(given)))

    def compare(self, given: Mapping[str, str]) -> None:
        """Compares, on rank 0, what it was given with what the others were.

        Args:
            given: by name; nothing if they need not be compared.

        Raises:
            ConfigError: if there is a difference, or some rank does not tell in time.
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
        """A further connection, for another thread."""
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
        own = hold_store(host, 0, self._timeout, self._member.alone)
        self._host, self._port, self._token = host, own.port, secrets.token_hex(16)
        agent.set(_KEY, f"{self._port} {self._host} {self._token}")
        return self._within(own)

    def _find(self, agent: Any) -> Any:
        """Connects to rank 0's store; a port of workers who are gone refuses, and is replaced soon."""
        until = time.monotonic() + self._timeout
        while True:
            told: list[str] = [*agent.get(_KEY).decode().split(), self._member.host, ""]
            self._port, self._host, self._token = int(told[0]), told[1], told[2]
            try:
                return self._within(self._join(self._host, self._port, _TRY))
            except RuntimeError:
                if time.monotonic() > until:
                    raise

    def _within(self, store: Any) -> Any:
        """The part of a store that strangers do not hit upon."""
        word = hashlib.sha256(f"{self._secret} {self._token}".encode()).hexdigest()[:32]
        return dist.PrefixStore(word, store)  # type: ignore[attr-defined]

    def _join(self, host: str, port: int, patience: float) -> Any:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, False, timeout=timedelta(seconds=patience), wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=self._timeout))
        end_when_silent(port, self._timeout)
        return store
