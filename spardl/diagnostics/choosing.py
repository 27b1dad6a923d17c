"""Which method and schedule a model wants on a network, before anything is sent: from the cost model.

Seconds are those of the timeline model (``spardl.diagnostics.timeline``): published rounds and words on an alpha-beta
network, and what compressing takes on this machine, which is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.clusters.network import LATENCY, PRESETS, Network, parse_bandwidth
from spardl.clusters.profile import Profile
from spardl.diagnostics.advice import DENSE, Advice, Choice
from spardl.diagnostics.measuring import Compressing, Repeated, measured, profiled
from spardl.diagnostics.timeline.model import Timeline
from spardl.diagnostics.timeline.schedules import SCHEDULES, MethodCosts
from spardl.method.momentum import AutoMomentum
from spardl.method.recipes import make_method
from spardl.schedules.linear import Linear

__all__ = ["ATTACHED", "METHODS", "advise"]

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
