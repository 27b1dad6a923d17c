"""Runs a benchmark by name: one of the programs scripts/bench_NAME.py, which can also be run directly.

python scripts/bench.py --list
python scripts/bench.py merge --entries 14700000 --density 0.01
python scripts/bench.py merge --help
python scripts/netlab.py run --workers 4 --gbit 1 -- python scripts/bench.py overlap --gbit 1

Options after the name are those of the benchmark.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from pathlib import Path

from spardl.basics.errors import ConfigError

# The files keep their names: ids of recorded measurements contain their paths.
PREFIX = "bench_"
BAD_INPUT = 2


def benchmarks() -> dict[str, str]:
    """Returns the first line of each benchmark's docstring, by name."""
    paths = sorted(Path(__file__).parent.glob(f"{PREFIX}*.py"))
    return {path.stem.removeprefix(PREFIX): _headline(path) for path in paths}


def _headline(path: Path) -> str:
    """Read without importing the module, which would import torch."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def run(name: str, words: list[str]) -> int:
    """Runs a benchmark.

    Args:
        name: Name of the benchmark.
        words: Options of the benchmark.

    Returns:
        The exit code.

    Raises:
        ConfigError: If there is no such benchmark.
    """
    known = benchmarks()
    if name not in known:
        raise ConfigError(f"benchmark {name!r} does not exist; choose from {', '.join(known)}")
    main = importlib.import_module(f"scripts.{PREFIX}{name}").main
    sys.argv = [f"bench.py {name}", *words]
    return int((main(words) if inspect.signature(main).parameters else main()) or 0)


def main() -> int:
    """Runs the command line, and returns the exit code."""
    name, *options = sys.argv[1:] or ["--help"]
    if name.startswith("-"):
        parser = argparse.ArgumentParser(
            usage="bench.py [-h] [--list] NAME ...",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--list", action="store_true", help="print all benchmarks")
        parser.parse_args()
        print("\n".join(f"{known:<12} {headline}" for known, headline in benchmarks().items()))
        return 0
    try:
        return run(name, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
