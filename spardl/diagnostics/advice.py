"""What ``spardl.advise`` answers: the ways to train a model on a network, the fastest first, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from spardl.clusters.network import Network

__all__ = ["CLEAR", "DENSE", "LEFT", "Advice", "Choice"]

DENSE = "none"
"""The method without compression."""
CLEAR = 1.05
"""Less is no gain: in the network lab the model was off by about as much (docs/schedules.md)."""
# Share of computing that exchanges may take before local steps are worth a thought.
_WAITED = 0.05
# By steps between two exchanges, what is left of dense training's gain in loss over one worker alone: DiLoCo's rows of
# the table in docs/learning.md.
LEFT: Mapping[int, float] = MappingProxyType({15: 0.22, 30: 0.03})
# The least gain that is not 0% when rounded.
_SEEN = 1.005
# Below, gains are shown in percent: two digits of a factor would hide them.
_SMALL = 1.1
# Losses as without compression, to what seeds differ by (docs/learning.md).
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
                f"(docs/learning.md), and its seconds by at most {CLEAR - 1:.0%} from those of the fastest, "
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
        f"{left} (one seed; docs/learning.md, Local steps)"
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
