"""A separate process for Triton, whose interpreter must be enabled before the import; uses a GPU if available."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

Call = Callable[..., Any]


def has_gpu() -> bool:
    return torch.cuda.is_available()


def add_and_list(
    sizes: tuple[int, int] | None,
    memory: Tensor,
    gradient: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    bounds: Sequence[float],
    capacity: int,
) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the memory as well; with small tiles and groups, small vectors have many of them.

    Each vector is the front of a longer one, whose remaining entries must not change.
    """
    from spardl.vector.kernels import gpu

    device = "cuda" if has_gpu() else "cpu"
    longer = [torch.cat([part, part.new_ones(64)]).to(device) for part in (memory, gradient) if part is not None]
    fronts = [part[: len(memory)] for part in longer]
    normal = gpu._TILE, gpu._GROUP
    gpu._TILE, gpu._GROUP = sizes or normal
    try:
        positions, counts = gpu.add_and_list(
            fronts[0], fronts[1] if gradient is not None else None, starts, stops, bounds, capacity
        )
    finally:
        gpu._TILE, gpu._GROUP = normal
    assert all(bool((part[len(memory) :] == 1).all()) for part in longer)
    return fronts[0].cpu().clone(), positions.cpu(), counts


def list_far_out(length: int, marks: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> Any:
    """Entries found of ones among zeros in a vector too long to be sent here; none that exceeds the capacity."""
    from spardl.vector.kernels.gpu import add_and_list

    if torch.cuda.mem_get_info()[0] < 6 * length:
        return None
    memory = torch.zeros(length, dtype=torch.bfloat16, device="cuda")
    gradient = torch.zeros_like(memory)
    gradient[torch.tensor(marks, device="cuda")] = 1
    positions, counts = add_and_list(memory, gradient, starts, stops, [1.0] * len(starts), length)
    return positions.tolist(), counts, bool(memory.equal(gradient))


def step_of_finder(
    memory: Tensor, gradient: Tensor, starts: Sequence[int], stops: Sequence[int], bound: float, wanted: int
) -> tuple[Tensor, list[int], list[int], list[int]]:
    """The memory after a gradient was added; how many were listed of each range; the largest; and among how many."""
    from spardl.vector.layout import Range
    from spardl.vector.selection import GpuFinder, ListingRanges

    values, more = (each.to("cuda" if has_gpu() else "cpu", copy=True) for each in (memory, gradient))
    finder, count = GpuFinder(), len(starts)
    bounds, capacities = torch.full((count,), bound, dtype=memory.dtype), np.full(count, 64)
    counts = finder.add(values, more, ListingRanges(np.array(starts), np.array(stops), bounds, capacities))
    parts = [Range(start, stop, wanted) for start, stop in zip(starts, stops, strict=True)]
    found = finder.largest(values, parts, [])
    return values.cpu(), counts.tolist(), found.positions.tolist(), found.looked.tolist()


def compile_for_hopper(kind: str, wide: str, has_gradient: bool, integer: str) -> dict[str, str]:
    """The instructions (PTX) of each kernel for compute capability 9.0, which takes no such device."""
    from spardl.vector.kernels import gpu

    types = {
        "memory": f"*{kind}",
        "gradient": f"*{kind}" if has_gradient else "constexpr",
        "bounds": f"*{wide}",
        "words": "*i32",
        "counts": "*i32",
        **dict.fromkeys(("before", "edges", "hits", "positions"), "*i64"),
        **dict.fromkeys(("tiles", "offset", "segments"), "i32"),
        **dict.fromkeys(("length", "lower", "upper", "earlier"), integer),
        **dict.fromkeys(("tile", "group"), "constexpr"),
    }
    fixed = {"tile": gpu._TILE, "group": gpu._GROUP, "gradient": None}
    kernels = ((gpu._add_tile, gpu._WARPS), (gpu._count_below, 1), (gpu._list_group, 4))
    return {kernel.fn.__name__: ptx_of(kernel, types, fixed, warps) for kernel, warps in kernels}


def ptx_of(kernel: Any, types: Mapping[str, str], fixed: Mapping[str, Any], warps: int) -> str:
    """The PTX of one kernel for compute capability 9.0; parameters of type ``constexpr`` have the ``fixed`` values."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(at,): fixed[name] for at, name in enumerate(names) if types[name] == "constexpr"},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name][0] == "*"},
    )
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return str(compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def compile_codec_for_hopper(raw: str, integer: str, full: bool) -> dict[str, str]:
    """PTX of the kernels that encode and decode messages of values with the integer type ``raw``."""
    from spardl.vector.kernels import gpu_codec

    types = {
        **dict.fromkeys(("indices", "table"), "*i64"),
        **dict.fromkeys(("values", "places", "found"), f"*{raw}"),
        **dict.fromkeys(("out", "messages"), "*u8"),
        **dict.fromkeys(("count", "capacity", "low", "lows", "uppers", "bits", "size"), "i32"),
        "length": integer,
        **dict.fromkeys(("width", "full", "tile"), "constexpr"),
    }
    fixed = {"width": 4, "full": full, "tile": gpu_codec._TILE}
    kernels = gpu_codec._encode, gpu_codec._decode
    return {kernel.fn.__name__: ptx_of(kernel, types, fixed, gpu_codec._WARPS) for kernel in kernels}


def compile_selection_for_hopper(kind: str, has_flags: bool, integer: str) -> dict[str, str]:
    """PTX of the kernels that add, mark and select entries of type ``kind``."""
    from spardl.vector.kernels import gpu_select

    width = 4 if kind == "fp32" else 2
    types = {
        **dict.fromkeys(("memory", "gradient"), f"*{kind}"),
        **dict.fromkeys(("words", "bounds", "following", "memo", "scratch"), "*i32"),
        "flags": "*u8" if has_flags else "constexpr",
        "values": f"*i{8 * width}",
        **dict.fromkeys(("edges", "positions", "table"), "*i64"),
        **dict.fromkeys(("length", "count"), integer),
        "segments": "i32",
        "most": "fp32",
        **dict.fromkeys(("tile", "width", "unit", "columns", "skips"), "constexpr"),
    }
    fixed = {"flags": None, "tile": gpu_select._TILE, "width": width, "unit": 128, "columns": gpu_select.ROW}
    fixed["skips"] = has_flags
    kernels = [gpu_select._add, gpu_select._mark, *([gpu_select._find_nonfinite] if has_flags else [])]
    texts = {kernel.fn.__name__: ptx_of(kernel, types, fixed, gpu_select._WARPS) for kernel in kernels}
    fixed["tile"] = gpu_select._LISTED
    return {**texts, "_select": ptx_of(gpu_select._select, types, fixed, gpu_select._WARPS)}


def compile_rest_for_hopper(kind: str, bits: int) -> dict[str, str]:
    """PTX of the kernels for entries of type ``kind``, sums of sparse vectors, factors and, in float32, levels."""
    from spardl.vector.kernels import gpu_entries, gpu_factors, gpu_levels, gpu_merge

    raw = "*i32" if kind == "fp32" else "*i16"
    of_values = ("values", "factors", "old", "amounts", "before", "total", "out", "out_values", "new", "scales")
    types = {
        **dict.fromkeys(of_values, f"*{kind}"),
        **dict.fromkeys(("positions", "indices", "places", "final", "out_indices", "ends"), "*i64"),
        **dict.fromkeys(("kept_indices", "other_indices"), "*i64"),
        **dict.fromkeys(("kept_values", "other_values", "taken"), raw),
        "words": "*i32",
        **dict.fromkeys(("finite", "codes", "packed"), "*u8"),
        **dict.fromkeys(("count", "start", "length", "k", "steps", "others", "size", "block", "negative_zero"), "i32"),
        **dict.fromkeys(("rows", "columns"), "i32"),
        **dict.fromkeys(("divisor", "most", "top", "half"), "fp32"),
        **dict.fromkeys(("tile", "vectors", "leave", "bits", "add"), "constexpr"),
    }
    fixed = {"tile": 1024, "vectors": 4, "leave": True, "bits": bits, "add": True}
    as_integers = {**types, "values": raw}
    kernels = [
        (gpu_entries._cut, as_integers),
        (gpu_entries._add, types),
        (gpu_entries._limit_and_divide, types),
        (gpu_merge._merge, {**types, "total": "i32"}),
        (gpu_merge._magnitudes, types),
        (gpu_merge._split, as_integers),
        (gpu_merge._write_others, types),
        (gpu_factors._scale, {**types, "out": "*fp32"}),
    ]
    if kind == "fp32":
        read = {**types, "scales": "*u8"}
        kernels += [(gpu_levels._quantize, types), (gpu_levels._pack, types), (gpu_levels._read, read)]
    return {f"{each.__module__}.{each.fn.__name__}": ptx_of(each, kinds, fixed, 4) for each, kinds in kernels}


def _serve(pipe: Connection, interpreted: bool, needs_cpu: bool) -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of overflows that a GPU passes over in silence
    torch.set_num_threads(1)
    if interpreted and (needs_cpu or not has_gpu()):
        os.environ["TRITON_INTERPRET"] = "1"
    while (request := pickle.loads(pipe.recv_bytes())) is not None:
        function, arguments = request
        try:
            answer = function(*arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


@contextmanager
def worker(interpreted: bool = True, needs_cpu: bool = False) -> Iterator[Call]:
    """Starts a process, and gives a function that has it call another.

    Args:
        interpreted: Whether Triton interprets kernels on a machine without a GPU.
        needs_cpu: Whether it interprets them on every machine.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, interpreted, needs_cpu), daemon=True)
    process.start()
    theirs.close()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        ours.send_bytes(pickle.dumps((function, arguments)))
        result, error = pickle.loads(ours.recv_bytes())
        assert error is None, error
        return result

    try:
        yield call
    finally:
        if process.is_alive():
            ours.send_bytes(pickle.dumps(None))
        process.join()
        ours.close()
