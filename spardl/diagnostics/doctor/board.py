"""A board on which workers leave notes for one another, before there is a process group."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spardl.basics.errors import PeerError
from spardl.basics.messages import first_line
from spardl.clusters.workers.membership import Membership
from spardl.clusters.workers.store import hold_store

__all__ = ["Board", "join_store"]


class Board:
    """Where workers tell one another what they know, without a process group.

    Args:
        member: this process.
        store: which all share.
        timeout: seconds that bound every wait for others.
    """

    def __init__(self, member: Membership, store: Any, timeout: float) -> None:
        self.member, self.store, self.timeout = member, store, timeout

    @property
    def others(self) -> list[int]:
        """All ranks but this one's."""
        return [rank for rank in range(self.member.size) if rank != self.member.rank]

    def tell(self, topic: str, content: Any) -> None:
        """Says something to all: plain data, once for each topic."""
        self._asked(lambda: self.store.set(f"{topic}/{self.member.rank}", json.dumps(content)))

    def hear(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What workers said, by rank: of those who did in time.

        Raises:
            PeerError: if the store is gone, and with it the first worker.
        """
        until, found = time.monotonic() + seconds, {}
        for rank in ranks:
            key = f"{topic}/{rank}"
            if self._asked(lambda key=key: self._comes(key, until - time.monotonic())):
                found[rank] = json.loads(self._asked(lambda key=key: self.store.get(key)))
        return found

    def hear_leader(self, topic: str, seconds: float) -> Any:
        """What rank 0 said.

        Raises:
            PeerError: if it said nothing in time.
        """
        found = self.hear(topic, [0], seconds)
        if not found:
            raise PeerError(f"worker 0 at {self.member.host} says nothing any more; see what it printed")
        return found[0]

    def _comes(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=max(0.01, seconds)))
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # not the same for each kind of store
            return False
        return True

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            raise PeerError(
                f"worker {self.member.rank} on {socket.gethostname()} lost worker 0, which holds the store: "
                f"{first_line(error)}; see what worker 0 printed"
            ) from error


def join_store(member: Membership, timeout: float) -> Any:
    """The store of workers that torchrun or srun started.

    Raises:
        PeerError: if it cannot be reached, or not be opened.
    """
    where = f"{member.host}:{member.port}"
    me = f"worker {member.rank} on {socket.gethostname()}"
    try:
        socket.getaddrinfo(member.host, member.port)
    except OSError as error:
        raise PeerError(f"{me}: {member.host} does not resolve ({error}); set MASTER_ADDR to an address") from error
    holds = member.rank == 0 and not member.served
    try:
        if holds:
            store = hold_store(member.host, member.port, timeout, member.alone)
        else:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                member.host, member.port, None, False, timedelta(seconds=timeout), wait_for_workers=False
            )
        # torchrun's own store outlives restarts, with what was said before.
        return dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        reason = first_line(error)
        if holds:
            raise PeerError(f"{me} cannot listen on {where}: {reason}; set MASTER_PORT to a free one") from error
        raise PeerError(
            f"{me} cannot reach worker 0 at {where}: {reason}; see whether worker 0 runs, and what is between them: "
            "link, firewall, MASTER_ADDR"
        ) from error
