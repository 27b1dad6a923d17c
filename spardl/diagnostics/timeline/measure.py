"""Measures a profile: when each layer's parameters are first used, and when its gradients are there."""

from __future__ import annotations

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import LayerTimes, Profile
from spardl.vector.flat import FlatGradient

__all__ = ["measure"]


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
