"""Measures the time to encode, decode and add sparse vectors, with the compiled and the portable kernels.

python scripts/bench.py kernels
python scripts/bench.py kernels --entries 14700000 --densities 0.01 0.001 --types float32 bfloat16 --json kernels.json

"plain" is the message format of published codes: indices as int32 and values as float32, 8 bytes per entry.
"coalesce" is that of torch.sparse, which guarantees no order of additions. "copy" is the floor: every entry of one
vector is read and written once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.timing import PATHS, Row, add_repetitions, content, interleaved, on_path, positive, table
from spardl.basics.errors import ConfigError
from spardl.vector.packing import Slot, message_bytes, pack, unpack
from spardl.vector.sparse import SparseVector, merge

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN_BYTES = 8


def random_vector(entries: int, density: float, seed: int) -> SparseVector:
    """Values as in a gradient, at places drawn independently of each other.

    Raises:
        ConfigError: If no entry is drawn.
    """
    source = torch.Generator().manual_seed(seed)
    indices = (torch.rand(entries, generator=source) < density).nonzero().squeeze(1)
    if not indices.numel():
        raise ConfigError(f"a vector of {entries} entries at density {density:g} is empty; increase either")
    return SparseVector(indices, torch.randn(indices.numel(), generator=source), entries)


def plain_pack(vector: SparseVector) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in (vector.indices.to(torch.int32), vector.values)])


def plain_unpack(message: Tensor, length: int) -> SparseVector:
    border = message.numel() // 2
    indices, values = message[:border].view(torch.int32), message[border:].view(torch.float32)
    return SparseVector(indices.to(torch.int64), values.clone(), length)


def coalesce(vectors: Sequence[SparseVector]) -> Tensor:
    indices = torch.cat([vector.indices for vector in vectors]).unsqueeze(0)
    values = torch.cat([vector.values for vector in vectors])
    return torch.sparse_coo_tensor(indices, values, (vectors[0].length,), check_invariants=False).coalesce()


def measure(vectors: Sequence[SparseVector], dtype: torch.dtype, repetitions: int) -> list[Row]:
    """Measures one row for each way to encode or decode the first vector, and to add all."""
    vector = vectors[0]
    slot = Slot(len(vector), vector.length)
    message, plain = pack(vector, slot, dtype), plain_pack(vector)
    candidates: dict[str, Callable[[], object]] = {}
    for path in PATHS:
        candidates[f"{path} write"] = on_path(path, lambda: pack(vector, slot, dtype))
        candidates[f"{path} read"] = on_path(path, lambda: unpack(message, slot, dtype, torch.float32))
        candidates[f"{path} merge"] = on_path(path, lambda: merge(vectors))
    candidates["plain write"] = lambda: plain_pack(vector)
    candidates["plain read"] = lambda: plain_unpack(plain, vector.length)
    candidates["coalesce"] = lambda: coalesce(vectors)
    candidates["copy"] = lambda: (vector.indices.clone(), vector.values.clone())
    coded, total, rows = message_bytes(slot, dtype) / len(vector), sum(map(len, vectors)), []
    for name, seconds in interleaved(candidates, repetitions).items():
        what = name.rpartition(" ")[2]
        entries = total if what in ("merge", "coalesce") else len(vector)
        figures: dict[str, float | str] = {"ns/entry": 1e9 * median(seconds) / entries}
        if what in ("write", "read"):
            figures["bytes/entry"] = PLAIN_BYTES if name.startswith("plain") else coded
        rows.append(Row(name, seconds, figures))
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the dense vectors")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    parser.add_argument("--types", choices=TYPES, nargs="+", default=["float32", "bfloat16"], help="types on the wire")
    parser.add_argument("--vectors", type=positive, default=4, help="number of vectors to add")
    add_repetitions(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cases = {}
    if refused := [density for density in arguments.densities if not 0 < density <= 1]:
        raise ConfigError(f"--densities must be above 0 and at most 1, got {refused[0]:g}")
    for density in arguments.densities:
        vectors = [random_vector(arguments.entries, density, seed) for seed in range(1, arguments.vectors + 1)]
        for name in arguments.types:
            title = f"{arguments.vectors} vectors of {arguments.entries} entries, density {density:g}, {name}"
            cases[title] = measure(vectors, TYPES[name], arguments.repetitions)
            print(f"{title}\n\n{table(cases[title], 'copy')}\n", flush=True)
    return content(cases, arguments)
