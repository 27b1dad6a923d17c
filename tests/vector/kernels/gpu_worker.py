"""A separate process for Triton, whose interpreter must be enabled before the import; uses a GPU if available."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor


def has_gpu() -> bool:
    return torch.cuda.is_available()


def add_and_list(
    sizes: tuple[int, int] | None,
    memory: Tensor,
    gradient: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    bounds: Sequence[float],
    room: int,
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
            fronts[0], fronts[1] if gradient is not None else None, starts, stops, bounds, room
        )
    finally:
        gpu._TILE, gpu._GROUP = normal
    assert all(bool((part[len(memory) :] == 1).all()) for part in longer)
    return fronts[0].cpu().clone(), positions.cpu(), counts


def list_far_out(length: int, marks: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> Any:
    """What is found of some ones among zeros in a vector too long to be sent here; nothing without room for it."""
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
    bounds, rooms = torch.full((count,), bound, dtype=memory.dtype), np.full(count, 64)
    counts = finder.add(values, more, ListingRanges(np.array(starts), np.array(stops), bounds, rooms))
    parts = [Range(start, stop, wanted) for start, stop in zip(starts, stops, strict=True)]
    found = finder.largest(values, parts, [])
    return values.cpu(), counts.tolist(), found.positions.tolist(), found.looked.tolist()


def compile_for_hopper(kind: str, wide: str, has_gradient: bool, integer: str) -> dict[str, str]:
    """The instructions (PTX) of each kernel for compute capability 9.0, which takes no such device."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
    texts = {}
    for kernel, warps in ((gpu._add_tile, gpu._WARPS), (gpu._count_below, 1), (gpu._list_group, 4)):
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={name: types[name] for name in names},
            constexprs={(at,): fixed[name] for at, name in enumerate(names) if types[name] == "constexpr"},
            attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name][0] == "*"},
        )
        options = {"num_warps": warps, "enable_fp_fusion": False}
        texts[kernel.fn.__name__] = compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return texts


def _serve(pipe: Connection, interpreted: bool) -> None:
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of overflows that a GPU passes over in silence
    torch.set_num_threads(1)
    if interpreted and not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
    while (request := pickle.loads(pipe.recv_bytes())) is not None:
        function, arguments = request
        try:
            answer = function(*arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


@contextmanager
def worker(interpreted: bool = True) -> Iterator[Callable[..., Any]]:
    """Starts a process, and gives a function that has it call another."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, interpreted), daemon=True)
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
