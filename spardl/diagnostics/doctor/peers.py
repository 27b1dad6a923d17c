"""Checks that all workers are present and reachable, with plain sockets, before a backend connects them.

A backend that cannot connect reports the failure late, and does not name the worker.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import torch

from spardl.clusters import ProcessGroupCluster
from spardl.diagnostics.doctor.board import Board, Findings, own_address, versions, why_unreachable
from spardl.protocol.programs import Exchange, Program, Receive, Send

__all__ = [
    "SHORT",
    "Peer",
    "check_present",
    "connect_all",
    "listen",
    "networked",
    "report_lost_worker",
    "ring",
    "roll_call",
    "round_trip",
    "seconds",
    "share_result",
]


# Timed messages: a round trip between two workers, and a round of all workers.


SHORT = 8
"""Bytes of a message whose time is all latency."""
_CPU = torch.device("cpu")


def round_trip(
    rank: int, first: int = 0, second: int = 1, length: int = SHORT, device: torch.device = _CPU
) -> Program[None]:
    """Program of worker ``rank``: worker ``first`` sends ``length`` bytes to worker ``second``, which replies.

    All other workers do nothing.
    """
    for sender, receiver, size in ((first, second, length), (second, first, SHORT)):
        if rank == sender:
            yield Exchange([Send(receiver, torch.zeros(size, dtype=torch.uint8, device=device), 1)], [])
        elif rank == receiver:
            yield Exchange([], [Receive(sender, size, torch.uint8)])


def ring(rank: int, size: int, length: int, device: torch.device = _CPU) -> Program[None]:
    """Program of worker ``rank`` of ``size`` workers: each sends a message of ``length`` bytes to the next one."""
    message = torch.zeros(length, dtype=torch.uint8, device=device)
    yield Exchange([Send((rank + 1) % size, message, 1)], [Receive((rank - 1) % size, length, torch.uint8)])


def seconds(cluster: ProcessGroupCluster, program: Callable[[], Program[None]], times: int) -> list[float]:
    """Runs a program ``times`` + 1 times; returns the seconds of each run but the first, which opens connections."""
    return [cluster.time_uncounted([program()])[0] for _ in range(times + 1)][1:]


# Timeout of a connection to another worker, and extra seconds for worker 0 to publish its result.
_CONNECTING, _PUBLISHING = 4.0, 5.0


class Peer(NamedTuple):
    """Address and versions that a worker publishes.

    Attributes:
        host: Host name of the worker.
        address: Address on which it listens; ``None`` if its host has none that others can reach.
        port: Port on which it listens.
        versions: Versions of packages that must be equal on all hosts.
    """

    host: str
    address: str | None
    port: int
    versions: Mapping[str, str]


def networked(present: Sequence[Peer]) -> bool:
    """Returns whether a network connects the workers: they run on several machines, or have different addresses."""
    return len({(peer.host, peer.address) for peer in present}) > 1


def listen(backend: str) -> socket.socket:
    """Opens a socket for trial connections of other workers, on this process's address or, without one, on all."""
    address, _ = own_address(backend)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address or "", 0))
    listener.listen(4096)  # all workers connect at once, and their connections are never accepted
    return listener


def roll_call(board: Board, backend: str, listener: socket.socket, findings: Findings) -> list[Peer]:
    """Waits until all workers have published their addresses; worker 0 reports the missing ones.

    Args:
        board: Exchange of data between all workers.
        backend: Name of the backend: ``gloo`` or ``nccl``.
        listener: Socket on which this worker listens.
        findings: Receives the results.

    Returns:
        All workers, ordered by rank; empty if one is missing or unreachable.
    """
    address, _ = own_address(backend)
    board.publish("here", Peer(socket.gethostname(), address, listener.getsockname()[1], versions()))
    if board.member.rank:
        called = board.read_leader("called", board.timeout + _PUBLISHING)
    else:
        called = _call(board, findings)
        board.publish("called", called)
    present = [Peer(*one) for one in called]
    return present if _all_reachable(board, backend, present, findings) else []


def _call(board: Board, findings: Findings) -> list[Any]:
    here = board.read("here", range(board.member.size), board.timeout)
    missing = [rank for rank in range(board.member.size) if rank not in here]
    if missing:
        findings.fail(
            f"workers: {_named(missing)} did not connect to {board.member.host}:{board.member.port} within "
            f"{board.timeout:g} s ({len(here)} of {board.member.size} did); see their output, and check that their "
            "hosts reach this address"
        )
        return []
    return [here[rank] for rank in sorted(here)]


def _all_reachable(board: Board, backend: str, present: Sequence[Peer], findings: Findings) -> bool:
    """Checks the address of every worker; worker 0 reports the results."""
    if not present:
        return False
    # Only the worker itself knows its interfaces, so each checks its own address.
    board.publish("address", why_unreachable(backend, len({one.host for one in present})))
    answers = board.read("address", range(board.member.size), board.timeout)
    wrong = {rank: reason for rank, reason in answers.items() if reason}
    for rank, reason in wrong.items():
        findings.fail(f"interface of worker {rank}: {reason}")
    for rank in sorted(set(range(board.member.size)) - set(answers)):
        findings.fail(f"workers: worker {rank} on {present[rank].host} stopped answering; see its output")
    return len(answers) == board.member.size and not wrong


def check_present(present: Sequence[Peer], findings: Findings) -> None:
    """Reports which workers run on which hosts, and whether the versions of packages agree."""
    places: dict[str, list[int]] = {}
    for rank, one in enumerate(present):
        places.setdefault(f"{one.host} ({one.address})", []).append(rank)
    findings.ok("; ".join(f"{_named(ranks)} on {place}" for place, ranks in places.items()))
    for name, version in present[0].versions.items():
        others = {one.versions[name]: rank for rank, one in enumerate(present) if one.versions[name] != version}
        for other, rank in others.items():
            findings.fail(
                f"versions: worker 0 has {name} {version}, but worker {rank} on {present[rank].host} has {other}; "
                "install the same version on all hosts"
            )


def connect_all(board: Board, present: Sequence[Peer], findings: Findings) -> bool:
    """Connects every pair of workers in both directions; worker 0 reports the workers that cannot be reached.

    Returns:
        Whether all connections succeeded, equal on all workers.
    """
    size = board.member.size
    # In parallel, because an unreachable worker costs the whole timeout.
    with ThreadPoolExecutor(max_workers=min(32, size)) as pool:
        reasons = list(pool.map(_try, [present[rank] for rank in board.others]))
    board.publish("reached", {rank: why for rank, why in zip(board.others, reasons, strict=True) if why})
    if board.member.rank:
        return bool(board.read_leader("reachable", board.timeout + 3 * _CONNECTING + _PUBLISHING))
    answers = board.read("reached", range(size), board.timeout + 3 * _CONNECTING)
    between = "links and firewalls between these hosts" if networked(present) else "firewall of this machine"
    for rank in sorted(set(range(size)) - set(answers)):
        findings.fail(f"peers: worker {rank} on {present[rank].host} stopped answering; see its output")
    for target in range(size):
        lost = {rank: why[str(target)] for rank, why in answers.items() if str(target) in why}
        if lost:
            who, reason = _named(list(lost)), next(iter(lost.values()))
            at = f"{present[target].host}, {present[target].address}:{present[target].port}"
            findings.fail(
                f"peers: worker {target} ({at}) cannot be reached by {who}: {reason}; check the {between} (workers "
                "need all ports), or choose another --interface"
            )
    reachable = not findings.failures
    board.publish("reachable", reachable)
    if reachable:
        findings.ok(f"peers: every worker reaches all others ({size * (size - 1)} connections)")
    return reachable


def report_lost_worker(
    board: Board, present: Sequence[Peer], doing: str, reason: str, own: bool, findings: Findings
) -> None:
    """Reports which worker stopped answering; every worker that notices this calls this function.

    Args:
        board: Exchange of data between all workers.
        present: All workers, ordered by rank.
        doing: Name of the check during which the connection was lost.
        reason: Text of the error on this worker.
        own: Whether this worker itself failed; otherwise it lost contact with another one.
        findings: Receives the result that worker 0 reports.
    """
    # Sorted by this flag, an error of a worker itself comes before the lost connections that it causes.
    board.publish("parted", [not own, reason])
    if board.member.rank:
        return
    noticed = board.read("parted", range(board.member.size), board.timeout + _PUBLISHING)
    silent = [rank for rank in range(board.member.size) if rank not in noticed]
    late, first = min(noticed.values())
    if not late:
        findings.fail(f"{doing}: {first}; if all hosts have the same versions, report a bug")
    elif silent:
        who = f"{_named(silent)} on {', '.join(sorted({present[rank].host for rank in silent}))}"
        link = ", and check its link" if networked(present) else ""
        findings.fail(f"{doing}: {who} stopped answering; see the output there{link}")
    else:
        fix = "check the links between them" if networked(present) else "check whether this machine is overloaded"
        findings.fail(f"{doing}: {first}; all workers still answer, so {fix}")


def share_result(board: Board, findings: Findings) -> bool:
    """Returns on all workers whether worker 0 passed all checks; waits until every worker has read this result.

    Raises:
        PeerError: If worker 0 is lost.
    """
    if board.member.rank:
        healthy = bool(board.read_leader("healthy", 2 * board.timeout + _PUBLISHING))
        board.publish("acknowledged", healthy)
        return healthy
    board.publish("healthy", not findings.failures)
    # The store ends with this process, so it stays until the others have read the result.
    board.read("acknowledged", board.others, _PUBLISHING)
    return not findings.failures


def _try(peer: Peer) -> str | None:
    try:
        # A plain connection: unlike a backend it fails quickly and names the worker.
        with closing(socket.create_connection((peer.address or peer.host, peer.port), timeout=_CONNECTING)):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _named(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
