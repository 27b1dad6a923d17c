"""DeAR: the reduce-scatter during the backward pass, the all-gather during the next forward pass.

Source: Zhang et al., DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining, ICDCS 2023
(arXiv 2302.12445). The mathematics is that of synchronous training: every group of parameters is updated before it is
used. Per group, all-reduce costs as much as in one piece: (P-1) alpha + n(P-1)/P beta for each half.

With a sparse communicator the halves are those of its own: SparDL's Spar-Reduce-Scatter (and the gather between teams)
goes beside the backward pass, the all-gather inside the teams beside the next forward pass. No paper has this. What a
worker dropped is put back when its all-gather has ended, which is before its next gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters.base import Cluster, Flight, gather_rows
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.schedules.base import Schedule
from spardl.schedules.first_use import FirstUses
from spardl.schedules.fusion import Range, by_count, by_size
from spardl.schedules.in_backward import InBackward
from spardl.schedules.synchronizer import Group, Synchronizer, Training
from spardl.schedules.trials import Trials
from spardl.schedules.wfbp import check_megabytes, entries_of
from spardl.vector.norms import clip_factor, largest, norm_of, sum_of_squares
from spardl.vector.sparse import Sum

__all__ = ["Dear"]


@dataclass(frozen=True)
class Dear(Schedule):
    """Overlaps communication with the backward pass and with the forward pass after it.

    Args:
        threshold_mb: most megabytes of gradients in a fusion group; 0: every layer alone.
        layers: so many neighbouring layers in a group instead; ``None`` for groups by size.
        trials: sizes to try in the first steps of training, the first being ``threshold_mb``, of which the fastest is
            kept (Bayesian optimization, section 4 of the paper); 0 for none.
        low_mb: least size to try, in megabytes.
        high_mb: greatest size to try, in megabytes.
        seed: of the choice of sizes.

    Raises:
        ConfigError: if a value is out of range, or two contradict each other.
    """

    threshold_mb: float = 25.0
    layers: int | None = None
    trials: int = 0
    low_mb: float = 1.0
    high_mb: float = 256.0
    seed: int = 0

    name = "dear"

    def __post_init__(self) -> None:
        for name in ("threshold_mb", "low_mb", "high_mb"):
            check_megabytes(f"schedule.{name}", getattr(self, name))
        for name, least in (("layers", 1), ("trials", 0), ("seed", 0)):
            value = getattr(self, name)
            if not (is_a(int, value) and value >= least) and not (name == "layers" and value is None):
                raise ConfigError(f"schedule.{name} must be a whole number, at least {least}, got {value!r}")
        if self.trials and self.layers is not None:
            raise ConfigError("schedule.trials tunes the size of groups; use schedule.layers=null with it")
        if self.trials:
            self._tuner()

    def _tuner(self) -> Trials:
        return Trials(self.low_mb, self.high_mb, self.threshold_mb, self.trials, self.seed)

    def check(self, method: Method, *, clips: bool) -> None:
        """Accepts methods that may rest between their halves."""
        method.check_split()
        if clips:
            method.check_shards()

    def start(self, method: Method, cluster: Cluster, training: Training) -> Synchronizer:
        """With groups by size or by number."""
        cut = partial(self._partition, training)
        return _InHalves(method, cluster, training, cut, self.threshold_mb, self._tuner() if self.trials else None)

    def _partition(self, training: Training, megabytes: float) -> list[Range]:
        sizes = [layer.entries for layer in training.gradient.layers]
        if self.layers is not None:
            return by_count(len(sizes), self.layers)
        return by_size(sizes, entries_of(megabytes, training))


class _InHalves(InBackward):
    pauses = True

    def __init__(
        self,
        method: Method,
        cluster: Cluster,
        training: Training,
        cut: Callable[[float], list[Range]],
        megabytes: float,
        trials: Trials | None,
    ) -> None:
        self._cut, self._trials = cut, trials
        self._landing: list[Flight[Sum]] = []
        self._landed: list[set[int]] = []
        self._pending: set[int] = set()
        self._late: set[int] = set()
        self._skipped: set[nn.Parameter] = set()
        self._factor: float | None = None
        self._computing = False
        super().__init__(method, cluster, training, cut(megabytes))
        self._uses = FirstUses(training.model, training.gradient.layer_of(), self._need)
        self._hooks += [
            training.model.register_state_dict_pre_hook(lambda *_: self.flush()),
            training.optimizer.register_state_dict_pre_hook(lambda *_: self.flush()),
        ]

    def begin(self, local: int = 0) -> None:
        """Forward passes of a local rank come next, and wait for what they use."""
        if local == 0:
            self._tune()
        super().begin(local)
        self._computing = True
        self._uses.begin()

    def _tune(self) -> None:
        megabytes = self._trials.next(self._cluster) if self._trials else None
        if megabytes is not None:
            self.flush()
            self._regroup(self._cut(megabytes))

    def _regroup(self, partition: Sequence[Range]) -> None:
        self._landing, self._landed = [], []
        super()._regroup(partition)

    def before_backward(self, *, last: bool) -> None:
        """What the forward passes did not use is updated now at the latest, before there are new gradients."""
        self._uses.end()
        super().before_backward(last=last)
        self._late = set(range(len(self._groups))) - self._landed[self._local] if self._landed else set()
        self._land_all(self._local)

    def _on_gradient(self, number: int) -> None:
        group = self._group_of[number]
        if group in self._late:
            raise TrainingError(
                f"the forward pass used {self._gradient.names[number]} where it did not in the first step, before the "
                "parameter was up to date; use schedule=wfbp for models that change their way"
            )
        super()._on_gradient(number)

    def collect(self) -> None:
        """The rest of the reduce-scatters begin."""
        self._computing = False
        super().collect()

    def finish(self) -> None:
        """Orders the update; the all-gathers begin, in the order of the forward pass."""
        self._skipped = set(self._unused())
        limit = self._training.clip_norm
        self._factor = None if limit is None else clip_factor(self._norm(), limit)
        self._updater.hold()
        self._landing, self._flights = self._flights, []
        self._landed = [set() for _ in self._cluster.local_ranks]
        self._pending = set(range(len(self._groups)))
        self._averages = [{} for _ in self._cluster.local_ranks]
        for flight in self._landing:
            flight.resume()

    def _norm(self) -> float:
        """Of the average, from the shards that each worker has."""
        shards = [self._shards(local) for local in range(len(self._cluster.local_ranks))]
        length = self._gradient.vector.numel()
        rows = [torch.tensor([largest(parts)], dtype=torch.float64) for parts in shards]
        peak = largest(gather_rows(self._cluster, rows, counted=True))
        rows = [torch.tensor([sum_of_squares(parts, peak, length)]) for parts in shards]
        totals = gather_rows(self._cluster, rows, counted=True)
        return norm_of(sum(int(total) for total in totals), peak, length)

    def _shards(self, local: int) -> list[Tensor]:
        worker = self._cluster.local_workers[local]
        return [
            self._method.shard(flight.boundary(local), worker, group.states[local])
            for flight, group in zip(self._flights, self._groups, strict=True)
        ]

    def _need(self, layers: Collection[int]) -> None:
        """A forward pass of the local rank is about to use some layers."""
        if not self._landed or len(self._landed[self._local]) == len(self._groups):
            return
        if self._computing:
            self._cluster.reach(self._local, layers, backward=False)
        for layer in sorted(layers):
            group = next(number for number, group in enumerate(self._groups) if layer < group.layers[1])
            self._land(group, self._local)

    def _land_all(self, local: int) -> None:
        for number in range(len(self._groups) if self._landed else 0):
            self._land(number, local)

    def _land(self, number: int, local: int) -> None:
        """Lets a local rank wait for a group, which is updated when the first of them has it."""
        if number in self._landed[local]:
            return
        average = self._landing[number].wait(local)
        self._averages[local][number] = average
        self._landed[local].add(number)
        if number in self._pending:
            self._pending.remove(number)
            with self._everybody(Phase.UPDATE):
                self._update(self._groups[number], average)

    def _update(self, group: Group, average: Sum) -> None:
        self._take_over(group, average)
        gradient = group.of(self._gradient.vector)
        if self._factor is not None:
            gradient.mul_(self._factor)
        members = self._gradient.parameters[slice(*group.tensors)]
        self._updater.apply(parameter for parameter in members if parameter not in self._skipped)
        gradient.zero_()

    def flush(self) -> None:
        """Waits for all that is on its way, and updates."""
        if self._trials:
            self._trials.disturb()
        for local in range(len(self._landed)):
            self._land_all(local)

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """That of every schedule, and the trials."""
        return {**super().state_dict(local), "trials": self._trials.state_dict() if self._trials else None}

    def _follow(self, values: Mapping[str, Any]) -> None:
        super()._follow(values)
        if self._trials and values["trials"] is not None:
            self._trials.load_state_dict(values["trials"])

    def close(self) -> None:
        """Flushes, and takes the hooks off."""
        self.flush()
        self._uses.close()
        super().close()
