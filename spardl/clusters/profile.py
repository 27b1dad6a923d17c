"""How long a model's layers take: the measured half of what the timeline model needs.

Times are those of one worker's training step without communication. A layer is what a schedule may cut between: the
neighbouring tensors of one module, in the order in which the model registers them.
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

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json, write_atomically
from spardl.clusters.base import Cluster, gather_rows
from spardl.clusters.ledger import Ledger
from spardl.protocol.programs import Phase
from spardl.vector.layout import Layout

__all__ = ["LayerTimes", "Profile", "StepCosts", "break_even_gbit", "gather_costs"]


# What a step really cost, by the workers' ledgers, and when its compression pays.


@dataclass(frozen=True)
class StepCosts:
    """What one step cost, on average over steps and workers.

    Attributes:
        seconds: by phase.
        beside: seconds of what ran beside these, by phase.
        rounds: exchanges, of the worker that has most.
        words: sent, an index or a value being one.
        bytes_sent: sent by a worker.
        dense_bytes: what a ring all-reduce of the same gradient would send.
        peak_memory: largest resident memory of a process, in bytes.
    """

    seconds: dict[str, float]
    beside: dict[str, float]
    rounds: float
    words: float
    bytes_sent: float
    dense_bytes: float
    peak_memory: float

    @property
    def overhead(self) -> float:
        """Seconds that compressing takes: selecting, packing and merging."""
        local = (Phase.SELECT.value, Phase.PACK.value, Phase.MERGE.value)
        return sum(self.seconds[phase] + self.beside[phase] for phase in local)


def gather_costs(cluster: Cluster, steps: int, gradient: Tensor) -> StepCosts:
    """Averages all workers' ledgers; of no step at all, they are 0.

    Args:
        cluster: the workers.
        steps: that the ledgers count.
        gradient: of the whole model, shape (n,).
    """
    steps = max(1, steps)
    rows = gather_rows(cluster, [_row(ledger, gradient.device) for ledger in cluster.ledgers])
    table = torch.stack(rows).cpu()
    _, words, sent, *seconds = (table[:, :-1].mean(0) / steps).tolist()
    return StepCosts(
        seconds={phase.value: value for phase, value in zip(Phase, seconds[: len(Phase)], strict=True)},
        beside={phase.value: value for phase, value in zip(Phase, seconds[len(Phase) :], strict=True)},
        rounds=float(table[:, 0].max()) / steps,
        words=words,
        bytes_sent=sent,
        dense_bytes=2 * gradient.nbytes * (cluster.size - 1) / cluster.size,
        peak_memory=float(table[:, -1].max()),
    )


def _row(ledger: Ledger, device: torch.device) -> Tensor:
    counts = [ledger.rounds, ledger.words, ledger.bytes_sent]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    values = [*counts, *(ledger.seconds[phase] for phase in Phase), *(ledger.beside[phase] for phase in Phase), peak]
    return torch.tensor(values, dtype=torch.float64, device=device)


def break_even_gbit(costs: StepCosts) -> float | None:
    """The bandwidth under which compressing is faster than sending the dense gradient.

    Per step, compressing costs its seconds of selecting, packing and merging, and saves bytes. Both are equal
    at (bytes saved) / (seconds spent); on a slower network compressing wins. The seconds that a dense
    all-reduce spends on its own additions are left out, in its favour.

    Returns:
        Gbit/s per worker, or ``None`` if no bytes are saved.
    """
    saved = costs.dense_bytes - costs.bytes_sent
    if saved <= 0 or costs.overhead <= 0:
        return None
    return 8e-9 * saved / costs.overhead


DIGITS = 6


@dataclass(frozen=True)
class LayerTimes:
    """One layer of a profile.

    Attributes:
        name: path of the module.
        entries: entries of all its tensors.
        needed: seconds from the start of the forward pass to the first use of its parameters.
        ready: seconds from the start of the backward pass until all its gradients are there.
        shapes: of its tensors, in order; none if unknown.
    """

    name: str
    entries: int
    needed: float
    ready: float
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Profile:
    """The times of one model on one device.

    Attributes:
        model: what was measured.
        device: on what.
        batch: examples in one pass.
        layers: in flat order, that of registration.
        forward: seconds of the forward pass, loss included.
        backward: seconds of the backward pass.
        update: seconds that the optimizer takes for one entry.

    Raises:
        ConfigError: if there are no layers, or a value is out of range.
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
        _demand(is_a(int, self.batch) and self.batch >= 1, "batch", self.batch, "a whole number, at least 1")
        for name in ("forward", "backward", "update"):
            _demand_seconds(name, getattr(self, name), math.inf)
        if not self.layers:
            raise ConfigError("layers is empty; a model without parameters has nothing to send")
        for number, layer in enumerate(self.layers):
            where = f"layers[{number}]."
            count = layer.entries
            _demand_text(f"{where}name", layer.name)
            _demand(is_a(int, count) and count >= 0, f"{where}entries", count, "a whole number, at least 0")
            if layer.shapes:
                held = sum(map(math.prod, layer.shapes))
                _demand(held == count, f"{where}shapes", layer.shapes, f"those of {count} entries in all")
            _demand_seconds(f"{where}needed", layer.needed, self.forward)
            _demand_seconds(f"{where}ready", layer.ready, self.backward)

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """Entries of each layer."""
        return tuple(layer.entries for layer in self.layers)

    @cached_property
    def ready(self) -> tuple[float, ...]:
        """Seconds from the start of the backward pass until each layer's gradients are there."""
        return tuple(layer.ready for layer in self.layers)

    @cached_property
    def layout(self) -> Layout | None:
        """The model's tensors; ``None`` if the shapes of some are unknown."""
        if not all(layer.shapes or not layer.entries for layer in self.layers):
            return None
        return Layout.of(shape for layer in self.layers for shape in layer.shapes)

    @property
    def compute(self) -> float:
        """Seconds of forward and backward pass together."""
        return self.forward + self.backward

    def scaled(self, seconds: float) -> Profile:
        """The same shape on a faster or slower device.

        Args:
            seconds: of forward and backward pass together. The update is stretched by the same factor.

        Returns:
            Another profile.

        Raises:
            ConfigError: if that is negative, or this profile has no seconds to stretch.
        """
        _demand_seconds("seconds", seconds, math.inf)
        if not self.compute:
            raise ConfigError(f"the profile of {self.model} takes no time, so it cannot be scaled; measure it again")
        return self.stretched(seconds / self.compute)

    def stretched(self, factor: float) -> Profile:
        """Every time multiplied by ``factor``."""
        layers = tuple(
            replace(layer, needed=layer.needed * factor, ready=layer.ready * factor) for layer in self.layers
        )
        times = (self.forward * factor, self.backward * factor, self.update * factor)
        return Profile(self.model, self.device, self.batch, layers, *times)

    def write(self, path: Path) -> None:
        """Writes JSON to ``path``, one line for each layer, times with 6 significant digits.

        Raises:
            OSError: if the file cannot be written.
        """
        plain = _rounded(asdict(self))
        layers = [{name: value for name, value in layer.items() if value != []} for layer in plain.pop("layers")]
        lines = ",\n".join(f"  {json.dumps(layer)}" for layer in layers)
        head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in plain.items())
        write_atomically(path, f'{{\n{head} "layers": [\n{lines}\n ]\n}}\n'.encode())

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads what ``write`` wrote to ``path``.

        Raises:
            ConfigError: if the file is not there or not a profile; the message names the field.
        """
        try:
            plain = read_json(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a profile ({error}); spardl profile makes one") from error
        try:
            return cls(**{**_fields(cls, plain, ""), "layers": _layers(plain["layers"])})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def _layers(rows: Any) -> tuple[LayerTimes, ...]:
    _demand(isinstance(rows, list), "layers", type(rows).__name__, "a list")
    return tuple(_layer(row, f"layers[{number}].") for number, row in enumerate(rows))


def _layer(row: Any, where: str) -> LayerTimes:
    found = _fields(LayerTimes, row, where)
    shapes = found.get("shapes", [])
    right = isinstance(shapes, list) and all(isinstance(shape, list) for shape in shapes)
    right = right and all(is_a(int, length) and length >= 0 for shape in shapes for length in shape)
    _demand(right, f"{where}shapes", shapes, "lists of whole numbers, one list for each tensor")
    return LayerTimes(**{**found, "shapes": tuple(map(tuple, shapes))})


def _fields(kind: type[Profile | LayerTimes], plain: Any, where: str) -> Mapping[str, Any]:
    """The mapping, if it has just the fields of a class, but for those that have defaults."""
    _demand(isinstance(plain, dict), where.rstrip(".") or "the file", type(plain).__name__, "a mapping")
    names = [field.name for field in fields(kind)]
    absent = [field.name for field in fields(kind) if field.default is MISSING and field.name not in plain]
    unknown = [name for name in plain if name not in names]
    if absent or unknown:
        raise ConfigError(f"{where}{(absent or unknown)[0]} is {'missing' if absent else 'unknown'}")
    return dict(plain)


def _rounded(value: Any) -> Any:
    """Plain data with every float cut to a few significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value


def _demand_text(name: str, value: object) -> None:
    _demand(isinstance(value, str), name, value, "text")


def _demand_seconds(name: str, value: Any, limit: float) -> None:
    finite = is_a(float, value) and math.isfinite(value)
    most = f" to {limit:g}" if math.isfinite(limit) else " up"
    _demand(finite and 0 <= value <= limit, name, value, f"seconds from 0{most}")


def _demand(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {wanted}, got {value!r}")
