"""The store through which workers find one another."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spardl.errors import ConfigError
from spardl.training.membership import Membership
from spardl.training.messages import first_line
from spardl.training.silence import end_when_silent

__all__ = ["Meeting"]

# Where rank 0 tells, in the store of torchrun's agent, the port of its own.
_KEY = "spardl/port"
# Seconds to try a port that may be that of workers who are gone.
_TRY = 2.0


class Meeting:
    """A store that rank 0 holds, on the host and port that all were told.

    With torchrun that port is its agent's, whose store outlives restarts: what former workers left there, such as their
    addresses, would mislead the next. So rank 0 then holds a store of its own, too, and tells its port there.

    Args:
        member: this worker.
        timeout: seconds that a worker waits for the others.
        listener: descriptor of a socket that listens already, for rank 0.
    """

    def __init__(self, member: Membership, timeout: float, listener: int | None = None) -> None:
        self._member, self._timeout, self._listener = member, timeout, listener
        self._port = member.port
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
            missing = ", ".join(key.partition("/")[2] for key in others if not store.check([key]))
            raise self._failure(f"no sign of rank {missing} within {self._timeout:g} seconds") from error

    def _failure(self, reason: str) -> ConfigError:
        where = f"{self._member.host}:{self._port}"
        return ConfigError(f"rank {self._member.rank} cannot meet the others at {where}: {reason}")

    def connect(self) -> Any:
        """A further connection, for another thread."""
        return self._join(self._port, self._timeout)

    def _open(self) -> Any:
        member = self._member
        if member.rank:
            return self._join(member.port, self._timeout)
        return self._hold(member.port, self._listener)

    def _open_by_agent(self) -> Any:
        agent = self._join(self._member.port, self._timeout)
        if self._member.rank:
            return self._find(agent)
        own = self._hold(0)
        self._port = own.port
        agent.set(_KEY, str(own.port))
        return own

    def _find(self, agent: Any) -> Any:
        """Connects to rank 0's store; a port of workers who are gone refuses, and is replaced soon."""
        until = time.monotonic() + self._timeout
        while True:
            self._port = int(agent.get(_KEY))
            try:
                return self._join(self._port, _TRY)
            except RuntimeError:
                if time.monotonic() > until:
                    raise

    def _hold(self, port: int, listener: int | None = None) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            self._member.host,
            port,
            None,
            True,
            timeout=timedelta(seconds=self._timeout),
            wait_for_workers=False,
            master_listen_fd=listener,
            # In older versions of torch, libuv takes no socket that listens already.
            use_libuv=listener is None or torch.__version__ >= "2.14",
        )

    def _join(self, port: int, patience: float) -> Any:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            self._member.host, port, None, False, timeout=timedelta(seconds=patience), wait_for_workers=False
        )
        store.set_timeout(timedelta(seconds=self._timeout))
        end_when_silent(port, self._timeout)
        return store
