"""Which method and schedule a model wants on a network, before anything is sent: from the cost model.

Seconds are those of the timeline model (``spardl.diagnostics.timeline``): published rounds and words on an alpha-beta
network, and what compressing takes on this machine, which is measured.
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

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.clusters.network import LATENCY, PRESETS, Network, parse_bandwidth
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
    "LEFT",
    "METHODS",
    "PATIENCE",
    "Advice",
    "Choice",
    "Compressing",
    "Repeated",
    "advise",
    "measured",
    "profiled",
]


# What ``spardl.advise`` answers: the ways to train a model on a network, the fastest first, and how they are shown.


DENSE = "none"
"""The method without compression."""
CLEAR = 1.05
"""Less is no gain: in the network lab the model was off by about as much (docs/schedules.md)."""
# Share of computing that exchanges may take before local steps are worth a thought.
_WAITED = 0.05
# By steps between two exchanges, what is left of dense training's gain in loss over one worker alone: DiLoCo's rows of
# the table in docs/tables/learning.md.
LEFT: Mapping[int, float] = MappingProxyType({15: 0.22, 30: 0.03})
# The least gain that is not 0% when rounded.
_SEEN = 1.005
# Below, gains are shown in percent: two digits of a factor would hide them.
_SMALL = 1.1
# Losses as without compression, to what seeds differ by (docs/tables/learning.md).
_LEARN_AS_DENSE = frozenset({DENSE, "bf16", "fp16"})
# What learns more than a sparse method where steps are few.
_RIVALS = frozenset({"bf16", "powersgd"})


class Choice(NamedTuple):
    """One way to train.

    Attributes:
        method: its name, for ``spardl.attach`` and for ``compressor=``.
        options: of the method.
        schedule: its name, for ``spardl.attach`` and for ``schedule=``.
        seconds: of a step, as predicted.
        bytes_sent: by each worker in a step.
        break_even_gbit: bandwidth in Gbit/s under which a synchronization by this method is faster than a dense one;
            infinite if it always is, 0 if it never is, or is dense itself.
        moves: whether it wants to know the optimizer, whose state it moves before compression.
        exchange: seconds of one synchronization of the whole model with nothing beside it, as outer steps have it.
        between: the least and the most seconds of a step over repetitions of a measurement; ``None`` without one.
        pays_between: the same of ``break_even_gbit``.
    """

    method: str
    options: Mapping[str, Any]
    schedule: str
    seconds: float
    bytes_sent: float
    break_even_gbit: float
    moves: bool = False
    exchange: float = 0.0
    between: tuple[float, float] | None = None
    pays_between: tuple[float, float] | None = None

    def __str__(self) -> str:
        """The arguments of ``spardl.attach`` after the model, but for the optimizer."""
        return f'{self.arguments}, schedule="{self.schedule}"'

    @property
    def arguments(self) -> str:
        """Method and options, as all handles take them."""
        return ", ".join([f'"{self.method}"', *(f"{name}={value!r}" for name, value in self.options.items())])

    @property
    def call(self) -> str:
        """The line of a training loop."""
        return f"spardl.attach(model, {self}{', optimizer=optimizer' * self.moves})"


@dataclass(frozen=True)
class Advice:
    """What the cost model says.

    Attributes:
        choices: every method under its best schedule, the fastest first.
        network: on which.
        workers: P.
        entries: parameters of the model.
        compute: seconds of a step without communication; 0 if unknown, and then they are not part of any seconds.
        baseline: plain DDP: dense, in buckets of 25 MB beside the backward pass.
        left_out: methods that could not be compared, and why: one line each.
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
        """The fastest."""
        return self.choices[0]

    @property
    def advised(self) -> Choice:
        """The fastest, or one about as fast that learns as dense training does and is clearly faster than DDP."""
        limit = min(CLEAR * self.best.seconds, self.baseline.seconds / CLEAR)
        near = (choice for choice in self.choices if choice.method in _LEARN_AS_DENSE and choice.seconds <= limit)
        return next(near, self.best)

    @property
    def dense(self) -> Choice:
        """Without compression, under its best schedule; the baseline, if no other is asked about."""
        return next((choice for choice in self.choices if choice.method == DENSE), self.baseline)

    @property
    def every(self) -> int | None:
        """Local steps between two exchanges of the advised way that take a 20th of computing; see ``spardl.Outer``.

        ``None`` where a step of it waits for less than that, or the seconds of computing are not known.
        """
        way = self.advised
        if not self.compute or way.seconds <= (1 + _WAITED) * self.compute:
            return None
        return math.ceil(way.exchange / (_WAITED * self.compute))

    def __str__(self) -> str:
        known = f"{_digits(1e3 * self.compute)} ms of computation" if self.compute else "communication alone"
        head = f"{self.entries:,} parameters, {self.workers} workers, {self.network.gbit:g} Gbit/s, {known}"
        return "\n".join(
            [
                f"{head}: {self._verdict()}",
                *(self._line(choice) for choice in self._rows()),
                *self._ranging(),
                *self._preferring(),
                *self._learning(),
                *self._locally(),
                *(f"  not compared: {reason}" for reason in self.left_out),
            ]
        )

    def _verdict(self) -> str:
        gain, way = self.baseline.seconds / self.advised.seconds, self.advised.call
        if gain >= CLEAR:
            return f"use {way}, {self._speed()} plain DDP"
        if self.advised == self.baseline:
            return "stay with plain DDP; nothing is faster"
        speed = f"only {gain - 1:.0%} faster than" if gain >= _SEEN else "as fast as"
        return f"stay with plain DDP; {way} is {speed} plain DDP"

    def _speed(self) -> str:
        """How many times as fast as plain DDP the advised way is, as a range where it was measured more than once."""
        fast, slow = self.advised.between or (self.advised.seconds, self.advised.seconds)
        low, high = self.baseline.seconds / slow, self.baseline.seconds / fast
        if low < _SMALL:
            return f"{_range(f'{low - 1:.0%}', f'{high - 1:.0%}')} faster than"
        return f"{_range(_digits(low), _digits(high))} times as fast as"

    def _ranging(self) -> Iterator[str]:
        """What ranges are."""
        if any(" to " in _milliseconds(choice) + _pays(choice) for choice in self._rows()):
            yield "  ranges: the least and the most over repetitions of the measurement of compression"

    def _learning(self) -> Iterator[str]:
        """What the advised way costs besides seconds."""
        density = self.advised.options.get("density")
        if density and self.baseline.seconds >= CLEAR * self.advised.seconds:
            rivals = [f'"{choice.method}"' for choice in self.choices if choice.method in _RIVALS]
            beside = f" beside that of {' or '.join(rivals)}" if rivals else ""
            yield (
                f"  learning: at density={density:g} an entry is sent every {1 / density:,.0f} steps or so; in fewer "
                f"than {10 / density:,.0f} steps look at the loss{beside}"
            )

    def _preferring(self) -> Iterator[str]:
        """Why the advised way is not the fastest."""
        if self.advised != self.best and self.baseline.seconds >= CLEAR * self.advised.seconds:
            yield (
                f'  preferred: the loss of "{self.advised.method}" differs from dense training by less than seeds do '
                f"(docs/tables/learning.md), and its seconds by at most {CLEAR - 1:.0%} from those of the fastest, "
                f'"{self.best.method}": less than the error of these predictions'
            )

    def _locally(self) -> Iterator[str]:
        """After how many local steps the network would hardly be waited for."""
        if self.every:
            waits = 1 - self.compute / self.advised.seconds
            yield (
                f"  local steps: {waits:.0%} of such a step waits for the network; with spardl.Outer(..., "
                f"{self.advised.arguments}, every={self.every}) {_WAITED:.0%} of computing does, and as many examples "
                f"teach less: {_price()}"
            )

    def _rows(self) -> list[Choice]:
        """The choices, and plain DDP where it stands among them."""
        others = [] if self.baseline in self.choices else [self.baseline]
        return sorted([*self.choices, *others], key=lambda choice: choice.seconds)

    def _line(self, choice: Choice) -> str:
        pays = "plain DDP" if choice == self.baseline else _pays(choice)
        return f"  {_milliseconds(choice):>14} ms  {_digits(choice.bytes_sent / 1e6):>8} MB  {pays:30} {choice}"


def _digits(value: float) -> str:
    """Two significant digits: what is measured does not repeat to more. No exponent."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = 1 - math.floor(math.log10(abs(float(f"{value:.1e}"))))
    return f"{round(value, places):.{max(0, places)}f}"


def _milliseconds(choice: Choice) -> str:
    return _range(*(_digits(1e3 * seconds) for seconds in choice.between or (choice.seconds, choice.seconds)))


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _price() -> str:
    """What local steps cost in loss, as far as that was measured."""
    left = ", ".join(f"{share:.0%} with every={every}" for every, share in LEFT.items())
    return (
        "of what 8 workers gain over one alone in 900 steps of a GPT of 0.2 M parameters, dense exchanges left "
        f"{left} (one seed; docs/tables/learning.md, Local steps)"
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


# What advice is based on: a model's passes and what compressing takes, measured on this machine.


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


_DDP = "wfbp"
ATTACHED = (_DDP, "mg_wfbp", "layer_fusion", "dear")
"""The schedules of ``spardl.attach``; the first one is what DDP does: buckets of 25 MB beside the backward pass."""


def _teams(workers: int, density: float) -> list[dict[str, Any]]:
    """Of SparDL: as many as divide the workers, up to the root of their number."""
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
"""What is compared: by name, the options for a number of workers and a density."""


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
        methods: which to compare, of ``none``, ``bf16``, ``powersgd``, ``topka``, ``oktopk`` and ``spardl``. PowerSGD,
            which compresses matrices, is left out where a profile has no shapes.
        schedules: under which, those of ``spardl.attach`` if nothing else is asked for.

    Returns:
        The advice; ``print`` shows it as a table, beside plain DDP.

    Raises:
        ConfigError: if a value is out of range, or a method or schedule is unknown.

    Example:
        >>> def compressing(method, options):  # on the machines that are asked about; if not given, it is measured here
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
          learning: at density=0.01 an entry is sent every 100 steps or so;
            in fewer than 1,000 steps look at the loss beside that of "powersgd" or "bf16"
    """
    network = _network(bandwidth)
    if not is_a(int, workers) or workers < 2:
        raise ConfigError(f"workers must be a whole number, at least 2, got {workers!r}")
    _check("methods", methods, METHODS)
    _check("schedules", schedules, SCHEDULES)
    profile, device = profiled(model, loss, compute_seconds)
    time = compressing or measured(workers, device, profile.layout)
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
    """All methods that can be compared, beside plain DDP."""
    left_out = {name: reason for name in methods if (reason := _why_not(name, profile))}
    dense = _cost(DENSE, {}, workers, network, compressing, profile)
    costs = [
        _cost(name, options, workers, network, compressing, profile)
        for name in methods
        if name not in left_out
        for options in METHODS[name](workers, density)
    ]
    if not costs:
        raise ConfigError(f"there is nothing to compare: {'; '.join(left_out.values())}")
    found = [_choice(cost, dense, profile, schedules) for cost in costs]
    ordered = sorted(found, key=lambda choice: (choice.seconds, choice.bytes_sent))
    baseline = _choice(dense, dense, profile, [_DDP])
    return Advice(
        tuple(ordered), network, workers, sum(profile.entries), profile.compute, baseline, tuple(left_out.values())
    )


class _Cost(NamedTuple):
    """A method and what it costs; once more for each repetition of what was measured."""

    name: str
    options: Mapping[str, Any]
    costs: MethodCosts
    repetitions: tuple[MethodCosts, ...]

    def rounds(self, entries: int) -> float:
        """Of a synchronization of so many entries."""
        return sum(self.costs.whole.formula(entries).rounds) / 2

    def bytes_sent(self, entries: int) -> float:
        """By each worker in one."""
        return sum(self.costs.whole.formula(entries).words) / 2 * self.costs.whole.word(entries)


def _check(option: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"{option} must be some of {', '.join(known)}, got {', '.join(unknown) or 'none'}")


def _why_not(name: str, profile: Profile) -> str | None:
    """Why a method cannot be compared, if so."""
    if make_method(name).compressor.by_matrix and profile.layout is None:
        return f"{name}, which compresses matrices: the profile has no shapes; spardl profile writes them"
    return None


def _cost(
    name: str, options: Mapping[str, Any], workers: int, network: Network, compressing: Compressing, profile: Profile
) -> _Cost:
    line = Linear(0.0, 0.0) if name == DENSE else compressing(name, options)
    method = make_method(name, **options)
    costs = MethodCosts.of(method, workers, network, line, profile.layout)
    lines = line.lines if isinstance(line, Repeated) else ()
    return _Cost(name, options, costs, tuple(costs.on(network, each) for each in lines))


def _choice(cost: _Cost, dense: _Cost, profile: Profile, schedules: Sequence[str]) -> Choice:
    """A method under its best schedule."""
    timelines = dict(_timelines(cost.costs, profile, schedules))
    if not timelines:
        raise ConfigError(f"{cost.name} runs under none of the schedules {', '.join(schedules)}; ask about more")
    schedule = min(timelines, key=lambda name: timelines[name].seconds)
    entries = sum(profile.entries)
    sent, pays = cost.bytes_sent(entries), _break_even(cost, dense, entries)
    moves = isinstance(make_method(cost.name).momentum, AutoMomentum)
    exchange = cost.costs.whole.seconds(entries)
    seconds = timelines[schedule].seconds
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
        between=_ends(seconds, repeated),
        pays_between=_ends(pays, thresholds),
    )


def _ends(value: float, repeated: Sequence[float]) -> tuple[float, float] | None:
    """The least and the most, with the value that is predicted."""
    return (min(value, *repeated), max(value, *repeated)) if repeated else None


def _timelines(costs: MethodCosts, profile: Profile, schedules: Sequence[str]) -> Iterator[tuple[str, Timeline]]:
    for name in schedules:
        found = SCHEDULES[name](profile, costs)
        if found:
            yield name, found


def _break_even(cost: _Cost, dense: _Cost, entries: int) -> float:
    """Where seconds saved on the wire are those lost in compressing and in further rounds."""
    saved = dense.bytes_sent(entries) - cost.bytes_sent(entries)
    rounds = cost.rounds(entries) - dense.rounds(entries)
    lost = cost.costs.whole.compression(entries) + rounds * cost.costs.whole.network.alpha
    if saved <= 0:
        return 0.0
    return 8e-9 * saved / lost if lost > 0 else math.inf


def _network(bandwidth: str | float | Network) -> Network:
    if isinstance(bandwidth, Network):
        return bandwidth
    if isinstance(bandwidth, str):
        network = PRESETS.get(bandwidth) or parse_bandwidth(bandwidth)
        if network is None:
            raise ConfigError(
                f"bandwidth={bandwidth!r} is none; use one like '1gbit' or '100mbit', a number of Gbit/s, or "
                f"{', '.join(PRESETS)}"
            )
        return network
    return Network(LATENCY, bandwidth)
