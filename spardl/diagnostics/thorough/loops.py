"""``attach`` in a loop of DDP with autocast and a GradScaler, beside the same loop by hand on the CPU."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
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
"""The density at which a sparse method averages everything."""
_SPARSE, _SCALE = 0.05, 2.0**8
# Two good steps, one with an infinity in the last worker's gradient, and a good one.
_HARM = (1.0, 1.0, torch.inf, 1.0)
# How far an update in float16 may be from one by hand, relative to its size, as devices round products differently.
_NEAR = 0.02


class _Run(NamedTuple):
    """What one worker's loop came to.

    Attributes:
        start: the weights in the beginning, one after the other.
        weights: the same after each step.
        scales: of the loss, after each step.
    """

    start: Tensor
    weights: list[Tensor]
    scales: list[float]


def model_of(device: torch.device) -> nn.Module:
    """A model with layers of several sizes, the same everywhere."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    """What a worker sees in a step, shape (32, 64)."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(32, 64, generator=random).to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def check_attach(workers: int) -> Callable[[Place], Outcome]:
    """The check for so many workers that share the device."""

    def check(place: Place) -> Outcome:
        where = setting(place, workers)
        whole = shared(place, workers, lambda device: _attached(device, LOSSLESS))
        sparse = shared(place, workers, lambda device: _attached(device, _SPARSE))
        # Last: where there is a GPU, no process can be forked after a backward pass in its parent.
        by_hand = _by_hand(workers)
        off = [
            distance(one - whole[0].start, by - by_hand.start)
            for one, by in zip(whole[0].weights, by_hand.weights, strict=True)
        ]
        problems = [
            *_faults(whole, f"at density {LOSSLESS:g}, {where}"),
            *_faults(sparse, f"at density {_SPARSE:g}, {where}"),
            *(
                f"attach: after step {step} the weights are {each:.0e} off those by hand on the CPU, {where}"
                for step, each in enumerate(off)
                if not each <= _NEAR
            ),
        ]
        good = (
            f"attach with optimizer=, autocast and GradScaler, {where}: the weights of a loop by hand on the CPU "
            f"but for {max(off):.0e}, replicas equal, and all skip a step in which one worker overflowed"
        )
        fix = "do not train with it on this device, and send the file of --json with your report"
        return judged(good, problems, fix, {"workers": workers, "off": off, "scales": whole[0].scales})

    return check


def _faults(runs: list[_Run], where: str) -> Iterator[str]:
    for step, harm in enumerate(_HARM):
        before = [run.weights[step - 1] if step else run.start for run in runs]
        after = [run.weights[step] for run in runs]
        stayed = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
        if not all(torch.equal(after[0], each) and each.isfinite().all() for each in after):
            yield f"attach: weights differ between workers, or are not finite, after step {step}, {where}"
        elif harm == 1 and any(stayed):
            yield f"attach: step {step} changed no weights, {where}"
        elif harm != 1 and not all(stayed):
            yield f"attach: step {step} was not skipped, although one worker overflowed, {where}"
        elif harm != 1 and any(run.scales[step] >= run.scales[step - 1] for run in runs):
            yield f"attach: the loss is not scaled down after the overflow in step {step}, {where}"


def _attached(device: torch.device, density: float) -> _Run:
    """As a user writes it; the momentum is moved in front of the compression."""
    rank = torch.distributed.get_rank()
    last = rank == torch.distributed.get_world_size() - 1
    ddp = DistributedDataParallel(model_of(device))
    rule, scaler = optimizer_of(ddp), GradScaler(device.type, init_scale=_SCALE)
    handle: Hook = attach(ddp, "spardl", density=density, optimizer=rule, scaler=scaler, timeout=60)
    run = _Run(_weights(ddp), [], [])
    for step, harm in enumerate(_HARM):
        rule.zero_grad()
        loss = _loss(ddp, batch(rank, step, device), device)
        (scaler.scale(loss) * (harm if last else 1.0)).backward()
        scaler.step(rule)
        scaler.update()
        run.weights.append(_weights(ddp))
        run.scales.append(scaler.get_scale())
    handle.detach()
    return run


def _by_hand(workers: int) -> _Run:
    """What all workers together come to, in one process on the CPU, without this library."""
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


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.float16)


def _loss(model: nn.Module, given: Tensor, device: torch.device) -> Tensor:
    with _autocast(device):
        out: Tensor = model(given)
    return out.float().square().mean()


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


# Where the backward pass of an attached model waits for the device, by torch's profiler.


# How a stop of the host is called: of CUDA, and what would cause one if there were a GPU.
_STOPS = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
_MARK, _THREAD = "spardl: backward", "spardl-communication"
_OWN = re.compile(r"spardl/\w+/[\w/]+\.py\(\d+\): \w+")
_WARM, _SEEN = 4, 3


class Wait(NamedTuple):
    """A wait within a backward pass.

    Attributes:
        name: what waited.
        where: the function of this library that asked for it, if it is known.
        beside: whether in the thread of communication, which holds up no computation.
    """

    name: str
    where: str
    beside: bool


def check_waits(place: Place) -> Outcome:
    """Counts waits in the backward pass of an attached model: they keep it from being sent to the GPU ahead of time."""
    (found,) = shared(place, 1, _profiled)
    counted = {name: sum(wait.name == name for wait in found) / _SEEN for name in sorted(_STOPS | _READS)}
    telling = _STOPS if place.on_gpu else {"aten::_local_scalar_dense"}
    held = Counter(wait.where for wait in found if wait.name in telling and not wait.beside)
    beside = Counter(wait.where for wait in found if wait.name in telling and wait.beside)
    figures = {"counted": counted, "held_up": dict(held), "beside": dict(beside), "passes": _SEEN}
    what = "waits for the GPU" if place.on_gpu else "reads of a tensor's number, which would wait for a GPU,"
    rate = sum(beside.values()) / _SEEN
    if not held:
        return ok(
            f"backward pass: no {what} in the threads that compute, {rate:.3g} per pass in the one that communicates",
            figures,
        )
    places = ", ".join(f"{where} ({number / _SEEN:.3g})" for where, number in held.most_common(4))
    return warned(
        f"backward pass: {sum(held.values()) / _SEEN:.3g} {what} per pass in the threads that compute: {places}; "
        "the rest of the pass starts late: send the file of --json",
        figures,
    )


def _profiled(device: torch.device) -> list[Wait]:
    ddp = DistributedDataParallel(model_of(device), bucket_cap_mb=0.02)
    rule = optimizer_of(ddp)
    handle = attach(ddp, "spardl", density=0.05, bucket_mb=0.02)

    def step(number: int) -> None:
        rule.zero_grad()
        loss = ddp(batch(0, number, device)).square().mean()
        with record_function(_MARK):
            loss.backward()
        rule.step()

    for number in range(_WARM):
        step(number)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, with_stack=True, experimental_config=_all_threads()) as profiler:
        for number in range(_SEEN):
            step(_WARM + number)
    beside = {thread.native_id for thread in threading.enumerate() if thread.name == _THREAD}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    handle.detach()
    return waits_in(events, beside)


def _all_threads() -> _ExperimentalConfig:
    """Older versions of torch know the activities of CUDA in all threads, but the operations of one only."""
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return _ExperimentalConfig()


def waits_in(events: Iterable[Mapping[str, Any]], beside: Iterable[int | None]) -> list[Wait]:
    """The waits that began during a backward pass.

    Args:
        events: of a trace in the form of Chrome's.
        beside: ids of the threads that communicate.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    passes = [span for span in spans if span["name"] == _MARK]
    threads, own = set(beside), [span for span in spans if _OWN.search(span["name"])]
    return [
        Wait(span["name"], _place(span, own), span["tid"] in threads)
        for span in spans
        if span["name"] in _STOPS | _READS and any(_begins_in(span, each) for each in passes)
    ]


def _begins_in(span: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    return bool(outer["ts"] <= span["ts"] <= outer["ts"] + outer["dur"])


def _place(span: Mapping[str, Any], own: Iterable[Mapping[str, Any]]) -> str:
    """The innermost function of this library around it."""

    def around() -> Iterator[Mapping[str, Any]]:
        return (each for each in own if each["tid"] == span["tid"] and _begins_in(span, each))

    inner = max(around(), key=lambda each: each["ts"], default=None)
    found = _OWN.search(inner["name"]) if inner else None
    return found[0] if found else "outside of spardl"
