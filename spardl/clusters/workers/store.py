"""The key-value store on rank 0 through which workers find one another, and TCP keepalive for connections to it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spardl.clusters.workers.membership import listen_as

__all__ = ["enable_keepalive", "hold_store"]


# Keepalive probes within the allowed silence.
_PROBES = 3
# Longest keepalive interval that the kernel accepts, in seconds.
_LONGEST = 32767


def enable_keepalive(port: int, seconds: float) -> None:
    """Makes the kernel close this process's connections to a port if the remote machine stops answering.

    A wait for the store then fails instead of hanging. The timeouts of torch do not help here: the store enforces them
    itself, and over a broken link its reply (a timeout) never arrives. A store that is only slow is not cut off,
    because its machine still acknowledges packets.

    Args:
        port: Port of the store.
        seconds: Time without an answer after which a connection is closed, in seconds; at least 1.
    """
    patience = min(max(1, round(seconds)), _LONGEST)
    every = max(1, patience // _PROBES)
    limits = {
        "TCP_KEEPIDLE": every,
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": 1000 * patience,
    }
    known = {getattr(socket, name): value for name, value in limits.items() if hasattr(socket, name)}  # all on Linux
    for connection in _connections(port):
        with suppress(OSError):  # closed in the meantime
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in known.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connections(port: int) -> Iterator[socket.socket]:
    """Yields the sockets of this process that are connected to ``port``."""
    # torch does not expose the sockets of a store, so all descriptors are searched.
    for path in [*Path("/dev/fd").iterdir()]:
        with _opened(int(path.name)) as one:
            if one and one.family in (socket.AF_INET, socket.AF_INET6) and _port_of(one) == port:
                yield one


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket | None]:
    """Yields a duplicate of a socket, or ``None`` if the descriptor is not a socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed in the meantime
        yield None
        return
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with found:
        yield found


def _port_of(one: socket.socket) -> int | None:
    try:
        return int(one.getpeername()[1])
    except OSError:  # a listening socket, or a lost peer
        return None


def hold_store(host: str, port: int, timeout: float, alone: bool, listener: socket.socket | None = None) -> Any:
    """Opens a store that listens on the address that the other workers use and, if possible, on no other address.

    Args:
        host: Host name or address of this machine, as the other workers know it.
        port: Port to listen on; 0 for any free port.
        timeout: Time that workers wait for one another, in seconds.
        alone: Whether all workers run on this machine.
        listener: Socket that already listens on the port, if any; the store takes ownership.

    Raises:
        OSError: If the port is in use, or the name does not resolve.
        RuntimeError: If the store cannot be opened for another reason.
    """
    listener = listener or listen_as(host, port, alone=alone)
    if listener is None:
        print(
            f"warning: {host} is not an address at which other machines reach this one, so the store listens on all "
            "addresses; set MASTER_ADDR to one of them",
            file=sys.stderr,
            flush=True,
        )
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1] if listener else port,
        None,
        True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
        # Before torch 2.14, the libuv store does not accept a socket that already listens.
        use_libuv=listener is None or torch.__version__ >= "2.14",
    )
