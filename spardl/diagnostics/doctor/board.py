"""Reports of the doctor's checks, facts about this machine, and an exchange of data between workers."""

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
    "nccl_version",
    "own_address",
    "versions",
    "why_unreachable",
]


# The result lines of the checks.


class Verdict(Enum):
    """Result of a check; its value is the word with which the reported line begins."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass
class Findings:
    """Prints the results of the checks and counts the failures.

    Attributes:
        prints: Whether this process prints results; of all workers, only one does.
        failures: Number of failed checks.
    """

    prints: bool
    failures: int = field(default=0, init=False)

    def ok(self, text: str) -> None:
        """Reports a passed check."""
        self.report(Verdict.OK, text)

    def warn(self, text: str) -> None:
        """Reports a problem that does not prevent training; ``text`` states what is wrong, where, and how to fix it."""
        self.report(Verdict.WARNING, text)

    def fail(self, text: str) -> None:
        """Reports a failed check; ``text`` states what is wrong, where, and how to fix it."""
        self.report(Verdict.FAILED, text)

    def judge(self, good: bool, text: str, fix: str) -> None:
        """Reports ``text`` as passed if ``good``, otherwise as failed; then ``fix`` says how to fix the problem."""
        if good:
            self.ok(text)
        else:
            self.fail(f"{text}; {fix}")

    def progress(self, text: str) -> None:
        """Prints to stderr the next check, because it may take a while."""
        if self.prints:
            print(text, file=sys.stderr, flush=True)

    def show(self, lines: list[str]) -> None:
        """Prints additional lines below the last result, indented."""
        if self.prints:
            print("\n".join(f"{'':<9}{line}" for line in lines), flush=True)

    def report(self, verdict: Verdict, text: str) -> None:
        """Reports a result as one line, and counts a failure."""
        self.failures += verdict is Verdict.FAILED
        if self.prints:
            # Errors of libraries may span lines; scripts expect one line per result.
            print(f"{verdict.value:<9}{' '.join(text.split())}", flush=True)


# The installation and the addresses of this machine.


VARIABLES: Mapping[str, str] = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""Environment variables that select the network interface of a backend."""
# The extra that installs the compiler of the kernels.
_FAST = "fast"


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch and spardl, by name; they must be equal on all hosts."""
    return {"python": platform.python_version(), "torch": torch.__version__, "spardl": __version__}


def check_versions(findings: Findings) -> None:
    """Reports the versions of packages, and whether compiled kernels are enabled."""
    named = {**versions(), **{name: found for name in ("numpy", "numba") if (found := installed(name))}}
    findings.ok(f"installation: {', '.join(f'{name} {version}' for name, version in named.items())}, {_gpus()}")
    if os.environ.get("SPARDL_KERNELS") == "portable":
        findings.warn("installation: SPARDL_KERNELS=portable disables compiled kernels; unset it")


def _gpus() -> str:
    if not torch.version.cuda:
        return "no CUDA in torch"
    return f"CUDA {torch.version.cuda}, NCCL {nccl_version() or 'none'}, {torch.cuda.device_count()} GPU(s) here"


def nccl_version() -> str | None:
    """Returns the version of NCCL, or ``None`` if torch has no NCCL."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


def check_extras(findings: Findings) -> None:
    """Reports which optional packages (extras) are installed, and how to install the others."""
    try:
        wanted = metadata.requires("spardl") or []
    except metadata.PackageNotFoundError:
        findings.warn(
            "extras: spardl is imported from the working directory, not installed; pip install -e . in its repository"
        )
        return
    extras: dict[str, list[str]] = {}
    for line in wanted:
        found = re.match(r"""([\w.-]+).*extra\s*==\s*["']([\w-]+)["']""", line)
        if found and found[1] != "spardl":  # an extra may include other extras of this package
            extras.setdefault(found[2], []).append(found[1])
    missing = {extra: [name for name in names if not installed(name)] for extra, names in sorted(extras.items())}
    if lacks := missing.get(_FAST):
        findings.warn(
            f"extras: selection is about 3 x slower without {', '.join(lacks)}; pip install 'spardl[{_FAST}]'"
        )
    there = ", ".join(extra for extra, names in missing.items() if not names) or "none"
    others = ", ".join(f"{extra} (without {', '.join(names)})" for extra, names in missing.items() if names)
    more = f"; incomplete: {others}; pip install 'spardl[NAME]' to complete one" if others else ""
    findings.ok(f"extras: {there}{more}")


def installed(name: str) -> str | None:
    """Returns the version of an installed package; ``None`` if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def interfaces() -> list[str]:
    """Returns the names of this machine's network interfaces, with the loopback interface last."""
    return sorted((name for _, name in socket.if_nameindex()), key=lambda name: (name == "lo", name))


def own_address(backend: str) -> tuple[str | None, str]:
    """Returns the address at which other workers should reach this process, and the source of this address.

    Args:
        backend: Name of the backend: ``gloo`` or ``nccl``.

    Returns:
        The IPv4 address, or ``None`` without one; and its source as text, such as ``host name node1``.
    """
    variable = VARIABLES[backend]
    named = os.environ.get(variable, "")
    if named and not named.startswith("^"):  # NCCL accepts prefixes of names; after a ^ it excludes them
        wanted = named.split(",")[0].lstrip("=")
        matching = [name for name in interfaces() if name.startswith(wanted)]
        return address_of(wanted if wanted in matching else (*matching, wanted)[0]), f"{variable}={named}"
    try:
        return socket.gethostbyname(socket.gethostname()), f"host name {socket.gethostname()}"
    except OSError:
        return None, f"host name {socket.gethostname()}"


def why_unreachable(backend: str, hosts: int) -> str | None:
    """Explains why other machines cannot reach this one's address, and how to fix it; ``None`` if nothing is wrong.

    Args:
        backend: Name of the backend: ``gloo`` or ``nccl``.
        hosts: Number of machines on which the workers run.
    """
    address, source = own_address(backend)
    there = [name for name in interfaces() if address_of(name)]
    # The loopback interface is suggested only if there is no other.
    better = [name for name in there if name != "lo"] or there
    advice = f"set {VARIABLES[backend]} to one of {', '.join(better)}, or pass --interface"
    if address is None:
        return f"{source} has no address on {socket.gethostname()}; {advice}"
    if hosts > 1 and address.startswith("127."):
        return f"{source} is {address} on {socket.gethostname()}, which other hosts cannot reach; {advice}"
    return None


class Board:
    """Exchanges data between workers through a key-value store, before a process group exists.

    Args:
        member: Rank of this process, and number of workers.
        store: Key-value store that all workers share.
        timeout: Timeout of every wait, in seconds.
    """

    def __init__(self, member: Membership, store: Any, timeout: float) -> None:
        self.member, self.store, self.timeout = member, store, timeout

    @property
    def others(self) -> list[int]:
        """Ranks of all other workers."""
        return [rank for rank in range(self.member.size) if rank != self.member.rank]

    def publish(self, topic: str, content: Any) -> None:
        """Makes plain data of this worker available to all workers as ``topic``; call this once per topic."""
        self._asked(lambda: self.store.set(f"{topic}/{self.member.rank}", json.dumps(content)))

    def read(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Reads the data that workers published under a topic, by rank; omits data that does not arrive in time.

        Raises:
            PeerError: If the store is lost, because worker 0, which runs it, has ended.
        """
        # One deadline for all ranks: several missing workers must not multiply the wait.
        until, found = time.monotonic() + seconds, {}
        for rank in ranks:
            key = f"{topic}/{rank}"
            if self._asked(lambda key=key: self._comes(key, until - time.monotonic())):
                found[rank] = json.loads(self._asked(lambda key=key: self.store.get(key)))
        return found

    def read_leader(self, topic: str, seconds: float) -> Any:
        """Reads the data that worker 0 published under a topic.

        Raises:
            PeerError: If nothing arrives in time.
        """
        found = self.read(topic, [0], seconds)
        if not found:
            raise PeerError(f"worker 0 at {self.member.host} stopped answering; see its output")
        return found[0]

    def _comes(self, key: str, seconds: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=max(0.01, seconds)))
        except dist.DistNetworkError:
            raise  # the store is gone, which is not a timeout
        except RuntimeError:  # stores raise different subclasses on a timeout
            return False
        return True

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            raise PeerError(
                f"worker {self.member.rank} on {socket.gethostname()} lost worker 0, which holds the store: "
                f"{first_line(error)}; see the output of worker 0"
            ) from error


def join_store(member: Membership, timeout: float) -> Any:
    """Opens or joins the key-value store of workers that torchrun or srun started.

    Raises:
        PeerError: If the store cannot be reached or opened.
    """
    where = f"{member.host}:{member.port}"
    me = f"worker {member.rank} on {socket.gethostname()}"
    try:
        socket.getaddrinfo(member.host, member.port)
    except OSError as error:
        raise PeerError(f"{me} cannot resolve {member.host} ({error}); set MASTER_ADDR to an address") from error
    holds = member.rank == 0 and not member.served
    try:
        if holds:
            store = hold_store(member.host, member.port, timeout, member.alone)
        else:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                member.host, member.port, None, False, timedelta(seconds=timeout), wait_for_workers=False
            )
        # The store of torchrun survives restarts and still holds the messages of earlier attempts.
        return dist.PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        reason = first_line(error)
        if holds:
            raise PeerError(f"{me} cannot listen on {where}: {reason}; set MASTER_PORT to a free port") from error
        raise PeerError(
            f"{me} cannot reach worker 0 at {where}: {reason}; check that worker 0 runs, and check the link, the "
            "firewall and MASTER_ADDR"
        ) from error
