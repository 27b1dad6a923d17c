"""Where the backward pass of an attached model waits for the device, by torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from spardl.diagnostics.thorough.loops import batch, model_of, optimizer_of
from spardl.diagnostics.thorough.outcome import Outcome, Place, ok, warned
from spardl.diagnostics.thorough.sharing import shared
from spardl.hooks.ddp import attach

__all__ = ["Wait", "check_waits", "waits_in"]

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
