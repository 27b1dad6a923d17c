"""Measures round-trip time and bandwidth of the links between workers.

python scripts/netlab.py run --workers 4 --gbit 1 --delay-ms 1 -- python scripts/bench_link.py
torchrun --standalone --nproc-per-node 2 scripts/bench_link.py --throttle ethernet_1g

In a round every worker sends a message to the next rank and receives one from the previous rank through gloo. Seconds
are those of the first worker, medians with minimum and maximum; Gbit/s are those of its link in each direction.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from spardl.basics.errors import ConfigError, SpardlError
from spardl.basics.files import write_atomically
from spardl.clusters import ProcessGroupCluster, parse_network
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


def show(found: dict[str, Any]) -> None:
    """Formats the measurements as a table."""
    print("| | median ms | least | most |\n|---|---|---|---|")
    for name, times in found["seconds"].items():
        cells = [f"{1e3 * value:.3f}" for value in (median(times), min(times), max(times))]
        print(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    print(f"{found['gbit']:.3f} Gbit/s each way with {found['bytes']} bytes, {found['workers']} workers")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        ConfigError: If it makes no sense.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=16.0, help="megabytes of a long message (16)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of long messages (7)")
    parser.add_argument("--short-rounds", type=int, default=200, help="rounds of short messages (200)")
    parser.add_argument("--throttle", help="name of a network; messages that would take longer there are delayed")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args(words)
    if not (arguments.mb > 0 and arguments.rounds > 0 and arguments.short_rounds > 0):
        raise ConfigError("--mb, --rounds and --short-rounds must be above 0")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "at least two workers are needed, but WORLD_SIZE is missing or 1; start this with scripts/netlab.py run or "
            "torchrun"
        )
    return arguments


def main(words: Sequence[str]) -> int:
    """Runs as one worker, and returns the exit code."""
    torch.set_num_threads(1)
    try:
        arguments = parse(words)
        throttle = parse_network(arguments.throttle, "--throttle") if arguments.throttle else None
        dist.init_process_group("gloo")
        cluster = ProcessGroupCluster(throttle=throttle)
        found = measure(cluster, arguments)
    except SpardlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if cluster.leads:
        show(found)
        if arguments.json:
            write_atomically(arguments.json, (json.dumps(found, indent=1) + "\n").encode())
    dist.barrier()
    cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
