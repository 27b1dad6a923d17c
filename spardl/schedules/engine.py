"""The engine: averages the gradients of a model, group by group. All schedules and all handles share it.

A step is: for each local rank ``begin``, its forward and backward passes (with ``before_backward`` before each of the
latter) and ``collect``; then ``finish``, once. Gradients are either views of one vector, which the optimizer reads, too
(``FlatGradient``), or come from elsewhere and go back there (``CopiedGradient``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spardl.basics.errors import TrainingError
from spardl.basics.weak import weakly
from spardl.clusters.base import Cluster, gather_rows
from spardl.method.method import Method, MethodState
from spardl.method.provenance import compare, facts_of, shapes_of
from spardl.protocol.programs import Boundary, Phase, Program, Worker, described
from spardl.schedules.carried import Carried, Group, Quality, Usage, Waiting
from spardl.schedules.fusion import Range, is_partition, within
from spardl.schedules.plain import Updater
from spardl.schedules.scaling import Limit, Scale, Scaling, norm_in, somebody_overflowed
from spardl.schedules.tuning import Trials
from spardl.vector.flat import FlatGradient, Storage, write
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["Engine", "Schedule", "Training", "check_saved"]


# Saved states: whether an engine can continue from them, checked before anything is changed.


def check_saved(
    values: Mapping[str, Any], gradient: Storage, carried: Carried, scaling: Scaling, trials: Trials | None, fixed: bool
) -> None:
    """Accepts values that an engine can continue from; changes nothing.

    Args:
        values: as saved by the engine's ``state_dict``.
        gradient: of the engine, as are the next four.
        carried: what lasts from step to step.
        scaling: of gradients.
        trials: of other sizes of groups, if there are some.
        fixed: whether the groups stay as they were in the beginning.

    Raises:
        KeyError: if something is missing.
        ValueError: if something is of another kind or shape, or there are other groups.
        ConfigError: if settings do not allow a value.
    """
    partition = values.get("partition", carried.partition)
    if not is_partition(partition, len(gradient.layers)):
        raise ValueError(f"partition does not hold each of {len(gradient.layers)} layers once, in order")
    partition = [(start, stop) for start, stop in partition]
    if fixed and partition != carried.partition:
        raise ValueError(f"there are groups {partition}, expected {carried.partition}")
    _check_groups(values["groups"], partition, gradient, carried)
    usage, kept, tried = values.get("usage", True), values.get("kept", 0), values.get("trials")
    if type(usage) is not bool:
        raise ValueError(f"usage is {described(usage)}, expected True or False")
    if type(kept) is not int or kept < 0:
        raise ValueError(f"kept is {described(kept)}, expected a whole number, at least 0")
    scaling.check(values, [sum(gradient.entries[start:stop]) for start, stop in partition])
    if tried is not None and not isinstance(tried, Mapping):
        raise ValueError(f"trials is {described(tried)}, expected a dict or None")
    if trials and tried is not None:
        trials.check_state(tried)


def _check_groups(
    groups: Sequence[Mapping[str, Any]], partition: Sequence[Range], gradient: Storage, carried: Carried
) -> None:
    found = list(within(gradient.runs, partition))
    if len(found) != len(groups):
        raise ValueError(f"there are {len(groups)} groups, expected {len(found)}")
    for number, (layers, saved) in enumerate(zip(found, groups, strict=True)):
        try:
            carried.like(layers).check(saved, finite=carried.remembers)
        except (KeyError, ValueError) as error:
            raise ValueError(f"group {number}: {error.args[0]}") from error


# What a schedule is given to train.


class Training(NamedTuple):
    """What is trained.

    Attributes:
        model: whose passes are to be overlapped with communication.
        gradient: all its gradients.
        optimizer: of its parameters; ``None`` if somebody else uses the averages.
        clip_norm: largest 2-norm of the averaged gradient, or, where an optimizer's momentum is moved before
            compression, of each worker's own; ``None`` for any.
        scale: of the gradients, where a GradScaler changes it. All workers then agree in each step whether somebody's
            gradient overflowed, at the price of one byte from each to each in every group.
        find_unused: whether workers ask one another in every step which parameters nobody used; otherwise only until a
            step in which all used all.
        decay: the multiple of a parameter's weights that is added to its gradient; ``None``: the momentum's, for all.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = spardl.schedules.Training(model, spardl.vector.FlatGradient(model.named_parameters()), optimizer)
        >>> cluster = spardl.clusters.SimulatedCluster(2, spardl.clusters.Network(alpha=50e-6, gbit=1))
        >>> synchronizer = spardl.schedules.Wfbp(bucket_mb=1).start(spardl.make_method("spardl"), cluster, training)
        >>> for local in range(2):  # the workers that this process plays
        ...     synchronizer.begin(local)
        ...     loss = model(torch.randn(5, 100)).square().mean()
        ...     synchronizer.before_backward(last=True)
        ...     loss.backward()
        ...     synchronizer.collect()
        >>> synchronizer.finish()
        >>> print(f"{synchronizer.kept} entries averaged, {cluster.ledgers[0].bytes_sent} bytes sent by each worker")
        10 entries averaged, 56 bytes sent by each worker
    """

    model: nn.Module | None
    gradient: Storage
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None = None
    scale: Scale | None = None
    find_unused: bool = False
    decay: Callable[[nn.Parameter], float] | None = None


# How many steps there are to one in which gradients are measured: so rarely that it costs nothing.
_MEASURED = 16


class Engine(ABC):
    """Averages gradients, group by group, and lets the optimizer use them.

    Args:
        method: how to average.
        cluster: the workers.
        training: what is trained.
        partition: layers that are synchronized together; groups end where type or place of the gradients change.

    Attributes:
        kept: entries of all averages so far.
        steps: that have begun since this was made.
        carried: what lasts from step to step.
        limit: limits the norm of gradients, and has the last norm that was measured.
        measures: whether to measure what this step adds to residuals; handles of other loops do it now and then anyway.
    """

    _trials: Trials | None = None  # of other sizes of groups, where a schedule makes some

    def __init__(self, method: Method, cluster: Cluster, training: Training, partition: Sequence[Range]) -> None:
        self._method, self._cluster, self._training = method, cluster, training
        self._gradient = training.gradient
        # Gradients that are not views, and those with a scale, go into the flights as they are.
        self._copies = self._gradient.backwards
        self._updater = Updater(training.optimizer) if training.optimizer else None
        ranks, parameters = len(cluster.local_ranks), len(self._gradient.parameters)
        self._usage = Usage(ranks, parameters, always=training.find_unused)
        self._scaling = Scaling(training.scale)
        self.limit = Limit(training.clip_norm, first=method.momentum.moved)
        self._decay = training.decay or (lambda parameter: method.momentum.decay)
        self._whole: list[list[Tensor]] = []
        self._local = 0
        self.kept = self.steps = 0
        self.measures = False
        self.carried = Carried(method, self._gradient, ranks, partition)
        self._begin_groups()
        cluster.expect(self._gradient.entries)
        self._hooks = [] if self._copies else list(self._watched())

    def _watched(self) -> Iterator[RemovableHandle]:
        for number, parameter in enumerate(self._gradient.parameters):
            yield parameter.register_post_accumulate_grad_hook(weakly(self._arrive, number))

    def compare(self, given: Mapping[str, Any] | None = None) -> None:
        """Sees to it that all processes were given the same, before they send gradients.

        Args:
            given: what else decides on messages, by name; ``None``: what this knows of itself.

        Raises:
            ConfigError: on all workers, if there is a difference.
        """
        if len(self._cluster.local_ranks) == self._cluster.size:
            return
        facts, workers, device = self.facts(given), self._cluster.local_workers, self._cluster.device
        self._cluster.run_aside([compare(worker, facts, device) for worker in workers])

    def facts(self, given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """What decides on messages, by name: the method, what was ``given`` (as for ``compare``), and what is saved."""
        clip_norm, handle = self._training.clip_norm, type(self).__name__.strip("_")
        given = {"handle": handle, "groups": self.partition, "clip_norm": clip_norm} if given is None else given
        facts = {**facts_of(self._method), **{name: str(value) for name, value in given.items()}}
        facts["step"] = ", ".join(dict.fromkeys(str(states[0].step) for states in self.carried.states))
        facts |= shapes_of(*self._gradient.forward())
        facts |= {"groups of layers": str(self.partition), "usage exchanged": str(self._usage.state_dict())}
        return {**facts, "trials": str(self._trials and self._trials.progress)}

    # --- the steps of training

    def begin(self, local: int = 0) -> None:
        """From here on passes are those of the local rank ``local``."""
        if local == 0:
            self.steps += 1
            self._whole = [[] for _ in self._groups]
            # What is averaged where it is may be there already.
            states = [] if self.carried.shares else self.carried.states
            self._scaling.settle(states, remembers=self.carried.remembers)
        self._local = local

    def before_backward(self, *, last: bool) -> None:
        """Is called before each backward pass; ``last``: whether it is this rank's last one in this step."""
        self._cluster.reach(self._local, (), backward=True)

    def note(self, number: int) -> None:
        """Is told that a backward pass had a gradient for parameter ``number``."""
        self._usage.note(self._local, number)

    def complete(self, number: int) -> None:
        """Is told when the gradient of parameter ``number`` is complete in a backward pass."""

    def collect(self) -> None:
        """Takes over the gradient that the rank's backward passes left, and clears it."""

    @abstractmethod
    def finish(self) -> None:
        """Ends a step: the optimizer uses the averages, now or at the latest before the weights are used."""

    def end(self) -> None:
        """Is told that the step that was finished was the training's last one."""

    def flush(self) -> None:
        """Sees to it that the weights are those after the last step."""

    def close(self) -> None:
        """Takes everything off the model that was attached to it."""
        for hook in self._hooks:
            hook.remove()

    @property
    def partition(self) -> list[Range]:
        """Layers that are synchronized together."""
        return self.carried.partition

    @property
    def _groups(self) -> list[Group]:
        return self.carried.groups

    @property
    def chosen(self) -> list[Range] | None:
        """The groups that measurements have led to, for good; ``None`` before that, and where nothing is measured."""
        return None

    @property
    def fixed(self) -> bool:
        """Whether the groups stay as they were in the beginning."""
        return True

    def averages(self, local: int = 0) -> list[Sum]:
        """What the local rank ``local`` computed as the averages of the last step, group by group.

        To be asked for after ``flush``, and before the next gradient.
        """
        return [average for _, average in sorted(self._averages[local].items())]

    def lasting(self, local: int = 0) -> dict[str, Sequence[Tensor]]:
        """What lasts from step to step of the local rank ``local`` alone, by name, in any shapes."""
        return {"residuals are": self.carried.lasting(local)}

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """What the local rank ``local`` carries from step to step, as plain data."""
        self.flush()
        return {
            "partition": [list(layers) for layers in self.partition],
            "groups": self.carried.state_dicts(local),
            "usage": self._usage.state_dict(),
            "kept": self.kept,
            **self._scaling.state_dict(),
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from ``values`` that ``state_dict`` gave the same rank, ``local``; what they lack stays."""
        self._follow(values)
        self.carried.load_state_dicts(local, values["groups"])

    def adopt(self, local: int, parts: Sequence[Mapping[str, Any]], before: int) -> None:
        """Continues from what ``state_dict`` gave another number of workers.

        Args:
            local: which rank.
            parts: of the ranks in ``spardl.method.elastic.sources``, in that order.
            before: how many workers there were.
        """
        self._follow(parts[0])
        self._scaling.share(before / self._cluster.size)
        worker = self._cluster.local_workers[local]
        self.carried.adopt(local, worker, [part["groups"] for part in parts], before)

    @property
    def scale(self) -> float:
        """Of the gradients that are carried over."""
        return self._scaling.factor

    @property
    def overflowed(self) -> bool:
        """Whether the averages of this step are to be left out, as some worker's gradient, or a sum, overflowed."""
        return bool(self._scaling.refused)

    def settle(self) -> None:
        """Sees to it that all of what nobody used is in residuals."""
        self._scaling.give_back(self.carried.states, remembers=self.carried.remembers)

    def forget(self) -> None:
        """Begins as in the first step."""
        self._scaling.begin_anew()
        self.carried.forget()
        self._begin_groups()

    def succeed(self, other: Engine) -> None:
        """Goes on in other groups where ``other``, whose method carries nothing over, has ended a step."""
        self.steps, self.kept = other.steps, other.kept
        self._usage.load_state_dict(other._usage.state_dict())
        self._scaling.load_state_dict(other._scaling.state_dict())
        self.carried.succeed(other.carried)

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Accepts ``values`` that ``load_state_dict`` can continue from; changes nothing.

        Raises:
            ValueError: if they do not fit.
        """
        check_saved(values, self._gradient, self.carried, self._scaling, self._trials, self.fixed)

    def _follow(self, values: Mapping[str, Any]) -> None:
        partition = [(start, stop) for start, stop in values.get("partition", self.partition)]
        if partition != self.partition:
            self._regroup(partition)
        self._usage.load_state_dict(values.get("usage", self._usage.state_dict()))
        self.kept = values.get("kept", self.kept)
        self._scaling.load_state_dict(values)

    def _regroup(self, partition: Sequence[Range]) -> None:
        self.settle()
        self.carried.regroup(partition)
        self._begin_groups()

    def _begin_groups(self) -> None:
        self._quality = Quality(len(self._groups))
        self._averages: list[dict[int, Sum]] = [{} for _ in self._cluster.local_ranks]

    def _part(self, group: Group) -> Tensor:
        """The gradient of a group, then its average."""
        return self._gradient.cut(self._gradient.vectors, group.entries)

    # --- from gradients to averages

    def _hand_over(self, number: int) -> None:
        """The gradient of a group is complete: it goes to what the local rank carried over, now or in the flight."""
        group = self._groups[number]
        with self._cluster.timed(Phase.SELECT, [self._local]):
            self._gradient.add_weights(self._decay, self._scaling.factor, group.tensors)
            if self._copies:
                self._whole[number][:] = [self._part(group)]
            elif self._scaling:
                # The next local rank's gradient comes into the same memory.
                self._whole[number].append(self._part(group).clone())
                self._part(group).zero_()
            else:
                self._accumulate(number, self._part(group), group.states[self._local], clear=True)

    def _accumulate(self, number: int, gradient: Tensor, state: MethodState, *, clear: bool = False) -> None:
        """Adds a gradient to what its worker carried over; now and then, measures what the first one's adds."""
        measured = self.carried.remembers and (self.measures or (self._copies and self.steps % _MEASURED == 1))
        if not measured or state is not self._groups[number].states[0]:
            self._method.accumulate(gradient, state, clear=clear)
            return
        before = state.memory.clone()
        self._method.accumulate(gradient, state, clear=clear)
        self._quality.note(number, state.memory - before, self._scaling.factor)

    def _clip_first(self) -> None:
        """Limits the norm of the local rank's own gradient, which is complete, where that is what is limited."""
        with self._cluster.timed(Phase.SELECT, [self._local]):
            self.limit.shorten(self._gradient.vectors, self._gradient.layout.length, self._scaling.factor)

    def _programs(self, number: int) -> list[Program[Sum]]:
        """The synchronization of a group, one program per local rank."""
        pairs = list(zip(self._cluster.local_workers, self._groups[number].states, strict=True))
        if self._copies or self._scaling:
            # A program may begin to run when the next step has begun, with gradients of its own.
            whole = self._whole[number]
            return [self._from_gradient(number, whole, local, *pair) for local, pair in enumerate(pairs)]
        return [self._method.average(worker, state) for worker, state in pairs]

    def _from_gradient(
        self, number: int, whole: Sequence[Tensor], local: int, worker: Worker, state: MethodState
    ) -> Program[Sum]:
        """A program that begins with the gradient itself: all of it runs beside the computation."""
        gradient = whole[local]
        if self._scaling and (yield from somebody_overflowed(worker, gradient)):
            self._overflow(number, gradient)
            yield Boundary(gradient)  # as if it were averaged
            return gradient
        self._accumulate(number, gradient, state)
        average = yield from self._method.average(worker, state, gradient)
        write(average, gradient)
        if self._scaling and state.overflowed:
            # A scaler must see it; the worker's share of the average comes back, at a lower scale.
            if self.carried.remembers:
                state.change(more=gradient)
            self._overflow(number, gradient)
            return gradient
        return average

    def _overflow(self, number: int, gradient: Tensor) -> None:
        self._scaling.refused.add(number)
        gradient.fill_(torch.inf)

    def waiting(self) -> Waiting | None:
        """How much the first local rank carries over; ``None`` if it is not known yet."""
        if not self.carried.remembers:
            return Waiting(0.0, 0.0)
        return self._quality.waiting(self.carried.residuals(), self._scaling.factor)

    def _arrive(self, number: int, parameter: nn.Parameter) -> None:
        if isinstance(self._gradient, FlatGradient) and not self._gradient.has(number, parameter.grad):
            raise TrainingError(
                f"the gradient of {self._gradient.names[number]} is no part of the flat gradient any more; clear it by "
                "gradient.zero() in place of optimizer.zero_grad(), and assign none"
            )
        self.note(number)
        self.complete(number)

    # --- the update

    def _take_over(self, group: Group, average: Sum) -> None:
        """Puts an average where the optimizer looks for it."""
        if not self._copies:
            # What was there has been moved to the residual.
            write(average, self._part(group), clear=False)
        self.kept += len(average) if isinstance(average, SparseVector) else average.numel()

    def _update_all(self) -> None:
        """Lets the optimizer use the averages of all groups."""
        if self._scaling:
            self._scaling.keep([gradients[0] for gradients in self._whole])
        if self._updater is None:
            return
        unused = [self._gradient.parameters[number] for number in self.unused()]
        with self._everybody(Phase.UPDATE):
            if not self._scaling.refused:
                self._shorten()
                self._updater.hold()
                with self._gradient.hidden(unused):
                    self._updater.apply(self._gradient.parameters)
            for vector in self._gradient.vectors:
                vector.zero_()

    def _shorten(self) -> None:
        """Takes the scale off the average, and limits its norm."""
        vectors, length = self._gradient.vectors, self._gradient.layout.length
        factor = self._factor(lambda: norm_in(vectors, length))
        if factor is not None:
            for vector in vectors:
                vector.mul_(factor)

    def _factor(self, norm: Callable[[], float]) -> float | None:
        """What the average is multiplied by before it is used, if by anything; ``norm``: of the average."""
        return self.limit.factor(norm, self._scaling.factor)

    def unused(self) -> list[int]:
        """Parameters that no worker's gradient depends on in this step: they are left as they are, as DDP does.

        To be asked for once in each step, by all workers.
        """
        rows = self._usage.rows()
        numbers = self._usage.unused(gather_rows(self._cluster, rows) if rows else [])
        self._usage.clear()
        return numbers

    def _everybody(self, phase: Phase) -> AbstractContextManager[None]:
        return self._cluster.timed(phase, range(len(self._cluster.local_ranks)))


# When gradients are sent: what a configuration chooses.


class Schedule(ABC):
    """A way to interleave communication with computation. Immutable: what changes is in the ``Engine``.

    Attributes:
        name: how configurations call it.
        alone: whether each worker's optimizer makes steps of its own, and keeps its own state.
    """

    name: ClassVar[str]
    alone: ClassVar[bool] = False

    def check(self, method: Method, *, clips: bool) -> None:
        """Accepts a method, before any worker starts.

        Args:
            method: how gradients are averaged.
            clips: whether the norm of the average is limited.

        Raises:
            ConfigError: if this schedule cannot run it; the message says what to do instead.
        """

    def start(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Makes what goes through the steps of one training; all workers must call this at once.

        Args:
            method: how gradients are averaged.
            cluster: the workers.
            training: what is trained.

        Returns:
            The object whose methods the training loop calls.

        Raises:
            ConfigError: on all workers, if they were not given the same.
        """
        engine = self.make(method, cluster, training)
        engine.compare()
        return engine

    @abstractmethod
    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """The same as ``start``, but that workers do not compare what they were given yet.

        Args:
            method: how gradients are averaged.
            cluster: the workers.
            training: what is trained.

        Returns:
            What is not compared yet.
        """
