"""Measures quality and time of the count-sketch compressor, to choose its defaults.

python scripts/bench.py sketch
python scripts/bench.py sketch --density 0.001 --rows 3 5 --columns 2 8 --candidates 4 16
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import mean
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.benchmarks.timing import interleaved, setting_of
from spardl.communicators import Dense
from spardl.compressors.count_sketch import CountSketch, Sketch
from spardl.diagnostics.commands.timeline import markdown
from spardl.protocol.programs import Context, Program, State, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.flat import FlatGradient, write
from spardl.vector.layout import Layout
from spardl.vector.selection import top_k
from spardl.vector.sparse import SparseVector
from tasks.datasets.digits import load_digits
from tasks.models.resnet_cifar import CifarResNet

T = TypeVar("T")

ALONE = Worker(0, 1)


def training(
    density: float, momentum: float, workers: int = 8, batch: int = 16, rate: float = 0.05
) -> Iterator[Tensor]:
    """Trains ResNet-20 on the digits with exact top-k, and yields the sum of the workers' accumulated gradients.

    Args:
        density: Share of the entries in the averaged gradient.
        momentum: Momentum factor of each worker, reset for sent entries; 0 accumulates gradients without momentum.
        workers: Number of workers.
        batch: Images for each of them.
        rate: Learning rate of SGD.
    """
    torch.manual_seed(1)
    source = torch.Generator().manual_seed(1)
    model, images = CifarResNet(20, 10, in_channels=1), load_digits().train
    gradient = FlatGradient(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.0 if momentum else 0.9)
    velocity, memory = (torch.zeros(workers, gradient.layout.length) for _ in range(2))
    while True:
        for rank in range(workers):
            gradient.zero()
            drawn = images.batch(torch.randint(len(images), (batch,), generator=source), source)
            F.cross_entropy(model(drawn["images"]), drawn["labels"]).backward()
            velocity[rank].mul_(momentum).add_(gradient.vector)
        memory += velocity
        total = memory.sum(0)
        yield total
        sent = top_k(total, round(density * total.numel()))
        write(SparseVector(sent, total[sent] / workers, total.numel()), gradient.vector)
        optimizer.step()
        velocity[:, sent] = 0
        memory[:, sent] = 0


def vectors(density: float, steps: Sequence[int]) -> dict[str, list[Tensor]]:
    """Vectors to compress, by origin."""
    source = torch.Generator().manual_seed(1)
    found = {"Student's t, 3 degrees": [_student(270_000, 3, source) for _ in steps]}
    for name, momentum in (("ResNet-20", 0.0), ("ResNet-20, momentum corrected", 0.9)):
        captured = itertools.islice(enumerate(training(density, momentum)), max(steps) + 1)
        found[name] = [vector.clone() for step, vector in captured if step in steps]
    return found


def _student(length: int, degrees: int, source: torch.Generator) -> Tensor:
    normal = torch.randn(degrees + 1, length, generator=source)
    return normal[0] / normal[1:].square().mean(0).sqrt()


def finish(program: Program[T]) -> T:
    """Runs the program of a single worker."""
    try:
        while True:
            next(program)
    except StopIteration as stop:
        result: T = stop.value
        return result


def recovered(compressor: CountSketch, vector: Tensor, step: int) -> float:
    """Returns the total magnitude of the entries found / that of the largest entries."""
    context = Context(ALONE, Layout.flat(vector.numel()), step)
    program = compressor.rounds(
        Accumulator(vector.clone()), context, lambda tensor: Dense().total(ALONE, tensor), State()
    )
    found = finish(program)
    assert isinstance(found, SparseVector)
    best = vector[top_k(vector, compressor.count(context))]
    return float(found.values.abs().sum() / best.abs().sum())


def quality(arguments: argparse.Namespace) -> dict[str, list[list[str]]]:
    """Returns the table of the cost and the recovered share of each shape."""
    sources = vectors(arguments.density, arguments.steps)
    found = [["rows", "columns / k", "candidates / k", "words / dense", *sources]]
    for rows, columns, candidates in itertools.product(arguments.rows, arguments.columns, arguments.candidates):
        share = arguments.density * (rows * columns + candidates)
        if share >= 1:
            continue
        compressor = CountSketch(density=arguments.density, rows=rows, columns_per_entry=columns, candidates=candidates)
        shares = [[recovered(compressor, v, step) for step, v in enumerate(each)] for each in sources.values()]
        cells = [f"{mean(each):.1%} ({min(each):.1%})" for each in shares]
        found.append([str(rows), f"{columns:g}", f"{candidates:g}", f"{share:.1%}", *cells])
    return {f"density {arguments.density:g}; recovered mass at steps {arguments.steps}, mean (lowest)": found}


def speed(arguments: argparse.Namespace) -> dict[str, list[list[str]]]:
    """Returns the table of the milliseconds to insert into a table and to query it."""
    found = [["entries", "rows", "insert, ms", "query, ms"]]
    for length, rows in itertools.product(arguments.lengths, arguments.rows):
        k = round(arguments.density * length)
        sketch = Sketch(rows, round(arguments.columns[-1] * k), seed=0)
        vector = _student(length, 3, torch.Generator().manual_seed(0))
        table, count = sketch.insert(vector), round(arguments.candidates[-1] * k)
        works = {"insert": partial(sketch.insert, vector), "query": partial(sketch.largest, table, 0, length, count)}
        seconds = interleaved(works, 5).values()
        found.append([str(length), str(rows), *(f"{1000 * min(each):.1f}" for each in seconds)])
    return {"milliseconds, least of five": found}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--columns", type=float, nargs="+", default=[2, 4], help="columns per sent entry")
    parser.add_argument("--candidates", type=float, nargs="+", default=[2, 6, 8], help="candidates per sent entry")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 50, 110], help="training steps to examine")
    parser.add_argument("--lengths", type=int, nargs="+", default=[270_000, 14_700_000], help="vector lengths to time")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cases = {**quality(arguments), **speed(arguments)}
    for title, rows in cases.items():
        print(f"{title}\n\n{markdown(rows)}\n")
    return {"setting": setting_of(arguments), "cases": cases}
