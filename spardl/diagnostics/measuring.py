"""What advice is based on: a model's passes and what compressing takes, measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.compressing import measure_compression
from spardl.diagnostics.timeline.measure import measure
from spardl.method.recipes import make_method
from spardl.schedules.linear import Linear
from spardl.vector.flat import FlatGradient
from spardl.vector.layout import Layout

__all__ = ["PATIENCE", "Compressing", "Repeated", "measured", "profiled"]

# Simulated workers measure on gradients of so many entries in all; beyond, the line is drawn on.
_MEASURED = 1 << 22
# Repetitions of a measurement; two are the least that show a range.
_LEAST, _MOST = 2, 5

PATIENCE = 2.0
"""Seconds for each method, after which its measurement is not repeated again."""

Compressing: TypeAlias = Callable[[str, Mapping[str, Any]], Callable[[int], float]]
"""What a method, by its name and options, takes for a gradient of so many entries, in seconds."""


@dataclass(frozen=True)
class Repeated:
    """Seconds by entries, measured several times.

    Attributes:
        lines: one for each repetition.
    """

    lines: tuple[Linear, ...]

    def __call__(self, entries: int) -> float:
        """The median of the repetitions."""
        return median(line(entries) for line in self.lines)


def measured(
    workers: int,
    device: torch.device,
    layout: Layout | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Compressing:
    """What compressing takes on this machine, measured two to five times for each method.

    Args:
        workers: P.
        device: where gradients are.
        layout: the model's tensors, for methods that compress by matrix; ``None`` if unknown.
        clock: tells the seconds that bound the repetitions.
    """
    largest = max(1 << 12, _MEASURED // workers)

    def seconds(name: str, options: Mapping[str, Any]) -> Repeated:
        method = make_method(name, **options)
        tensors = layout if method.compressor.by_matrix else None
        until, lines = clock() + PATIENCE, list[Linear]()
        while len(lines) < _LEAST or (len(lines) < _MOST and clock() < until):
            lines.append(measure_compression(method, workers, (largest // 8, largest), device, tensors)[0])
        return Repeated(tuple(lines))

    return seconds


def profiled(
    model: nn.Module | Profile, loss: Callable[[], Tensor] | None, seconds: float | None
) -> tuple[Profile, torch.device]:
    """A profile, and where its gradients are.

    Args:
        model: to be measured, or a profile of it.
        loss: makes one forward pass and returns the loss, a scalar; ``None`` to guess by the sizes of layers.
        seconds: of both passes; ``None`` for those measured, or none if they are not.

    Raises:
        ConfigError: if the model cannot be measured, or the seconds are out of range.
    """
    if isinstance(model, Profile):
        return model if seconds is None else model.scaled(seconds), torch.device("cpu")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a module, or a Profile (Profile.read(path)), got a {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise ConfigError(
            "loss must be a function that makes one forward pass, such as lambda: criterion(model(inputs), targets), "
            f"got a {type(loss).__name__}"
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _gradients_kept(model):
        if loss is None:
            return _evenly(FlatGradient(model.named_parameters()), seconds or 0.0, type(model).__name__), device
        # A rate of 0: what is measured does not train.
        made = measure(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), name=type(model).__name__, batch=1)
        return made if seconds is None else made.scaled(seconds), device


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    """What looks at a model's layers makes its gradients views of a vector."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _evenly(gradient: FlatGradient, seconds: float, name: str) -> Profile:
    """A third of the time forward, two thirds backward, each layer as much of it as it has entries: a guess."""
    forward, backward = seconds / 3, 2 * seconds / 3
    whole_model, before = gradient.layout.length, 0
    layers = []
    for layer in gradient.layers:
        after = before + layer.entries
        ready = backward * (1 - before / whole_model)
        shapes = gradient.layout.shapes[slice(*layer.tensors)]
        layers.append(LayerTimes(layer.name or name, layer.entries, forward * before / whole_model, ready, shapes))
        before = after
    return Profile(name, "unknown", 1, tuple(layers), forward, backward, 0.0)
