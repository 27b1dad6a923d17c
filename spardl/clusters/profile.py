"""Layer times of a model, measured without communication, and the measured costs of a training step.

A layer is the smallest unit that a schedule sends separately: adjacent tensors of one module, in the order in which the
model registers them.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json, write_atomically
from spardl.clusters.base import Cluster, gather_rows
from spardl.clusters.ledger import Ledger
from spardl.protocol.programs import Phase
from spardl.vector.layout import Layout

__all__ = ["LayerTimes", "Profile", "StepCosts", "break_even_gbit", "gather_costs"]


# Costs of a step from the workers' ledgers, and the bandwidth below which compression pays.


@dataclass(frozen=True)
class StepCosts:
    """Measured costs of one training step, averaged over steps and workers.

    Attributes:
        seconds: Time by phase, in seconds.
        overlapped: Time of synchronizations that run while the worker computes, by phase, in seconds.
        rounds: Number of message exchanges, of the worker that has the most.
        words: Number of words sent per worker; an index or a value is one word.
        bytes_sent: Number of payload bytes sent per worker.
        dense_bytes: Number of bytes that a ring all-reduce of the same gradient sends per worker.
        peak_memory: Largest resident memory of any process, in bytes.
    """

    seconds: dict[str, float]
    overlapped: dict[str, float]
    rounds: float
    words: float
    bytes_sent: float
    dense_bytes: float
    peak_memory: float

    @property
    def overhead(self) -> float:
        """Time of compression in seconds: selection, packing and merging."""
        local = (Phase.SELECT.value, Phase.PACK.value, Phase.MERGE.value)
        return sum(self.seconds[phase] + self.overlapped[phase] for phase in local)


def gather_costs(cluster: Cluster, steps: int, gradient: Tensor) -> StepCosts:
    """Averages the costs in the ledgers of all workers; without any step, all costs are 0.

    Args:
        cluster: Cluster that connects the workers.
        steps: Number of steps that the ledgers cover.
        gradient: Gradient of the whole model, shape (n,).
    """
    # Without any step the ledgers are empty; dividing by 1 gives zeros.
    steps = max(1, steps)
    rows = gather_rows(cluster, [_row(ledger, gradient.device) for ledger in cluster.ledgers])
    table = torch.stack(rows).cpu()
    _, words, sent, *seconds = (table[:, :-1].mean(0) / steps).tolist()
    return StepCosts(
        seconds={phase.value: value for phase, value in zip(Phase, seconds[: len(Phase)], strict=True)},
        overlapped={phase.value: value for phase, value in zip(Phase, seconds[len(Phase) :], strict=True)},
        rounds=float(table[:, 0].max()) / steps,
        words=words,
        bytes_sent=sent,
        dense_bytes=2 * gradient.nbytes * (cluster.size - 1) / cluster.size,
        peak_memory=float(table[:, -1].max()),
    )


def _row(ledger: Ledger, device: torch.device) -> Tensor:
    # Linux reports ru_maxrss in KiB.
    counts = [ledger.rounds, ledger.words, ledger.bytes_sent]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    values = [
        *counts,
        *(ledger.seconds[phase] for phase in Phase),
        *(ledger.overlapped[phase] for phase in Phase),
        peak,
    ]
    return torch.tensor(values, dtype=torch.float64, device=device)


def break_even_gbit(costs: StepCosts) -> float | None:
    """Computes the bandwidth below which a compressed synchronization is faster than the dense all-reduce.

    Compression spends time on selection, packing and merging, and saves bytes. Gain and loss are equal at a bandwidth
    of (bytes saved) / (seconds spent). The dense all-reduce also needs time for additions, which is ignored in its
    favour.

    Returns:
        Gbit/s per worker, or ``None`` if compression saves no bytes.
    """
    # Without savings no bandwidth makes compression faster; without overhead it is faster on any.
    saved = costs.dense_bytes - costs.bytes_sent
    if saved <= 0 or costs.overhead <= 0:
        return None
    return 8e-9 * saved / costs.overhead


# Significant digits of times in a file: more than measurements reproduce.
DIGITS = 6


@dataclass(frozen=True)
class LayerTimes:
    """Computation times and size of one layer.

    Attributes:
        name: Path of the module.
        entries: Number of entries of all its tensors.
        needed: Time from the start of the forward pass to the first use of its parameters, in seconds.
        ready: Time from the start of the backward pass until all its gradients are complete, in seconds.
        shapes: Shapes of its tensors, in order; empty if unknown.
    """

    name: str
    entries: int
    needed: float
    ready: float
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Profile:
    """Measured computation times of the layers of one model on one device.

    Attributes:
        model: Name of the model.
        device: Name of the device.
        batch: Number of examples per pass.
        layers: Layers in the order of registration.
        forward: Duration of the forward pass in seconds, including the loss.
        backward: Duration of the backward pass in seconds.
        update: Time that the optimizer needs per entry, in seconds.

    Raises:
        ConfigError: If there are no layers, or a value is out of range.
    """

    model: str
    device: str
    batch: int
    layers: tuple[LayerTimes, ...]
    forward: float
    backward: float
    update: float

    def __post_init__(self) -> None:
        for name in ("model", "device"):
            _demand_text(name, getattr(self, name))
        _demand(is_number(int, self.batch) and self.batch >= 1, "batch", self.batch, "an integer, at least 1")
        for name in ("forward", "backward", "update"):
            _demand_seconds(name, getattr(self, name), math.inf)
        if not self.layers:
            raise ConfigError("layers is empty; profile a model with parameters")
        for number, layer in enumerate(self.layers):
            where = f"layers[{number}]."
            count = layer.entries
            _demand_text(f"{where}name", layer.name)
            _demand(is_number(int, count) and count >= 0, f"{where}entries", count, "an integer, at least 0")
            if layer.shapes:  # shapes are optional, but must agree with the entries
                held = sum(map(math.prod, layer.shapes))
                _demand(held == count, f"{where}shapes", layer.shapes, f"shapes with {count} entries in total")
            _demand_seconds(f"{where}needed", layer.needed, self.forward)
            _demand_seconds(f"{where}ready", layer.ready, self.backward)

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """Number of entries of each layer, in the order of ``layers``."""
        return tuple(layer.entries for layer in self.layers)

    @cached_property
    def ready(self) -> tuple[float, ...]:
        """Time from the start of the backward pass until the gradients of each layer are complete, in seconds."""
        return tuple(layer.ready for layer in self.layers)

    @cached_property
    def layout(self) -> Layout | None:
        """Shapes and positions of the tensors of all layers; ``None`` if any shape is unknown."""
        if not all(layer.shapes or not layer.entries for layer in self.layers):
            return None
        return Layout.of(shape for layer in self.layers for shape in layer.shapes)

    @property
    def compute(self) -> float:
        """Duration of forward and backward pass together, in seconds."""
        return self.forward + self.backward

    def scaled(self, seconds: float) -> Profile:
        """Returns the profile of the same model on a faster or slower device.

        Args:
            seconds: Duration of forward and backward pass together, in seconds; all times are scaled by the same
                factor.

        Returns:
            A new profile.

        Raises:
            ConfigError: If the seconds are negative, or the passes of this profile take no time.
        """
        _demand_seconds("seconds", seconds, math.inf)
        if not self.compute:
            raise ConfigError(
                f"the passes of {self.model} take 0 seconds and cannot be scaled; measure the profile again"
            )
        return self.stretched(seconds / self.compute)

    def stretched(self, factor: float) -> Profile:
        """Returns a profile with every time multiplied by ``factor``."""
        layers = tuple(
            replace(layer, needed=layer.needed * factor, ready=layer.ready * factor) for layer in self.layers
        )
        times = (self.forward * factor, self.backward * factor, self.update * factor)
        return Profile(self.model, self.device, self.batch, layers, *times)

    def write(self, path: Path) -> None:
        """Writes the profile to ``path`` as JSON, one line per layer, with times of 6 significant digits.

        Raises:
            OSError: If the file cannot be written.
        """
        plain = _rounded(asdict(self))
        # Unknown shapes are omitted, as in older files.
        layers = [{name: value for name, value in layer.items() if value != []} for layer in plain.pop("layers")]
        lines = ",\n".join(f"  {json.dumps(layer)}" for layer in layers)
        head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in plain.items())
        write_atomically(path, f'{{\n{head} "layers": [\n{lines}\n ]\n}}\n'.encode())

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads a profile from ``path``, as written by ``write``.

        Raises:
            ConfigError: If the file is missing or is not a profile; the message names the field.
        """
        try:
            plain = read_json(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a profile ({error}); create one with spardl profile") from error
        try:
            return cls(**{**_fields(cls, plain, ""), "layers": _layers(plain["layers"])})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None  # names the file, which the field's error does not


def _layers(rows: Any) -> tuple[LayerTimes, ...]:
    _demand(isinstance(rows, list), "layers", type(rows).__name__, "a list")
    return tuple(_layer(row, f"layers[{number}].") for number, row in enumerate(rows))


def _layer(row: Any, where: str) -> LayerTimes:
    found = _fields(LayerTimes, row, where)
    shapes = found.get("shapes", [])
    right = isinstance(shapes, list) and all(isinstance(shape, list) for shape in shapes)
    right = right and all(is_number(int, length) and length >= 0 for shape in shapes for length in shape)
    _demand(right, f"{where}shapes", shapes, "a list that contains the shape of each tensor as a list")
    return LayerTimes(**{**found, "shapes": tuple(map(tuple, shapes))})


def _fields(kind: type[Profile | LayerTimes], plain: Any, where: str) -> Mapping[str, Any]:
    """Returns ``plain`` as a mapping after checking its keys against the fields of ``kind``."""
    _demand(isinstance(plain, dict), where.rstrip(".") or "the file", type(plain).__name__, "a mapping")
    names = [field.name for field in fields(kind)]
    # Fields with defaults may be absent: older files lack them.
    absent = [field.name for field in fields(kind) if field.default is MISSING and field.name not in plain]
    unknown = [name for name in plain if name not in names]
    if absent or unknown:
        state, remedy = ("missing", "add it") if absent else ("unknown", "remove it")
        raise ConfigError(
            f"{where}{(absent or unknown)[0]} is {state}; {remedy} or create the file with spardl profile"
        )
    return dict(plain)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):  # a string is a sequence of strings
        return [_rounded(item) for item in value]
    return value


def _demand_text(name: str, value: object) -> None:
    _demand(isinstance(value, str), name, value, "text")


def _demand_seconds(name: str, value: Any, limit: float) -> None:
    finite = is_number(float, value) and math.isfinite(value)
    bounds = f"from 0 to {limit:g}" if math.isfinite(limit) else "at least 0"
    _demand(finite and 0 <= value <= limit, name, value, f"a number of seconds, {bounds}")


def _demand(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")
