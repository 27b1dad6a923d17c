"""Measures the time of whole synchronizations over gloo, compared with torch and with the physical bound.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 scripts/bench.py sync
python scripts/netlab.py run --workers 4 --gbit 1 -- python scripts/bench.py sync --gbit 1

Each candidate replaces the gradient of every worker by the average over all workers, in place. Ours adds it to the
residual, selects, communicates, updates the residual and writes the sparse average over the gradient, in the steady
state of error feedback. The candidates of torch are its dense all-reduce and its DDP hooks for 16 bits and PowerSGD,
called as by DDP with one bucket that holds one square matrix. Seconds are those of the slowest worker between two
barriers; the candidates alternate.

A second table breaks down the time. ``alone`` is the time of the same messages without any computation in between;
``bound`` is the time of a worker's bytes at the bandwidth of the links, plus that of as many rounds of one-byte
messages. ``predicted`` is the computation of the busiest worker, plus its counted rounds and bytes on the network
as measured between the same workers: rounds x alpha + bytes x beta.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from scripts import choices
from scripts.benchmarks.timing import Row, add_repetitions, content, measured_network, positive, table
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.ledger import Ledger
from spardl.diagnostics.commands.timeline import markdown
from spardl.diagnostics.timeline.model import Work
from spardl.method.method import Method
from spardl.protocol.programs import Exchange, Phase, Program, Receive, Send
from spardl.vector.flat import write
from spardl.vector.layout import Layout

DENSE = "torch dense all-reduce"


class Bucket:
    """The only bucket of DDP, for torch's hooks: the whole gradient as one matrix."""

    def __init__(self, gradient: Tensor, side: int) -> None:
        self._buffer, self._side = gradient, side

    def buffer(self) -> Tensor:
        """Returns the gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces it."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Returns the largest square matrix that fits, and the rest."""
        square = self._side**2
        parts = [self._buffer[:square].view(self._side, self._side), self._buffer[square:]]
        return [part for part in parts if part.numel()]

    parameters = gradients  # with the shapes of the gradients

    def index(self) -> int:
        """Returns 0: it is the first bucket."""
        return 0

    def is_last(self) -> bool:
        """Returns true: it is the only bucket."""
        return True


class Ours:
    """One method of this library, step after step."""

    def __init__(self, method: Method, cluster: ProcessGroupCluster, length: int) -> None:
        self._method, self._cluster = method, cluster
        self._state = method.init_state(Layout.flat(length), torch.float32)
        self.phases: list[dict[Phase, float]] = []
        self.counts = Ledger()

    def __call__(self, gradient: Tensor) -> None:
        """Averages in place."""
        (ledger,) = self._cluster.ledgers
        ledger.load_state_dict(Ledger().state_dict())
        # As our DDP hook does: a dense average is written over whatever is there.
        sparse = self._method.compressor.sparsifies
        began = time.perf_counter()
        self._method.accumulate(gradient, self._state, clear=sparse)
        ledger.spend(Phase.SELECT, time.perf_counter() - began)
        (average,) = self._cluster.run([self._program(None if sparse else gradient)])
        began = time.perf_counter()
        write(average, gradient, clear=not sparse)
        ledger.spend(Phase.UPDATE, time.perf_counter() - began)
        self.phases.append(dict(ledger.seconds))
        self.counts.load_state_dict(ledger.state_dict())

    def _program(self, into: Tensor | None = None) -> Program[Any]:
        return self._method.average(self._cluster.local_workers[0], self._state, into)

    def taped(self, gradient: Tensor) -> list[Exchange]:
        """Records the exchanges of one more step, with messages of zeros."""
        tape: list[Exchange] = []
        self._method.accumulate(gradient, self._state)
        self._cluster.run_uncounted([_taped(self._program(), tape)])
        return tape


def _taped(program: Program[Any], tape: list[Exchange]) -> Program[Any]:
    reply: list[Tensor] | None = None
    while True:
        try:
            request = next(program) if reply is None else program.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Exchange):
            sends = [send._replace(payload=torch.zeros_like(send.payload)) for send in request.sends]
            tape.append(Exchange(sends, [receive._replace(into=None) for receive in request.receives]))
        reply = yield request


def replayed(tape: Sequence[Exchange]) -> Program[None]:
    """Sends the same messages again, without any computation."""
    for exchange in tape:
        # Each gets a reply, which ``yield from`` a list would not take.
        _ = yield exchange


def tiny(tape: Sequence[Exchange]) -> Program[None]:
    """As many rounds between the same workers, with messages of one byte."""
    for exchange in tape:
        yield Exchange(
            [Send(send.to, torch.zeros(1, dtype=torch.uint8), 0) for send in exchange.sends],
            [Receive(receive.source, 1, torch.uint8) for receive in exchange.receives],
        )


def torchs(length: int) -> dict[str, Callable[[Tensor], object]]:
    """Returns the candidates of torch, by name."""
    side = math.isqrt(length)
    powersgd = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    group: Any = dist.group.WORLD

    def dense(gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())

    def hook(run: Callable[..., Any], state: object) -> Callable[[Tensor], object]:
        return lambda gradient: run(state, Bucket(gradient, side)).wait()

    return {
        DENSE: dense,
        "torch fp16 hook": hook(default_hooks.fp16_compress_hook, group),
        "torch bf16 hook": hook(default_hooks.bf16_compress_hook, group),
        "torch PowerSGD hook, rank 4": hook(powerSGD_hook.powerSGD_hook, powersgd),
    }


def slowest(seconds: float) -> float:
    """Returns the seconds of the slowest worker."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds of the slowest worker, all of whom begin at once."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began)


def measure(
    candidates: Mapping[str, Callable[[Tensor], object]], gradients: Sequence[Tensor], turns: int
) -> dict[str, list[float]]:
    """Returns the seconds of each candidate's turns, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns):
        for name, work in candidates.items():
            gradient = gradients[turn % len(gradients)].clone()
            seconds[name].append(timed(partial(work, gradient)))
    return seconds


def breakdown(
    ours: Mapping[str, Ours], cluster: ProcessGroupCluster, gradient: Tensor, gbit: float | None, turns: int
) -> list[list[str | float]]:
    """Rows of the second table: counts, and milliseconds of this worker, medians; predictions are of the slowest."""
    network = measured_network(cluster)
    lines: list[list[str | float]] = []
    for name, method in ours.items():
        tape, count = method.taped(gradient), method.counts
        alone, small = (
            1000 * median(timed(partial(_run, cluster, make, tape)) for _ in range(max(5, turns)))
            for make in (replayed, tiny)
        )
        spent = {phase: 1000 * median(step[phase] for step in method.phases[-turns:]) for phase in PHASES}
        wire = 8e-6 * count.bytes_sent / gbit if gbit else 0.0
        work = slowest(sum(spent.values()) - spent[Phase.COMMUNICATE])
        messages = 1000 * Work.of(0.0, slowest(count.rounds), slowest(count.bytes_sent), network).transfer
        entry = 2 * count.bytes_sent / count.words if count.words else ""
        bounds = (alone, small, wire, wire + small, alone / (wire + small))
        lines.append([name, count.rounds, count.bytes_sent, entry, *spent.values(), *bounds, messages, work + messages])
    return lines


def _run(cluster: ProcessGroupCluster, make: Callable[..., Program[None]], tape: Sequence[Exchange]) -> None:
    cluster.run_uncounted([make(tape)])


PHASES = (Phase.SELECT, Phase.PACK, Phase.COMMUNICATE, Phase.MERGE, Phase.UPDATE)
HEADER = ["", "rounds", "bytes", "bytes/entry", *(phase.value for phase in PHASES)]
HEADER += ["alone", "latency", "bytes at the bandwidth", "bound", "alone / bound", "messages, predicted", "predicted"]


def build(name: str, wire: str, density: float) -> Method:
    """Makes a method, with the given density if it has this option.

    Raises:
        ConfigError: If there is no such choice.
    """
    words = ["warmup.steps=0", f"wire={wire}"]
    method = choices.build(name, *words)
    if not hasattr(method.compressor, "density"):
        return method
    return choices.build(name, f"compressor.density={density}", *words)


def gradients_of(rank: int, length: int) -> list[Tensor]:
    """Returns some steps' gradients: a part that all workers share, and noise."""
    common = torch.randn(length, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(rank + 1)
    return [common + 0.5 * torch.randn(length, generator=noise) for _ in range(2)]


NEEDS_WORKERS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the gradient (n)")
    parser.add_argument("--density", type=float, default=0.01, help="density (k / n)")
    parser.add_argument("--methods", default="spardl", help="comma-separated choices of compressor=")
    parser.add_argument("--wires", default="exact,bfloat16", help="comma-separated choices of wire=")
    parser.add_argument("--settle", type=positive, default=60, help="steps before the first timed one")
    parser.add_argument("--gbit", type=float, help="bandwidth of a link, for the bound")
    add_repetitions(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    pairs = [(name, wire) for name in arguments.methods.split(",") for wire in arguments.wires.split(",")]
    with choices.composing():
        methods = {f"{name}, {wire}": build(name, wire, arguments.density) for name, wire in pairs}
    dist.init_process_group("gloo")
    cluster = ProcessGroupCluster(timeout=120)
    ours = {name: Ours(method, cluster, arguments.entries) for name, method in methods.items()}
    gradients = gradients_of(dist.get_rank(), arguments.entries)
    for step in range(arguments.settle):
        for method in ours.values():
            method(gradients[step % len(gradients)].clone())
    seconds = measure({**torchs(arguments.entries), **ours}, gradients, arguments.repetitions + 1)
    found = [Row(name, each[1:], {}) for name, each in seconds.items()]
    lines = breakdown(ours, cluster, gradients[0], arguments.gbit, arguments.repetitions)
    cluster.close()
    if not cluster.leads:
        return None
    title = f"n = {arguments.entries:,}, density {arguments.density:g}, P = {cluster.size}"
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    print(f"{title}\n{table(found, DENSE)}\n\n{markdown([HEADER, *cells])}", flush=True)
    return content({title: found}, arguments, breakdown=[HEADER, *lines])
