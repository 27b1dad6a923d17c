"""Who is there, and who reaches whom: found with a store and plain sockets, before a backend is asked.

A backend that cannot connect says so late and does not name the worker.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from doctoring.findings import Findings
from doctoring.installation import own_address, versions, why_unreachable
from spardl.basics.errors import PeerError
from spardl.basics.messages import first_line
from spardl.clusters.workers.membership import Membership
from spardl.clusters.workers.store import hold_store

__all__ = [
    "Meeting",
    "Present",
    "agree",
    "check_present",
    "join_store",
    "listen",
    "name_lost",
    "reach_all",
    "roll_call",
]

# Seconds that a connection to another worker may take, and that the leader gets to tell what it has heard.
_CONNECTING, _TELLING = 4.0, 5.0


class Present(NamedTuple):
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


class Meeting:
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


def listen(backend: str) -> socket.socket:
    """A socket on this process's own address, for the others to try; on all addresses if there is no such one."""
    address, _ = own_address(backend)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address or "", 0))
    listener.listen(4096)
    return listener


def roll_call(meeting: Meeting, backend: str, listener: socket.socket, findings: Findings) -> list[Present]:
    """Waits for all workers; the first one says who they are, or who is missing.

    Args:
        meeting: of all.
        backend: gloo or nccl.
        listener: of this worker.
        findings: where it is said.

    Returns:
        What all said of themselves, by rank; nothing if somebody is missing, or cannot go on.
    """
    address, _ = own_address(backend)
    meeting.tell("here", Present(socket.gethostname(), address, listener.getsockname()[1], versions()))
    if meeting.member.rank:
        called = meeting.hear_leader("called", meeting.timeout + _TELLING)
    else:
        called = _call(meeting, findings)
        meeting.tell("called", called)
    present = [Present(*one) for one in called]
    return present if _all_reachable(meeting, backend, present, findings) else []


def _call(meeting: Meeting, findings: Findings) -> list[Any]:
    here = meeting.hear("here", range(meeting.member.size), meeting.timeout)
    missing = [rank for rank in range(meeting.member.size) if rank not in here]
    if missing:
        findings.fail(
            f"workers: {_named(missing)} did not come to {meeting.member.host}:{meeting.member.port} within "
            f"{meeting.timeout:g} s ({len(here)} of {meeting.member.size} did); see what was printed there, and "
            "whether that host reaches this address"
        )
        return []
    return [here[rank] for rank in sorted(here)]


def _all_reachable(meeting: Meeting, backend: str, present: Sequence[Present], findings: Findings) -> bool:
    """Lets every worker look at its own address; the first one says what they found."""
    if not present:
        return False
    meeting.tell("address", why_unreachable(backend, len({one.host for one in present})))
    said = meeting.hear("address", range(meeting.member.size), meeting.timeout)
    wrong = {rank: reason for rank, reason in said.items() if reason}
    for rank, reason in wrong.items():
        findings.fail(f"interface of worker {rank}: {reason}")
    for rank in sorted(set(range(meeting.member.size)) - set(said)):
        findings.fail(f"workers: worker {rank} on {present[rank].host} says nothing any more; see what it printed")
    return len(said) == meeting.member.size and not wrong


def check_present(present: Sequence[Present], findings: Findings) -> None:
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


def reach_all(meeting: Meeting, present: Sequence[Present], findings: Findings) -> bool:
    """Connects every worker with every other one, in both directions; the first one says who cannot be reached.

    Returns:
        Whether all can, which all know then.
    """
    size = meeting.member.size
    with ThreadPoolExecutor(max_workers=min(32, size)) as pool:
        reasons = list(pool.map(_try, [present[rank] for rank in meeting.others]))
    meeting.tell("reached", {rank: why for rank, why in zip(meeting.others, reasons, strict=True) if why})
    if meeting.member.rank:
        return bool(meeting.hear_leader("reachable", meeting.timeout + 3 * _CONNECTING + _TELLING))
    said = meeting.hear("reached", range(size), meeting.timeout + 3 * _CONNECTING)
    for rank in sorted(set(range(size)) - set(said)):
        findings.fail(f"peers: worker {rank} on {present[rank].host} says nothing any more; see what it printed")
    for target in range(size):
        lost = {rank: why[str(target)] for rank, why in said.items() if str(target) in why}
        if lost:
            who, reason = _named(list(lost)), next(iter(lost.values()))
            at = f"{present[target].host}, {present[target].address}:{present[target].port}"
            findings.fail(
                f"peers: worker {target} ({at}) cannot be reached by {who}: {reason}; see the links and firewalls "
                "between these hosts (workers need all ports), or choose another --interface"
            )
    reachable = not findings.failures
    meeting.tell("reachable", reachable)
    if reachable:
        findings.ok(f"peers: every worker reaches every other one ({size * (size - 1)} connections tried)")
    return reachable


def name_lost(
    meeting: Meeting, present: Sequence[Present], doing: str, reason: str, own: bool, findings: Findings
) -> None:
    """Says which worker does not answer any more; called by all that have noticed.

    Args:
        meeting: of all.
        present: who they were.
        doing: the check in which contact was lost.
        reason: how this worker noticed.
        own: whether something went wrong with this worker, rather than with another.
        findings: where the first worker says it.
    """
    meeting.tell("parted", [not own, reason])
    if meeting.member.rank:
        return
    noticed = meeting.hear("parted", range(meeting.member.size), meeting.timeout + _TELLING)
    silent = [rank for rank in range(meeting.member.size) if rank not in noticed]
    late, first = min(noticed.values())
    if not late:
        findings.fail(f"{doing}: {first}; if all hosts have the same versions, report it")
    elif silent:
        who = f"{_named(silent)} on {', '.join(sorted({present[rank].host for rank in silent}))}"
        findings.fail(f"{doing}: {who} did not answer any more; see what was printed there, and its link")
    else:
        findings.fail(f"{doing}: {first}; all workers are there, so see what is between them")


def agree(meeting: Meeting, findings: Findings) -> bool:
    """Lets the first worker tell the others whether all is well, and stays until they have heard it.

    Raises:
        PeerError: if the first worker is lost.
    """
    if meeting.member.rank:
        well = bool(meeting.hear_leader("well", 2 * meeting.timeout + _TELLING))
        meeting.tell("heard", well)
        return well
    meeting.tell("well", not findings.failures)
    # The store ends with this process.
    meeting.hear("heard", meeting.others, _TELLING)
    return not findings.failures


def _try(peer: Present) -> str | None:
    """Why a worker cannot be reached."""
    try:
        with closing(socket.create_connection((peer.address or peer.host, peer.port), timeout=_CONNECTING)):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def _named(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
