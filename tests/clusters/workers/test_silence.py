from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from spardl.clusters.workers.store import enable_keepalive
from tests.support import labs

LIMITS = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 9000}
NO_LIMIT = 0


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """Both ends of a connection, and the port that it leads to."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with closing(socket.create_connection(("127.0.0.1", port))) as ours, closing(server.accept()[0]) as theirs:
            yield ours, theirs, port


def patience(one: socket.socket) -> int:
    return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_only_connections_to_the_port_are_limited() -> None:
    before = [*Path("/dev/fd").iterdir()]
    with connected() as (ours, theirs, port), connected() as (other, _, _):
        enable_keepalive(port, 9.2)
        assert {option: ours.getsockopt(socket.IPPROTO_TCP, option) for option in LIMITS} == LIMITS
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert patience(theirs) == patience(other) == NO_LIMIT
        ours.sendall(b"it still works")
        assert theirs.recv(20) == b"it still works"
    assert [*Path("/dev/fd").iterdir()] == before


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 1000), (1e9, 32767000)])
def test_what_the_kernel_does_not_take(seconds: float, expected: int) -> None:
    with connected() as (ours, _, port):
        enable_keepalive(port, seconds)
        assert patience(ours) == expected


WAITING = """
import os, subprocess, time
from trainer.launch import _read
from trainer.rendezvous import Rendezvous
from spardl.clusters.workers.membership import find_membership

member = find_membership(os.environ)
store = Rendezvous(member, 3).store
began = time.monotonic()
if member.rank == 0:
    time.sleep(12)
else:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    try:
        _read(store, "what rank 0 decides")
    except Exception as error:
        print(type(error).__name__, time.monotonic() - began < 10, error)
"""


@labs.in_a_lab
def test_worker_with_a_lost_link_does_not_wait() -> None:
    """It has an hour, as long as rank 0 is there."""
    done = labs.run("--", sys.executable, "-c", WAITING)
    assert "ConfigError True rank 0 exited before it chose the run folder: " in done.stderr
    assert done.returncode == 0
