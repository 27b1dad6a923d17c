"""Measures the time of compression of methods, and fits a line a + b * entries for the timeline model.

python scripts/compression.py --methods spardl,topka --workers 64 --out compression.json

All workers synchronize random gradients in the simulated cluster. Only the time in which one worker selects, packs and
merges on one core is measured; messages take no time. It depends on the number of workers, so a file is valid for one
number.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from scripts import choices
from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically
from spardl.diagnostics.timeline.measure import SIZES, measure_compression


def main() -> int:
    """Measures the methods of the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="spardl,topka,count_sketch", help="comma-separated choices of compressor=")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = {}
    try:
        with choices.composing():
            for name in arguments.methods.split(","):
                line, seconds = measure_compression(choices.build(name, "warmup.steps=0"), arguments.workers)
                print(f"{name}: {line.fixed:.4g} s + {line.per_entry:.4g} s per entry", flush=True)
                lines[name] = {"fixed": line.fixed, "per_entry": line.per_entry, "seconds": seconds}
        plain = {"workers": arguments.workers, "device": "cpu, threads: 1", "entries": SIZES, "methods": lines}
        write_atomically(arguments.out, f"{json.dumps(plain, indent=1)}\n".encode())
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
