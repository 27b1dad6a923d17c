"""Counts rounds and words of every method in a simulation, and compares them with the published formulas.

python scripts/complexity.py
python scripts/complexity.py --methods oktopk,spardl --workers 4,7,14

Every method synchronizes random gradients (a part shared by all workers, plus noise) in the simulated cluster, without
dense warm-up, and without residual so that all steps are alike. Steps with different costs, such as those in which
Ok-Topk evaluates its thresholds, have separate rows. "words, mean" is the mean over all workers, as in the papers.
"longest path" counts the words that are sent one after the other, which determine the duration: in a tree, most workers
send little and wait. The other counts are per worker. The exit code is 1 if a count violates its formula.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from scripts import choices
from scripts.benchmarks.timing import positive
from spardl.basics.errors import ConfigError
from spardl.clusters import Network, SimulatedCluster
from spardl.method.method import Method
from spardl.protocol.programs import Bounds, Context, Cost, Worker
from spardl.vector.layout import Layout

WORKERS = (4, 7, 8, 14, 16, 64, 256)
STEPS = 2
DENSITY = 0.02
# The words of counts (P log P in total) must be few compared with k, and P vectors of n entries must fit into memory.
KEPT_PER_WORKER = 8
BYTES_PER_SECOND = 1e9 / 8  # bandwidth of the simulated links
HEADER = "| method | P | n | step | rounds | formula | words, mean | formula | words | limits | longest path |  |"


class Line(NamedTuple):
    """Counts of one step, or of several steps with equal costs, as minimum and maximum over these steps.

    Attributes:
        published: Published formula for the mean over all workers.
        limits: Limits for each worker.
        rounds: Counted rounds, also over all workers.
        words: Counted words, also over all workers.
        mean: Mean words over all workers.
        path: Words on the longest path through all workers.
    """

    method: str
    workers: int
    length: int
    steps: list[int]
    published: Cost
    limits: Cost
    rounds: Bounds
    words: Bounds
    mean: Bounds
    path: Bounds

    @property
    def holds(self) -> bool:
        """Whether the counts satisfy the formula and the limits."""
        pairs = [
            (self.rounds, self.published.rounds),
            (self.mean, self.published.words),
            (self.rounds, self.limits.rounds),
            (self.words, self.limits.words),
        ]
        return all(found.low in bounds and found.high in bounds for found, bounds in pairs)

    def text(self) -> str:
        """Formats the row of the table."""
        steps = ",".join(map(str, self.steps))
        bounds = (self.rounds, self.published.rounds, self.mean, self.published.words, self.words, self.limits.words)
        verdict = "" if self.holds else "DIFFERS"
        cells = (self.method, self.workers, self.length, steps, *map(show, (*bounds, self.path)), verdict)
        return "| " + " | ".join(map(str, cells)) + " |"


def show(bounds: Bounds) -> str:
    """Formats a number or a range."""
    return str(bounds.low) if bounds.low == bounds.high else f"{bounds.low}..{bounds.high}"


def layout_for(workers: int) -> Layout:
    """Returns a matrix and a vector of which ``DENSITY`` keeps ``KEPT_PER_WORKER`` entries for each worker."""
    length = round(KEPT_PER_WORKER * workers / DENSITY)
    rows = workers
    columns = length // rows - 10
    return Layout.of([(rows, columns), (length - rows * columns,)])


def measure(name: str, method: Method, workers: int, steps: Iterable[int] = range(STEPS)) -> Iterator[Line]:
    """Runs the steps with these increasing numbers, and compares the counts with the formula.

    Yields:
        A line for each kind of step, the kinds in the order of their first steps.

    Raises:
        ConfigError: If the method does not support this number of workers.
    """
    layout = layout_for(workers)
    groups: dict[tuple[Cost, Cost], list[tuple[int, Bounds, Bounds, Bounds, Bounds]]] = {}
    for step, cluster in synchronized(method, layout, workers, steps):
        context = Context(Worker(0, workers), layout, step)
        costs = (method.published_cost(context), method.cost(context))
        groups.setdefault(costs, []).append((step, *_counted(cluster)))
    for costs, found in groups.items():
        run, *counts = zip(*found, strict=True)
        yield Line(name, workers, layout.length, list(run), *costs, *map(_span, counts))


def synchronized(
    method: Method, layout: Layout, workers: int, steps: Iterable[int]
) -> Iterator[tuple[int, SimulatedCluster]]:
    """Synchronizes random gradients in steps with these increasing numbers, without residual and dense warm-up.

    Yields:
        A step's number, and the cluster it ran in, and nothing else: on links of 1 Gbit/s, without latency.

    Raises:
        ConfigError: If the method does not support this number of workers.
    """
    method.communicator.check_workers(workers)
    states = [method.init_state(layout, torch.float32) for _ in range(workers)]
    source = torch.Generator().manual_seed(1)
    for step in steps:
        cluster = SimulatedCluster(workers, Network(alpha=0, gbit=1), count_local=False)
        common = torch.randn(layout.length, generator=source)
        for state in states:
            state.step = step
            state.memory.zero_()
            method.accumulate(common + torch.randn(layout.length, generator=source), state)
        cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
        yield step, cluster


def _counted(cluster: SimulatedCluster) -> tuple[Bounds, Bounds, Bounds, Bounds]:
    """Rounds, words, mean words and words on the longest path of one step."""
    rounds, words, sent = zip(
        *((ledger.rounds, ledger.words, ledger.bytes_sent) for ledger in cluster.ledgers), strict=True
    )
    mean = round(sum(words) / len(words))
    # Seconds without latency are bytes on the path; a word takes as many there as anywhere.
    path = round(cluster.seconds() * BYTES_PER_SECOND * sum(words) / sum(sent)) if sum(sent) else 0
    spans = (Bounds(min(rounds), max(rounds)), Bounds(min(words), max(words)))
    return *spans, Bounds.exactly(mean), Bounds.exactly(path)


def _span(bounds: Sequence[Bounds]) -> Bounds:
    return Bounds(min(low for low, _ in bounds), max(high for _, high in bounds))


def lines(names: Sequence[str], workers: Sequence[int]) -> Iterator[Line]:
    """Yields the lines of the table as soon as they are computed."""
    with choices.composing():
        for name in names:
            for size in workers:
                yield from measure(name, choices.build(name, "warmup.steps=0", *_density(name)), size)


def _density(name: str) -> list[str]:
    """Returns the override that gives a method this script's density, if it has one."""
    fields = vars(choices.build(name).compressor)
    return [f"compressor.density={DENSITY}"] if "density" in fields else []


def counts_of(text: str) -> list[int]:
    """Parses a comma-separated list of positive integers."""
    try:
        return [positive(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of positive integers") from error


def main() -> int:
    """Prints the table line by line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(choices.names()), help="comma-separated choices of compressor=")
    parser.add_argument("--workers", type=counts_of, default=WORKERS, help="comma-separated numbers of workers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    differing = 0
    print(f"{HEADER}\n|{'---|' * 12}", flush=True)
    try:
        for line in lines(arguments.methods.split(","), arguments.workers):
            print(line.text(), flush=True)
            differing += not line.holds
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if differing:
        print(f"error: {differing} counts differ from their formulas; see the table", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
