"""Measures round-trip time and bandwidth of the links between workers.

python scripts/netlab.py run --workers 4 --gbit 1 --delay-ms 1 -- python scripts/bench.py link
torchrun --standalone --nproc-per-node 2 scripts/bench.py link --throttle ethernet_1g

In a round every worker sends a message to the next rank and receives one from the previous rank through gloo. Seconds
are those of the first worker, medians with minimum and maximum; Gbit/s are those of its link in each direction.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

import torch.distributed as dist

from scripts.benchmarks.timing import positive
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster, parse_network
from spardl.diagnostics.commands.timeline import markdown
from spardl.diagnostics.doctor.peers import SHORT, ring, round_trip, seconds


def measure(cluster: ProcessGroupCluster, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns all measurements of this worker."""
    rank, size, long = cluster.local_ranks[0], cluster.size, round(arguments.mb * 1e6)
    short, rounds = arguments.short_rounds, arguments.rounds
    found = {
        "round_trip": seconds(cluster, lambda: round_trip(rank), short),
        "short_round": seconds(cluster, lambda: ring(rank, size, SHORT), short),
        "long_round": seconds(cluster, lambda: ring(rank, size, long), rounds),
    }
    return {"workers": size, "bytes": long, "gbit": 8e-9 * long / median(found["long_round"]), "seconds": found}


NEEDS_WORKERS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mb", type=float, default=16.0, help="megabytes of a long message (16)")
    parser.add_argument("--rounds", type=positive, default=7, help="rounds of long messages (7)")
    parser.add_argument("--short-rounds", type=positive, default=200, help="rounds of short messages (200)")
    parser.add_argument("--throttle", help="name of a network; messages that would take longer there are delayed")


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    if arguments.mb <= 0:
        raise ConfigError(f"--mb must be above 0, got {arguments.mb:g}")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError("at least two workers are needed, but WORLD_SIZE is 1; start more workers")
    throttle = parse_network(arguments.throttle, "--throttle") if arguments.throttle else None
    dist.init_process_group("gloo")
    cluster = ProcessGroupCluster(throttle=throttle)
    found = measure(cluster, arguments)
    if cluster.leads:
        times = {name.replace("_", " "): seconds for name, seconds in found["seconds"].items()}
        figures = [[name, *(f"{1e3 * way(each):.3f}" for way in (median, min, max))] for name, each in times.items()]
        print(markdown([["", "median ms", "least", "most"], *figures]))
        print(f"{found['gbit']:.3f} Gbit/s each way with {found['bytes']} bytes, {found['workers']} workers")
    dist.barrier()
    cluster.close()
    return found if cluster.leads else None
