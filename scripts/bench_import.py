"""Measures the import time of the library in addition to that of torch and numpy.

python scripts/bench_import.py --repeats 7

New interpreters import torch and numpy with and without spardl, alternately; results are medians with minimum and
maximum.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

from scripts.benchmarks.timing import positive

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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=7)
    repeats = parser.parse_args().repeats
    found: dict[str, list[float]] = {"": [], ", spardl": []}
    for more in found:
        seconds(more)  # compiled and cached once
    for _ in range(repeats):
        for more, times in found.items():
            times.append(seconds(more))
    for more, times in found.items():
        print(f"numpy, torch{more:8}  {median(times):.2f} s ({min(times):.2f}..{max(times):.2f})")
    beyond = [after - before for before, after in zip(*found.values(), strict=True)]
    print(f"beyond torch: {median(beyond):.2f} s ({min(beyond):.2f}..{max(beyond):.2f})")


if __name__ == "__main__":
    main()
