"""Measures the time to encode and decode sparse vectors, compared with the transfer time of the saved bytes.

python scripts/bench.py packing
python scripts/bench.py packing --entries 14700000 --densities 0.01 0.001 --types float32 bfloat16 --json packing.json

"compiled" and "portable" are the two paths of spardl.vector.packing. "plain" is the format of published codes: indices
as int32 and values as float32, 8 bytes per entry. "copy" is the floor: every entry in memory is read and written
once. The cost of encoding is its time beyond "plain"; it must stay below the transfer time of the saved bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.timing import PATHS, Row, add_repetitions, content, interleaved, on_path, positive, rows, table
from spardl.vector.packing import Slot, message_bytes, pack, unpack
from spardl.vector.sparse import SparseVector

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN_BYTES = 8
GBIT = (1, 10)


def random_vector(entries: int, density: float, seed: int = 1) -> SparseVector:
    """Values as in a gradient, at places drawn independently of each other."""
    source = torch.Generator().manual_seed(seed)
    indices = (torch.rand(entries, generator=source) < density).nonzero().squeeze(1)
    return SparseVector(indices, torch.randn(indices.numel(), generator=source), entries)


def plain_pack(vector: SparseVector) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in (vector.indices.to(torch.int32), vector.values)])


def plain_unpack(message: Tensor, length: int) -> SparseVector:
    border = message.numel() // 2
    indices, values = message[:border].view(torch.int32), message[border:].view(torch.float32)
    return SparseVector(indices.to(torch.int64), values.clone(), length)


def measure(vector: SparseVector, dtype: torch.dtype, repetitions: int) -> list[Row]:
    """Measures one row for each way to encode and to decode."""
    slot = Slot(len(vector), vector.length)
    message, plain = pack(vector, slot, dtype), plain_pack(vector)
    writing: dict[str, Callable[[], object]] = {
        f"{path} write": on_path(path, lambda: pack(vector, slot, dtype)) for path in PATHS
    }
    reading: dict[str, Callable[[], object]] = {
        f"{path} read": on_path(path, lambda: unpack(message, slot, dtype, torch.float32)) for path in PATHS
    }
    others = {
        "plain write": lambda: plain_pack(vector),
        "plain read": lambda: plain_unpack(plain, vector.length),
        "copy": lambda: (vector.indices.clone(), vector.values.clone()),
    }
    found = interleaved({**writing, **reading, **others}, repetitions)
    sizes = dict.fromkeys(writing | reading, message_bytes(slot, dtype) / len(vector))
    sizes |= {"plain write": PLAIN_BYTES, "plain read": PLAIN_BYTES}
    return [
        Row(row.name, row.seconds, {"ns/entry": 1e9 * row.median / len(vector), "bytes/entry": sizes.get(row.name, "")})
        for row in rows(found, {})
    ]


def verdict(found: list[Row], dtype: torch.dtype) -> str:
    """Compares the additional time of the encoding with the transfer time of the saved bytes, as text."""
    cost = {row.name: float(row.figures["ns/entry"]) for row in found}
    beyond = sum(cost[f"compiled {what}"] - cost[f"plain {what}"] for what in ("write", "read"))
    size = next(float(row.figures["bytes/entry"]) for row in found if row.name == "compiled write")
    # Values as such are not the code's merit.
    saved = PLAIN_BYTES / 2 + dtype.itemsize - size
    times = ", ".join(f"{8 * saved / gbit:.2f} ns at {gbit} Gbit/s" for gbit in GBIT)
    return (
        f"writing and reading: {beyond:.2f} ns/entry beyond plain; the {saved:.2f} bytes saved by indices take {times}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the dense vector")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    parser.add_argument("--types", choices=TYPES, nargs="+", default=["float32", "bfloat16"], help="types on the wire")
    add_repetitions(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cases = {}
    for density in arguments.densities:
        vector = random_vector(arguments.entries, density)
        for name in arguments.types:
            title = f"{arguments.entries} entries, density {density:g}, {name}"
            cases[title] = measure(vector, TYPES[name], arguments.repetitions)
            print(f"{title}: {len(vector)} sent\n\n{table(cases[title], 'copy')}\n", flush=True)
            print(f"{verdict(cases[title], TYPES[name])}\n", flush=True)
    return content(cases, arguments)
