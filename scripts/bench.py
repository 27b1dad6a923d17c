"""Runs a benchmark, one of the modules of scripts/benchmarks/ that have a function ``run``.

python scripts/bench.py --list
python scripts/bench.py kernels --entries 14700000 --json kernels.json
python scripts/bench.py kernels --help
python scripts/netlab.py run --workers 4 --gbit 1 -- python scripts/bench.py sync --gbit 1
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spardl.basics.errors import ConfigError, SpardlError

FOLDER = Path(__file__).resolve().parent / "benchmarks"
BAD_INPUT = 2


def benchmarks() -> dict[str, str]:
    """Returns the first line of each benchmark's docstring, by name, without importing torch."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
    return {name: (ast.get_docstring(tree) or "").partition("\n")[0] for name, tree in trees.items() if _runs(tree)}


def _runs(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


def current(words: Sequence[str]) -> list[str]:
    """Returns a command in which ``bench.py NAME`` replaces ``bench_NAME.py``, which ids of measurements contain."""
    script, *options = words
    old = re.search(r"\bbench_(\w+)\.py$", script)
    return [f"{script[: old.start()]}bench.py", old[1], *options] if old else [*words]


def parse(words: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """Reads the command line.

    A benchmark has ``add_options(parser)`` and ``run(arguments)``, and ``NEEDS_WORKERS = True`` if each process is
    one of several workers. ``run`` prints its measurements and returns the content of --json (``None``: no file).

    Returns:
        The module of the benchmark, and its options.

    Raises:
        ConfigError: If the benchmark does not exist, is not started as a worker, or the folder of --json is missing.
    """
    known = benchmarks()
    listed = "\n".join(f"{name:<12}{headline}" for name, headline in known.items())
    formatter = argparse.RawDescriptionHelpFormatter
    if not words or words[0].startswith("-"):
        parser = argparse.ArgumentParser(description=f"{__doc__}\n{listed}", formatter_class=formatter)
        parser.add_argument("--list", action="version", version=listed, help="print all benchmarks")
        parser.add_argument("name", metavar="NAME", help="a benchmark; its options follow")
        parser.parse_args(words)
    name, *options = words
    if name not in known:
        raise ConfigError(f"benchmark {name!r} does not exist; choose from {', '.join(known)}")
    module = importlib.import_module(f"scripts.benchmarks.{name}")
    parser = argparse.ArgumentParser(f"bench.py {name}", description=module.__doc__, formatter_class=formatter)
    module.add_options(parser)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args(options)
    if getattr(module, "NEEDS_WORKERS", False) and "RANK" not in os.environ:
        raise ConfigError("no RANK in the environment; start this with scripts/netlab.py run or torchrun")
    if arguments.json and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: create the folder {arguments.json.parent} first")
    return module, arguments


def main(words: Sequence[str]) -> int:
    """Runs the benchmark of the command line, and returns the exit code."""
    try:
        module, arguments = parse(words)
        import torch  # noqa: PLC0415 - slow, and --list does not need it

        from spardl.basics.files import write_atomically  # noqa: PLC0415 - it imports torch

        torch.set_num_threads(arguments.threads)
        found = module.run(arguments)
        if arguments.json and found is not None:
            write_atomically(arguments.json, f"{json.dumps(found, indent=1)}\n".encode())
    except (SpardlError, OSError, argparse.ArgumentTypeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    from spardl.clusters.workers.processes import exit_now

    exit_now(code)  # torch may abort at interpreter shutdown if one of its threads is still running
