"""Gradient averaging shared by all handles: copies gradients in, averages them group by group, and copies averages out.

A handle is the object that ``attach`` and similar functions return. A group is a range of parameters whose gradients
are averaged together. The module also defines the statistics of a handle (:class:`Stats`), the process group over which
it communicates, and the checks that detect workers whose settings or loaded states differ.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError, SpardlError
from spardl.clusters.base import gather_rows
from spardl.clusters.ledger import Ledger
from spardl.clusters.process_group import ProcessGroupCluster, ProcessWork
from spardl.method.method import Method
from spardl.method.provenance import check_owner, check_whole, compare_if_loaded, owner_of
from spardl.method.refusals import NonFiniteCounts, NonFiniteReports, is_due
from spardl.protocol.programs import Phase, Program, Worker, clone_data
from spardl.schedules.engine import Schedule, Training
from spardl.schedules.gradient_state import ResidualSize, Snapshot, step_counts
from spardl.schedules.wfbp import InBackward
from spardl.vector.flat import CopiedGradient

__all__ = [
    "ALWAYS_CHECKED",
    "CHECK_INTERVAL",
    "REQUIRED_KEYS",
    "WRONG_PARAMETERS",
    "Averager",
    "LoadChecks",
    "Meter",
    "Named",
    "SideGroup",
    "Stats",
    "inherit",
]


# --- statistics


_PHASES = (Phase.SELECT, Phase.PACK, Phase.COMMUNICATE, Phase.MERGE)


class Stats(NamedTuple):
    """Communication statistics of one worker, averaged over steps; ``print`` shows them as a table with units.

    Attributes:
        steps: Number of synchronizations.
        rounds: Number of message exchanges per step.
        words: Number of words sent per step; an index or a value is one word.
        bytes_sent: Number of payload bytes sent per step. The messages with which ``mg_wfbp`` and ``layer_fusion``
            measure the network once are included here and in ``rounds``, ``words`` and ``seconds``.
        dense_bytes: Number of payload bytes that a ring all-reduce of the same gradients would send per step:
            2(P-1)/P times their size.
        seconds: Time per step in seconds, by phase: ``select``, ``pack``, ``communicate``, ``merge``. These times
            overlap with the backward pass. The first step of a handle (compilation, setup) is excluded once a second
            step has ended.
        refused: Number of gradients (one per group and step) that were skipped because they were not finite, or clipped
            because a sum overflowed. It covers all workers, which exchange their counts after steps 1, 2, 4, ..., 64
            and after every 64th step; for ``all_reduce``, it covers this worker only.
        residual_ratio: 2-norm of the residual, as a multiple of the norm of one step's gradient (with ``optimizer=``:
            of its update), which is measured every 16 steps; ``None`` if unknown. It grows at first and should then
            level off.
        residual_age: Number of steps that an entry spends in the residual on average, by Little's law: L1 norm of the
            residual divided by that of one step's gradient (or update).
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
        """Bytes sent as a share of ``dense_bytes``, for example 0.02; 0 for a single worker, which sends nothing."""
        return self.bytes_sent / self.dense_bytes if self.dense_bytes else 0.0

    def __str__(self) -> str:
        residual = "unknown"
        if self.residual_ratio is not None and self.residual_age is not None:
            residual = f"{self.residual_ratio:.3g} x the norm of one step, mean age {self.residual_age:.3g} steps"
        rows = [
            ("steps", f"{self.steps:,}"),
            ("rounds", f"{self.rounds:,.4g} per step"),
            ("words", f"{self.words:,.0f} per step"),
            ("sent", f"{self.bytes_sent:,.0f} bytes per step, {self.share:.2%} of dense ({self.dense_bytes:,.0f})"),
            *((phase, f"{1000 * seconds:,.3f} ms per step") for phase, seconds in self.seconds.items()),
            ("refused", f"{self.refused:,} gradients"),
            ("residual", residual),
        ]
        return "\n".join(f"{name:<12} {text}" for name, text in rows)


class _Counts(NamedTuple):
    steps: int
    rounds: int
    words: int
    bytes_sent: int
    seconds: dict[str, float]


class Meter:
    """Averages a worker's communication counts (from its ledger, which records all messages) over steps.

    Args:
        ledger: Record of the messages and times of this worker.
        size: Number of workers, from which the bytes of a ring all-reduce are computed.

    Attributes:
        steps: Number of completed steps.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger, self._size = ledger, size
        self.steps = 0
        self._since = self._timed = self._counts(0)
        self._refused = 0

    def step(self) -> None:
        """Counts a completed step."""
        self.steps += 1
        if self.steps == 1:
            # Times start here: the first step includes compilation and connection setup.
            self._timed = self._counts(1)

    def reset(self, refused: int) -> None:
        """Restarts all counts at 0; ``refused`` is the total number of gradients skipped so far, as for ``stats``."""
        self._since = self._timed = self._counts(self.steps)
        self._refused = refused

    def stats(
        self, nbytes: float, refused: int, waiting: ResidualSize | None = None, *, under_way: bool = False
    ) -> Stats:
        """Returns averages over the steps since ``reset``.

        Args:
            nbytes: Size of the gradients of one step in bytes.
            refused: Total number of gradients skipped so far, including those before ``reset``.
            waiting: Size of the residual (the entries that have not been sent yet); ``None`` if unknown.
            under_way: Whether to count a step that has begun but not ended.
        """
        now = self._counts(self.steps + under_way)
        since, timed = self._since, self._timed if now.steps > self._timed.steps else self._since
        # At least 1, so that a handle without any step reports zeros.
        counted, counted_timed = max(1, now.steps - since.steps), max(1, now.steps - timed.steps)
        return Stats(
            now.steps - since.steps,
            (now.rounds - since.rounds) / counted,
            (now.words - since.words) / counted,
            (now.bytes_sent - since.bytes_sent) / counted,
            2 * nbytes * (self._size - 1) / self._size,
            {phase: (seconds - timed.seconds[phase]) / counted_timed for phase, seconds in now.seconds.items()},
            # A loaded state can lower the total below the count at reset().
            max(0, refused - self._refused),
            waiting.norm if waiting else None,
            waiting.age if waiting else None,
        )

    def _counts(self, steps: int) -> _Counts:
        ledger = self._ledger
        seconds = {phase.value: ledger.seconds[phase] + ledger.overlapped[phase] for phase in _PHASES}
        return _Counts(steps, ledger.rounds, ledger.words, ledger.bytes_sent, seconds)


# --- averages of gradients


# Keys that every saved state has, in addition to its owner.
REQUIRED_KEYS: Mapping[str, Any] = MappingProxyType({"names": [], "groups": [], "skipped": [], "factor": 1.0})

WRONG_PARAMETERS = (
    "this state belongs to other parameters or another bucket_mb; load it into a handle of the same model and bucket_mb"
)

# Checks that read gradients or cost a round trip run in each of the first ``ALWAYS_CHECKED`` steps, and then once in
# every ``CHECK_INTERVAL`` steps.
CHECK_INTERVAL = 16
ALWAYS_CHECKED = 20
# After a step whose averages were discarded, number of steps that take a snapshot, so that the next discarded step can
# be undone exactly.
_SNAPSHOT_STEPS = 128
_VECTORS = ("memory", "velocity", "variance")

T = TypeVar("T")


class Named(NamedTuple):
    """A parameter and its name."""

    name: str
    parameter: nn.Parameter


class SideGroup(ProcessGroupCluster):
    """Cluster of a process group's workers that communicates over an additional group, with the handle's timeout."""

    # A handle reports all traffic of its schedule, whereas the trainer's records contain training traffic only.
    counts_calibration = True

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs this worker's program (its sequence of messages) in the communication thread; waits for the result.

        Args:
            programs: List with the program of this worker.

        Returns:
            List with the result of the program.
        """
        return self._result(self.enqueue(programs))

    def run_uncounted(self, programs: Sequence[Program[T]]) -> list[T]:
        """Runs a program that is not part of training, such as a check, without counting its messages."""
        return self._result(self.enqueue(programs, counted=False))

    def _result(self, flight: ProcessWork[T]) -> list[T]:
        flight.release(0)
        return [flight.wait(0)]


class LoadChecks:
    """Detects workers that have loaded different states, a few steps after the load.

    A worker does not know whether others have loaded a state, so all workers exchange one byte. This takes a round
    trip, so it happens in each of the first ``ALWAYS_CHECKED`` steps and then every ``CHECK_INTERVAL`` steps. Workers
    whose states differ after a load therefore fail at most ``CHECK_INTERVAL`` steps later.

    Attributes:
        steps: Number of steps of the handle, equal on all workers even if only some of them loaded a state.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._loaded = False

    def note(self) -> None:
        """Records that this worker has loaded a state."""
        self._loaded = True

    @property
    def due(self) -> bool:
        """Whether the next step checks the states."""
        return self.steps < ALWAYS_CHECKED or self.steps % CHECK_INTERVAL == 0

    def step(self, worker: Worker, facts: Callable[[], Mapping[str, str]], device: torch.device) -> list[Program[None]]:
        """Counts a step that begins, and returns the check to run in this step, if any.

        Args:
            worker: Rank and number of workers.
            facts: Function that returns the values that must be equal on all workers, by name.
            device: Device of the messages.

        Returns:
            An empty list in steps without a check. Otherwise, a list with one program for this worker to run: if any
            worker loaded a state, it compares the facts of all workers.
        """
        due = self.due
        self.steps += 1
        if worker.size == 1 or not due:
            return []
        loaded, self._loaded = self._loaded, False
        return [compare_if_loaded(worker, loaded, facts, device)]


class Averager:
    """Averages the gradients of some parameters over all workers.

    In each step, ``put`` every gradient once, in any order, and call ``wait``; then copy each average with
    ``gradient.take``. Workers compare their settings in the first step, and their states within 16 steps after a load.

    Args:
        method: Method that averages the gradients.
        schedule: Schedule that divides the parameters into groups.
        training: Model, gradients and options of the training; its gradient storage must copy gradients.
        cluster: Cluster that connects the workers.
        given: Further settings that must be equal on all workers, by name.
        update: Function that returns settings of the optimizer that must be equal on all workers, by name.

    Attributes:
        numbers: Number of each parameter (of any shape) in the order of the gradient storage.

    Raises:
        ConfigError: If the method does not support the number of workers.
    """

    def __init__(
        self,
        method: Method,
        schedule: Schedule,
        training: Training,
        cluster: SideGroup,
        given: Mapping[str, Any],
        update: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        method.communicator.check_workers(training.nodes.count(cluster.size))
        assert isinstance(training.gradient, CopiedGradient)
        self.method, self.gradient, self._cluster = method, training.gradient, cluster
        self.numbers: dict[Tensor, int] = {each: number for number, each in enumerate(self.gradient.parameters)}
        self._placements = [(parameter.dtype, parameter.device) for parameter in self.gradient.parameters]
        self.scaled = training.scale is not None
        engine = schedule.make(method, cluster, training)
        assert isinstance(engine, InBackward)
        self.engine = engine
        (worker,) = cluster.local_workers
        self._worker = worker
        self._owner = owner_of(method, worker.rank, worker.size, training.nodes.ranks_per_node)
        # Settings of the optimizer may change during training, so they are read at each comparison.
        fixed = {**given, "scaler": self.scaled}
        self._given: Callable[[], dict[str, Any]] = lambda: {**fixed, **update()}
        self._compared, self._loads = False, LoadChecks()
        self._refusals = NonFiniteReports(worker.size)
        self.begun = self._in_backward = self._has_gradients = False
        self._lent: set[int] = set()
        self.undo = StepUndo(self)
        self._excluded: dict[int, tuple[Tensor, ...]] = {}

    # --- a step

    def begin(self) -> None:
        """Begins a step, unless it has already begun.

        Raises:
            ConfigError: On all workers, in the first step, if their settings differ.
            PeerError: If another worker is lost or does not reach the first step in time.
        """
        if self.begun:
            return
        self._cluster.check_alive()  # otherwise the communication thread would raise a less helpful error
        # Read now: the check may run after step(), when the learning rate has changed. But synchronizations before it
        # (of dear) still count their steps.
        facts = self.engine.facts(self._given()) if self._loads.due else {}
        state = self.engine.gradient_state
        check = self._loads.step(self._worker, lambda: facts | {"step": step_counts(state)}, self._cluster.device)
        if not self._compared:
            self.engine.compare(self._given())
            self._compared = True
        elif check:
            # Overlaps with computation. If workers differ, this and everything sent afterwards fails on all of them.
            self._cluster.enqueue(check, counted=False).release(0)
        self.engine.begin()
        self.begun = True
        self._in_backward = self._has_gradients = False

    def put(self, number: int, gradient: Tensor | None) -> None:
        """Copies the gradient of a parameter, and starts to average its group once the group is complete.

        Args:
            number: Number of the parameter.
            gradient: Gradient of the parameter, of its shape; ``None`` counts as zeros.

        Raises:
            SpardlError: If this step already has a gradient of the parameter.
            ConfigError: If the gradient is sparse, or the parameter's dtype or device has changed; on all workers in
                the first step, if their settings differ.
            PeerError: If another worker is lost in the first step or does not reach it in time.
        """
        name = self.gradient.names[number]
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigError(f"the gradient of {name} is sparse; create its layer with sparse=False")
        self.check_parameters([number])
        self.begin()
        self._enter_backward()
        if not self.engine.awaits(number):
            raise SpardlError(
                f"{name} received a second gradient before its first one was averaged; run all backward passes of a "
                "step except the last in no_sync(); if checkpointed blocks share a layer, use use_reentrant=False, or "
                "run the backward pass in no_sync() and then call wait(); after a failed backward pass, call wait() on "
                "all workers"
            )
        self._has_gradients = True
        # An excluded parameter contributes zeros, so that its group still completes.
        self.gradient.put(number, None if number in self._excluded else gradient)
        self.engine.complete(number)

    def check_parameters(self, numbers: Iterable[int] | None = None) -> None:
        """Raises ``ConfigError`` if the dtype or device of a parameter in ``numbers`` (all if ``None``) has changed."""
        for number in range(len(self._placements)) if numbers is None else numbers:
            parameter, (dtype, device) = self.gradient.parameters[number], self._placements[number]
            if parameter.dtype is not dtype or parameter.device != device:
                raise ConfigError(
                    f"{self.gradient.names[number]} was {dtype} on {device} when this handle was created and is now "
                    f"{parameter.dtype} on {parameter.device}; convert or move the model before creating the handle"
                )

    def lend(self, numbers: Sequence[int], buffer: Tensor | None) -> None:
        """From now on, averages one group in the caller's memory instead of a copy, if the method has no residual.

        Args:
            numbers: Numbers of the parameters; if they do not form exactly one group, gradients are copied as before.
            buffer: Their gradients, one after the other in this order, shape (m,); ``None`` if they are not contiguous.
        """
        group = None if buffer is None else self._group_of(numbers, buffer)
        if group is None:
            self.take_back(numbers)
        elif buffer is not None:
            self.engine.gradient_state.lend(group, buffer)
            self._lent.add(group)

    def _group_of(self, numbers: Sequence[int], buffer: Tensor) -> int | None:
        if not self.engine.gradient_state.shares:
            return None
        wanted = (tuple(numbers), buffer.dtype)
        groups = enumerate(zip(self.engine.gradient_state.groups, self.gradient.vectors, strict=True))
        return next((at for at, (group, own) in groups if wanted == (tuple(range(*group.tensors)), own.dtype)), None)

    def take_back(self, numbers: Sequence[int] | None = None) -> None:
        """Ends ``lend`` for the groups of the parameters ``numbers`` (all if ``None``): copies gradients again."""
        groups = self.engine.gradient_state.groups
        for lent in sorted(self._lent):
            if numbers is None or any(number in range(*groups[lent].tensors) for number in numbers):
                self.engine.gradient_state.lend(lent, torch.empty_like(self.gradient.vectors[lent]))
                self._lent.remove(lent)

    def continue_from(self, other: Averager) -> None:
        """Takes over the training state of ``other``, which has another order of parameters and no residual."""
        self.engine.continue_from(other.engine)
        self._compared, self._loads, self._refusals = other._compared, other._loads, other._refusals

    def note(self, number: int) -> None:
        """Records that a backward pass has computed a gradient of parameter ``number``."""
        if self.begun:
            self._enter_backward()
        self.engine.note(number)

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self.engine.before_backward(last=True)
            self.undo.begin()
            self._in_backward = True

    def exclude(self, numbers: Iterable[int]) -> None:
        """Excludes parameters from a step: sends zeros for them, and leaves their residuals and moments unchanged.

        Args:
            numbers: Numbers of the parameters.

        Raises:
            ConfigError: On all workers, in the first step, if their settings differ.
            PeerError: If another worker is lost in the first step or does not reach it in time.
        """
        self.begin()
        if not self.method.carries:
            return
        self._excluded = {
            number: tuple(each.clone() for each in self.engine.gradient_state.of(number)) for number in numbers
        }
        # Zeros keep old residuals out of the averages of this step.
        for number in self._excluded:
            for each in self.engine.gradient_state.of(number):
                each.zero_()
        self.engine.gradient_state.changed()

    def _restore_excluded(self) -> None:
        for number, saved in self._excluded.items():
            for target, each in zip(self.engine.gradient_state.of(number), saved, strict=True):
                target.copy_(each)
        if self._excluded:
            self._excluded = {}
            self.engine.gradient_state.changed()

    def missing(self) -> list[int]:
        """Returns the numbers of the parameters whose gradients have not been put in this step."""
        numbers = range(len(self.gradient.names))
        return [number for number in numbers if not (self.begun and self._in_backward) or self.engine.awaits(number)]

    def wait(self) -> None:
        """Waits until all complete groups are averaged, and ends the step.

        Raises:
            PeerError: If another worker is lost or does not answer in time.
        """
        if self.receive():
            self.report_refusals()

    def receive(self) -> bool:
        """Waits like ``wait``, but does not warn of non-finite gradients; call ``report_refusals`` afterwards.

        Returns:
            Whether there was a step to wait for.

        Raises:
            PeerError: If another worker is lost or does not answer in time.
        """
        if not self.begun:
            return False
        self.begun = False
        self.engine.finish()
        self._restore_excluded()
        return True

    def give_up(self) -> None:
        """Ends the current step, if any, without averages, because its last backward pass failed."""
        if self._has_gradients:
            self._abandon()

    def _abandon(self) -> None:
        if self.begun:
            self.begun = False
            self.engine.give_up()
            self._restore_excluded()

    def report_refusals(self, advice: str | None = None) -> None:
        """Warns of non-finite gradients of this worker; in some steps, all workers also exchange their counts.

        Args:
            advice: End of the warning text; ``None`` recommends ``scaler=`` if the handle has no GradScaler.
        """
        (own,) = self.engine.gradient_state.refusals()
        if advice is None:
            advice = "" if self.scaled else "; if you use a GradScaler, pass it to the handle (scaler=scaler)"
        # This count of steps is equal on all workers, even if only some of them have loaded a state.
        report_non_finite(self._refusals, own, self._cluster, advice, exchanges=is_due(self._loads.steps))

    # --- state

    @property
    def refused(self) -> int:
        """Number of gradients (one per group and step) that were not finite or whose sum overflowed, on all workers."""
        return self._refusals.total

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker as plain data that shares no memory with it."""
        return {
            "owner": dict(self._owner),
            "names": self.gradient.forward()[0],
            **{name: clone_data(value) for name, value in self.engine.state_dict().items()},
        }

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Raises ``ConfigError`` if ``load_state_dict`` would reject ``values``; does not change the state."""
        check_owner(values, self._owner, "groups")
        _check_state(values, self.engine, self.gradient.forward()[0])

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank.

        Raises:
            ConfigError: If the state belongs to another rank, world size, method, model or grouping, or is incomplete;
                nothing is changed then.
            PeerError: If a backward pass has failed, and another worker does not finish its synchronizations in time.
        """
        self.check_state(values)
        with self.replacing_state():
            self.engine.load_state_dict(0, {name: clone_data(value) for name, value in values.items()})

    def forget(self) -> None:
        """Resets residuals, moments and counts as before the first step. Raises: as ``load_state_dict``."""
        with self.replacing_state():
            self.engine.reset()

    @contextmanager
    def replacing_state(self) -> Iterator[None]:
        """Ends a step in flight, whose synchronizations use the old residuals, while the engine's state is replaced."""
        only_forward = self.begun and not self._has_gradients
        self._abandon()
        # Loading may regroup, and DDP's buffers belong to the current groups.
        self.take_back()
        yield
        self.undo.forget()
        self._loads.note()
        if only_forward:
            # The step is already counted, and may go on with its backward pass.
            self.engine.begin()
            self.begun, self._in_backward = True, False


def report_non_finite(
    reports: NonFiniteReports, own: NonFiniteCounts, cluster: ProcessGroupCluster, advice: str = "", *, exchanges: bool
) -> None:
    """Warns of new non-finite gradients of this worker.

    Args:
        reports: Counts of all workers, which are updated.
        own: Counts of this worker.
        cluster: Cluster of the workers.
        advice: End of the warning text.
        exchanges: Whether workers also exchange their counts; equal on all of them.

    Raises:
        PeerError: If another worker is lost.
    """
    (rank,) = cluster.local_ranks
    if line := reports.notice({rank: own}):
        warnings.warn(f"spardl: {line}{advice}.", stacklevel=4)
    if exchanges and cluster.size > 1:
        rows = gather_rows(cluster, [torch.tensor([own.number], device=cluster.device)])
        reports.learn([int(row) for row in rows])


class StepUndo:
    """Restores residuals and moments after a step whose averages the training loop has discarded.

    Args:
        averager: Averager that owns this object.
    """

    def __init__(self, averager: Averager) -> None:
        # Weak, because the averager owns this object and should be freed with its last reference.
        self._averager = weakref.ref(averager)
        self._steps_left, self._pending = 0, False
        self._snapshot: Snapshot | None = None

    def begin(self) -> None:
        """Prepares a step; call it when the last step is complete and nothing of the next one has been sent."""
        if self._pending:
            self.last_step()
        self._steps_left = max(0, self._steps_left - 1)
        averager = self._averager()
        assert averager is not None
        self._snapshot = (
            Snapshot.of(averager.engine.gradient_state, averager.engine.scale) if self._steps_left else None
        )

    def last_step(self, *, in_flight: bool = False) -> None:
        """Restores residuals and moments to their values before the last step.

        The first call finds no snapshot of these values, so the averages are added back to the residuals instead. Then
        a snapshot is taken in each step, until none has been needed for ``_SNAPSHOT_STEPS`` steps.

        Args:
            in_flight: Whether the last step is still being averaged. It is then undone when the next backward pass
                begins.
        """
        averager = self._averager()
        assert averager is not None
        self._pending = in_flight and averager.method.carries
        if in_flight or not averager.method.carries:
            return
        carried = averager.engine.gradient_state
        if self._snapshot is not None:
            self._snapshot.restore(carried, averager.engine.scale)
        elif carried.remembers:
            # Sent entries are lost on each worker, but the sum of all residuals is restored.
            for group, average in zip(carried.groups, averager.gradient.vectors, strict=True):
                group.states[0].change(more=average)
        self._steps_left, self._snapshot = _SNAPSHOT_STEPS, None

    def forget(self) -> None:
        """Deletes the snapshot, because the state was replaced and no earlier step can be undone."""
        self._pending, self._snapshot = False, None


def inherit(into: Averager, other: Averager) -> None:
    """Copies residuals and moments from one averager to another; skips those that one of the two methods does not keep.

    All moments start from zero if the optimizers differ in kind, Muon updates different matrices, or only one of the
    methods keeps a first moment: all parameters share one count of updates, which would be wrong for new moments.

    Args:
        into: Averager to copy to.
        other: Averager to copy from. It has the same parameters, in any groups, and no step is in flight.
    """
    other.engine.return_unused()
    both = into.method.residual.remembers and other.method.residual.remembers
    mine, theirs = into.engine.gradient_state, other.engine.gradient_state
    places = {parameter: place for place, parameter in enumerate(other.gradient.parameters)}
    alike = (
        type(into.method.momentum) is type(other.method.momentum)
        and set(mine.matrices) == set(theirs.matrices)
        and all(
            mine.of(number)[1].shape == theirs.of(places[parameter])[1].shape
            for number, parameter in enumerate(into.gradient.parameters)
        )
    )
    moments = alike and into.method.momentum.remembers
    factor = into.engine.scale / other.engine.scale
    for number, parameter in enumerate(into.gradient.parameters):
        pairs = zip(mine.of(number), theirs.of(places[parameter]), strict=True)
        # Residual, velocity and variance: the first two scale with the loss, the variance is kept unscaled.
        kinds = ((both, factor), (moments, factor), (moments, 1.0))
        for (vector, given), (wanted, multiple) in zip(pairs, kinds, strict=True):
            if wanted and vector.shape == given.shape:
                vector.copy_(given * multiple)
    if moments:
        mine.count_updates(theirs.updates)
    mine.changed()


def _check_state(values: Mapping[str, Any], engine: InBackward, names: list[str]) -> None:
    """Checks that an engine can continue from a state.

    Raises:
        ConfigError: If the state has other parameters (than ``names``) or groups, or is incomplete or damaged.
    """
    check_whole(values, REQUIRED_KEYS)
    if values["names"] != names:
        raise ConfigError(WRONG_PARAMETERS)
    groups, mine = values["groups"], engine.gradient_state.state_dicts()
    # Schedules that regroup may have saved more or fewer groups: each must then have the structure of the first.
    check_whole(groups, mine if len(groups) == len(mine) else [mine[0]] * len(groups), "groups")
    if engine.fixed and (len(groups) != len(mine) or _sizes(groups) != _sizes(mine)):
        raise ConfigError(WRONG_PARAMETERS)
    try:
        engine.check_state(values)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"this state is damaged: {error.args[0]}; load what state_dict() returned") from error


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [getattr(group.get(name), "shape", None) for group in groups for name in _VECTORS]
