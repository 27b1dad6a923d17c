"""The two halves of a step that all schedules share: from gradients to averages, and from averages to new weights.

A *group* is a range of neighboring layers that are synchronized together; a *local rank* is one of the workers that
this process runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from spardl.clusters.base import Cluster, gather_rows
from spardl.communicators.steps.nodes import Nodes
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Boundary, Phase, Program, Worker
from spardl.schedules.apply_update import Updater
from spardl.schedules.gradient_state import GradientState, Group, ResidualMonitor, ResidualSize, Usage
from spardl.schedules.scaling import Limit, Scaling, any_overflowed, norm_in
from spardl.vector.flat import Storage, write
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["Averaging", "ModelUpdate", "gradient_of"]


def gradient_of(gradient: Storage, group: Group) -> Tensor:
    """Returns a view of a group's gradient, shape (m,), which contains the average after the synchronization."""
    return gradient.cut(gradient.vectors, group.entries)


class Averaging:
    """Adds gradients to the residuals, and creates the programs (sequences of messages) that average them.

    Args:
        method: Method that averages the gradients.
        cluster: Cluster that runs the workers.
        gradient: Storage of the model's gradients.
        decay: Function that returns, for a parameter, the multiple of its weights to add to its gradient.
        state: Residuals, moments and groups of layers of the model.
        scaling: Tracks the loss scale of a GradScaler, if there is one.
        limit: Gradient clipping: limit on the norm of each worker's own gradient.
        nodes: Workers that share a node; several only if gradients are copied.

    Attributes:
        gradients: Gradients that the programs of this step average, by group and local rank, shape (m,) each.
    """

    def __init__(
        self,
        method: Method,
        cluster: Cluster,
        gradient: Storage,
        decay: Callable[[nn.Parameter], float],
        state: GradientState,
        scaling: Scaling,
        limit: Limit,
        nodes: Nodes,
    ) -> None:
        assert gradient.backwards or nodes.ranks_per_node == 1
        self._method, self._cluster, self._nodes = method, cluster, nodes
        self._gradient, self._decay = gradient, decay
        self._state, self._scaling, self._limit = state, scaling, limit
        self._measured = False
        self.gradients: list[list[Tensor]] = []
        self.regroup()

    def regroup(self) -> None:
        """Restarts the measurement of residual sizes for changed groups."""
        self._monitor = ResidualMonitor(len(self._state.groups))

    @property
    def _starts_from_gradients(self) -> bool:
        """Whether programs start from the gradients instead of the residuals.

        Copied gradients are accumulated in the background. Scaled ones are accumulated only if no worker overflowed.
        """
        return self._gradient.backwards or bool(self._scaling)

    def begin(self, *, measured: bool) -> None:
        """Begins a step; ``measured`` states whether to measure what it adds to the residuals."""
        self._measured = measured
        self.gradients = [[] for _ in self._state.groups]

    def clip_own(self, local: int) -> None:
        """Clips the complete gradient of the local rank ``local``, if each worker's own gradient has a limit."""
        with self._cluster.timed(Phase.SELECT, [local]):
            self._limit.clip(self._gradient.vectors, self._gradient.layout.length, self._scaling.factor)

    def hand_over(self, number: int, local: int) -> None:
        """Adds the complete gradient of group ``number`` on the local rank ``local`` to the residual.

        With a loss scale or copied gradients, the program of the group does so later.
        """
        group = self._state.groups[number]
        with self._cluster.timed(Phase.SELECT, [local]):
            self._gradient.add_weights(self._decay, self._scaling.factor, group.tensors)
            gradient = gradient_of(self._gradient, group)
            if self._gradient.backwards:
                self.gradients[number][:] = [gradient]
            elif self._scaling:
                # The next local rank writes its gradient into the same memory.
                self.gradients[number].append(gradient.clone())
                gradient.zero_()
            else:
                self._accumulate(number, gradient, group.states[local], clear=True)

    def programs(self, number: int) -> list[Program[Sum]]:
        """Returns the programs that average group ``number``, one per local rank."""
        pairs = list(zip(self._cluster.local_workers, self._state.groups[number].states, strict=True))
        if self._starts_from_gradients:
            # Bind this step's list: the program may start when the next step has already begun.
            gradients = self.gradients[number]
            return [self._from_gradient(number, gradients, local, *pair) for local, pair in enumerate(pairs)]
        return [self._method.average(worker, state) for worker, state in pairs]

    def _from_gradient(
        self, number: int, gradients: Sequence[Tensor], local: int, worker: Worker, state: MethodState
    ) -> Program[Sum]:
        """Averages one group, starting from the gradient, so that it is accumulated in the background as well."""
        gradient = gradients[local]
        # Before the check, because the sum inside a node may overflow.
        yield from self._nodes.mean_inside(worker, gradient)
        if self._scaling and (yield from any_overflowed(worker, gradient)):
            self._overflow(number, gradient)
            # The schedule waits for a boundary of every program, even if the program averages nothing.
            yield Boundary(gradient)
            return gradient
        self._accumulate(number, gradient, state)
        own = self._method.average(self._nodes.node_of(worker), state, gradient)
        average = yield from self._nodes.between(worker, own, self._cluster.device)
        write(average, gradient)
        if self._scaling:
            state.catch_up()
        if self._scaling and state.overflowed:
            # The GradScaler must see the overflow in this gradient. The residual keeps the worker's share of the
            # average, so that the next step sends it again at a lower scale.
            if self._state.remembers:
                state.change(more=gradient)
            self._overflow(number, gradient)
            return gradient
        return average

    def _overflow(self, number: int, gradient: Tensor) -> None:
        self._scaling.overflowed.add(number)
        gradient.fill_(torch.inf)

    def _accumulate(self, number: int, gradient: Tensor, state: MethodState, *, clear: bool = False) -> None:
        if not (self._measured and self._state.remembers) or state is not self._state.groups[number].states[0]:
            self._method.accumulate(gradient, state, clear=clear)
            return
        # Momentum and residual rules determine the addition, so measure the difference instead of the gradient.
        before = state.memory.clone()
        self._method.accumulate(gradient, state, clear=clear)
        self._monitor.note(number, state.memory - before, self._scaling.factor)

    def residual_size(self) -> ResidualSize | None:
        """Returns the relative size of the first local rank's residual; ``None`` before the first measurement."""
        if not self._state.remembers:
            return ResidualSize(0.0, 0.0)
        return self._monitor.residual_size(self._state.residuals(), self._scaling.factor)


class ModelUpdate:
    """Writes averages to the gradients that the optimizer reads, and runs the optimizer.

    Args:
        cluster: Cluster that runs the workers.
        gradient: Storage of the model's gradients.
        optimizer: Optimizer of the parameters; ``None`` if the caller uses the averages.
        usage: Records which parameters the local ranks used in a step.
        scaling: Tracks the loss scale of a GradScaler, if there is one.
        limit: Gradient clipping: limit on the norm of the average.

    Attributes:
        updater: Runs the optimizer on some of its parameters; ``None`` if the caller uses the averages.
    """

    def __init__(
        self,
        cluster: Cluster,
        gradient: Storage,
        optimizer: torch.optim.Optimizer | None,
        usage: Usage,
        scaling: Scaling,
        limit: Limit,
    ) -> None:
        self._cluster, self._gradient = cluster, gradient
        self._usage, self._scaling, self._limit = usage, scaling, limit
        self.updater = Updater(optimizer) if optimizer else None

    def timed(self) -> AbstractContextManager[None]:
        """Returns a context manager that attributes the time of its block to updating, on all local ranks."""
        return self._cluster.timed(Phase.UPDATE, range(len(self._cluster.local_ranks)))

    def store(self, group: Group, average: Sum) -> int:
        """Writes the average of a group to its gradient.

        Returns:
            Number of entries of the average.
        """
        # Copied gradients already contain their average.
        if not self._gradient.backwards:
            # No need to clear the memory first: accumulation has moved its content to the residual.
            write(average, gradient_of(self._gradient, group), clear=False)
        return len(average) if isinstance(average, SparseVector) else average.numel()

    def unused(self) -> list[int]:
        """Returns the numbers of the parameters without a gradient on any worker.

        All workers must call this once in each step.
        """
        rows = self._usage.rows()
        numbers = self._usage.unused(gather_rows(self._cluster, rows) if rows else [])
        self._usage.clear()
        return numbers

    def factor(self, norm: Callable[[], float]) -> float | None:
        """Returns the factor that clips the average and removes its loss scale; ``None`` if neither is needed.

        ``norm`` computes the norm of the average, and is called only if this norm is limited.
        """
        return self._limit.factor(norm, self._scaling.factor)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Runs the optimizer on the averages of all groups, and sets them to zero.

        Args:
            gradients: Gradients from which the averages were computed, by group and local rank, shape (m,) each.
        """
        if self._scaling:
            self._scaling.keep_unused([own[0] for own in gradients])
        if self.updater is None:
            return
        unused = [self._gradient.parameters[number] for number in self.unused()]
        with self.timed():
            if not self._scaling.overflowed:
                self._clip_average()
                self.updater.hold()
                # A parameter without a gradient on any worker would still get weight decay or a momentum step.
                with self._gradient.hidden(unused):
                    self.updater.apply(self._gradient.parameters)
            for vector in self._gradient.vectors:
                vector.zero_()

    def _clip_average(self) -> None:
        vectors, length = self._gradient.vectors, self._gradient.layout.length
        factor = self.factor(lambda: norm_in(vectors, length))
        if factor is not None:
            for vector in vectors:
                vector.mul_(factor)

    def step_group(self, group: Group, skipped: Collection[nn.Parameter]) -> None:
        """Runs the optimizer on the parameters of one ``group``, except those in ``skipped``."""
        assert self.updater is not None
        members = self._gradient.parameters[slice(*group.tensors)]
        with self._gradient.exposed(range(*group.tensors)):
            self.updater.apply(parameter for parameter in members if parameter not in skipped)
