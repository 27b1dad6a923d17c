"""A store of keys and values that worker 0 holds for all."""

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

__all__ = ["end_when_silent", "hold_store"]


# Connections to a store that end when nobody is at the other end any more.


# Probes of a connection on which nothing is sent, within the time that it may be silent.
_PROBES = 3
# Seconds: the kernel takes no more.
_LONGEST = 32767


def end_when_silent(port: int, seconds: float) -> None:
    """Lets the kernel end this process's connections to a port when the machine there is silent for so long.

    What waits for a store's answer then fails. torch gives no limit of its own to that: its timeouts are kept by the
    store, and a link that is gone brings no answer, not even that the time is over. A store that takes its time does no
    harm, since its machine goes on to confirm what arrives.

    Args:
        port: of the store.
        seconds: to wait for a sign of life; at least 1, as the kernel counts.
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
        with suppress(OSError):  # it has ended meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in known.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connections(port: int) -> Iterator[socket.socket]:
    """This process's sockets whose other end has that port; torch does not tell which are its own."""
    for path in [*Path("/dev/fd").iterdir()]:
        with _opened(int(path.name)) as one:
            if one and one.family in (socket.AF_INET, socket.AF_INET6) and _port_of(one) == port:
                yield one


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket | None]:
    """A second handle of a socket; ``None`` for what is no socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile
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
    except OSError:  # listens, or its other end is gone
        return None


def hold_store(host: str, port: int, timeout: float, alone: bool, listener: socket.socket | None = None) -> Any:
    """A store that listens where others look for it, and nowhere else if that can be told.

    Args:
        host: a name or an address of this machine, as the others know it.
        port: 0 for any free one.
        timeout: seconds that its users wait for one another.
        alone: whether all of them are on this machine.
        listener: a socket that listens already; it belongs to the store from now on.

    Raises:
        OSError: if the port is taken, or the name means nothing.
        RuntimeError: if it cannot be opened for another reason.
    """
    listener = listener or listen_as(host, port, alone=alone)
    if listener is None:
        print(
            f"warning: {host} is no address of this machine that workers elsewhere could use, so the store in which "
            "they meet listens on all of its addresses; set MASTER_ADDR to one of them",
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
        # In older versions of torch, libuv takes no socket that listens already.
        use_libuv=listener is None or torch.__version__ >= "2.14",
    )
