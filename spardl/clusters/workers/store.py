"""A store of keys and values that worker 0 holds for all."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spardl.clusters.workers.addresses import listen_as

__all__ = ["hold_store"]


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
