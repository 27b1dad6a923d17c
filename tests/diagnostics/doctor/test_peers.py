"""The doctor names who is missing, and who cannot be reached."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from spardl.basics.errors import PeerError
from spardl.diagnostics.doctor import board, peers
from spardl.diagnostics.doctor.board import join_store
from tests.diagnostics.doctor.common import Collected, Doctor, member


def test_missing_worker_is_named(places: Callable[[int], Any], findings: Collected) -> None:
    with closing(peers.listen("gloo")) as listener:
        assert peers.roll_call(places(0), "gloo", listener, findings) == []
    (line,) = findings.lines
    assert line.startswith("FAILED workers: worker 1 did not connect to 127.0.0.1:1 within 0.2 s (1 of 2 did); see")


@pytest.mark.parametrize(
    ("other", "between"), [("two", "links and firewalls between these hosts"), ("one", "firewall of this machine")]
)
def test_unreachable_worker_is_named(
    other: str, between: str, places: Callable[[int], Any], findings: Collected
) -> None:
    with closing(peers.listen("gloo")) as open_one, closing(socket.socket()) as closed_one:
        closed_one.bind(("127.0.0.1", 0))
        present = [
            peers.Peer(host, "127.0.0.1", listener.getsockname()[1], {})
            for host, listener in (("one", open_one), (other, closed_one))
        ]
        places(1).publish("reached", {})
        assert not peers.connect_all(places(0), present, findings)
    (line,) = findings.lines
    where = f"({other}, 127.0.0.1:{closed_one_port(present)})"
    assert line.startswith(f"FAILED peers: worker 1 {where} cannot be reached by worker 0: Connection refused; ")
    assert f"; check the {between} (workers need all ports)" in line


def closed_one_port(present: list[Any]) -> int:
    port: int = present[1].port
    return port


def test_other_versions_elsewhere(doctor: Doctor, findings: Collected) -> None:
    present = [peers.Peer(f"h{rank}", "10.0.0.1", 1, {"torch": version}) for rank, version in enumerate("223")]
    peers.check_present(present, findings)
    assert findings.lines[0] == "ok worker 0 on h0 (10.0.0.1); worker 1 on h1 (10.0.0.1); worker 2 on h2 (10.0.0.1)"
    assert findings.lines[1] == (
        "FAILED versions: worker 0 has torch 2, but worker 2 on h2 has 3; install the same version on all hosts"
    )


def test_a_store_that_cannot_be_found(doctor: Doctor) -> None:
    nowhere = member(1)._replace(host="nowhere.invalid")
    with pytest.raises(PeerError, match=r"worker 1 on .* cannot resolve nowhere\.invalid .*set MASTER_ADDR"):
        join_store(nowhere, 1.0)


def test_silent_worker_0(places: Callable[[int], Any]) -> None:
    with pytest.raises(PeerError, match=r"worker 0 at 127\.0\.0\.1 stopped answering"):
        places(1).read_leader("called", 0.1)


@pytest.mark.parametrize(
    ("interface", "address", "hosts", "said"),
    [
        ("lo", "127.0.0.1", 1, None),
        ("lo", "127.0.0.1", 2, "GLOO_SOCKET_IFNAME=lo is 127.0.0.1 on "),
        ("none9", "127.0.0.1", 1, "GLOO_SOCKET_IFNAME=none9 has no address on "),
        ("", "127.0.1.1", 1, None),
        ("", "127.0.1.1", 2, "is 127.0.1.1 on .*, which other hosts cannot reach; set GLOO_SOCKET_IFNAME to one of "),
        ("", "10.0.0.7", 2, None),
        ("", None, 1, "host name .* has no address on .*; set GLOO_SOCKET_IFNAME to one of .*, or pass --interface"),
    ],
)
def test_addresses(
    interface: str,
    address: str | None,
    hosts: int,
    said: str | None,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(name: str) -> str:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    found = board.why_unreachable("gloo", hosts)
    assert (found is None) == (said is None)
    if said:
        assert re.search(said, found), found
