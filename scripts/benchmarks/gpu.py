"""Measures synchronizations and training steps on one GPU.

python scripts/bench.py gpu --json gpu.json
python scripts/bench.py gpu --device cpu --entries 20000 --small

First a whole synchronization of each method, over NCCL with one worker and over gloo with two workers that share the
GPU: seconds, bytes, kernel launches, host waits (from torch.profiler) and memory per parameter. Then a training step of
a GPT of about 120 million parameters with plain DDP, with torch's bf16 hook and with attach(). bench.py selection
--device cuda times a selection, and spardl doctor --device cuda --thorough checks results.

Without a GPU, --device cpu runs the same code as a rehearsal: launches are not counted, host waits are reads of values
by the host, and --entries and --small keep it short.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import spardl
from scripts.benchmarks.timing import positive
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.diagnostics.thorough.outcome import Place, plain, setting, shared
from spardl.diagnostics.timeline.measure import Clock
from spardl.method.method import Method
from spardl.vector.flat import write
from spardl.vector.layout import Layout

DENSITY = 0.01
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "spardl": ("spardl", {"density": DENSITY}),
    "oktopk": ("oktopk", {"density": DENSITY}),
    "topka": ("topka", {"density": DENSITY}),
    "gtopk": ("gtopk", {"density": DENSITY}),
    "int8": ("quantized", {"format": "int8"}),
    "int4": ("quantized", {"format": "int4"}),
    "powersgd": ("powersgd", {}),
}
WAYS = ("ddp", "bf16", "attach")
# Kernel launches, and calls in which the host waits for the GPU. Without a GPU, reads of values take their place.
LAUNCHES = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"})
WAITS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
READS = frozenset({"aten::_local_scalar_dense"})
# Targets: host waits of a synchronization, and the share that attach adds to a step.
MOST_WAITS, ADDED = 2.0, 0.05
WARM, TURNS, TRACED = 6, 20, 3
TIMEOUT = 60.0  # of every wait for a worker, in seconds
# A GPT-2 of 124 million parameters, and one for rehearsals.
BIG = {"vocab_size": 50257, "context": 512, "hidden_size": 768, "num_layers": 12, "num_heads": 12}
SMALL = {"vocab_size": 64, "context": 16, "hidden_size": 16, "num_layers": 1, "num_heads": 2}


def timed(device: torch.device, work: Callable[[], object], turns: int) -> float:
    """Returns the median seconds of ``work`` after a warm-up."""
    clock, marks = Clock(device), []
    for turn in range(WARM + turns):
        clock.settle()
        before = clock.mark()
        work()
        if turn >= WARM:
            marks.append((before, clock.mark()))
    clock.settle()
    return median(clock.between(*pair) for pair in marks)


def counted(device: torch.device, work: Callable[[], object]) -> dict[str, float | None]:
    """Returns the kernel launches (``None`` without a GPU) and host waits of one run of ``work``."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(TRACED):
            work()
    calls = {event.key: event.count / TRACED for event in profiler.key_averages()}
    waits = sum(count for name, count in calls.items() if name in (WAITS if on_gpu else READS))
    launches = sum(count for name, count in calls.items() if name in LAUNCHES) if on_gpu else None
    return {"launches": launches, "waits": waits}


def synchronize(device: torch.device, entries: int, turns: int) -> list[dict[str, Any]]:
    """Returns the seconds, bytes, launches, host waits and memory of a synchronization, by method."""
    cluster, found = ProcessGroupCluster(None, device), []
    layout = Layout.of([(entries // 100, 100)])
    for name, (method_name, options) in METHODS.items():
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        method = spardl.make_method(method_name, **options)
        step = _synchronization_of(method, cluster, layout)
        with torch.no_grad():
            seconds = timed(device, step, turns)
            sent = cluster.ledgers[0].bytes_sent
            step()
            row: dict[str, Any] = {"method": name, "entries": layout.length, "seconds": seconds}
            row |= {"bytes": cluster.ledgers[0].bytes_sent - sent, **counted(device, step)}
            # The gradient is the caller's; the copy of it belongs to this measurement.
            peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
            row["bytes_per_parameter"] = peak / layout.length - 8 if peak is not None else None
        found.append(row)
    cluster.close()
    return found


def _synchronization_of(method: Method, cluster: ProcessGroupCluster, layout: Layout) -> Callable[[], None]:
    worker = cluster.local_workers[0]
    state = method.init_state(layout, torch.float32, cluster.device)
    source = torch.randn(layout.length, generator=torch.Generator().manual_seed(worker.rank)).to(cluster.device)
    gradient = source.clone()

    def step() -> None:
        gradient.copy_(source)
        method.accumulate(gradient, state)
        write(cluster.run([method.average(worker, state)])[0], gradient)

    return step


def train(device: torch.device, sizes: Mapping[str, Any], turns: int) -> list[dict[str, Any]]:
    """Returns the seconds of a training step, and its peak memory, by way to average."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook  # noqa: PLC0415

    from tasks.models.gpt import GptLanguageModel  # noqa: PLC0415 - transformers takes seconds to import

    found = []
    for way in WAYS:
        torch.manual_seed(1)
        model = DistributedDataParallel(GptLanguageModel(**sizes).to(device))
        rule = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if way == "bf16":
            model.register_comm_hook(None, bf16_compress_hook)
        handle = spardl.attach(model, "spardl", density=DENSITY, optimizer=rule) if way == "attach" else None
        tokens = torch.randint(sizes["vocab_size"], (8, sizes["context"]), device=device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = timed(device, _step_of(model, rule, tokens), turns)
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        parameters = sum(parameter.numel() for parameter in model.parameters())
        found.append({"way": way, "parameters": parameters, "seconds": seconds, "peak_memory": memory})
        if handle is not None:
            handle.detach()
    return found


def _step_of(model: torch.nn.Module, rule: torch.optim.Optimizer, tokens: Tensor) -> Callable[[], None]:
    def step() -> None:
        rule.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(tokens)
        shaped = logits.float().reshape(-1, logits.shape[-1])
        torch.nn.functional.cross_entropy(shaped, tokens.reshape(-1)[: len(shaped)]).backward()
        rule.step()

    return step


def verdict(device: str, good: bool) -> str:
    """Returns whether a target is met; the targets apply to a GPU only."""
    return "tried" if device == "cpu" else "ok" if good else "slow"


def report_synchronization(device: str, where: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints one verdict per method."""
    for row in rows:
        launches = "launches not counted" if row["launches"] is None else f"{row['launches']:.0f} launches"
        memory = row["bytes_per_parameter"]
        more = "" if memory is None else f", {memory:.3g} bytes of memory per parameter"
        judged = verdict(device, row["waits"] <= MOST_WAITS)
        print(
            f"{judged:<5} {row['method']}, {where}: {1e3 * row['seconds']:.3g} ms,",
            f"{row['bytes']:,} bytes sent, {launches}, {row['waits']:.3g} host waits{more}",
            flush=True,
        )


def report_training(device: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the time of a step of each way, and a verdict on attach."""
    for row in rows:
        added = row["seconds"] / rows[0]["seconds"] - 1
        print(
            f"{verdict(device, row['way'] != 'attach' or added <= ADDED):<5} training with {row['way']}, "
            f"{row['parameters']:,} parameters: {1e3 * row['seconds']:.4g} ms per step, {100 * added:+.1f}% compared "
            "with plain DDP",
            flush=True,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device to measure")
    parser.add_argument("--entries", type=positive, default=14_700_000, help="length of the vectors, at least 100")
    parser.add_argument("--turns", type=positive, default=TURNS, help="timed repetitions of each measurement")
    parser.add_argument("--small", action="store_true", help="train a tiny model, for a rehearsal")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.entries < 100:
        raise ConfigError(f"--entries must be at least 100, got {arguments.entries}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda found no GPU; rehearse with --device cpu")
    results = dict(measured(arguments, Place(arguments.device, TIMEOUT, TIMEOUT)))
    content: dict[str, Any] = plain({"device": arguments.device, "torch": torch.__version__, "results": results})
    return content


def measured(arguments: argparse.Namespace, place: Place) -> Iterator[tuple[str, Any]]:
    """Yields the name and the results of each section."""
    turns, sizes = arguments.turns, SMALL if arguments.small else BIG
    for workers in (1, 2):
        where = setting(place, workers)
        rows = shared(place, workers, partial(synchronize, entries=arguments.entries, turns=turns))[0]
        report_synchronization(place.device, where, rows)
        yield f"synchronization, {where}", rows
    rows = shared(place, 1, partial(train, sizes=sizes, turns=turns))[0]
    report_training(place.device, rows)
    yield "training", rows
