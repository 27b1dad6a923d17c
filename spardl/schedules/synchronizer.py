"""Synchronizes the gradients of one model, group by group: what all schedules have in common.

A step is: for each local rank ``begin``, its forward and backward passes (with ``before_backward`` before each of the
latter) and ``collect``; then ``finish``, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spardl.clusters.base import Cluster, gather_rows
from spardl.method.agreement import compare, facts_of, shapes_of
from spardl.method.method import Method, MethodState
from spardl.method.refusals import Refused
from spardl.protocol.programs import Phase, Program
from spardl.schedules.fusion import Range
from spardl.schedules.update import Updater
from spardl.schedules.usage import Usage
from spardl.vector.flat import FlatGradient, write
from spardl.vector.layout import Layout
from spardl.vector.norms import clip_factor, largest, norm_of, sum_of_squares
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["Group", "Synchronizer", "Training"]


class Training(NamedTuple):
    """What is trained.

    Attributes:
        model: whose passes are to be overlapped with communication.
        gradient: all its gradients.
        optimizer: of its parameters.
        clip_norm: largest 2-norm of the averaged gradient; ``None`` for any.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = spardl.Training(model, spardl.FlatGradient(model.named_parameters()), optimizer)
        >>> cluster = spardl.SimulatedCluster(2, spardl.Network(alpha=50e-6, gbit=1))
        >>> synchronizer = spardl.Wfbp(bucket_mb=1).start(spardl.make_method("spardl"), cluster, training)
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

    model: nn.Module
    gradient: FlatGradient
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None


@dataclass(frozen=True)
class Group:
    """Neighbouring layers that are synchronized together.

    Attributes:
        layers: numbers of the first one and of the one after the last.
        tensors: likewise.
        entries: first position in the flat gradient, and the position after the last.
        states: of the method, one per local rank; residual and velocity are parts of those of the whole model.
    """

    layers: Range
    tensors: tuple[int, int]
    entries: tuple[int, int]
    states: list[MethodState]

    def of(self, vector: Tensor) -> Tensor:
        """This group's part, shape (m,), of a vector of the whole model, shape (n,): ``vector``."""
        return vector[slice(*self.entries)]


class Synchronizer(ABC):
    """Averages gradients and lets the optimizer use them.

    Args:
        method: how to average.
        cluster: the workers.
        training: what is trained.
        partition: layers that are synchronized together.

    Attributes:
        kept: entries of all averages so far.

    Raises:
        ConfigError: on all workers, if they were not given the same.
    """

    def __init__(self, method: Method, cluster: Cluster, training: Training, partition: Sequence[Range]) -> None:
        self._method, self._cluster, self._training = method, cluster, training
        self._gradient = training.gradient
        self._updater = Updater(training.optimizer)
        self._usage = Usage(len(cluster.local_ranks), len(self._gradient.parameters))
        self._local = 0
        self.kept = 0
        vector = self._gradient.vector
        carried = vector.numel() if method.momentum.remembers else 0
        self._memories = [torch.zeros_like(vector) for _ in cluster.local_ranks]
        self._velocities = [vector.new_zeros(carried) for _ in cluster.local_ranks]
        self._groups: list[Group] = []
        self._averages: list[dict[int, Sum]] = []
        self._regroup(partition)
        self._compare()
        cluster.expect([layer.entries for layer in self._gradient.layers])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, number))
            for number, parameter in enumerate(self._gradient.parameters)
        ]

    def _compare(self) -> None:
        """Sees to it that all processes were given the same, before they send gradients."""
        if len(self._cluster.local_ranks) == self._cluster.size:
            return
        facts = {**facts_of(self._method), "handle": type(self).__name__.strip("_"), "groups": str(self.partition)}
        facts["clip_norm"] = str(self._training.clip_norm)
        facts |= shapes_of(self._gradient.names, self._gradient.parameters)
        workers, device = self._cluster.local_workers, self._cluster.device
        self._cluster.run_aside([compare(worker, facts, device) for worker in workers])

    # --- the steps of training

    def begin(self, local: int = 0) -> None:
        """From here on passes are those of the local rank ``local``."""
        self._local = local
        self._usage.begin(local)

    def before_backward(self, *, last: bool) -> None:
        """Is called before each backward pass; ``last``: whether it is this rank's last one in this step."""
        self._cluster.reach(self._local, (), backward=True)

    def collect(self) -> None:
        """Takes over the gradient that the rank's backward passes left, and clears it."""

    @abstractmethod
    def finish(self) -> None:
        """Ends a step: the optimizer uses the averages, now or at the latest before the weights are used."""

    def flush(self) -> None:
        """Sees to it that the weights are those after the last step."""

    def close(self) -> None:
        """Takes everything off the model that was attached to it."""
        for hook in self._hooks:
            hook.remove()

    # --- what others may know

    @property
    def remembers(self) -> bool:
        """Whether the method carries anything over from step to step."""
        return self._method.residual.remembers

    @property
    def partition(self) -> list[Range]:
        """Layers that are synchronized together."""
        return [group.layers for group in self._groups]

    @property
    def chosen(self) -> list[Range] | None:
        """The groups that measurements have led to, for good; ``None`` before that, and where nothing is measured."""
        return None

    def averages(self, local: int = 0) -> list[Sum]:
        """What the local rank ``local`` computed as the averages of the last step, group by group.

        To be asked for after ``flush``, and before the next gradient.
        """
        return [average for _, average in sorted(self._averages[local].items())]

    def refused(self) -> int:
        """Gradients (of a group, by a local rank) that were left out because they were not finite, or cut."""
        return sum(state.refused for group in self._groups for state in group.states)

    def refusals(self) -> list[Refused]:
        """The same for each local rank, and when the last one was."""
        return [Refused.of(states) for states in zip(*(group.states for group in self._groups), strict=True)]

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """What the local rank ``local`` carries from step to step, as plain data."""
        self.flush()
        return {
            "partition": [list(layers) for layers in self.partition],
            "groups": [group.states[local].state_dict() for group in self._groups],
            "usage": self._usage.state_dict(),
            "kept": self.kept,
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from ``values``, which ``state_dict`` gave for the same rank, ``local``."""
        self._follow(values)
        for group, saved in zip(self._groups, values["groups"], strict=True):
            group.states[local].load_state_dict(saved)

    def adopt(self, local: int, parts: Sequence[Mapping[str, Any]], before: int) -> None:
        """Continues from what ``state_dict`` gave another number of workers.

        Args:
            local: which rank.
            parts: of the ranks in ``spardl.method.elastic.sources``, in that order.
            before: how many workers there were.
        """
        self._follow(parts[0])
        worker = self._cluster.local_workers[local]
        for group, *saved in zip(self._groups, *(part["groups"] for part in parts), strict=True):
            group.states[local].adopt(saved, worker, before)

    def carried(self, local: int = 0) -> list[Tensor]:
        """The residual and the velocity of the local rank ``local``, as far as the method has them: shapes (n,)."""
        return [*([self._memories[local]] if self.remembers else []), self._velocities[local]]

    def residual_sum(self, local: int = 0) -> float:
        """The sum of all entries of the residual of the local rank ``local``."""
        return float(self._memories[local].sum(dtype=torch.float64))

    def _follow(self, values: Mapping[str, Any]) -> None:
        """Continues with what is equal on all workers."""
        partition = [(start, stop) for start, stop in values["partition"]]
        if partition != self.partition:
            self._regroup(partition)
        self._usage.load_state_dict(values["usage"])
        self.kept = values["kept"]

    # --- groups

    def _regroup(self, partition: Sequence[Range]) -> None:
        """Cuts the gradient anew. Residuals and velocities stay: they belong to the parameters."""
        before = self._groups
        self._groups = [self._group(layers) for layers in partition]
        self._averages = [{} for _ in self._cluster.local_ranks]
        if before:
            for local in range(len(self._cluster.local_ranks)):
                refused = Refused.of(group.states[local] for group in before)
                first = self._groups[0].states[local]
                first.refused, first.refused_last = refused
                for group in self._groups:
                    group.states[local].step = before[0].states[local].step

    def _group(self, layers: Range) -> Group:
        members = self._gradient.layers[slice(*layers)]
        tensors = (members[0].tensors[0], members[-1].tensors[1])
        ranges = self._gradient.layout.tensors[slice(*tensors)]
        layout = Layout(self._gradient.layout.shapes[slice(*tensors)])
        start, stop = ranges[0][0], ranges[-1][1]
        pairs = zip(self._memories, self._velocities, strict=True)
        states = [self._method.state_in(layout, memory[start:stop], velocity[start:stop]) for memory, velocity in pairs]
        return Group(layers, tensors, (start, stop), states)

    def _accumulate(self, group: Group) -> None:
        """Moves the gradient of a group to what the local rank carried over."""
        with self._cluster.timed(Phase.SELECT, [self._local]):
            if self._method.momentum.decay:
                self._gradient.add_weights(self._method.momentum.decay, group.tensors)
            part = group.of(self._gradient.vector)
            self._method.accumulate(part, group.states[self._local], clear=True)

    def _programs(self, group: Group) -> list[Program[Sum]]:
        """The synchronization of a group, one program per local rank."""
        pairs = zip(self._cluster.local_workers, group.states, strict=True)
        return [self._method.average(worker, state) for worker, state in pairs]

    def _arrive(self, number: int, parameter: nn.Parameter) -> None:
        """Is called when a gradient is complete in a backward pass."""
        self._usage.note(self._local, number)
        self._on_gradient(number)

    def _on_gradient(self, number: int) -> None:
        """For those who do not wait for the end of the backward pass."""

    # --- the update

    def _take_over(self, group: Group, average: Sum) -> None:
        """Puts an average where the optimizer looks for it."""
        # What was there has been moved to the residual.
        write(average, group.of(self._gradient.vector), clear=False)
        self.kept += len(average) if isinstance(average, SparseVector) else average.numel()

    def _update_all(self) -> None:
        """Lets the optimizer use the averages of all groups."""
        vector, limit = self._gradient.vector, self._training.clip_norm
        unused = self._unused()
        with self._everybody(Phase.UPDATE):
            if limit is not None:
                peak, length = largest([vector]), vector.numel()
                total = sum_of_squares([vector], peak, length)
                vector.mul_(clip_factor(norm_of(total, peak, length), limit))
            self._updater.hold()
            with self._gradient.hidden(unused):
                self._updater.apply(self._gradient.parameters)
            vector.zero_()

    def _unused(self) -> list[nn.Parameter]:
        """Parameters that no worker's gradient depends on in this step: they are left as they are, as DDP does."""
        rows = self._usage.rows()
        numbers = self._usage.unused(gather_rows(self._cluster, rows) if rows else [])
        return [self._gradient.parameters[number] for number in numbers]

    def _everybody(self, phase: Phase) -> AbstractContextManager[None]:
        return self._cluster.timed(phase, range(len(self._cluster.local_ranks)))
