"""Measures a profile: when each layer's parameters are first used, and when its gradients are there."""

from __future__ import annotations

import math
import platform
import time
from abc import ABC, abstractmethod
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

__all__ = ["SIZES", "measure", "measure_compression", "read_compression"]


# How long a method selects, packs and merges on this machine: the part of a synchronization that is no message.


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
    """Lets simulated workers synchronize random gradients of some sizes; messages are free.

    Args:
        method: how to average.
        workers: P; the work depends on it.
        sizes: entries of the gradients, at least two different numbers.
        device: where they are.
        layout: the tensors of which they have the first ones, again and again; ``None`` for a vector.

    Returns:
        The line nearest to the seconds of one worker, and these seconds.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """
    method.communicator.check_workers(workers)
    layouts = [_beginning(layout, size) if layout else Layout.flat(size) for size in sizes]
    seconds = [_seconds(method, workers, each, torch.device(device)) for each in layouts]
    return Linear.fit(sizes, seconds), seconds


def read_compression(path: Path, workers: int) -> Mapping[str, Linear]:
    """What scripts/compression.py measured, by method.

    Args:
        path: of the file.
        workers: P, for which it must hold.

    Raises:
        ConfigError: if the file cannot be read, or holds for another number of workers.
    """
    try:
        plain = read_json(path)
        found = {name: Linear(line["fixed"], line["per_entry"]) for name, line in plain["methods"].items()}
        measured = plain["workers"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no file of compression times ({error!r}); scripts/compression.py makes one"
        ) from error
    if measured != workers:
        raise ConfigError(
            f"{path} was measured with {measured} workers, not {workers}; make one with scripts/compression.py"
        )
    return found


def _beginning(layout: Layout, entries: int) -> Layout:
    """The first tensors with so many entries in all; the last one has fewer rows, or is cut to a vector."""
    shapes: list[tuple[int, ...]] = []
    left = entries
    for shape in cycle(shape for shape in layout.shapes if math.prod(shape)):
        row = math.prod(shape[1:])
        rows = min(shape[0] if shape else 1, left // row)
        shapes.append((rows, *shape[1:]) if rows else (left,))
        left -= math.prod(shapes[-1])
        if not left:
            return Layout.of(shapes)
    raise ConfigError("a model without entries has nothing to compress")


def _seconds(method: Method, workers: int, layout: Layout, device: torch.device) -> float:
    """The median over the workers in the fastest step; the first, in which memory is allocated, does not count."""
    cluster = SimulatedCluster(workers, Network(alpha=0, gbit=1), device=device)
    states = [method.init_state(layout, torch.float32, device) for _ in range(workers)]
    source = torch.Generator().manual_seed(1)
    found: list[float] = []
    for step in range(1 + _STEPS):
        seconds = [-_spent(ledger) for ledger in cluster.ledgers]
        for rank, state in enumerate(states):
            gradient = torch.randn(layout.length, generator=source).to(device)
            _settle(device)
            started = time.perf_counter()
            method.accumulate(gradient, state)
            _settle(device)
            seconds[rank] += time.perf_counter() - started
        cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)])
        if step:
            found.append(median(map(add, seconds, map(_spent, cluster.ledgers))))
    return min(found)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """Runs some training steps, and takes the median of each time.

    Gradients are views of a flat gradient, as in training; layers are the ones it names. The weights change.

    Args:
        model: with its parameters on one device.
        forward_and_loss: the forward pass; returns the scalar loss. It must call the model as a module, or the hooks
            do not run.
        optimizer: of the model's parameters, as in training.
        name: what the profile calls the model.
        batch: examples in one pass.
        passes: steps that count.
        warmup: steps before them, in which memory is allocated.
        timer: seconds, on a CPU. With one thread on a machine that others use, too, ``time.process_time`` leaves out
            the time that they take.

    Returns:
        A layer that got no gradient is ready at the end of the backward pass, and needed at the end of the forward
        pass: no schedule can do better with it.

    Raises:
        ConfigError: if the parameters do not fit into a flat gradient, there is no pass to measure, or the loss or a
            gradient is not finite; weights are as before that pass then.
    """
    if passes < 1:
        raise ConfigError(f"a profile needs passes >= 1, got {passes}")
    gradient = FlatGradient(model.named_parameters())
    device = gradient.vector.device
    clock = _CudaClock(device) if device.type == "cuda" else _CpuClock(timer)
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
    update /= max(1, gradient.layout.length)
    return Profile(name, clock.device_name(), batch, tuple(times), forward, backward, update)


class _Seconds(NamedTuple):
    """One pass; ``needed`` and ``ready`` have one value for each layer."""

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
    _check_finite(loss, gradient)  # before weights are changed, whatever the learning rate
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
        raise ConfigError(f"a profile needs the loss of a pass, a scalar that depends on the model, got {found}")


def _check_finite(loss: Tensor, gradient: FlatGradient) -> None:
    for what, found in (("the loss", loss), ("a gradient", gradient.vector)):
        if not found.isfinite().all():
            raise ConfigError(
                f"{what} of the profiled model is not finite; look at its inputs, or use a lower learning rate"
            )


class _Clock(ABC):
    """Takes marks while a pass runs, and tells the seconds between them afterwards."""

    @abstractmethod
    def mark(self) -> Any:
        """Now, in the order of the device's work."""

    @abstractmethod
    def between(self, start: Any, stop: Any) -> float:
        """Seconds between two marks, once all work has settled."""

    @abstractmethod
    def settle(self) -> None:
        """Waits for the device."""

    @abstractmethod
    def device_name(self) -> str:
        """What the profile calls the device."""


@dataclass(frozen=True)
class _CpuClock(_Clock):
    timer: Callable[[], float]

    def mark(self) -> float:
        return self.timer()

    def between(self, start: float, stop: float) -> float:
        return stop - start

    def settle(self) -> None:
        """Work on a CPU is done when the call returns."""

    def device_name(self) -> str:
        return f"cpu ({platform.machine()}, threads: {torch.get_num_threads()})"


@dataclass(frozen=True)
class _CudaClock(_Clock):
    """Events take their time when the work in front of them on their stream is done; the host runs ahead of that.

    Hooks of the backward pass run in a thread of autograd's, under the stream that works on the gradient: there, as
    in the forward pass, the current stream is the right one.
    """

    device: torch.device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        milliseconds: float = start.elapsed_time(stop)
        return milliseconds / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device)


@dataclass
class _Marks:
    """The marks of one pass.

    Attributes:
        clock: takes them.
        used: by module, at the start of its first call.
        done: by parameter, once its gradient is there.
        users: by parameter, the modules that hold it, each followed by those around it, the innermost first.
    """

    clock: _Clock
    used: dict[nn.Module, Any] = field(default_factory=dict)
    done: dict[nn.Parameter, Any] = field(default_factory=dict)
    users: dict[nn.Parameter, list[list[nn.Module]]] = field(default_factory=dict)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[_Marks]:
        """Inside, the model's hooks take marks."""
        handles = [module.register_forward_pre_hook(self._enter) for module in model.modules()]
        handles += [
            parameter.register_post_accumulate_grad_hook(self._arrive)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self.users.setdefault(parameter, []).append(_around(model, path))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module not in self.used:
            self.used[module] = self.clock.mark()

    def _arrive(self, parameter: Tensor) -> None:
        self.done[parameter] = self.clock.mark()  # type: ignore[index]

    def clear(self) -> None:
        """Forgets the last pass."""
        self.used.clear()
        self.done.clear()

    def ready(self, parameters: Sequence[nn.Parameter], turn: Any, backward: float) -> float:
        """Seconds of the backward pass until all gradients that come are there."""
        arrived = [self.done[parameter] for parameter in parameters if parameter in self.done]
        return max((min(self.clock.between(turn, mark), backward) for mark in arrived), default=backward)

    def needed(self, parameters: Sequence[nn.Parameter], begin: Any, forward: float) -> float:
        """Seconds of the forward pass to the first use of those parameters that get a gradient."""
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
        """Who used it: modules that hold it or, where none was called, the innermost one around that was.

        Attention, for instance, uses the weights of its output projection without calling that.
        """
        chains = self.users[parameter]
        holders = [chain[0] for chain in chains if chain[0] in self.used]
        return holders or [module for chain in chains for module in chain if module in self.used][:1]


def _around(model: nn.Module, path: str) -> list[nn.Module]:
    """A module, and those around it, the innermost first."""
    names = path.split(".") if path else []
    return [model.get_submodule(".".join(names[:depth])) for depth in range(len(names), -1, -1)]
