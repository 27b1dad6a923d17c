"""What is installed on this machine, and what this machine is called."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib import metadata

import torch

from spardl.basics.version import __version__
from spardl.clusters.workers.addresses import address_of
from spardl.diagnostics.doctor.findings import Findings

__all__ = [
    "VARIABLES",
    "check_extras",
    "check_versions",
    "installed",
    "interfaces",
    "own_address",
    "versions",
    "why_unreachable",
]

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
