"""``spardl advise``: recommends a method and a schedule for a model on a network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from spardl.clusters.network import parse_network
from spardl.clusters.profile import Profile
from spardl.diagnostics.advice import DENSE, METHODS, PATIENCE, Compressing, measured_compression
from spardl.diagnostics.advice import advise as advised
from spardl.diagnostics.commands import network_option, workers_option

__all__ = ["advise", "with_progress"]

# Load per core above which measurements are unreliable.
_BUSY = 0.5
_EXAMPLES = """\b
Examples:
  spardl advise model.json --network 1gbit --workers 8
  spardl advise model.json --network network.yaml --workers 16 --compute 0.2
"""


@click.command(epilog=_EXAMPLES)
@click.argument("profile", type=click.Path(path_type=Path, dir_okay=False))
@network_option
@workers_option
@click.option("--compute", type=float, help="Seconds of the forward and backward pass [from the profile].")
@click.option("--density", type=float, default=0.01, show_default=True, help="Density of sparse methods.")
def advise(profile: Path, network: str, workers: int, compute: float | None, density: float) -> None:
    """Recommend a method and a schedule for a model on a network.

    PROFILE is a file from spardl profile. The time of compression is measured on one core of this machine, several
    times per method and in about half a minute on an idle machine; everything else is predicted. The first line can be
    pasted into a DDP training loop; the table compares all methods with plain DDP.
    """
    torch.set_num_threads(1)
    link, found = parse_network(network, "--network"), Profile.read(profile)
    compressing = None
    if workers > 1:
        _warn_if_busy()
        count = sum(len(options(workers, density)) for name, options in METHODS.items() if name != DENSE)
        compressing = with_progress(measured_compression(workers, torch.device("cpu"), found.layout), count)
    click.echo(advised(found, link, workers, compute_seconds=compute, density=density, compressing=compressing))


def _warn_if_busy() -> None:
    if not hasattr(os, "getloadavg"):
        return  # not available on every system
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cores:
        click.echo(
            f"this machine is busy (load {load:.1f} on {cores} cores), so compression will look slower than it is; "
            "measure again on an idle machine",
            err=True,
        )


def with_progress(compressing: Compressing, count: int, clock: Callable[[], float] = time.perf_counter) -> Compressing:
    """Returns a function that does the same as ``compressing``, and also prints the progress of measurements to stderr.

    Args:
        compressing: Function that measures the time of compression of a method.
        count: Number of measurements, one for each method and set of options.
        clock: Function that returns the time in seconds.
    """
    done = 0
    click.echo(
        f"measuring the compression of {count} methods on one core: about {PATIENCE * count:.0f} s on an idle machine, "
        "longer if kernels must be compiled first",
        err=True,
    )

    def seconds(name: str, options: Mapping[str, Any]) -> Callable[[int], float]:
        nonlocal done
        done += 1
        words = ", ".join([name, *(f"{option}={value}" for option, value in options.items())])
        click.echo(f"measuring {words} ({done} of {count}) ... ", err=True, nl=False)
        began = clock()
        line = compressing(name, options)
        click.echo(f"{clock() - began:.1f} s", err=True)
        return line

    return seconds
