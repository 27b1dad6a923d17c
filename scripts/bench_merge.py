"""Measures the time to add sorted sparse vectors, compared with torch.

python scripts/bench_merge.py
python scripts/bench_merge.py --entries 14700000 --density 0.01 --counts 2 4 16 --json merge.json

"compiled" and "portable" are the two paths of spardl.vector.sparse.merge; the portable one uses cat, unique and
searchsorted. "coalesce" is that of torch.sparse, which guarantees no order of additions. "copy" is the floor: all
entries are read and written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scripts.benchmarks.timing import PATHS, Row, add_options, interleaved, on_path, positive, rows, table, write_json
from spardl.vector.sparse import SparseVector, merge


def random_vectors(count: int, entries: int, density: float) -> list[SparseVector]:
    """Vectors of as many entries each, at places drawn independently of each other."""
    source, found = torch.Generator().manual_seed(1), []
    for _ in range(count):
        indices = (torch.rand(entries, generator=source) < density).nonzero().squeeze(1)
        found.append(SparseVector(indices, torch.randn(indices.numel(), generator=source), entries))
    return found


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


def main() -> None:
    """Reads what to measure on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the dense vectors")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--counts", type=positive, nargs="+", default=[2, 4, 16], help="numbers of vectors to add")
    add_options(parser, repetitions=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = {}
    for count in arguments.counts:
        vectors = random_vectors(count, arguments.entries, arguments.density)
        title = f"{count} vectors of {arguments.entries} entries, density {arguments.density:g}"
        cases[title] = measure(vectors, arguments.repetitions)
        sent = sum(len(vector) for vector in vectors)
        print(f"{title}: {sent} given, {len(merge(vectors))} found\n\n{table(cases[title], 'copy')}\n", flush=True)
    write_json(arguments.json, cases, vars(arguments))


if __name__ == "__main__":
    main()
