"""Recommends a method and a schedule for a model and a network, from predicted step times.

The prediction uses the timeline model (``spardl.diagnostics.timeline``). Message times follow from the published
numbers of rounds and words on an alpha-beta network; the time of compression is measured on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.clusters.network import LATENCY, Network, parse_network
from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.measure import measure, measure_compression
from spardl.diagnostics.timeline.model import SCHEDULES, MethodCosts, Timeline
from spardl.method.momentum import AutoMomentum
from spardl.method.recipes import make_method
from spardl.schedules.fusion import Linear
from spardl.vector.flat import FlatGradient
from spardl.vector.layout import Layout

__all__ = [
    "ATTACHED",
    "CLEAR",
    "DENSE",
    "KEPT_GAIN",
    "METHODS",
    "PATIENCE",
    "Advice",
    "Choice",
    "Compressing",
    "Repeated",
    "advise",
    "measured_compression",
    "profiled",
]


# The result of ``spardl.advise``: the options ordered by step time, and their text.


DENSE = "none"
"""The method without compression."""
CLEAR = 1.05
"""Smallest speedup that counts as a gain: about the error of the model in the network lab (docs/schedules.md)."""
# Share of the computation that communication may take before local steps are recommended.
_WAITED = 0.05
# Remaining share of the gain in loss of dense training over a single worker, by local steps between two exchanges: the
# DiLoCo rows of the table in docs/tables/learning.md.
KEPT_GAIN: Mapping[int, float] = MappingProxyType({15: 0.22, 30: 0.03})
# Smallest speedup that does not round to 0%.
_SEEN = 1.005
# Speedups below this factor are shown in percent, because two digits of a factor would hide them.
_SMALL = 1.1
# Methods whose loss equals that of dense training within the noise of seeds (docs/tables/learning.md).
_LEARN_AS_DENSE = frozenset({DENSE, "bf16", "fp16"})
# Methods that learn more than sparse ones in short trainings.
_RIVALS = frozenset({"bf16", "powersgd"})


class Choice(NamedTuple):
    """A method with its best schedule, and the predicted step time.

    Attributes:
        method: Name of the method, for ``spardl.attach`` and ``compressor=``.
        options: Options of the method.
        schedule: Name of the schedule, for ``spardl.attach`` and ``schedule=``.
        seconds: Predicted time of a step, in seconds.
        bytes_sent: Number of bytes that each worker sends in a step.
        break_even_gbit: Bandwidth in Gbit/s below which a synchronization with this method is faster than a dense one;
            infinite if it is faster at any bandwidth, 0 if at none or if the method is dense.
        local_update: Whether ``attach`` needs ``optimizer=`` for this method, because momentum is applied before
            compression.
        exchange: Time of one synchronization of the whole model that overlaps no computation, as in ``Outer``, in
            seconds.
        between: Smallest and largest predicted time of a step, in seconds, over repeated measurements; ``None`` without
            measurements.
        pays_between: Smallest and largest ``break_even_gbit`` over the same measurements; ``None`` without
            measurements.
    """

    method: str
    options: Mapping[str, Any]
    schedule: str
    seconds: float
    bytes_sent: float
    break_even_gbit: float
    local_update: bool = False
    exchange: float = 0.0
    between: tuple[float, float] | None = None
    pays_between: tuple[float, float] | None = None

    def __str__(self) -> str:
        """Returns the arguments of ``spardl.attach`` after the model, without the optimizer."""
        return f'{self.arguments}, schedule="{self.schedule}"'

    @property
    def arguments(self) -> str:
        """Arguments of ``attach`` and other handles, as Python text: method and options, ``"spardl", density=0.01``."""
        return ", ".join([f'"{self.method}"', *(f"{name}={value!r}" for name, value in self.options.items())])

    @property
    def call(self) -> str:
        """Call of ``spardl.attach`` with this method and schedule, as Python text to paste into a training loop."""
        return f"spardl.attach(model, {self}{', optimizer=optimizer' * self.local_update})"


@dataclass(frozen=True)
class Advice:
    """Predicted step times of all methods.

    Attributes:
        choices: All methods with their best schedules, ordered by step time.
        network: Network of the prediction.
        workers: Number of workers, P.
        entries: Number of parameters of the model.
        compute: Time of a step without communication, in seconds. If it is unknown, it is 0, and step times do not
            include it.
        baseline: Prediction for plain DDP: dense, in buckets of 25 MB that overlap the backward pass.
        left_out: One line for each method that cannot be compared, which states the reason.
    """

    choices: tuple[Choice, ...]
    network: Network
    workers: int
    entries: int
    compute: float
    baseline: Choice
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        """The choice with the shortest step time."""
        return self.choices[0]

    @property
    def advised(self) -> Choice:
        """The recommended choice: ``best``, or a method that learns like dense training and is nearly as fast."""
        # A method that learns like dense training is preferred to a slightly faster one, if it clearly beats DDP.
        limit = min(CLEAR * self.best.seconds, self.baseline.seconds / CLEAR)
        near = (choice for choice in self.choices if choice.method in _LEARN_AS_DENSE and choice.seconds <= limit)
        return next(near, self.best)

    @property
    def dense(self) -> Choice:
        """The choice without compression (``none``) and its best schedule; ``baseline`` if ``none`` is not compared."""
        return next((choice for choice in self.choices if choice.method == DENSE), self.baseline)

    @property
    def every(self) -> int | None:
        """Number of local steps (``every`` of ``spardl.Outer``) with which communication takes 5% of the computation.

        ``None`` if communication already adds at most 5% to a step, or if the time of the computation is unknown.
        """
        way = self.advised
        if not self.compute or way.seconds <= (1 + _WAITED) * self.compute:
            return None
        # An exchange of outer steps overlaps nothing, so its whole duration counts.
        return math.ceil(way.exchange / (_WAITED * self.compute))

    def __str__(self) -> str:
        known = f"{_digits(1e3 * self.compute)} ms of computation" if self.compute else "communication alone"
        head = f"{self.entries:,} parameters, {self.workers} workers, {self.network.gbit:g} Gbit/s, {known}"
        return "\n".join(
            [
                f"{head}: {self._recommendation()}",
                *(self._line(choice) for choice in self._rows()),
                *self._range_note(),
                *self._preference(),
                *self._learning(),
                *self._local_steps(),
                *(f"  not compared: {reason}" for reason in self.left_out),
            ]
        )

    def _recommendation(self) -> str:
        gain, way = self.baseline.seconds / self.advised.seconds, self.advised.call
        if gain >= CLEAR:
            return f"use {way}, {self._speed()} plain DDP"
        if self.advised == self.baseline:
            return "keep plain DDP; no method is faster"
        speed = f"only {gain - 1:.0%} faster than" if gain >= _SEEN else "as fast as"
        return f"keep plain DDP; {way} is {speed} plain DDP"

    def _speed(self) -> str:
        """Speedup of the recommended choice over plain DDP, as a range if it was measured more than once."""
        fast, slow = self.advised.between or (self.advised.seconds, self.advised.seconds)
        low, high = self.baseline.seconds / slow, self.baseline.seconds / fast
        if low < _SMALL:
            return f"{_range(f'{low - 1:.0%}', f'{high - 1:.0%}')} faster than"
        return f"{_range(_digits(low), _digits(high))} times as fast as"

    def _range_note(self) -> Iterator[str]:
        if any(" to " in _milliseconds(choice) + _pays(choice) for choice in self._rows()):
            yield "  ranges: minimum and maximum over repeated measurements of compression"

    def _learning(self) -> Iterator[str]:
        density = self.advised.options.get("density")
        if density and self.baseline.seconds >= CLEAR * self.advised.seconds:
            rivals = [f'"{choice.method}"' for choice in self.choices if choice.method in _RIVALS]
            others = f" with that of {' or '.join(rivals)}" if rivals else " with that of dense training"
            yield (
                f"  learning: at density={density:g} an entry is sent every {1 / density:,.0f} steps on average; in a "
                f"training of fewer than {10 / density:,.0f} steps, compare the loss{others}"
            )

    def _preference(self) -> Iterator[str]:
        if self.advised != self.best and self.baseline.seconds >= CLEAR * self.advised.seconds:
            yield (
                f'  preferred: the loss of "{self.advised.method}" equals that of dense training within the noise of '
                f'seeds (docs/tables/learning.md); "{self.best.method}" is faster by at most {CLEAR - 1:.0%}, which is '
                "within the error of the prediction"
            )

    def _local_steps(self) -> Iterator[str]:
        if self.every:
            waits = 1 - self.compute / self.advised.seconds
            yield (
                f"  local steps: {waits:.0%} of such a step waits for the network, but only {_WAITED:.0%} of the "
                f"computation with spardl.Outer(..., {self.advised.arguments}, every={self.every}); the same number of "
                f"examples then teaches less: {_price()}"
            )

    def _rows(self) -> list[Choice]:
        others = [] if self.baseline in self.choices else [self.baseline]
        return sorted([*self.choices, *others], key=lambda choice: choice.seconds)

    def _line(self, choice: Choice) -> str:
        pays = "plain DDP" if choice == self.baseline else _pays(choice)
        return f"  {_milliseconds(choice):>14} ms  {_digits(choice.bytes_sent / 1e6):>8} MB  {pays:30} {choice}"


def _digits(value: float) -> str:
    # Two significant digits, as measurements reproduce, and no exponent.
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = 1 - math.floor(math.log10(abs(float(f"{value:.1e}"))))
    return f"{round(value, places):.{max(0, places)}f}"


def _milliseconds(choice: Choice) -> str:
    return _range(*(_digits(1e3 * seconds) for seconds in choice.between or (choice.seconds, choice.seconds)))


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _price() -> str:
    left = " or ".join(f"{share:.0%} (every={every})" for every, share in KEPT_GAIN.items())
    return (
        f"with dense exchanges, {left} of the gain of 8 workers over a single one remained in 900 steps of a GPT of "
        "0.2 M parameters (one seed; docs/tables/learning.md, Local steps)"
    )


def _pays(choice: Choice) -> str:
    if choice.method == DENSE:
        return "dense"
    if choice.break_even_gbit == math.inf:
        return "pays on any network"
    if not choice.break_even_gbit:
        return "never pays"
    least, most = choice.pays_between or (choice.break_even_gbit, choice.break_even_gbit)
    return f"pays below {_range(_digits(least), _digits(most))} Gbit/s"


# Measurements on this machine: the passes of a model, and the time of compression.


# Largest total number of measured entries over all simulated workers; larger sizes are extrapolated.
_MEASURED = 1 << 22
# Least and most repetitions of a measurement; a range needs at least two.
_LEAST, _MOST = 2, 5

PATIENCE = 2.0
"""Seconds per method after which its measurement is not repeated."""

Compressing: TypeAlias = Callable[[str, Mapping[str, Any]], Callable[[int], float]]
"""Maps a method, by name and options, to its seconds of compression for a number of entries."""


@dataclass(frozen=True)
class Repeated:
    """Time of compression as a function of the number of entries, from repeated measurements.

    Attributes:
        lines: For each repetition, the line (fixed time and time per entry) that fits its measurements.
    """

    lines: tuple[Linear, ...]

    def __call__(self, entries: int) -> float:
        """Returns the median time over the repetitions, in seconds."""
        return median(line(entries) for line in self.lines)


def measured_compression(
    workers: int,
    device: torch.device,
    layout: Layout | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Compressing:
    """Returns a function that measures the time of compression on this machine, two to five times per method.

    Args:
        workers: Number of workers, P.
        device: Device of the gradients.
        layout: Shapes of the model's tensors, for methods that compress matrices; ``None`` if unknown.
        clock: Function that returns the time in seconds, to limit the repetitions.
    """
    largest = max(1 << 12, _MEASURED // workers)

    def seconds(name: str, options: Mapping[str, Any]) -> Repeated:
        method = make_method(name, **options)
        # Only methods that compress matrices depend on the shapes of the tensors.
        tensors = layout if method.compressor.by_matrix else None
        until, lines = clock() + PATIENCE, list[Linear]()
        while len(lines) < _LEAST or (len(lines) < _MOST and clock() < until):
            lines.append(measure_compression(method, workers, (largest // 8, largest), device, tensors)[0])
        return Repeated(tuple(lines))

    return seconds


def profiled(
    model: nn.Module | Profile, loss: Callable[[], Tensor] | None, seconds: float | None
) -> tuple[Profile, torch.device]:
    """Returns the layer times (profile) of a model, and the device of its gradients.

    Args:
        model: Model to measure, or a profile of it.
        loss: Function that runs one forward pass and returns the scalar loss, to measure the passes. With ``None``,
            their time is distributed over the layers in proportion to the layers' sizes.
        seconds: Time of forward and backward pass together, in seconds; ``None`` for the measured time, or 0 if there
            is none.

    Raises:
        ConfigError: If the model cannot be measured, or the seconds are out of range.
    """
    if isinstance(model, Profile):
        return model if seconds is None else model.scaled(seconds), torch.device("cpu")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a module or a Profile (Profile.read(path)), got a {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise ConfigError(
            "loss must be a function that runs one forward pass, such as lambda: criterion(model(inputs), targets), "
            f"got a {type(loss).__name__}"
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _gradients_kept(model):
        if loss is None:
            return _evenly(FlatGradient(model.named_parameters()), seconds or 0.0, type(model).__name__), device
        # A learning rate of 0, because measuring must not change the weights.
        made = measure(model, loss, torch.optim.SGD(model.parameters(), lr=0.0), name=type(model).__name__, batch=1)
        return made if seconds is None else made.scaled(seconds), device


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    # FlatGradient replaces the gradients by views of one vector.
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _evenly(gradient: FlatGradient, seconds: float, name: str) -> Profile:
    """Estimated profile: a third of the time forward, two thirds backward, in proportion to the entries."""
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


_DDP = "wfbp"
ATTACHED = (_DDP, "mg_wfbp", "layer_fusion", "dear")
"""Schedules of ``spardl.attach``; the first one is that of DDP: buckets of 25 MB that overlap the backward pass."""


def _teams(workers: int, density: float) -> list[dict[str, Any]]:
    """Options of SparDL: all numbers of teams that divide the workers, up to the square root of their number."""
    counts = [count for count in range(1, workers + 1) if workers % count == 0 and count**2 <= workers]
    return [{"density": density, "teams": count} for count in counts]


_Options = Callable[[int, float], list[dict[str, Any]]]
METHODS: Mapping[str, _Options] = MappingProxyType(
    {
        DENSE: lambda workers, density: [{}],
        "bf16": lambda workers, density: [{}],
        "powersgd": lambda workers, density: [{"rank": 4}],
        "topka": lambda workers, density: [{"density": density}],
        "oktopk": lambda workers, density: [{"density": density}],
        "spardl": _teams,
    }
)
"""Compared methods: by name, a function of workers and density that returns the options."""


def advise(
    model: nn.Module | Profile,
    bandwidth: str | float | Network = "1gbit",
    workers: int = 8,
    *,
    loss: Callable[[], Tensor] | None = None,
    compute_seconds: float | None = None,
    density: float = 0.01,
    compressing: Compressing | None = None,
    methods: Sequence[str] = tuple(METHODS),
    schedules: Sequence[str] = ATTACHED,
) -> Advice:
    """Predicts the step time of every common method and schedule.

    Args:
        model: Model to train, or a profile of it.
        bandwidth: Bandwidth of each worker's link: ``"1gbit"``, ``"100mbit"``, a number of Gbit/s, a preset name
            (``"ethernet_10g"``), a file from ``spardl doctor --out``, or a :class:`Network`.
        workers: Number of workers, P.
        loss: Function that runs one forward pass and returns the scalar loss. If given, the passes are measured, which
            changes running statistics of the model but not its weights.
        compute_seconds: Time of forward and backward pass together, in seconds, instead of the measured time.
        density: Density k / n of the sparse methods.
        compressing: Function of a method and its options that returns the seconds of selection, packing and merging as
            a function of the number of entries, as measured on another machine; ``None`` measures them on this one. A
            dense sum counts as 0 seconds.
        methods: Methods to compare, from ``none``, ``bf16``, ``powersgd``, ``topka``, ``oktopk`` and ``spardl``.
            PowerSGD, which compresses matrices, is skipped for a profile without shapes.
        schedules: Schedules to compare; by default those of ``spardl.attach``.

    Returns:
        The predictions; ``print`` shows them as a table, in comparison with plain DDP.

    Raises:
        ConfigError: If a value is out of range, or a method or schedule is unknown.

    Example:
        >>> def compressing(method, options):  # as measured on the machines in question; by default measured here
        ...     return lambda entries: 2e-9 * entries
        >>> print(spardl.advise(nn.Linear(1000, 1000), "1gbit", workers=8, compressing=compressing))
        1,001,000 parameters, 8 workers, 1 Gbit/s, communication alone:
            use spardl.attach(model, "spardl", density=0.01, teams=2, schedule="wfbp", optimizer=optimizer),
            19 times as fast as plain DDP
                 3.0 ms     0.087 MB  pays below 36 Gbit/s     "spardl", density=0.01, teams=2, schedule="wfbp"
                 3.0 ms     0.091 MB  pays below 35 Gbit/s     "spardl", density=0.01, teams=1, schedule="wfbp"
                 3.2 ms     0.068 MB  pays below 29 Gbit/s     "oktopk", density=0.01, schedule="wfbp"
                 3.9 ms     0.063 MB  pays below 21 Gbit/s     "powersgd", rank=4, schedule="wfbp"
                 5.1 ms      0.36 MB  pays below 37 Gbit/s     "topka", density=0.01, schedule="wfbp"
                  31 ms       3.5 MB  pays below 14 Gbit/s     "bf16", schedule="wfbp"
                  57 ms       7.0 MB  plain DDP                "none", schedule="wfbp"
          learning: at density=0.01 an entry is sent every 100 steps on average;
            in a training of fewer than 1,000 steps, compare the loss with that of "powersgd" or "bf16"
    """
    network = bandwidth
    if not isinstance(network, Network):
        network = parse_network(network, "bandwidth") if isinstance(network, str) else Network(LATENCY, network)
    if not is_number(int, workers) or workers < 2:
        raise ConfigError(f"workers must be an integer, at least 2, got {workers!r}")
    _check("methods", methods, METHODS)
    _check("schedules", schedules, SCHEDULES)
    profile, device = profiled(model, loss, compute_seconds)
    time = compressing or measured_compression(workers, device, profile.layout)
    return _compared(profile, network, workers, density, time, methods, schedules)


def _compared(
    profile: Profile,
    network: Network,
    workers: int,
    density: float,
    compressing: Compressing,
    methods: Sequence[str],
    schedules: Sequence[str],
) -> Advice:
    # A method that cannot be compared does not prevent the advice; the table names it.
    left_out = {name: reason for name in methods if (reason := _why_not(name, profile))}
    dense = _cost(DENSE, {}, workers, network, compressing, profile)
    costs = [
        _cost(name, options, workers, network, compressing, profile)
        for name in methods
        if name not in left_out
        for options in METHODS[name](workers, density)
    ]
    if not costs:
        raise ConfigError(f"none of the methods can be compared ({'; '.join(left_out.values())}); choose others")
    found = [_choice(cost, dense, profile, schedules) for cost in costs]
    # On a fast network many step times are equal; fewer bytes then come first.
    ordered = sorted(found, key=lambda choice: (choice.seconds, choice.bytes_sent))
    baseline = _choice(dense, dense, profile, [_DDP])
    return Advice(
        tuple(ordered), network, workers, sum(profile.entries), profile.compute, baseline, tuple(left_out.values())
    )


class _Cost(NamedTuple):
    """A method and its costs, also for each repetition of a measurement."""

    name: str
    options: Mapping[str, Any]
    costs: MethodCosts
    repetitions: tuple[MethodCosts, ...]

    def rounds(self, entries: int) -> float:
        """Returns the number of message rounds of a synchronization of ``entries`` entries."""
        return sum(self.costs.whole.formula(entries).rounds) / 2

    def bytes_sent(self, entries: int) -> float:
        """Returns the number of bytes that each worker sends in a synchronization."""
        return sum(self.costs.whole.formula(entries).words) / 2 * self.costs.whole.word(entries)


def _check(option: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"{option} must be one or more of {', '.join(known)}, got {', '.join(unknown) or 'an empty list'}"
        )


def _why_not(name: str, profile: Profile) -> str | None:
    if make_method(name).compressor.by_matrix and profile.layout is None:
        return f"{name} compresses matrices, but the profile has no shapes; create it again with spardl profile"
    return None


def _cost(
    name: str, options: Mapping[str, Any], workers: int, network: Network, compressing: Compressing, profile: Profile
) -> _Cost:
    # A dense sum selects and packs nothing.
    line = Linear(0.0, 0.0) if name == DENSE else compressing(name, options)
    method = make_method(name, **options)
    costs = MethodCosts.of(method, workers, network, line, profile.layout)
    lines = line.lines if isinstance(line, Repeated) else ()
    return _Cost(name, options, costs, tuple(costs.on(network, each) for each in lines))


def _choice(cost: _Cost, dense: _Cost, profile: Profile, schedules: Sequence[str]) -> Choice:
    timelines = dict(_timelines(cost.costs, profile, schedules))
    if not timelines:
        raise ConfigError(f"{cost.name} supports none of the schedules {', '.join(schedules)}; add another schedule")
    schedule = min(timelines, key=lambda name: timelines[name].seconds)
    entries = sum(profile.entries)
    sent, pays = cost.bytes_sent(entries), _break_even(cost, dense, entries)
    moves = isinstance(make_method(cost.name).momentum, AutoMomentum)
    exchange = cost.costs.whole.seconds(entries)
    seconds = timelines[schedule].seconds
    # The repetitions use the schedule of the median, so the range does not mix schedules.
    repeated = [found.seconds for each in cost.repetitions for _, found in _timelines(each, profile, [schedule])]
    thresholds = [_break_even(cost._replace(costs=each), dense, entries) for each in cost.repetitions]
    return Choice(
        cost.name,
        cost.options,
        schedule,
        seconds,
        sent,
        pays,
        moves,
        exchange,
        between=_extremes(seconds, repeated),
        pays_between=_extremes(pays, thresholds),
    )


def _extremes(value: float, repeated: Sequence[float]) -> tuple[float, float] | None:
    return (min(value, *repeated), max(value, *repeated)) if repeated else None


def _timelines(costs: MethodCosts, profile: Profile, schedules: Sequence[str]) -> Iterator[tuple[str, Timeline]]:
    for name in schedules:
        found = SCHEDULES[name](profile, costs)
        if found:
            yield name, found


def _break_even(cost: _Cost, dense: _Cost, entries: int) -> float:
    """Returns the bandwidth at which the time saved by shorter messages equals that of compression and more rounds."""
    saved = dense.bytes_sent(entries) - cost.bytes_sent(entries)
    rounds = cost.rounds(entries) - dense.rounds(entries)
    lost = cost.costs.whole.compression(entries) + rounds * cost.costs.whole.network.alpha
    if saved <= 0:
        return 0.0  # never pays
    return 8e-9 * saved / lost if lost > 0 else math.inf
