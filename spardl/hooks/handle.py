"""Base classes of handles (results of ``attach`` etc.): setup, state, statistics, and connection to an optimizer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from os import PathLike
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from spardl.basics.checks import check_type
from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import weak_method
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.precompile import prepare
from spardl.communicators.steps.nodes import Nodes
from spardl.hooks.averager import Averager, Meter, Named, SideGroup, Stats
from spardl.hooks.choosing import check_optimizer_parameters, check_update, choose_nodes, options_of, update_facts
from spardl.hooks.optimizer_steps import OptimizerSteps, discarded_parameters
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.method.moving import Optimizers, matrices_of, optimizers_of, resolve_momentum
from spardl.method.provenance import check_owner, owner_of
from spardl.method.registry import check_weights
from spardl.protocol.programs import clone_data
from spardl.schedules import Schedule, Training
from spardl.schedules.apply_update import decay_of, step_size_of
from spardl.schedules.gradient_state import ResidualSize
from spardl.schedules.scaling import scale_of
from spardl.vector.flat import CopiedGradient, local_part

__all__ = ["GradientHandle", "Handle", "ShardedState"]


class Handle(ABC):
    """Base class of all handles: a method, the connection to the other workers, and statistics.

    Args:
        method: Method that averages gradients or updates; its momentum must not be ``AutoMomentum`` (see
            ``resolve_momentum``).
        cluster: Cluster that connects the workers.
        trained: Parameters whose gradients are averaged.
        nodes: Workers that share a node, whose gradients are averaged densely first.

    Attributes:
        method: Method that averages gradients or updates.

    Raises:
        ConfigError: If the method does not support the number of workers.
        PeerError: If a worker is lost during setup.
    """

    # Start of the keys in ``torch.distributed.checkpoint``, different for processes that have the same rank.
    _key = ""

    def __init__(
        self,
        method: Method,
        cluster: ProcessGroupCluster,
        trained: Iterable[nn.Parameter],
        nodes: Nodes = Nodes(),  # noqa: B008 - immutable
    ) -> None:
        self.method = method
        self._cluster, self._nodes = cluster, nodes
        # Compiles before the first message: in the first step, all workers would wait for the slowest one.
        prepare(method, nodes.count(cluster.size), trained, logs=cluster.leads)
        if isinstance(cluster, SideGroup):
            cluster.open()
        (self._worker,) = cluster.local_workers
        self._owner = owner_of(method, self._worker.rank, self._worker.size, nodes.ranks_per_node)
        self._meter = Meter(cluster.ledgers[0], cluster.size)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker as plain data; each rank saves its own."""

    @abstractmethod
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank and world size.

        Args:
            values: Result of ``state_dict``, as saved.
        """

    def sharded(self, saved: str | PathLike[str] | None = None) -> ShardedState:
        """Returns the state for ``torch.distributed.checkpoint``, with one key per rank.

        ``dcp.save({"model": ..., "spardl": handle.sharded()}, checkpoint_id=folder)`` or ``dcp.async_save`` saves it;
        ``dcp.load({"model": ..., "spardl": handle.sharded(folder)}, checkpoint_id=folder)`` loads it.

        Args:
            saved: Folder of the checkpoint to load; required if the number of workers may have changed. ``None`` to
                save, or to load a checkpoint of the same number of workers.

        Raises:
            ConfigError: If the folder contains no such state.
        """
        return ShardedState(self, self._worker.size if saved is None else _saving_workers(saved))

    def load_resharded(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores states that were saved by a different number of workers.

        The sum of the residuals over all workers and the mean of the velocities (moments of the optimizer) stay the
        same; compressor and communicator start with new states. If the number of workers has not changed, each worker
        loads its own state, as with ``load_state_dict``.

        Args:
            states: Results of ``state_dict`` of all ranks that saved them, in the order of ranks, on any device.

        Raises:
            ConfigError: If ``load_state_dict`` rejects a state, or this kind of handle supports no change of the world
                size.
        """
        self._load_shares(dict(enumerate(states)), len(states))

    def _load_shares(self, states: Mapping[int, Mapping[str, Any]], before: int) -> None:
        """Loads this worker's share of the residuals of ``before`` workers, from the ``states`` of some ranks."""
        if before != self._worker.size:
            raise ConfigError(
                f"this state was saved by {before} workers, but this is rank {self._worker.rank} of "
                f"{self._worker.size}; {type(self).__name__} needs the same number of workers"
            )
        self.load_state_dict(states[self._worker.rank])

    def stats(self) -> Stats:
        """Returns communication volume and times of this worker as :class:`Stats`."""
        return self._meter.stats(self._nbytes, self._refused, self._waiting, under_way=self._in_step)

    @property
    @abstractmethod
    def _nbytes(self) -> float:
        """Size of the gradients of one step in bytes."""

    @property
    @abstractmethod
    def _refused(self) -> int:
        """Number of skipped or clipped gradients on all workers."""

    @property
    def _waiting(self) -> ResidualSize | None:
        """Size of the residual; ``None`` if unknown."""
        return None

    @property
    def _in_step(self) -> bool:
        """Whether a step has begun that the statistics include, though it is not complete."""
        return False


class GradientHandle(Handle):
    """Base class of handles that average gradients, or updates of an optimizer, during the backward pass.

    Args:
        method: Method that averages gradients or updates.
        schedule: Schedule that divides the parameters into groups.
        named: All parameters of the handle, including frozen ones.
        trained: Parameters whose gradients are averaged.
        device: Device of the messages.
        group: Process group; ``None`` for the default group.
        timeout: Seconds after which a worker that does not answer counts as lost.
        scaler: GradScaler that scales the loss, if any.
        optimizer: Optimizer of the parameters, or several; ``None`` to average gradients.
        clip_norm: Largest 2-norm of a gradient; ``None`` for no limit.
        ranks_per_node: Number of workers that share a node, as for :func:`attach`.

    Raises:
        ConfigError: If an argument is invalid, or contradicts another one.
        PeerError: If a worker is lost during setup.
    """

    # The averager is None once a newer handle has taken over its state. The finalizer removes the optimizer's hooks
    # when the handle is garbage-collected.
    _cluster: SideGroup
    _averager: Averager | None
    _optimizer_steps: OptimizerSteps
    _finalizer: finalize[..., Any]

    def __init__(
        self,
        method: Method,
        schedule: Schedule,
        named: Sequence[Named],
        trained: Sequence[Named],
        *,
        device: torch.device,
        group: Any,
        timeout: float,
        scaler: GradScaler | None,
        optimizer: Optimizers,
        clip_norm: float | None,
        ranks_per_node: int | str = 1,
    ) -> None:
        # All checks come before the process group is opened, which is a collective call.
        check_type("scaler", scaler, GradScaler, optional=True)
        optimizers = optimizers_of(optimizer)
        method = resolve_momentum(method, optimizers or None, for_handle=True)
        check_update(schedule, method, optimizers, clip_norm, scaler)
        schedule.check(method, clips=clip_norm is not None and not method.momentum.moved)
        check_weights(method.compressor, trained)
        check_optimizer_parameters(schedule, method, optimizers, trained)
        parameters = [pair.parameter for pair in trained]
        cluster = SideGroup(group, device, timeout)
        nodes = choose_nodes(ranks_per_node, cluster.local_workers[0], schedule, method)
        super().__init__(method, cluster, parameters, nodes)
        self._schedule, self._optimizers, self._clip_norm = schedule, optimizers, clip_norm
        self._trained = list(trained)
        self._discardable = frozenset(parameters)
        self._discards: frozenset[nn.Parameter] = frozenset()
        applying = optimizers or None
        decay, step_size = decay_of(method.momentum, applying), step_size_of(method.momentum, applying)
        matrices = matrices_of(optimizers) if method.momentum.moved else frozenset()
        self._update_facts = update_facts(optimizers, named, matrices)
        self._make_training = partial(
            Training,
            clip_norm=clip_norm,
            scale=scale_of(scaler),
            decay=decay,
            matrices=matrices,
            step_size=step_size,
            nodes=nodes,
        )

    def _make_averager(
        self, named: Sequence[Named], given: Mapping[str, Any], schedule: Schedule | None = None, **training: Any
    ) -> Averager:
        """Makes an averager of the given parameters.

        Args:
            named: The parameters.
            given: Further settings that must be equal on all workers, by name.
            schedule: Schedule that forms the groups, if not that of the handle.
            **training: Further fields of :class:`Training`.
        """
        made = self._make_training(**{"model": None, "optimizer": None, **training}, gradient=CopiedGradient(named))
        shared = {"ranks_per_node": self._nodes.ranks_per_node}
        given = {"handle": given["handle"], **options_of(self._schedule), **shared, **given}
        return Averager(self.method, schedule or self._schedule, made, self._cluster, given, self._update_facts)

    def _load_shares(self, states: Mapping[int, Mapping[str, Any]], before: int) -> None:
        if before == self._worker.size:
            self.load_state_dict(states[self._worker.rank])
            return
        if self._nodes.ranks_per_node > 1:
            super()._load_shares(states, before)  # rejects them
        ranks = sources(self._worker, before)
        # All are checked before the first is loaded, so that an error leaves residuals and moments unchanged.
        for rank in ranks:
            check_owner(states[rank], {**self._owner, "rank": rank, "workers": before}, "groups")
        first, *others = ({**states[rank], "owner": self._owner} for rank in ranks)
        before_loading = self.state_dict()
        self.load_state_dict(first)
        averager = self._averager
        assert averager is not None  # a handle without one refuses to load
        try:
            for other in others:
                averager.check_state(other)
        except ConfigError:
            self.load_state_dict(before_loading)
            raise
        # Compressor and communicator start again: their states may depend on the number of workers.
        with averager.replacing_state():
            averager.engine.reset()
            averager.engine.adopt(0, clone_data([first, *others]), before)

    def _watch_steps(self, *, delayed: bool = False, awaited: Sequence[Named] = ()) -> None:
        """Starts to check the optimizer's steps; see :class:`OptimizerSteps` for the options."""
        self._optimizer_steps = OptimizerSteps(
            self.method,
            self._optimizers,
            self._trained,
            weak_method(self._active_averager),
            delayed=delayed,
            clip_norm=self._clip_norm,
            awaited=awaited,
        )

    @abstractmethod
    def _active_averager(self) -> Averager | None:
        """Returns the averager; ``None`` before its parameters are known."""

    @contextmanager
    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> Iterator[None]:
        """Context manager for backward passes whose gradients the loop does not use: does not average them.

        Use it for a loss that passes through a model it does not train, for example a generator's loss through the
        discriminator. All workers must call it in the same way. Gradients inside are not averaged, and residuals and
        moments stay unchanged; clear the gradients (``zero_grad()``) before the model's own backward pass.

        Args:
            parameters: Parameters whose gradients are discarded; ``None`` for all. If only some are given to a
                ``Synchronizer``, call its ``wait()`` inside the ``with`` block.

        Raises:
            ConfigError: If the handle does not average one of the parameters, or only some are given although
                ``step()`` applies the averages of all (``optimizer=``).
        """
        before = self._discards  # calls may be nested
        self._discards = discarded_parameters(parameters, self._discardable, whole=self._optimizer_steps.updates)
        try:
            yield
        finally:
            self._discards = before

    def _ignores(self, first: Iterable[torch.Tensor], *, passed: bool = False) -> bool:
        """Returns whether to ignore a pass whose first gradients are those of ``first``, all computed if ``passed``."""
        return self._discards >= self._discardable or self._optimizer_steps.ignores(first, passed=passed)

    def _begin_step(self, averager: Averager) -> None:
        self._optimizer_steps.begin(averager)
        self._exclude_discarded(averager)

    def _begin_once(self, averager: Averager) -> None:
        if not averager.begun:
            self._begin_step(averager)

    def _end_step(self, averager: Averager) -> None:
        """Replaces every gradient by its average, after the last backward pass of a step."""
        parameters = averager.gradient.parameters
        if self._ignores(parameters):
            self._optimizer_steps.check_ignored()
            return
        self._begin_once(averager)
        # All workers must send all groups, so parameters without a gradient send zeros.
        for number in averager.missing():
            gradient = parameters[number].grad
            averager.put(number, gradient)
            # The loop may have assigned a gradient itself, for which no hook ran.
            if gradient is not None and local_part(gradient).any():
                averager.note(number)
        averager.wait()
        if not averager.engine.overflowed:
            self._optimizer_steps.averaged(self._discards)
        self._meter.step()
        unused = set(averager.engine.unused())
        for number, parameter in enumerate(parameters):
            if number not in unused and parameter.requires_grad:
                # Another worker used a parameter that this one did not.
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                averager.gradient.take(number, parameter.grad)
        self._optimizer_steps.mark()

    def _exclude_discarded(self, averager: Averager) -> None:
        if self._discards:
            pairs = enumerate(averager.gradient.parameters)
            averager.exclude([number for number, each in pairs if each in self._discards])

    def reset(self) -> None:
        """Restarts the statistics at zero; residuals and moments stay."""
        self._meter.reset(self._refused)

    @property
    def _refused(self) -> int:
        return self._averager.refused if self._averager else 0

    @property
    def _waiting(self) -> ResidualSize | None:
        return self._averager.engine.residual_size() if self._averager else None

    def _release(self) -> None:
        """Stops checking the optimizer's steps, and releases the communication resources."""
        # If the finalizer has already run, it has closed the checks.
        if self._finalizer.detach():
            self._optimizer_steps.close()
        self._cluster.release()


class ShardedState:
    """State of a handle for ``torch.distributed.checkpoint``: one key per rank, because residuals differ.

    It has the interface of ``torch.distributed.checkpoint.stateful.Stateful``.

    Args:
        handle: Handle whose state is saved or loaded.
        before: Number of workers that saved the state to be loaded.
    """

    def __init__(self, handle: Handle, before: int) -> None:
        self._handle, self._before = handle, before

    def state_dict(self) -> dict[str, bytes]:
        """Returns the states by key, one key per rank, each as the bytes that ``torch.save`` writes."""
        worker, file = self._handle._worker, BytesIO()
        # Bytes instead of tensors: torch loads only the keys and shapes of the current state, and a new handle does not
        # know all of those that were saved.
        torch.save(self._handle.state_dict(), file)
        ranks = [worker.rank] if self._before == worker.size else sources(worker, self._before)
        return dict.fromkeys((f"{self._handle._key}rank_{rank}" for rank in ranks), file.getvalue())

    def load_state_dict(self, values: Mapping[str, bytes]) -> None:
        """Restores the states that ``state_dict`` returned.

        Args:
            values: States by rank.

        Raises:
            ConfigError: If :meth:`Handle.load_resharded` rejects the states.
        """
        states = {
            int(name.rpartition("_")[2]): torch.load(BytesIO(saved), map_location="cpu", weights_only=True)
            for name, saved in values.items()
        }
        self._handle._load_shares(states, self._before)


def _saving_workers(folder: str | PathLike[str]) -> int:
    """Returns the number of workers that saved the state in a checkpoint of ``torch.distributed.checkpoint``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415 - takes 0.3 s

    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    ranks = {int(found[1]) for name in names if (found := re.search(r"\brank_(\d+)$", name))}
    if not ranks:
        raise ConfigError(f"{folder} has no state of a spardl handle; save handle.sharded() with the model")
    return max(ranks) + 1
