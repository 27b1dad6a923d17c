"""Who is there, and who reaches whom: found with a store and plain sockets, before a backend is asked.

A backend that cannot connect says so late and does not name the worker.
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
    "agree",
    "check_present",
    "listen",
    "name_lost",
    "networked",
    "reach_all",
    "ring",
    "roll_call",
    "round_trip",
    "seconds",
]


# Messages between workers whose seconds are measured: there and back between two, and rounds of all.


SHORT = 8
"""Bytes of a message that is all start-up."""
_CPU = torch.device("cpu")


def round_trip(
    rank: int, first: int = 0, second: int = 1, length: int = SHORT, device: torch.device = _CPU
) -> Program[None]:
    """A message of so many bytes from one worker to another, and a short one back; the rest have nothing to do."""
    for sender, receiver, size in ((first, second, length), (second, first, SHORT)):
        if rank == sender:
            yield Exchange([Send(receiver, torch.zeros(size, dtype=torch.uint8, device=device), 1)], [])
        elif rank == receiver:
            yield Exchange([], [Receive(sender, size, torch.uint8)])


def ring(rank: int, size: int, length: int, device: torch.device = _CPU) -> Program[None]:
    """A message of so many bytes from every worker to the next."""
    message = torch.zeros(length, dtype=torch.uint8, device=device)
    yield Exchange([Send((rank + 1) % size, message, 1)], [Receive((rank - 1) % size, length, torch.uint8)])


def seconds(cluster: ProcessGroupCluster, program: Callable[[], Program[None]], times: int) -> list[float]:
    """What each run of a program takes, but for the first, which opens connections."""
    return [cluster.time_aside([program()])[0] for _ in range(times + 1)][1:]


# Seconds that a connection to another worker may take, and that the leader gets to tell what it has heard.
_CONNECTING, _TELLING = 4.0, 5.0


class Peer(NamedTuple):
    """What a worker says of itself.

    Attributes:
        host: its name.
        address: where it listens; ``None`` if this host has no address of its own.
        port: on which.
        versions: of what must be the same everywhere.
    """

    host: str
    address: str | None
    port: int
    versions: Mapping[str, str]


def networked(present: Sequence[Peer]) -> bool:
    """Whether there is a network between workers: they are on several machines, or have addresses of their own."""
    return len({(peer.host, peer.address) for peer in present}) > 1


def listen(backend: str) -> socket.socket:
    """A socket on this process's own address, for the others to try; on all addresses if there is no such one."""
    address, _ = own_address(backend)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address or "", 0))
    listener.listen(4096)
    return listener


def roll_call(board: Board, backend: str, listener: socket.socket, findings: Findings) -> list[Peer]:
    """Waits for all workers; the first one says who they are, or who is missing.

    Args:
        board: of all workers.
        backend: gloo or nccl.
        listener: of this worker.
        findings: where it is said.

    Returns:
        What all said of themselves, by rank; nothing if somebody is missing, or cannot go on.
    """
    address, _ = own_address(backend)
    board.tell("here", Peer(socket.gethostname(), address, listener.getsockname()[1], versions()))
    if board.member.rank:
        called = board.hear_leader("called", board.timeout + _TELLING)
    else:
        called = _call(board, findings)
        board.tell("called", called)
    present = [Peer(*one) for one in called]
    return present if _all_reachable(board, backend, present, findings) else []


def _call(board: Board, findings: Findings) -> list[Any]:
    here = board.hear("here", range(board.member.size), board.timeout)
    missing = [rank for rank in range(board.member.size) if rank not in here]
    if missing:
        findings.fail(
            f"workers: {_named(missing)} did not come to {board.member.host}:{board.member.port} within "
            f"{board.timeout:g} s ({len(here)} of {board.member.size} did); see what was printed there, and "
            "whether that host reaches this address"
        )
        return []
    return [here[rank] for rank in sorted(here)]


def _all_reachable(board: Board, backend: str, present: Sequence[Peer], findings: Findings) -> bool:
    """Lets every worker look at its own address; the first one says what they found."""
    if not present:
        return False
    board.tell("address", why_unreachable(backend, len({one.host for one in present})))
    said = board.hear("address", range(board.member.size), board.timeout)
    wrong = {rank: reason for rank, reason in said.items() if reason}
    for rank, reason in wrong.items():
        findings.fail(f"interface of worker {rank}: {reason}")
    for rank in sorted(set(range(board.member.size)) - set(said)):
        findings.fail(f"workers: worker {rank} on {present[rank].host} says nothing any more; see what it printed")
    return len(said) == board.member.size and not wrong


def check_present(present: Sequence[Peer], findings: Findings) -> None:
    """Says which workers are on which hosts, and whether all have the same versions."""
    places: dict[str, list[int]] = {}
    for rank, one in enumerate(present):
        places.setdefault(f"{one.host} ({one.address})", []).append(rank)
    findings.ok("; ".join(f"{_named(ranks)} on {place}" for place, ranks in places.items()))
    for name, version in present[0].versions.items():
        others = {one.versions[name]: rank for rank, one in enumerate(present) if one.versions[name] != version}
        for other, rank in others.items():
            findings.fail(
                f"versions: {name} {version} with worker 0 and {other} with worker {rank} on {present[rank].host}; "
                "install the same on all hosts"
            )


def reach_all(board: Board, present: Sequence[Peer], findings: Findings) -> bool:
    """Connects every worker with every other one, in both directions; the first one says who cannot be reached.

    Returns:
        Whether all can, which all know then.
    """
    size = board.member.size
    with ThreadPoolExecutor(max_workers=min(32, size)) as pool:
        reasons = list(pool.map(_try, [present[rank] for rank in board.others]))
    board.tell("reached", {rank: why for rank, why in zip(board.others, reasons, strict=True) if why})
    if board.member.rank:
        return bool(board.hear_leader("reachable", board.timeout + 3 * _CONNECTING + _TELLING))
    said = board.hear("reached", range(size), board.timeout + 3 * _CONNECTING)
    between = "links and firewalls between these hosts" if networked(present) else "firewall of this machine"
    for rank in sorted(set(range(size)) - set(said)):
        findings.fail(f"peers: worker {rank} on {present[rank].host} says nothing any more; see what it printed")
    for target in range(size):
        lost = {rank: why[str(target)] for rank, why in said.items() if str(target) in why}
        if lost:
            who, reason = _named(list(lost)), next(iter(lost.values()))
            at = f"{present[target].host}, {present[target].address}:{present[target].port}"
            findings.fail(
                f"peers: worker {target} ({at}) cannot be reached by {who}: {reason}; see the {between} (workers need "
                "all ports), or choose another --interface"
            )
    reachable = not findings.failures
    board.tell("reachable", reachable)
    if reachable:
        findings.ok(f"peers: every worker reaches every other one ({size * (size - 1)} connections tried)")
    return reachable


def name_lost(board: Board, present: Sequence[Peer], doing: str, reason: str, own: bool, findings: Findings) -> None:
    """Says which worker does not answer any more; called by all that have noticed.

    Args:
        board: of all workers.
        present: who they were.
        doing: the check in which contact was lost.
        reason: how this worker noticed.
        own: whether something went wrong with this worker, rather than with another.
        findings: where the first worker says it.
    """
    board.tell("parted", [not own, reason])
    if board.member.rank:
        return
    noticed = board.hear("parted", range(board.member.size), board.timeout + _TELLING)
    silent = [rank for rank in range(board.member.size) if rank not in noticed]
    late, first = min(noticed.values())
    if not late:
        findings.fail(f"{doing}: {first}; if all hosts have the same versions, report it")
    elif silent:
        who = f"{_named(silent)} on {', '.join(sorted({present[rank].host for rank in silent}))}"
        link = ", and its link" if networked(present) else ""
        findings.fail(f"{doing}: {who} did not answer any more; see what was printed there{link}")
    else:
        fix = "see what is between them" if networked(present) else "see whether this machine is overloaded"
        findings.fail(f"{doing}: {first}; all workers are there, so {fix}")


def agree(board: Board, findings: Findings) -> bool:
    """Lets the first worker tell the others whether all is well, and stays until they have heard it.

    Raises:
        PeerError: if the first worker is lost.
    """
    if board.member.rank:
        well = bool(board.hear_leader("well", 2 * board.timeout + _TELLING))
        board.tell("heard", well)
        return well
    board.tell("well", not findings.failures)
    # The store ends with this process.
    board.hear("heard", board.others, _TELLING)
    return not findings.failures


def _try(peer: Peer) -> str | None:
    """Why a worker cannot be reached."""
    try:
        with closing(socket.create_connection((peer.address or peer.host, peer.port), timeout=_CONNECTING)):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _named(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
