"""``spardl doctor``: is this installation, or this cluster, well."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import torch

from spardl.basics.errors import ConfigError
from spardl.clusters.workers.membership import Membership, find_membership
from spardl.diagnostics.doctor import board
from spardl.diagnostics.doctor.examination import Settings, examine
from spardl.diagnostics.thorough.running import examine_thoroughly

__all__ = ["QUIET", "doctor"]

QUIET = "TORCH_CPP_LOG_LEVEL"
"""What torch reads when it is imported."""

_EXAMPLES = """\b
Examples:
  spardl doctor                                                   four workers on this machine
  torchrun --nproc-per-node 4 --no-python spardl doctor           the workers that torchrun starts
  srun spardl doctor --interface eth0 --out network.yaml          those that srun starts
  spardl doctor --device cuda --thorough --json gpu.json          all that spardl does on a GPU, for you to send
"""


@click.command(epilog=_EXAMPLES)
@click.option("--workers", type=int, help="How many to start on this machine [4], or as many as were started.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the network as it was measured to this file.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Seconds that bound every wait.")
@click.option("--budget", type=float, default=60.0, show_default=True, help="Seconds; no check starts after them.")
@click.option("--interface", help="Network interface for gloo and NCCL, such as eth0.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--thorough", is_flag=True, help="Check instead all that spardl does on this device, in ten minutes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write what --thorough found to this file.")
def doctor(
    workers: int | None,
    out: Path | None,
    timeout: float,
    budget: float,
    interface: str | None,
    device: str,
    thorough: bool,
    json_file: Path | None,
) -> int:
    """Check this installation, or a cluster, within a minute.

    Alone it starts workers on this machine; under torchrun or srun every process is a worker, and the real cluster is
    checked. Each check prints one line: ok, warning or FAILED, with what, where and the fix. No check starts after the
    seconds of --budget, and one warning names those that are left out.

    With --thorough: the laws of all methods, kernels, selection, attach and waits on one GPU that this machine has, or,
    where there is none, on its CPU.

    The exit code is 0, or 1 if any check failed; 2 for bad input. The file of --out holds the network's alpha and
    bandwidth, which spardl advise, spardl timeline and train.py take in place of a preset's name.
    """
    member = find_membership(os.environ)
    if thorough:
        _check_thorough(member, {"--workers": workers, "--out": out, "--interface": interface}, timeout, json_file)
        _be_quiet()
        found = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        return 0 if examine_thoroughly(device, found, timeout, json_file) else 1
    if json_file:
        raise ConfigError("--json is for --thorough; add it, or leave --json away")
    settings = Settings(_count(workers, member), timeout, device, out, budget)
    _check(settings, interface)
    _be_quiet()
    for variable in board.VARIABLES.values() if interface else ():
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
    _check_timeout(settings.timeout)
    if not settings.budget > 0:
        raise ConfigError(f"--budget must be above 0 seconds, got {settings.budget:g}")
    _check_file("--out", settings.out)
    if interface and interface not in board.interfaces():
        there = ", ".join(board.interfaces())
        raise ConfigError(f"--interface {interface} is not on {socket.gethostname()}; use one of {there}")


def _check_thorough(
    member: Membership | None, useless: Mapping[str, object], timeout: float, json_file: Path | None
) -> None:
    if member:
        raise ConfigError("--thorough starts its own workers on this machine; run it once, without torchrun or srun")
    for option, value in useless.items():
        if value is not None:
            raise ConfigError(f"{option} is not for --thorough, which uses this machine alone; leave it away")
    _check_timeout(timeout)
    _check_file("--json", json_file)


def _check_timeout(seconds: float) -> None:
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--timeout must be from 1 to 3600 seconds, got {seconds:g}")


def _check_file(option: str, path: Path | None) -> None:
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"{option} {path} must be a file in a folder that exists")


def _be_quiet() -> None:
    """Begins anew without torch's own lines about lost peers: the doctor's say what matters.

    torch reads that when it is imported, which it is by now.
    """
    if QUIET not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, QUIET: "FATAL"})
