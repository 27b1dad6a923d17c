"""Measures the layer times of a model (its profile), and the time of compression on this machine."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json
from spardl.clusters import Ledger, Network, SimulatedCluster
from spardl.clusters.profile import LayerTimes, Profile
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules.fusion import Linear
from spardl.vector.flat import FlatGradient
from spardl.vector.layout import Layout

__all__ = ["SIZES", "Clock", "measure", "measure_compression", "read_compression"]


# Time of selection, packing and merging: the local part of a synchronization.


# Numbers of entries that are measured by default.
SIZES = (1 << 14, 1 << 17, 1 << 19)
_STEPS = 3
_LOCAL = (Phase.SELECT, Phase.PACK, Phase.MERGE)


def measure_compression(
    method: Method,
    workers: int,
    sizes: Sequence[int] = SIZES,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
) -> tuple[Linear, list[float]]:
    """Measures the time of compression: runs synchronizations of random gradients on simulated workers.

    Args:
        method: Method to measure.
        workers: Number of workers, P; the local work of each depends on it.
        sizes: Numbers of entries of the gradients, at least two different numbers.
        device: Device of the gradients.
        layout: Shapes of a model's tensors. The gradient consists of the first of these, up to each size (or repeats
            them if there are too few); ``None`` for a gradient that is one vector.

    Returns:
        The line (fixed time and time per entry) that fits the measurements, and the measured seconds of one worker for
        each size.

    Raises:
        ConfigError: If the method does not support this number of workers.
    """
    method.communicator.check_workers(workers)
    layouts = [_first_entries(layout, size) if layout else Layout.flat(size) for size in sizes]
    seconds = [_seconds(method, workers, each, torch.device(device)) for each in layouts]
    return Linear.fit(sizes, seconds), seconds


def read_compression(path: Path, workers: int) -> Mapping[str, Linear]:
    """Reads a file with times of compression that scripts/bench.py compression has measured; returns them by method.

    Args:
        path: File to read.
        workers: Number of workers, P, that the file must have.

    Raises:
        ConfigError: If the file cannot be read, or was measured with a different number of workers.
    """
    try:
        plain = read_json(path)
        found = {name: Linear(line["fixed"], line["per_entry"]) for name, line in plain["methods"].items()}
        measured = plain["workers"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file of compression times ({error!r}); create one with scripts/bench.py compression"
        ) from error
    if measured != workers:
        raise ConfigError(
            f"{path} was measured with {measured} workers, not {workers}; create one with scripts/bench.py compression"
        )
    return found


def _first_entries(layout: Layout, entries: int) -> Layout:
    """Returns the first tensors with ``entries`` entries in total; the last one is cut to fewer rows or a vector."""
    shapes: list[tuple[int, ...]] = []
    left = entries
    for shape in cycle(shape for shape in layout.shapes if math.prod(shape)):
        row = math.prod(shape[1:])
        rows = min(shape[0] if shape else 1, left // row)
        shapes.append((rows, *shape[1:]) if rows else (left,))
        left -= math.prod(shapes[-1])
        if not left:
            return Layout.of(shapes)
    raise ConfigError("the model has no parameters to compress; use a model with parameters")


def _seconds(method: Method, workers: int, layout: Layout, device: torch.device) -> float:
    cluster = SimulatedCluster(workers, Network(alpha=0, gbit=1), device=device)
    states = [method.init_state(layout, torch.float32, device) for _ in range(workers)]
    source = torch.Generator().manual_seed(1)
    # The fastest step counts, in the median over the workers. The first one allocates memory and is ignored.
    settle = Clock(device).settle
    found: list[float] = []
    for step in range(1 + _STEPS):
        seconds = [-_spent(ledger) for ledger in cluster.ledgers]
        for rank, state in enumerate(states):
            # Generated on the CPU, so that the values do not depend on the device.
            gradient = torch.randn(layout.length, generator=source).to(device)
            settle()
            started = time.perf_counter()
            method.accumulate(gradient, state)
            settle()
            seconds[rank] += time.perf_counter() - started
        cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
        if step:
            found.append(median(map(add, seconds, map(_spent, cluster.ledgers))))
    return min(found)


def _spent(ledger: Ledger) -> float:
    return sum(ledger.seconds[phase] for phase in _LOCAL)


def measure(
    model: nn.Module,
    forward_and_loss: Callable[[], Tensor],
    optimizer: Optimizer,
    *,
    name: str,
    batch: int,
    passes: int = 5,
    warmup: int = 2,
    timer: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Measures the layer times of a model: runs training steps, and takes the median of each time.

    As in training, gradients are views of a :class:`FlatGradient`, whose layers are measured. The steps change the
    weights.

    Args:
        model: Model with all parameters on one device.
        forward_and_loss: Function that runs the forward pass and returns the scalar loss. It must call the model as a
            module; otherwise the hooks do not run.
        optimizer: Optimizer of the model's parameters, as in training.
        name: Name of the model in the profile.
        batch: Number of examples per pass.
        passes: Number of measured steps.
        warmup: Number of steps before the measurement, in which memory is allocated.
        timer: Function that returns the time in seconds, used on a CPU. With one thread on a busy machine,
            ``time.process_time`` ignores the time of other programs.

    Returns:
        The profile. A layer without a gradient counts as ready at the end of the backward pass and as needed at the end
        of the forward pass, so that it never limits a schedule.

    Raises:
        ConfigError: If the parameters do not fit into a flat gradient, if no pass is measured, or if the loss or a
            gradient is not finite; in the last case, the weights are those before that pass.
    """
    if passes < 1:
        raise ConfigError(f"passes must be at least 1, got {passes}")
    gradient = FlatGradient(model.named_parameters())
    device = gradient.vector.device
    clock = Clock(device, timer)
    with _Marks(clock).attached(model) as marks:
        rows = [_one_pass(marks, forward_and_loss, optimizer, gradient) for _ in range(warmup + passes)][warmup:]
    forward, backward, update = (
        median(found) for found in zip(*((row.forward, row.backward, row.update) for row in rows), strict=True)
    )
    times = [
        LayerTimes(
            layer.name,
            layer.entries,
            median(row.needed[i] for row in rows),
            median(row.ready[i] for row in rows),
            gradient.layout.shapes[slice(*layer.tensors)],
        )
        for i, layer in enumerate(gradient.layers)
    ]
    update /= max(1, gradient.layout.length)  # per entry; the model may have no trainable parameters
    return Profile(name, clock.device_name(), batch, tuple(times), forward, backward, update)


class _Seconds(NamedTuple):
    """Times of one step in seconds; ``needed`` and ``ready`` hold one value per layer."""

    forward: float
    backward: float
    update: float
    needed: Sequence[float]
    ready: Sequence[float]


def _one_pass(
    marks: _Marks, forward_and_loss: Callable[[], Tensor], optimizer: Optimizer, gradient: FlatGradient
) -> _Seconds:
    gradient.zero()
    marks.clear()
    clock = marks.clock
    clock.settle()
    begin = clock.mark()
    loss = forward_and_loss()
    turn = clock.mark()
    _check_scalar(loss)
    loss.backward()
    end = clock.mark()
    _check_finite(loss, gradient)  # before the optimizer can spread non-finite values to the weights
    update = clock.mark()
    optimizer.step()
    updated = clock.mark()
    clock.settle()
    forward, backward = clock.between(begin, turn), clock.between(turn, end)
    layers = [gradient.parameters[slice(*layer.tensors)] for layer in gradient.layers]
    ready = [marks.ready(parameters, turn, backward) for parameters in layers]
    needed = [marks.needed(parameters, begin, forward) for parameters in layers]
    return _Seconds(forward, backward, clock.between(update, updated), needed, ready)


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"the loss must be a scalar tensor that depends on the model, got {found}")


def _check_finite(loss: Tensor, gradient: FlatGradient) -> None:
    for what, found in (("the loss", loss), ("a gradient", gradient.vector)):
        if not found.isfinite().all():
            raise ConfigError(
                f"{what} of the profiled model is not finite; check its inputs, or lower the learning rate"
            )


class Clock:
    """Records points in time (marks) during work on a device, and measures the seconds between them afterwards.

    On a GPU, marks are CUDA events. They record when the GPU reaches them, while the host continues without waiting.

    Args:
        device: Device that does the work.
        timer: Function that returns the time in seconds, used on a CPU.
    """

    def __init__(self, device: torch.device, timer: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._timer, self._on_gpu = device, timer, device.type == "cuda"

    def mark(self) -> Any:
        """Returns a mark for the current point in the device's work: a CUDA event, or the time."""
        if not self._on_gpu:
            return self._timer()
        event = torch.cuda.Event(enable_timing=True)
        # Hooks of the backward pass run in a thread of autograd under the stream of the gradient, so the current stream
        # is the right one there, as in the forward pass.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Returns the seconds between two marks. Call ``settle`` first, so that the device has reached both."""
        return float(start.elapsed_time(stop)) / 1e3 if self._on_gpu else float(stop - start)

    def settle(self) -> None:
        """Waits until the device has finished its work; on a CPU, does nothing."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def device_name(self) -> str:
        """Returns the name of the device as text, for the profile."""
        if self._on_gpu:
            return torch.cuda.get_device_name(self._device)
        return f"cpu ({platform.machine()}, threads: {torch.get_num_threads()})"


@dataclass
class _Marks:
    """Marks of one forward and backward pass, set by hooks of the model.

    Attributes:
        clock: Clock that takes the marks.
        used: Mark of each module at the start of its first call.
        done: Mark of each parameter when its gradient is complete.
        users: For each parameter, the modules that hold it, each followed by its parents from the inside out.
    """

    clock: Clock
    used: dict[nn.Module, Any] = field(default_factory=dict)
    done: dict[nn.Parameter, Any] = field(default_factory=dict)
    users: dict[nn.Parameter, list[list[nn.Module]]] = field(default_factory=dict)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[_Marks]:
        """Context manager: the model has the hooks that record marks inside the ``with`` block."""
        handles = [module.register_forward_pre_hook(self._enter) for module in model.modules()]
        handles += [
            parameter.register_post_accumulate_grad_hook(self._arrive)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self.users.setdefault(parameter, []).append(_with_parents(model, path))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module not in self.used:  # the first call counts
            self.used[module] = self.clock.mark()

    def _arrive(self, parameter: Tensor) -> None:
        self.done[parameter] = self.clock.mark()  # type: ignore[index]

    def clear(self) -> None:
        """Removes the marks of the last pass."""
        self.used.clear()
        self.done.clear()

    def ready(self, parameters: Sequence[nn.Parameter], turn: Any, backward: float) -> float:
        """Returns the seconds from the start of the backward pass until all gradients of the parameters exist."""
        arrived = [self.done[parameter] for parameter in parameters if parameter in self.done]
        return max((min(self.clock.between(turn, mark), backward) for mark in arrived), default=backward)

    def needed(self, parameters: Sequence[nn.Parameter], begin: Any, forward: float) -> float:
        """Returns the seconds from the start of the forward pass to the first use of trained ``parameters``."""
        since = partial(self.clock.between, begin)
        return min(
            (
                min(since(self.used[module]), forward)
                for parameter in parameters
                if parameter in self.done
                for module in self._called(parameter)
            ),
            default=forward,
        )

    def _called(self, parameter: nn.Parameter) -> list[nn.Module]:
        """Returns the modules that used the parameter."""
        # A module may use a parameter of a child without calling the child, as attention does with its output
        # projection. Then the innermost parent that was called counts.
        chains = self.users[parameter]
        holders = [chain[0] for chain in chains if chain[0] in self.used]
        return holders or [module for chain in chains for module in chain if module in self.used][:1]


def _with_parents(model: nn.Module, path: str) -> list[nn.Module]:
    """Returns the module at a path, followed by its parents from the inside out."""
    names = path.split(".") if path else []
    return [model.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
