"""Thorough checks of ``attach`` in a DDP loop: results compared with a manual loop, and waits for the GPU."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from spardl.diagnostics.doctor.correctness import distance
from spardl.diagnostics.thorough.outcome import Outcome, Place, judged, ok, setting, shared, warned
from spardl.hooks.hook import Hook, attach

__all__ = ["LOSSLESS", "Wait", "batch", "check_attach", "check_waits", "model_of", "optimizer_of", "waits_in"]


LOSSLESS = 1.0
"""Density at which a sparse method averages all entries."""
_SPARSE, _SCALE = 0.05, 2.0**8
# Factor on the last worker's gradient in each step: the third step overflows on that worker.
_HARM = (1.0, 1.0, torch.inf, 1.0)
# Largest relative distance between a float16 update and the manual one; devices round products differently.
_NEAR = 0.02


class _Run(NamedTuple):
    """Result of one worker's training loop.

    Attributes:
        start: Initial weights as one vector.
        weights: Weights after each step.
        scales: Loss scale after each step.
    """

    start: Tensor
    weights: list[Tensor]
    scales: list[float]


def model_of(device: torch.device) -> nn.Module:
    """Returns a model with layers of several sizes and the same weights on all workers."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    """Returns the random inputs of a worker in a step, shape (32, 64)."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(32, 64, generator=random).to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD with momentum for the parameters of a model."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def check_attach(workers: int) -> Callable[[Place], Outcome]:
    """Returns the check of ``attach``, for ``workers`` workers that share the device."""

    def check(place: Place) -> Outcome:
        where = setting(place, workers)
        whole = shared(place, workers, lambda device: _attached(device, LOSSLESS))
        sparse = shared(place, workers, lambda device: _attached(device, _SPARSE))
        # Last, because no process can be forked after a backward pass of its parent on a machine with a GPU.
        manual = _manual(workers)
        off = [
            distance(one - whole[0].start, by - manual.start)
            for one, by in zip(whole[0].weights, manual.weights, strict=True)
        ]
        problems = [
            *_problems(whole, f"at density {LOSSLESS:g}, {where}"),
            *_problems(sparse, f"at density {_SPARSE:g}, {where}"),
            *(
                f"attach: after step {step} the weights differ from a manual loop on the CPU by {each:.0e}, {where}"
                for step, each in enumerate(off)
                if not each <= _NEAR
            ),
        ]
        good = (
            f"attach with optimizer=, autocast and GradScaler, {where}: the weights match a manual loop on the CPU "
            f"within {max(off):.0e}, replicas are equal, and all workers skip a step in which one of them overflows"
        )
        fix = "do not train with it on this device, and report a bug with the file of --json"
        return judged(good, problems, fix, {"workers": workers, "off": off, "scales": whole[0].scales})

    return check


def _problems(runs: list[_Run], where: str) -> Iterator[str]:
    for step, harm in enumerate(_HARM):
        before = [run.weights[step - 1] if step else run.start for run in runs]
        after = [run.weights[step] for run in runs]
        stayed = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
        if not all(torch.equal(after[0], each) and each.isfinite().all() for each in after):
            yield f"attach: weights differ between workers or are not finite after step {step}, {where}"
        elif harm == 1 and any(stayed):
            yield f"attach: step {step} changed no weights, {where}"
        elif harm != 1 and not all(stayed):
            yield f"attach: step {step} was not skipped, although one worker overflowed, {where}"
        elif harm != 1 and any(run.scales[step] >= run.scales[step - 1] for run in runs):
            yield f"attach: the loss scale does not decrease after the overflow in step {step}, {where}"


def _attached(device: torch.device, density: float) -> _Run:
    """Runs the loop as users write it, with the momentum applied before compression."""
    rank = torch.distributed.get_rank()
    last = rank == torch.distributed.get_world_size() - 1
    ddp = DistributedDataParallel(model_of(device))
    rule, scaler = optimizer_of(ddp), GradScaler(device.type, init_scale=_SCALE)
    handle: Hook = attach(ddp, "spardl", density=density, optimizer=rule, scaler=scaler, timeout=60)
    run = _Run(_weights(ddp), [], [])
    for step, harm in enumerate(_HARM):
        rule.zero_grad()
        loss = _loss(ddp, batch(rank, step, device), device)
        # Only one worker overflows; all of them must skip the step nevertheless.
        (scaler.scale(loss) * (harm if last else 1.0)).backward()
        scaler.step(rule)
        scaler.update()
        run.weights.append(_weights(ddp))
        run.scales.append(scaler.get_scale())
    handle.detach()
    return run


def _manual(workers: int) -> _Run:
    """Runs the same loop in one process on the CPU, with the batches of all workers and without this library."""
    cpu = torch.device("cpu")
    model = model_of(cpu)
    rule = optimizer_of(model)
    run = _Run(_weights(model), [], [])
    for step, harm in enumerate(_HARM):
        if harm == 1:
            rule.zero_grad()
            for rank in range(workers):
                (_SCALE * _loss(model, batch(rank, step, cpu), cpu)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= _SCALE * workers
            rule.step()
        run.weights.append(_weights(model))
    return run


def _loss(model: nn.Module, given: Tensor, device: torch.device) -> Tensor:
    with torch.autocast(device.type, dtype=torch.float16):
        out: Tensor = model(given)
    return out.float().square().mean()


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


# Waits for the device in the backward pass of an attached model, found by torch's profiler.


# Events in which the host waits for a GPU, and operations that would wait if there were one.
_STOPS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
_MARK, _THREAD = "spardl: backward", "spardl-communication"
_OWN = re.compile(r"spardl/\w+/[\w/]+\.py\(\d+\): \w+")
_WARM, _SEEN = 4, 3


class Wait(NamedTuple):
    """A wait of the host for the GPU within a backward pass.

    Attributes:
        name: Name of the waiting call in the trace.
        where: Function of this library that caused the wait, if known.
        overlapped: Whether the communication thread waits, which does not delay the computation.
    """

    name: str
    where: str
    overlapped: bool


def check_waits(place: Place) -> Outcome:
    """Counts waits of the host for the GPU in the backward pass of an attached model, which delay further GPU work."""
    (found,) = shared(place, 1, _profiled)
    counted = {name: sum(wait.name == name for wait in found) / _SEEN for name in sorted(_STOPS | _READS)}
    # Without a GPU nothing waits, but reads of tensor values show where it would.
    relevant = _STOPS if place.on_gpu else {"aten::_local_scalar_dense"}
    delaying = Counter(wait.where for wait in found if wait.name in relevant and not wait.overlapped)
    overlapped = Counter(wait.where for wait in found if wait.name in relevant and wait.overlapped)
    figures = {"counted": counted, "held_up": dict(delaying), "beside": dict(overlapped), "passes": _SEEN}
    what = "waits for the GPU" if place.on_gpu else "reads of tensor values, which would wait for a GPU,"
    rate = sum(overlapped.values()) / _SEEN
    if not delaying:
        return ok(
            f"backward pass: no {what} in the compute threads; {rate:.3g} per pass in the communication thread",
            figures,
        )
    places = ", ".join(f"{where} ({number / _SEEN:.3g})" for where, number in delaying.most_common(4))
    return warned(
        f"backward pass: {sum(delaying.values()) / _SEEN:.3g} {what} per pass in the compute threads: {places}; they "
        "delay the rest of the pass; report it with the file of --json",
        figures,
    )


def _profiled(device: torch.device) -> list[Wait]:
    # Small buckets, so that the small model has several, as a large one does.
    ddp = DistributedDataParallel(model_of(device), bucket_cap_mb=0.02)
    rule = optimizer_of(ddp)
    handle = attach(ddp, "spardl", density=0.05, bucket_mb=0.02)

    def step(number: int) -> None:
        rule.zero_grad()
        loss = ddp(batch(0, number, device)).square().mean()
        with record_function(_MARK):
            loss.backward()
        rule.step()

    # DDP rebuilds its buckets after the first step, and kernels are compiled in the first ones.
    for number in range(_WARM):
        step(number)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, with_stack=True, experimental_config=_all_threads()) as profiler:
        for number in range(_SEEN):
            step(_WARM + number)
    communicating = {thread.native_id for thread in threading.enumerate() if thread.name == _THREAD}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    handle.detach()
    return waits_in(events, communicating)


def _all_threads() -> _ExperimentalConfig:
    # Without this option, older versions of torch record CUDA activity in all threads but operations in one only.
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return _ExperimentalConfig()


def waits_in(events: Iterable[Mapping[str, Any]], communicating: Iterable[int | None]) -> list[Wait]:
    """Returns the waits that start during a backward pass.

    Args:
        events: Events of a trace in Chrome's format.
        communicating: Ids of the communication threads.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    passes = [span for span in spans if span["name"] == _MARK]
    threads, own = set(communicating), [span for span in spans if _OWN.search(span["name"])]
    return [
        Wait(span["name"], _location(span, own), span["tid"] in threads)
        for span in spans
        if span["name"] in _STOPS | _READS and any(_begins_in(span, each) for each in passes)
    ]


def _begins_in(span: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    return bool(outer["ts"] <= span["ts"] <= outer["ts"] + outer["dur"])


def _location(span: Mapping[str, Any], own: Iterable[Mapping[str, Any]]) -> str:
    """Returns the innermost function of this library that contains the event."""

    def around() -> Iterator[Mapping[str, Any]]:
        return (each for each in own if each["tid"] == span["tid"] and _begins_in(span, each))

    inner = max(around(), key=lambda each: each["ts"], default=None)
    found = _OWN.search(inner["name"]) if inner else None
    return found[0] if found else "outside of spardl"
