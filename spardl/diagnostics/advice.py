"""Which method and schedule a model wants on a network, before anything is sent: from the cost model.

Seconds are those of the timeline model (``spardl.diagnostics.timeline``):
published rounds and words on an alpha-beta network, and
what compressing takes on this machine, which is measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.clusters.network import PRESETS, Network
from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.compressing import measure_compression
from spardl.diagnostics.timeline.costs import GroupCost, halves, whole
from spardl.diagnostics.timeline.measure import measure
from spardl.diagnostics.timeline.model import Timeline, after_backward, in_backward, in_halves
from spardl.method.recipes import make_method
from spardl.schedules.fusion import Linear, by_size
from spardl.vector.flat import FlatGradient

__all__ = ["Advice", "Choice", "advise"]

# Seconds that a message takes to start, where only a bandwidth is given: TCP over Ethernet.
_LATENCY = 50e-6
_BUCKET_ENTRIES = 25 * (1 << 20) // 4
_UNITS: Mapping[str, float] = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}
# Simulated workers measure on gradients of so many entries in all; beyond, the line is drawn on.
_MEASURED = 1 << 22
_DENSE = "none"

Compressing: TypeAlias = Callable[[str, Mapping[str, Any]], Callable[[int], float]]
"""What a method, by its name and options, takes for a gradient of so many entries, in seconds."""


class Choice(NamedTuple):
    """One way to train.

    Attributes:
        method: its name, for ``spardl.attach`` and for ``compressor=``.
        options: of the method.
        schedule: ``after_backward``, ``wfbp`` (what ``spardl.attach`` does) or ``dear``.
        seconds: of a step, as predicted.
        bytes_sent: by each worker in a step.
        break_even_gbit: bandwidth in Gbit/s under which a synchronization by this method is faster than a dense one;
            infinite if it always is, 0 if it never is, or is dense itself.
    """

    method: str
    options: Mapping[str, Any]
    schedule: str
    seconds: float
    bytes_sent: float
    break_even_gbit: float

    def __str__(self) -> str:
        words = ", ".join([f'"{self.method}"', *(f"{name}={value!r}" for name, value in self.options.items())])
        return f"{words}; schedule {self.schedule}"


@dataclass(frozen=True)
class Advice:
    """What the cost model says.

    Attributes:
        choices: every method under its best schedule, the fastest first.
        network: on which.
        workers: P.
        entries: parameters of the model.
        compute: seconds of a step without communication; 0 if unknown, and then they are not part of any seconds.
    """

    choices: tuple[Choice, ...]
    network: Network
    workers: int
    entries: int
    compute: float

    @property
    def best(self) -> Choice:
        """The fastest."""
        return self.choices[0]

    @property
    def dense(self) -> Choice:
        """Without compression."""
        return next(choice for choice in self.choices if choice.method == _DENSE)

    def __str__(self) -> str:
        known = f"{1e3 * self.compute:.4g} ms of computation" if self.compute else "communication alone"
        head = f"{self.entries:,} parameters, {self.workers} workers, {self.network.gbit:g} Gbit/s, {known}"
        gain = self.dense.seconds / self.best.seconds
        lines = [f"{head}: use {self.best} ({gain:.3g} times as fast as dense)"]
        lines += [
            f"  {1e3 * choice.seconds:10.4g} ms  {choice.bytes_sent / 1e6:8.4g} MB  {_pays(choice):24} {choice}"
            for choice in self.choices
        ]
        return "\n".join(lines)


def advise(
    model: nn.Module | Profile,
    bandwidth: str | float | Network = "1gbit",
    workers: int = 8,
    *,
    loss: Callable[[], Tensor] | None = None,
    compute_seconds: float | None = None,
    density: float = 0.01,
    compressing: Compressing | None = None,
) -> Advice:
    """Predicts a step under every common method and schedule.

    Args:
        model: to be trained, or a profile of it.
        bandwidth: of each worker's link: ``"1gbit"``, ``"100mbit"``, a number of Gbit/s, a preset's name
            (``"ethernet_10g"``), or a :class:`Network`.
        workers: P.
        loss: makes one forward pass and returns the loss, a scalar; then passes are measured, and training is some
            steps further in running statistics, not in weights.
        compute_seconds: seconds of forward and backward pass together, instead of measured ones.
        density: k / n of the sparse methods.
        compressing: seconds that a worker selects, packs and merges, by method and entries, as a machine elsewhere
            takes them; measured on this one if ``None``. A dense sum is taken to need none.

    Returns:
        The advice; ``print`` shows it as a table.

    Raises:
        ConfigError: if a value is out of range.

    Example:
        >>> def compressing(method, options):  # on the machines that are asked about; if not given, it is measured here
        ...     return lambda entries: 2e-9 * entries
        >>> print(spardl.advise(nn.Linear(1000, 1000), "1gbit", workers=8, compressing=compressing))
        1,001,000 parameters, 8 workers, 1 Gbit/s, communication alone: use "spardl", density=0.01, teams=2;
            schedule after_backward (19.2 times as fast as dense)
          2.951 ms   0.08742 MB  pays below 35.7 Gbit/s   "spardl", density=0.01, teams=2; schedule after_backward
          3.028 ms   0.09069 MB  pays below 34.5 Gbit/s   "spardl", density=0.01, teams=1; schedule after_backward
          3.171 ms   0.06798 MB  pays below 28.8 Gbit/s   "oktopk", density=0.01; schedule after_backward
          5.052 ms    0.3625 MB  pays below 36.6 Gbit/s   "topka", density=0.01; schedule after_backward
          30.73 ms     3.503 MB  pays below 14 Gbit/s     "bf16"; schedule after_backward
          56.76 ms     7.007 MB  dense                    "none"; schedule after_backward
    """
    network = _network(bandwidth)
    if not is_a(int, workers) or workers < 2:
        raise ConfigError(f"workers must be a whole number, at least 2, got {workers!r}")
    profile, device = _profile(model, loss, compute_seconds)
    costs = list(_costs(workers, network, density, compressing or _measured(workers, device)))
    dense = next(cost for cost in costs if cost.name == _DENSE)
    found = [_choice(cost, dense, profile) for cost in costs]
    ordered = sorted(found, key=lambda choice: (choice.seconds, choice.bytes_sent))
    return Advice(tuple(ordered), network, workers, sum(profile.entries), profile.compute)


class _Cost(NamedTuple):
    """A method and what it costs."""

    name: str
    options: Mapping[str, Any]
    whole: GroupCost
    split: tuple[GroupCost, GroupCost] | None

    def rounds(self, entries: int) -> float:
        """Of a synchronization of so many entries."""
        return sum(self.whole.formula(entries).rounds) / 2

    def bytes_sent(self, entries: int) -> float:
        """By each worker in one."""
        return sum(self.whole.formula(entries).words) / 2 * self.whole.word(entries)


def _measured(workers: int, device: torch.device) -> Compressing:
    """What compressing takes on this machine."""
    largest = max(1 << 12, _MEASURED // workers)

    def seconds(name: str, options: Mapping[str, Any]) -> Linear:
        return measure_compression(make_method(name, **options), workers, (largest // 8, largest), device)[0]

    return seconds


def _costs(workers: int, network: Network, density: float, compressing: Compressing) -> Iterator[_Cost]:
    teams = [count for count in range(1, workers + 1) if workers % count == 0 and count**2 <= workers]
    sparse = {"density": density}
    candidates: list[tuple[str, dict[str, Any]]] = [(_DENSE, {}), ("bf16", {}), ("topka", sparse), ("oktopk", sparse)]
    candidates += [("spardl", {**sparse, "teams": count}) for count in teams]
    for name, options in candidates:
        method = make_method(name, **options)
        line = Linear(0.0, 0.0) if name == _DENSE else compressing(name, options)
        try:
            split = halves(method, workers, network, line)
        except ConfigError:
            split = None
        yield _Cost(name, options, whole(method, workers, network, line), split)


def _choice(cost: _Cost, dense: _Cost, profile: Profile) -> Choice:
    """A method under its best schedule."""
    timelines = dict(_timelines(cost, profile))
    schedule = min(timelines, key=lambda name: timelines[name].seconds)
    entries = sum(profile.entries)
    sent, pays = cost.bytes_sent(entries), _break_even(cost, dense, entries)
    return Choice(cost.name, cost.options, schedule, timelines[schedule].seconds, sent, pays)


def _break_even(cost: _Cost, dense: _Cost, entries: int) -> float:
    """Where seconds saved on the wire are those lost in compressing and in further rounds."""
    saved = dense.bytes_sent(entries) - cost.bytes_sent(entries)
    rounds = cost.rounds(entries) - dense.rounds(entries)
    lost = cost.whole.compression(entries) + rounds * cost.whole.network.alpha
    if saved <= 0:
        return 0.0
    return 8e-9 * saved / lost if lost > 0 else math.inf


def _timelines(cost: _Cost, profile: Profile) -> Iterator[tuple[str, Timeline]]:
    groups = by_size(profile.entries, _BUCKET_ENTRIES)
    yield "after_backward", after_backward(profile, cost.whole)
    yield "wfbp", in_backward(profile, groups, cost.whole)
    if cost.split:
        yield "dear", in_halves(profile, groups, *cost.split)


def _pays(choice: Choice) -> str:
    if choice.method == _DENSE:
        return "dense"
    if choice.break_even_gbit == math.inf:
        return "pays on any network"
    return f"pays below {choice.break_even_gbit:.3g} Gbit/s" if choice.break_even_gbit else "never pays"


def _network(bandwidth: str | float | Network) -> Network:
    if isinstance(bandwidth, Network):
        return bandwidth
    if isinstance(bandwidth, str):
        if bandwidth in PRESETS:
            return PRESETS[bandwidth]
        found = re.fullmatch(r"([0-9.]+) *([kmg]bit)(?:/s)?", bandwidth.strip().lower())
        if not found or found[1].count(".") > 1 or not float(found[1]):
            raise ConfigError(
                f"bandwidth={bandwidth!r} is none; use one like '1gbit' or '100mbit', a number of Gbit/s, or "
                f"{', '.join(PRESETS)}"
            )
        return Network(_LATENCY, float(found[1]) * _UNITS[found[2]])
    return Network(_LATENCY, bandwidth)


def _profile(
    model: nn.Module | Profile, loss: Callable[[], Tensor] | None, seconds: float | None
) -> tuple[Profile, torch.device]:
    if isinstance(model, Profile):
        return model if seconds is None else model.scaled(seconds), torch.device("cpu")
    device = next(model.parameters()).device
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
        layers.append(LayerTimes(layer.name or name, layer.entries, forward * before / whole_model, ready))
        before = after
    return Profile(name, "unknown", 1, tuple(layers), forward, backward, 0.0)
