"""``spardl advise``: which method and schedule a model wants on a network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from spardl.clusters.network import PRESETS, Network, parse_network
from spardl.clusters.profile import Profile
from spardl.diagnostics.choosing import advise as advised
from spardl.diagnostics.measuring import Compressing, measured

__all__ = ["advise"]

# Share of the cores that others may use.
_BUSY = 0.5
_EXAMPLES = """\b
Examples:
  spardl advise model.json --bandwidth 1gbit --workers 8
  spardl advise model.json --bandwidth network.yaml --workers 16 --compute 0.2
"""


@click.command(epilog=_EXAMPLES)
@click.argument("profile", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--network",
    "--bandwidth",
    "bandwidth",
    default="1gbit",
    show_default=True,
    help=f"Like 1gbit, one of {', '.join(PRESETS)}, or a file by spardl doctor --out.",
)
@click.option("--workers", type=int, default=8, show_default=True)
@click.option("--compute", type=float, help="Seconds of forward and backward pass [as in the profile].")
@click.option("--density", type=float, default=0.01, show_default=True, help="Of sparse methods.")
def advise(profile: Path, bandwidth: str, workers: int, compute: float | None, density: float) -> None:
    """Say which method and schedule pay on a network.

    PROFILE is a file by spardl profile. What compressing takes is measured here, on one core, in some seconds; the rest
    is predicted. The first line can be pasted into a training loop with DDP; the table compares it with plain DDP.
    """
    torch.set_num_threads(1)
    _tell_if_busy()
    network: str | Network = parse_network(bandwidth, "--network") if Path(bandwidth).is_file() else bandwidth
    found = Profile.read(profile)
    compressing = _telling(measured(workers, torch.device("cpu"), found.layout)) if workers > 1 else None
    click.echo(advised(found, network, workers, compute_seconds=compute, density=density, compressing=compressing))


def _tell_if_busy() -> None:
    """What is measured next to other work is too long, and differs from run to run."""
    if not hasattr(os, "getloadavg"):
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        click.echo(
            f"this machine is busy (load {load:.1f} on {cores} cores): compressing will look slower than it is; "
            "measure again when it is idle",
            err=True,
        )


def _telling(compressing: Compressing) -> Compressing:
    """Says what is measured, while it is."""

    def seconds(name: str, options: Mapping[str, Any]) -> Callable[[int], float]:
        words = ", ".join([name, *(f"{option}={value}" for option, value in options.items())])
        click.echo(f"measuring what {words} takes here ... ", err=True, nl=False)
        began = time.perf_counter()
        line = compressing(name, options)
        click.echo(f"{time.perf_counter() - began:.1f} s", err=True)
        return line

    return seconds
