"""``spardl doctor``: checks an installation or a cluster."""

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
"""Environment variable of the log level that torch reads on import."""

_EXAMPLES = """\b
Examples:
  spardl doctor                                                   four workers on this machine
  torchrun --nproc-per-node 4 --no-python spardl doctor           the workers that torchrun starts
  srun spardl doctor --interface eth0 --out network.yaml          the workers that srun starts
  spardl doctor --device cuda --thorough --json gpu.json          full check of a GPU, with a report file
"""


@click.command(epilog=_EXAMPLES)
@click.option("--workers", type=int, help="Number of workers [4, or as many as torchrun or srun started].")
@click.option("--out", type=click.Path(path_type=Path), help="Write the measured network to this file.")
@click.option("--timeout", type=float, default=30.0, show_default=True, help="Timeout of every wait in seconds.")
@click.option("--budget", type=float, default=60.0, show_default=True, help="Seconds after which no check starts.")
@click.option("--interface", help="Network interface for gloo and NCCL, such as eth0.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of the workers.",
)
@click.option("--thorough", is_flag=True, help="Run all checks of this device instead, in ten minutes.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the results of --thorough to this file."
)
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
    """Check this installation or a cluster in about a minute.

    Started alone, it starts workers on this machine. Under torchrun or srun, every process is a worker, and the check
    covers the real cluster. Each check prints one line: ok, warning or FAILED, with what is wrong, where, and what to
    do. No check starts after the seconds of --budget; a warning lists the skipped ones.

    With --thorough: checks the laws of all methods, kernels, selection, attach and waits, on one GPU of this machine
    or, without a GPU, on its CPU.

    The exit code is 0, or 1 if a check failed, or 2 for bad input. The file of --out holds the latency and bandwidth
    of the network; spardl advise, spardl timeline and train.py accept it as a network.
    """
    member = find_membership(os.environ)
    if thorough:
        _check_thorough(member, {"--workers": workers, "--out": out, "--interface": interface}, timeout, json_file)
        _silence_torch()
        found = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        return 0 if examine_thoroughly(device, found, timeout, json_file) else 1
    if json_file:
        raise ConfigError("--json needs --thorough; add --thorough, or remove --json")
    settings = Settings(_count(workers, member), timeout, device, out, budget)
    _check(settings, interface)
    _silence_torch()
    # Backends read these variables when they connect.
    for variable in board.VARIABLES.values() if interface else ():
        os.environ[variable] = interface or ""
    return 0 if examine(settings, member) else 1


def _count(workers: int | None, member: Membership | None) -> int:
    if member and workers not in (None, member.size):
        raise ConfigError(f"--workers {workers} differs from the {member.size} started workers; remove --workers")
    if member:
        return member.size  # torchrun or srun decides
    return 4 if workers is None else workers


def _check(settings: Settings, interface: str | None) -> None:
    if settings.workers < 2:
        raise ConfigError(f"--workers must be at least 2, got {settings.workers}; one worker has no peers to check")
    _check_timeout(settings.timeout)
    if not settings.budget > 0:  # also rejects NaN
        raise ConfigError(f"--budget must be above 0 seconds, got {settings.budget:g}")
    _check_file("--out", settings.out)
    if interface and interface not in board.interfaces():
        there = ", ".join(board.interfaces())
        raise ConfigError(f"--interface {interface} is not on {socket.gethostname()}; use one of {there}")


def _check_thorough(
    member: Membership | None, unsupported: Mapping[str, object], timeout: float, json_file: Path | None
) -> None:
    if member:
        raise ConfigError("--thorough starts its own workers; run it once, without torchrun or srun")
    for option, value in unsupported.items():
        if value is not None:
            raise ConfigError(f"{option} has no effect with --thorough, which checks one machine; remove it")
    _check_timeout(timeout)
    _check_file("--json", json_file)


def _check_timeout(seconds: float) -> None:
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"--timeout must be from 1 to 3600 seconds, got {seconds:g}")


def _check_file(option: str, path: Path | None) -> None:
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"{option} {path} must be a file in an existing folder")


def _silence_torch() -> None:
    """Restarts the command with torch's own messages about lost peers disabled; the doctor reports them itself."""
    # torch reads the variable on import, which has already happened, so the process must start again.
    if QUIET not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, QUIET: "FATAL"})
