"""Measures the local cost per step of error feedback and exact top-k.

python scripts/bench.py selection
python scripts/bench.py selection --entries 133000000 --density 0.001 --dtype bfloat16 --json selection.json

Ours adds a gradient to the residual, checks it for non-finite values, finds the k entries of largest magnitude and
removes them, as in training, where thresholds come from the previous step. It is compared with an addition plus
torch.topk, with its portable path (no numba), and with the largest entries of every chunk; the floor is the addition.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.kernels import TYPES
from scripts.benchmarks.timing import add_repetitions, content, interleaved, on_path, positive, rows, table
from spardl.communicators import AllGather
from spardl.compressors import TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.protocol.programs import Context, State, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Layout

FLOOR, TORCH, OURS = "residual.add_(gradient)", "g + r, torch.topk", "spardl"


class Steps:
    """Selections of one worker in successive steps, with the gradients in turns."""

    def __init__(self, gradients: list[Tensor], density: float, scope: str = "model") -> None:
        self._gradients, self._step = gradients, 0
        self._method = Method(TopK(density, scope=scope), AllGather(), GlobalResidual())
        layout = Layout.flat(gradients[0].numel())
        self._context = Context(Worker(0, 1), layout, 0)
        self.state = self._method.init_state(layout, gradients[0].dtype, gradients[0].device)

    def step(self) -> Tensor:
        """Adds a gradient to the residual, removes the largest entries, and returns their values."""
        return self._take(self._accumulated())

    def is_exact(self) -> bool:
        """Whether the next step selects the same entries as torch.topk."""
        accumulated = self._accumulated()
        magnitudes = self.state.memory.abs()
        taken = self._take(accumulated).abs().sort().values
        return torch.equal(taken, magnitudes.topk(taken.numel()).values.sort().values)

    def _accumulated(self) -> Accumulator:
        self._step += 1
        self._method.accumulate(self._gradients[self._step % len(self._gradients)], self.state)
        return Accumulator(self.state.memory, self.state.candidates)

    def _take(self, accumulated: Accumulator) -> Tensor:
        compressor = self._method.compressor
        assert isinstance(compressor, TopK)
        parts = [compressor.whole(self._context)]
        return accumulated.take(parts, compressor.selector(self._context, State())).values


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the gradient (n)")
    parser.add_argument("--density", type=float, default=0.01, help="density (k / n)")
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="type of gradient and residual")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--settle", type=positive, default=100, help="steps before the first timed one")
    add_repetitions(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(1)
    common = torch.randn(arguments.entries)
    gradients = [
        (common + torch.randn(arguments.entries)).to(arguments.device, TYPES[arguments.dtype]) for _ in range(2)
    ]
    ours, plain = Steps(gradients, arguments.density), Steps(gradients, arguments.density)
    chunks = Steps(gradients, arguments.density, "chunk")
    for _ in range(arguments.settle):
        ours.step()
        chunks.step()
    residual, count = ours.state.memory.clone(), max(1, round(arguments.density * arguments.entries))
    spare, zero = residual.clone(), torch.zeros_like(residual)
    seconds = interleaved(
        {
            FLOOR: lambda: spare.add_(zero),
            TORCH: lambda: (gradients[0] + residual).abs().topk(count),
            OURS: on_path("compiled", ours.step),
            "spardl, scope=chunk": on_path("compiled", chunks.step),
            "spardl, portable": on_path("portable", plain.step),
        },
        arguments.repetitions,
    )
    found = rows(seconds, {OURS: {"equals torch.topk": str(ours.is_exact())}})
    title = f"n = {arguments.entries:,}, density {arguments.density:g}, {arguments.dtype}, {arguments.device}"
    print(f"{title}, {arguments.threads} thread(s)\n{table(found, FLOOR)}")
    return content({title: found}, arguments)
