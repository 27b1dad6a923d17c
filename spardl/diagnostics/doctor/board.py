"""A board on which workers leave notes for one another, before there is a process group."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from spardl.basics.errors import PeerError, first_line
from spardl.basics.version import __version__
from spardl.clusters.workers.membership import Membership, address_of
from spardl.clusters.workers.store import hold_store

__all__ = [
    "VARIABLES",
    "Board",
    "Findings",
    "Verdict",
    "check_extras",
    "check_versions",
    "installed",
    "interfaces",
    "join_store",
    "own_address",
    "versions",
    "why_unreachable",
]


# What a check found, in one line, and whether anything failed.


class Verdict(Enum):
    """How good news is; the text stands in front of the line."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass
class Findings:
    """All lines so far.

    Attributes:
        speaks: whether this process prints: one does.
        failures: how many checks failed.
    """

    speaks: bool
    failures: int = field(default=0, init=False)

    def ok(self, text: str) -> None:
        """What is as it should be, and where."""
        self._tell(Verdict.OK, text)

    def warn(self, text: str) -> None:
        """What works, but not well: what, where, the fix."""
        self._tell(Verdict.WARNING, text)

    def fail(self, text: str) -> None:
        """What does not work: what, where, the fix."""
        self.failures += 1
        self._tell(Verdict.FAILED, text)

    def judge(self, good: bool, text: str, fix: str) -> None:
        """What is either right or has failed."""
        if good:
            self.ok(text)
        else:
            self.fail(f"{text}; {fix}")

    def progress(self, text: str) -> None:
        """What comes next, to stderr: it may take a while."""
        if self.speaks:
            print(text, file=sys.stderr, flush=True)

    def show(self, lines: list[str]) -> None:
        """More than a line can hold, under the line before."""
        if self.speaks:
            print("\n".join(f"{'':<9}{line}" for line in lines), flush=True)

    def _tell(self, verdict: Verdict, text: str) -> None:
        if self.speaks:
            print(f"{verdict.value:<9}{' '.join(text.split())}", flush=True)


# What is installed on this machine, and what this machine is called.


VARIABLES: Mapping[str, str] = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""What tells a backend which interface to use."""
# The extra with the compiler of inner loops.
_FAST = "fast"


def versions() -> dict[str, str]:
    """What must be the same on all hosts, by name."""
    return {"python": platform.python_version(), "torch": torch.__version__, "spardl": __version__}


def check_versions(findings: Findings) -> None:
    """Names the versions, and says whether inner loops are compiled."""
    named = {**versions(), **{name: found for name in ("numpy", "numba") if (found := installed(name))}}
    findings.ok(f"installation: {', '.join(f'{name} {version}' for name, version in named.items())}, {_gpus()}")
    if os.environ.get("SPARDL_KERNELS") == "portable":
        findings.warn("installation: SPARDL_KERNELS=portable turns compiled kernels off; unset it")


def _gpus() -> str:
    if not torch.version.cuda:
        return "no CUDA in torch"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return f"CUDA {torch.version.cuda}, NCCL {nccl}, {torch.cuda.device_count()} GPU(s) here"


def check_extras(findings: Findings) -> None:
    """Says which optional libraries are here, and how to get the others."""
    try:
        wanted = metadata.requires("spardl") or []
    except metadata.PackageNotFoundError:
        findings.warn("extras: spardl is not installed, only found in the folder; in its repository, pip install -e .")
        return
    extras: dict[str, list[str]] = {}
    for line in wanted:
        found = re.match(r"""([\w.-]+).*extra\s*==\s*["']([\w-]+)["']""", line)
        if found and found[1] != "spardl":
            extras.setdefault(found[2], []).append(found[1])
    missing = {extra: [name for name in names if not installed(name)] for extra, names in sorted(extras.items())}
    if lacks := missing.get(_FAST):
        findings.warn(
            f"extras: without {', '.join(lacks)} selection takes three times as long; pip install 'spardl[{_FAST}]'"
        )
    there = ", ".join(extra for extra, names in missing.items() if not names) or "none"
    others = ", ".join(f"{extra} (without {', '.join(names)})" for extra, names in missing.items() if names)
    more = f"; not complete: {others}; pip install 'spardl[NAME]' if you want it" if others else ""
    findings.ok(f"extras: {there}{more}")


def installed(name: str) -> str | None:
    """A library's version, if it is there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def interfaces() -> list[str]:
    """The network interfaces of this machine, loopback last."""
    return sorted((name for _, name in socket.if_nameindex()), key=lambda name: (name == "lo", name))


def own_address(backend: str) -> tuple[str | None, str]:
    """Where the others can reach this process, and how that is known.

    Args:
        backend: gloo or nccl.

    Returns:
        The IPv4 address, or ``None`` if there is none, and words that say where it comes from.
    """
    variable = VARIABLES[backend]
    named = os.environ.get(variable, "")
    if named and not named.startswith("^"):  # NCCL leaves out what follows a ^, and takes beginnings of names
        wanted = named.split(",")[0].lstrip("=")
        matching = [name for name in interfaces() if name.startswith(wanted)]
        return address_of(wanted if wanted in matching else (*matching, wanted)[0]), f"{variable}={named}"
    try:
        return socket.gethostbyname(socket.gethostname()), f"host name {socket.gethostname()}"
    except OSError:
        return None, f"host name {socket.gethostname()}"


def why_unreachable(backend: str, hosts: int) -> str | None:
    """What is wrong with the address of this machine, and the fix; ``None`` if nothing is.

    Args:
        backend: gloo or nccl.
        hosts: how many machines there are.
    """
    address, source = own_address(backend)
    there = [name for name in interfaces() if address_of(name)]
    better = [name for name in there if name != "lo"] or there
    advice = f"set {VARIABLES[backend]} to one of {', '.join(better)}, or pass --interface"
    if address is None:
        return f"{source} has no address on {socket.gethostname()}; {advice}"
    if hosts > 1 and address.startswith("127."):
        return f"{source} is {address} on {socket.gethostname()}, which other hosts cannot reach; {advice}"
    return None


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
