"""``spardl doctor``: is this installation, or this cluster, well."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

from spardl.basics.errors import ConfigError
from spardl.clusters.workers.membership import Membership, find_membership
from spardl.diagnostics.doctor import installation
from spardl.diagnostics.doctor.examination import Settings, examine

__all__ = ["QUIET", "doctor"]

QUIET = "TORCH_CPP_LOG_LEVEL"
"""What torch reads when it is imported."""

_EXAMPLES = """\b
Examples:
  spardl doctor                                                   four workers on this machine
  torchrun --nproc-per-node 4 --no-python spardl doctor           the workers that torchrun starts
  srun spardl doctor --interface eth0 --out network.yaml          those that srun starts
"""


@click.command(epilog=_EXAMPLES)
@click.option("--workers", type=int, help="How many to start on this machine [4], or as many as were started.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the network as it was measured to this file.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds that bound every wait.")
@click.option("--interface", help="Network interface for gloo and NCCL, such as eth0.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def doctor(workers: int | None, out: Path | None, timeout: float, interface: str | None, device: str) -> int:
    """Check this installation, or a cluster, within a minute.

    Alone it starts workers on this machine; under torchrun or srun every process is a worker, and the real cluster is
    checked. Each check prints one line: ok, warning or FAILED, with what, where and the fix.

    The exit code is 0, or 1 if any check failed; 2 for bad input. The file of --out holds the network's alpha and
    bandwidth, which spardl advise, spardl timeline and train.py take in place of a preset's name.
    """
    member = find_membership(os.environ)
    settings = Settings(_count(workers, member), timeout, device, out)
    _check(settings, interface)
    _be_quiet()
    for variable in installation.VARIABLES.values() if interface else ():
        os.environ[variable] = interface or ""
    return 0 if examine(settings, member) else 1


def _count(workers: int | None, member: Membership | None) -> int:
    if member and workers not in (None, member.size):
        raise ConfigError(f"--workers {workers}, but {member.size} workers were started; leave it away")
    if member:
        return member.size
    return 4 if workers is None else workers


def _check(settings: Settings, interface: str | None) -> None:
    if settings.workers < 2:
        raise ConfigError(f"--workers must be at least 2, got {settings.workers}: one worker has no peers to check")
    if not 1 <= settings.timeout <= 3600:
        raise ConfigError(f"--timeout must be from 1 to 3600 seconds, got {settings.timeout:g}")
    if settings.out and (settings.out.is_dir() or not settings.out.parent.is_dir()):
        raise ConfigError(f"--out {settings.out} must be a file in a folder that exists")
    if interface and interface not in installation.interfaces():
        there = ", ".join(installation.interfaces())
        raise ConfigError(f"--interface {interface} is not on {socket.gethostname()}; use one of {there}")


def _be_quiet() -> None:
    """Begins anew without torch's own lines about lost peers: the doctor's say what matters.

    torch reads that when it is imported, which it is by now.
    """
    if QUIET not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, QUIET: "FATAL"})
