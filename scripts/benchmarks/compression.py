"""Measures the compression time of methods on one core, and fits a line a + b * entries for the timeline model.

python scripts/bench.py compression --methods spardl,topka --workers 64 --json compression.json
spardl timeline scripts/profiles/bert_base.json --workers 64 --methods spardl,topka --compression compression.json

All workers synchronize random gradients in the simulated cluster. Only the time in which one worker selects, packs and
merges is measured. It depends on the number of workers, so a file is valid for one number.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts import choices
from scripts.benchmarks.timing import positive
from spardl.diagnostics.timeline.measure import SIZES, measure_compression


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", default="spardl,topka,count_sketch", help="comma-separated choices of compressor=")
    parser.add_argument("--workers", type=positive, default=64)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    lines = {}
    with choices.composing():
        for name in arguments.methods.split(","):
            line, seconds = measure_compression(choices.build(name, "warmup.steps=0"), arguments.workers)
            print(f"{name}: {line.fixed:.4g} s + {line.per_entry:.4g} s per entry", flush=True)
            lines[name] = {"fixed": line.fixed, "per_entry": line.per_entry, "seconds": seconds}
    device = f"cpu, threads: {arguments.threads}"
    return {"workers": arguments.workers, "device": device, "entries": SIZES, "methods": lines}
