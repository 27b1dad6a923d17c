"""Measures the time to add sorted sparse vectors, compared with torch.

python scripts/bench.py merge
python scripts/bench.py merge --entries 14700000 --density 0.01 --counts 2 4 16 --json merge.json

"compiled" and "portable" are the two paths of spardl.vector.sparse.merge; the portable one uses cat, unique and
searchsorted. "coalesce" is that of torch.sparse, which guarantees no order of additions. "copy" is the floor: all
entries are read and written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.packing import random_vector
from scripts.benchmarks.timing import PATHS, Row, add_repetitions, content, interleaved, on_path, positive, rows, table
from spardl.vector.sparse import SparseVector, merge


def coalesce(vectors: Sequence[SparseVector]) -> Tensor:
    indices = torch.cat([vector.indices for vector in vectors]).unsqueeze(0)
    values = torch.cat([vector.values for vector in vectors])
    return torch.sparse_coo_tensor(indices, values, (vectors[0].length,), check_invariants=False).coalesce()


def measure(vectors: Sequence[SparseVector], repetitions: int) -> list[Row]:
    """Measures one row for each way to add vectors."""
    candidates: dict[str, Callable[[], object]] = {
        **{path: on_path(path, lambda: merge(vectors)) for path in PATHS},
        "coalesce": lambda: coalesce(vectors),
        "copy": lambda: [(vector.indices.clone(), vector.values.clone()) for vector in vectors],
    }
    total = sum(len(vector) for vector in vectors)
    return [
        Row(row.name, row.seconds, {"ns/entry": 1e9 * row.median / total})
        for row in rows(interleaved(candidates, repetitions), {})
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the dense vectors")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--counts", type=positive, nargs="+", default=[2, 4, 16], help="numbers of vectors to add")
    add_repetitions(parser, 5)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cases = {}
    for count in arguments.counts:
        vectors = [random_vector(arguments.entries, arguments.density, seed) for seed in range(1, count + 1)]
        title = f"{count} vectors of {arguments.entries} entries, density {arguments.density:g}"
        cases[title] = measure(vectors, arguments.repetitions)
        sent = sum(len(vector) for vector in vectors)
        print(f"{title}: {sent} given, {len(merge(vectors))} found\n\n{table(cases[title], 'copy')}\n", flush=True)
    return content(cases, arguments)
