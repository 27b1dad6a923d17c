"""Measures the import time of the library in addition to that of torch and numpy.

python scripts/bench.py imports --repetitions 7

New interpreters import torch and numpy with and without spardl, alternately; results are medians with minimum and
maximum.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

from scripts.benchmarks.timing import add_repetitions

PROGRAM = """
import time
begun = time.perf_counter()
import numpy, torch{more}
print(time.perf_counter() - begun)
"""


def seconds(more: str) -> float:
    """Returns the seconds that imports take in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(more=more)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_repetitions(parser, 7)


def run(arguments: argparse.Namespace) -> dict[str, list[float]]:
    names = {"numpy, torch": "", "numpy, torch, spardl": ", spardl"}
    turns = [[seconds(more) for more in names.values()] for _ in range(arguments.repetitions + 1)]
    # The first turn compiles and caches modules.
    found = dict(zip(names, map(list, zip(*turns[1:], strict=True)), strict=True))
    found["beyond torch"] = [after - before for before, after in turns[1:]]
    for name, times in found.items():
        print(f"{name:<20}  {median(times):.2f} s ({min(times):.2f}..{max(times):.2f})")
    return found
