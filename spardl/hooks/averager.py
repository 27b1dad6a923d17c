"""Gradients that come one by one, in any order, and go back as averages: what all handles of a loop share."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError, SpardlError
from spardl.clusters.base import gather_rows
from spardl.clusters.ledger import Ledger
from spardl.clusters.process_group import ProcessFlight, ProcessGroupCluster
from spardl.method.method import Method
from spardl.method.provenance import check_owner, check_whole, compare_if_told, owner_of
from spardl.method.refusals import Refusals, is_due
from spardl.protocol.programs import Phase, Program, Worker, copied
from spardl.schedules.carried import Snapshot, Waiting
from spardl.schedules.engine import Schedule, Training
from spardl.schedules.wfbp import InBackward
from spardl.vector.flat import CopiedGradient

__all__ = [
    "LOOKED",
    "LOOKED_FIRST",
    "OTHERS",
    "SAVED",
    "Averager",
    "Beside",
    "Loads",
    "Meter",
    "Named",
    "Stats",
    "inherit",
]


# What a method has sent and kept, for people and for logs.


_PHASES = (Phase.SELECT, Phase.PACK, Phase.COMMUNICATE, Phase.MERGE)


class Stats(NamedTuple):
    """What one worker did so far, on average over steps; printed, a table with units.

    Attributes:
        steps: synchronizations so far.
        rounds: exchanges of messages in a step.
        words: sent in a step; an index or a value is one word.
        bytes_sent: payload bytes sent in a step. Messages with which ``mg_wfbp`` and ``layer_fusion`` measure the
            network, once, count like all others, in ``rounds``, ``words`` and ``seconds`` as well.
        dense_bytes: payload bytes that a ring all-reduce of the same gradients would send in a step.
        seconds: of a step, by phase: ``select``, ``pack``, ``communicate``, ``merge``; they pass beside the backward
            pass. The handle's first step, in which much is compiled and set up, is left out once there is another.
        refused: gradients (of a group of parameters) left out so far, since they were not finite, or cut, since a sum
            overflowed: those of all workers, who tell one another after steps 1, 2, 4, ..., 64, and every 64th; of
            ``all_reduce``, those of this worker.
        residual_ratio: norm of what this worker carries over, as a multiple of the norm of what a step adds (its
            gradient, or its update where the optimizer's state is moved), which is measured in every 16th step;
            ``None`` if that is not known. It grows at first, and should then stay.
        residual_age: steps that an entry waits in the mean, by Little's law: the sum of the magnitudes that are carried
            over, as a multiple of that of what a step adds.
    """

    steps: int
    rounds: float
    words: float
    bytes_sent: float
    dense_bytes: float
    seconds: dict[str, float]
    refused: int
    residual_ratio: float | None = None
    residual_age: float | None = None

    @property
    def share(self) -> float:
        """Bytes sent, as a share of those that dense would send; 0 for one worker alone, who sends nothing."""
        return self.bytes_sent / self.dense_bytes if self.dense_bytes else 0.0

    def __str__(self) -> str:
        waiting = "unknown"
        if self.residual_ratio is not None and self.residual_age is not None:
            waiting = f"{self.residual_ratio:.3g} x what a step adds, some {self.residual_age:.3g} steps old"
        rows = [
            ("steps", f"{self.steps:,}"),
            ("rounds", f"{self.rounds:,.4g} a step"),
            ("words", f"{self.words:,.0f} a step"),
            ("sent", f"{self.bytes_sent:,.0f} bytes a step, {self.share:.2%} of dense ({self.dense_bytes:,.0f})"),
            *((phase, f"{1000 * seconds:,.3f} ms a step") for phase, seconds in self.seconds.items()),
            ("refused", f"{self.refused:,} gradients"),
            ("residual", waiting),
        ]
        return "\n".join(f"{name:<12} {text}" for name, text in rows)


class _Counts(NamedTuple):
    steps: int
    rounds: int
    words: int
    bytes_sent: int
    seconds: dict[str, float]


class Meter:
    """Makes averages over steps of what a worker's ledger counts.

    Args:
        ledger: of the worker.
        size: number of workers.

    Attributes:
        steps: that are over.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger, self._size = ledger, size
        self.steps = 0
        self._since = self._timed = self._counts(0)
        self._refused = 0

    def step(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.steps == 1:
            self._timed = self._counts(1)

    def reset(self, refused: int) -> None:
        """Begins to count anew; ``refused``: gradients left out so far."""
        self._since = self._timed = self._counts(self.steps)
        self._refused = refused

    def stats(self, nbytes: float, refused: int, waiting: Waiting | None = None, *, under_way: bool = False) -> Stats:
        """Averages over the steps since ``reset``.

        Args:
            nbytes: bytes of the gradients of a step.
            refused: gradients left out so far.
            waiting: what is carried over.
            under_way: whether a step has begun that is not over, and counts.
        """
        now = self._counts(self.steps + under_way)
        since, timed = self._since, self._timed if now.steps > self._timed.steps else self._since
        each, each_timed = max(1, now.steps - since.steps), max(1, now.steps - timed.steps)
        return Stats(
            now.steps - since.steps,
            (now.rounds - since.rounds) / each,
            (now.words - since.words) / each,
            (now.bytes_sent - since.bytes_sent) / each,
            2 * nbytes * (self._size - 1) / self._size,
            {phase: (seconds - timed.seconds[phase]) / each_timed for phase, seconds in now.seconds.items()},
            max(0, refused - self._refused),
            waiting.norm if waiting else None,
            waiting.age if waiting else None,
        )

    def _counts(self, steps: int) -> _Counts:
        ledger = self._ledger
        seconds = {phase.value: ledger.seconds[phase] + ledger.beside[phase] for phase in _PHASES}
        return _Counts(steps, ledger.rounds, ledger.words, ledger.bytes_sent, seconds)


# What every saved state has, besides its owner.
SAVED: Mapping[str, Any] = MappingProxyType({"names": [], "groups": [], "skipped": [], "factor": 1.0})

OTHERS = "this state is of other parameters, or of another bucket_mb; load it where it was saved"

# How many steps there are to one in which somebody looks whether averages were changed before they are used.
LOOKED = 16
# Until this step, somebody looks in each.
LOOKED_FIRST = 20
# For how many steps after a discarded one there are copies to go back to.
_UNDONE = 128
_VECTORS = ("memory", "velocity", "variance")

T = TypeVar("T")


class Named(NamedTuple):
    """A parameter and its name."""

    name: str
    parameter: nn.Parameter


class Beside(ProcessGroupCluster):
    """Workers whose own group is the caller's: everything goes through another one, which has our timeout."""

    # A handle reports all that it sends for its schedule; the trainer's records hold training alone.
    counts_calibration = True

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs this worker's program in the other thread, and waits for it."""
        return self._waited_for(self.flight(programs))

    def run_aside(self, programs: Sequence[Program[T]]) -> list[T]:
        """Likewise what is no part of training."""
        return self._waited_for(self.flight(programs, counted=False))

    def _waited_for(self, flight: ProcessFlight[T]) -> list[T]:
        flight.release(0)
        return [flight.wait(0)]


class Loads:
    """Whether this worker, or another, loaded a state that may differ from the others'.

    Only the worker that loads knows of it, so workers tell one another: one byte, in each of the first steps of the
    handle and then in every ``LOOKED``-th, since it is a round trip on a slow network. Workers that differ after a load
    are refused at most ``LOOKED`` steps later.

    Attributes:
        steps: of the handle: equal on all workers, whatever a state says that only some of them loaded.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._loaded = False

    def note(self) -> None:
        """Is told that this worker loaded a state."""
        self._loaded = True

    def step(self, worker: Worker, facts: Callable[[], Mapping[str, str]], device: torch.device) -> list[Program[None]]:
        """Counts a step that begins.

        Args:
            worker: of this process.
            facts: gives what must be equal on all workers, by name.
            device: where messages live.

        Returns:
            The program with which all workers compare what they have if somebody loaded a state, if it is time for it.
        """
        self.steps += 1
        if worker.size == 1 or (self.steps > LOOKED_FIRST and self.steps % LOOKED != 1):
            return []
        told, self._loaded = self._loaded, False
        return [compare_if_told(worker, told, facts, device)]


class Averager:
    """The gradients of some parameters and their averages over all workers.

    In each step, ``put`` every gradient once, in any order; then ``wait``; then ``take`` the averages. In the first
    one, workers compare what they were given, and after a load what they loaded, within 16 steps. Parameters have the
    numbers that ``gradient`` gives them.

    Args:
        method: how to average.
        schedule: in which groups.
        training: what is trained; its gradients are copies.
        cluster: the workers.
        given: what else all workers must be given the same, by name.
        update: gives what the optimizer makes of averages, by name, which must be equal where workers compare.

    Raises:
        ConfigError: if the method does not run on so many workers.
    """

    def __init__(
        self,
        method: Method,
        schedule: Schedule,
        training: Training,
        cluster: Beside,
        given: Mapping[str, Any],
        update: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        method.communicator.check_workers(cluster.size)
        assert isinstance(training.gradient, CopiedGradient)
        self.method, self.gradient, self._cluster = method, training.gradient, cluster
        self.known = frozenset(self.gradient.parameters)
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.gradient.parameters]
        self.scaled = training.scale is not None
        engine = schedule.make(method, cluster, training)
        assert isinstance(engine, InBackward)
        self.engine = engine
        (worker,) = cluster.local_workers
        self._worker = worker
        self._owner = owner_of(method, worker.rank, worker.size)
        fixed = {**given, "scaler": self.scaled}
        self._given: Callable[[], dict[str, Any]] = lambda: {**fixed, **update()}
        self._agreed, self._loads = False, Loads()
        self._refusals = Refusals(worker.size)
        self.begun = self._sending = self._sent = False
        self._lent: set[int] = set()
        self.undoing = Undoing(self)
        self._shelved: dict[int, tuple[Tensor, ...]] = {}

    # --- a step

    def begin(self) -> None:
        """Begins a step, unless it has begun.

        Raises:
            ConfigError: on all workers, in the first step, if they were not given the same.
            PeerError: if another worker is lost, or does not come to the first step in time.
        """
        if self.begun:
            return
        self._cluster.check_alive()
        look = self._loads.step(self._worker, lambda: self.engine.facts(self._given()), self._cluster.device)
        if not self._agreed:
            self.engine.compare(self._given())
            self._agreed = True
        elif look:  # beside the computation; if workers differ, this and all that is sent next fail on all of them
            self._cluster.flight(look, counted=False).release(0)
        self.engine.begin()
        self.begun = True
        self._sending = self._sent = False

    def put(self, number: int, gradient: Tensor | None) -> None:
        """Takes over a parameter's gradient.

        Args:
            number: of the parameter.
            gradient: of its shape; ``None`` is one of zeros.

        Raises:
            SpardlError: if it was there already in this step.
            ConfigError: if it is a sparse tensor, or the parameter's type or device has changed; on all workers, if
                they were not given the same.
            PeerError: if another worker is lost in the first step, or does not come to it in time.
        """
        name = self.gradient.names[number]
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(f"the gradient of {name} is sparse; use sparse=False where it is made")
        self.check_kinds([number])
        self.begin()
        self._send()
        if not self.engine.awaits(number):
            raise SpardlError(
                f"a second gradient of {name} came before the first was averaged; leave all backward passes of a step "
                "but the last to no_sync(); if reentrant checkpoints share a layer, pass use_reentrant=False, or run "
                "the backward pass in no_sync() and then call wait(); after a pass that failed, let all workers call "
                "wait()"
            )
        self._sent = True
        self.gradient.put(number, None if number in self._shelved else gradient)
        self.engine.complete(number)

    def check_kinds(self, numbers: Iterable[int] | None = None) -> None:
        """Refuses parameters, all unless ``numbers`` are given, that have another type or device than at first."""
        for number in range(len(self._kinds)) if numbers is None else numbers:
            parameter, (dtype, device) = self.gradient.parameters[number], self._kinds[number]
            if parameter.dtype is not dtype or parameter.device != device:
                raise ConfigError(
                    f"{self.gradient.names[number]} was {dtype} on {device} when this handle was made, and is "
                    f"{parameter.dtype} on {parameter.device}; convert or move the model first, then make the handle"
                )

    def lend(self, numbers: Sequence[int], buffer: Tensor | None) -> None:
        """Lets gradients be averaged where they are, if they are a group and nothing is carried over.

        Args:
            numbers: of the parameters whose gradients they are.
            buffer: that has them in this order, end to end, shape (m,); ``None`` if they are elsewhere.
        """
        whole = None if buffer is None else self._whole(numbers, buffer)
        if whole is None:
            self.take_back(numbers)
        elif buffer is not None:
            self.engine.carried.lend(whole, buffer)
            self._lent.add(whole)

    def _whole(self, numbers: Sequence[int], buffer: Tensor) -> int | None:
        """The group that consists of some parameters, in this order."""
        if not self.engine.carried.shares:
            return None
        kind = (tuple(numbers), buffer.dtype)
        groups = enumerate(zip(self.engine.carried.groups, self.gradient.vectors, strict=True))
        return next((at for at, (group, own) in groups if kind == (tuple(range(*group.tensors)), own.dtype)), None)

    def take_back(self, numbers: Sequence[int] | None = None) -> None:
        """Gradients of some parameters, of all unless ``numbers`` are given, are copied again."""
        groups = self.engine.carried.groups
        for lent in sorted(self._lent):
            if numbers is None or any(number in range(*groups[lent].tensors) for number in numbers):
                self.engine.carried.lend(lent, torch.empty_like(self.gradient.vectors[lent]))
                self._lent.remove(lent)

    def succeed(self, other: Averager) -> None:
        """Goes on in another order where ``other``, whose method carries nothing over, has ended a step."""
        self.engine.succeed(other.engine)
        self._agreed, self._loads, self._refusals = other._agreed, other._loads, other._refusals

    def note(self, number: int) -> None:
        """Is told that a backward pass, of whatever part of a step, has a gradient for parameter ``number``."""
        if self.begun:
            self._send()
        self.engine.note(number)

    def _send(self) -> None:
        if not self._sending:
            self.engine.before_backward(last=True)
            self.undoing.begin()
            self._sending = True

    def shelve(self, numbers: Iterable[int]) -> None:
        """Leaves parameters out of a step: its gradients of them do not count, and what is carried over of them rests.

        Args:
            numbers: of the parameters.

        Raises:
            ConfigError: on all workers, in the first step, if they were not given the same.
            PeerError: if another worker is lost in the first step, or does not come to it in time.
        """
        self.begin()
        if not self.method.carries:
            return
        self._shelved = {number: tuple(each.clone() for each in self.engine.carried.of(number)) for number in numbers}
        for number in self._shelved:
            for each in self.engine.carried.of(number):
                each.zero_()
        self.engine.carried.changed()

    def _unshelve(self) -> None:
        for number, kept in self._shelved.items():
            for into, each in zip(self.engine.carried.of(number), kept, strict=True):
                into.copy_(each)
        if self._shelved:
            self._shelved = {}
            self.engine.carried.changed()

    def missing(self) -> list[int]:
        """The parameters whose gradients are not there yet."""
        numbers = range(len(self.gradient.names))
        return [number for number in numbers if not (self.begun and self._sending) or self.engine.awaits(number)]

    def wait(self) -> None:
        """Waits until all groups that were complete are averaged; then the next step may begin.

        Raises:
            PeerError: if another worker is lost, or does not answer in time.
        """
        if self.receive():
            self.tell_refusals()

    def receive(self) -> bool:
        """Waits likewise, but leaves it to the caller to have refusals told, by all workers at the same time.

        Returns:
            Whether a step had begun.

        Raises:
            PeerError: if another worker is lost, or does not answer in time.
        """
        if not self.begun:
            return False
        self.begun = False
        self.engine.finish()
        self._unshelve()
        return True

    def give_up(self) -> None:
        """Ends a step whose last backward pass ended early, if there is one."""
        if self.begun and self._sent:
            self.begun = False
            self.engine.give_up()
            self._unshelve()

    def tell_refusals(self, advice: str | None = None) -> None:
        """The user at once, the other workers now and then.

        Args:
            advice: what is said after it; ``None``: how a GradScaler learns of it, where none was given.
        """
        (own,) = self.engine.carried.refusals()
        line = self._refusals.notice({self._worker.rank: own})
        if line:
            if advice is None:
                advice = "" if self.scaled else ". A GradScaler learns of it only if it is given (scaler=scaler)"
            warnings.warn(f"spardl: {line}{advice}.", stacklevel=3)
        if is_due(self._loads.steps) and self._cluster.size > 1:
            row = torch.tensor([own.number], device=self._cluster.device)
            self._refusals.learn([int(each) for each in gather_rows(self._cluster, [row])])

    def is_still(self, gradient: Tensor, before: Tensor) -> bool:
        """Whether nobody changed a gradient, but for a scaler that took its scale off.

        Args:
            gradient: as it is, of any shape.
            before: as it was, of the same shape as now.
        """
        multiples = {1.0, 1 / self.engine.scale}
        return any(torch.allclose(gradient, before * each, rtol=1e-2) for each in multiples)

    # --- what lasts

    @property
    def refused(self) -> int:
        """Gradients (of a group) that all workers left out, as they were not finite, or cut; see ``Refusals``."""
        return self._refusals.total

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step, as plain data that shares no memory with it."""
        return {
            "owner": dict(self._owner),
            "names": self.gradient.forward()[0],
            **{name: copied(value) for name, value in self.engine.state_dict().items()},
        }

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Accepts what ``state_dict`` gave on the same rank, and raises as ``load_state_dict``; changes nothing."""
        check_owner(values, self._owner, "groups")
        _check_state(values, self.engine, self.gradient.forward()[0])

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                other groups, or lacks something; nothing is changed then.
        """
        self.check_state(values)
        self.take_back()
        self.engine.load_state_dict(0, {name: copied(value) for name, value in values.items()})
        self.undoing.forget()
        self._loads.note()

    def forget(self) -> None:
        """Begins as in the first step."""
        self.take_back()
        self.engine.forget()
        self.undoing.forget()
        self._loads.note()


class Undoing:
    """Takes back steps of an averager whose averages the loop discards.

    Args:
        averager: which has this, and outlives it.
    """

    def __init__(self, averager: Averager) -> None:
        self._averager = weakref.ref(averager)
        self._left, self._due = 0, False
        self._kept: Snapshot | None = None

    def begin(self) -> None:
        """Is called when nothing of the last step is under way any more, and nothing of the next one yet."""
        if self._due:
            self.undo()
        self._left = max(0, self._left - 1)
        averager = self._averager()
        assert averager is not None
        self._kept = Snapshot.of(averager.engine.carried, averager.engine.scale) if self._left else None

    def undo(self, *, landing: bool = False) -> None:
        """The averages of the last step were discarded: what is carried over becomes what it was before that step.

        The first time there is no copy of it, and averages are given back to the residuals. Then a copy is made in each
        step, until none was discarded for many steps.

        Args:
            landing: whether that step is under way still: it is undone when the next backward pass begins.
        """
        averager = self._averager()
        assert averager is not None
        self._due = landing and averager.method.carries
        if landing or not averager.method.carries:
            return
        carried = averager.engine.carried
        if self._kept is not None:
            self._kept.restore(carried, averager.engine.scale)
        elif carried.remembers:
            for group, average in zip(carried.groups, averager.gradient.vectors, strict=True):
                group.states[0].change(more=average)
        self._left, self._kept = _UNDONE, None

    def forget(self) -> None:
        """What is carried over was replaced: no earlier step can be undone."""
        self._due, self._kept = False, None


def inherit(into: Averager, other: Averager) -> None:
    """Lets an averager go on with what another method carried over, where it carries the same kind of thing.

    Args:
        into: goes on.
        other: of the same parameters, in other groups or not; nothing of it may be under way.
    """
    other.engine.settle()
    moments = type(into.method.momentum) is type(other.method.momentum) and into.method.momentum.remembers
    both = into.method.residual.remembers and other.method.residual.remembers
    mine, theirs = into.engine.carried, other.engine.carried
    factor = into.engine.scale / other.engine.scale
    places = {parameter: place for place, parameter in enumerate(other.gradient.parameters)}
    for number, parameter in enumerate(into.gradient.parameters):
        pairs = zip(mine.of(number), theirs.of(places[parameter]), strict=True)
        kinds = ((both, factor), (moments, factor), (moments, 1.0))
        for (vector, given), (wanted, multiple) in zip(pairs, kinds, strict=True):
            if wanted and vector.shape == given.shape:
                vector.copy_(given * multiple)
    if moments:
        mine.count_updates(theirs.updates)
    mine.changed()


def _check_state(values: Mapping[str, Any], engine: InBackward, names: list[str]) -> None:
    """Accepts a state that an averager can continue from; changes nothing.

    Args:
        values: the state.
        engine: of the averager.
        names: of its parameters.

    Raises:
        ConfigError: if the state is of other parameters or groups, or lacks something, or something in it is of another
            kind.
    """
    check_whole(values, SAVED)
    if values["names"] != names:
        raise ConfigError(OTHERS)
    groups, mine = values["groups"], engine.carried.state_dicts()
    check_whole(groups, mine if len(groups) == len(mine) else [mine[0]] * len(groups), "groups")
    if engine.fixed and (len(groups) != len(mine) or _sizes(groups) != _sizes(mine)):
        raise ConfigError(OTHERS)
    try:
        engine.check_state(values)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"this state is damaged: {error.args[0]}; load what state_dict() gave") from error


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [getattr(group.get(name), "shape", None) for group in groups for name in _VECTORS]
