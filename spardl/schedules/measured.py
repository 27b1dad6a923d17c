"""Groups of layers that are chosen by what the first steps measure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spardl.clusters.base import Cluster, gather_rows
from spardl.method.method import Method
from spardl.protocol.state import described
from spardl.schedules.base import Schedule
from spardl.schedules.engine import Engine
from spardl.schedules.fusion import Range
from spardl.schedules.groups import Groups, agreed_groups
from spardl.schedules.in_backward import InBackward
from spardl.schedules.linear import Linear
from spardl.schedules.partition import flat_order
from spardl.schedules.training import Training
from spardl.vector.layout import Layout

__all__ = ["Decide", "Measured", "Measuring", "measure_cost"]

Decide: TypeAlias = Callable[[Sequence[int], Sequence[float], Linear], list[Range]]
"""``decide(entries, ready, cost)``: the partition for layers with so many entries, whose gradients are ready so many
seconds after the backward pass began, if the synchronization of a group takes ``cost(entries)`` seconds."""

# The first one finds caches cold, and memory to be allocated.
_SKIPPED, _COUNTED = 1, 5
_REPEATS = 3


@dataclass(frozen=True)
class Measuring(Schedule):
    """A schedule whose groups are chosen by what the first steps measure, or were chosen by another run.

    Times differ from run to run, and so may the groups, and the bits of what sparse methods find.

    Args:
        groups: a file with the groups that another run chose, to be used from the first step on: ``groups.json`` of its
            folder; ``None``: measure.

    Raises:
        ConfigError: if the file holds no groups.
    """

    groups: str | None = None

    def __post_init__(self) -> None:
        if self.groups is not None:
            Groups.read(Path(str(self.groups)))

    @abstractmethod
    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """The partition that measurements lead to.

        Args:
            entries: of each layer, in flat order.
            ready: when the gradient of each layer is there, in seconds since the backward pass began.
            cost: seconds that the synchronization of so many entries takes.

        Returns:
            It, in flat order.
        """

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Measures first, unless the groups are known."""
        if self.groups is None:
            return Measured(method, cluster, training, self.decide)
        return InBackward(method, cluster, training, agreed_groups(Path(str(self.groups)), cluster, training))


class Measured(InBackward):
    """Sends all layers together in the first steps, measures, decides, and stays with that.

    Args:
        method: how to average.
        cluster: the workers.
        training: what is trained.
        decide: chooses the partition.
    """

    def __init__(self, method: Method, cluster: Cluster, training: Training, decide: Decide) -> None:
        self._decide = decide
        self._rows: list[list[float]] | None = []
        self._began = 0.0
        layers = training.gradient.layers
        self._layer_of = [number for number, layer in enumerate(layers) for _ in range(*layer.tensors)]
        super().__init__(method, cluster, training, [(0, len(layers))])

    def begin(self, local: int = 0) -> None:
        """Decides if enough has been measured, and measures one step more if not."""
        if local == 0 and self._rows is not None:
            if len(self._rows) == _SKIPPED + _COUNTED:
                self._regroup(self._found(self._rows[_SKIPPED:]))
                self._rows = None
            else:
                self._rows.append([0.0] * len(self._gradient.layers))
        super().begin(local)

    def before_backward(self, *, last: bool) -> None:
        """The clock starts with the last backward pass."""
        super().before_backward(last=last)
        if self._rows is not None:
            self._began = self._cluster.now(self._local)

    def complete(self, number: int) -> None:
        """Takes the time."""
        # One rank of a process is enough.
        if self._rows is not None and self._local == 0:
            layer = self._layer_of[number]
            self._cluster.reach(self._local, [layer], backward=True)
            self._rows[-1][layer] = self._cluster.now(self._local) - self._began
        super().complete(number)

    def _found(self, rows: Sequence[Sequence[float]]) -> list[Range]:
        """What all workers' measurements lead to: the same on each of them."""
        mine = torch.tensor([median(times) for times in zip(*rows, strict=True)], dtype=torch.float64)
        ready = _mean(self._cluster, [mine for _ in self._cluster.local_ranks])
        cost = measure_cost(self._method, self._cluster, max(self._gradient.vectors, key=Tensor.numel))
        entries = self._gradient.entries
        return flat_order(
            self._gradient,
            lambda order: self._decide([entries[each] for each in order], [ready[each] for each in order], cost),
        )

    @property
    def fixed(self) -> bool:
        """Not before they are chosen."""
        return False

    @property
    def chosen(self) -> list[Range] | None:
        """The partition, once it is decided."""
        return self.partition if self._rows is None else None

    def facts(self, given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Those of every schedule, and how many steps were measured."""
        return {**super().facts(given), "steps measured": "all" if self._rows is None else str(len(self._rows))}

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """That of every schedule, and whether it is decided."""
        return {**super().state_dict(local), "decided": self._rows is None}

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Accepts states of other schedules as well, whose groups it begins with."""
        super().check_state(values)
        if type(values.get("decided", False)) is not bool:
            raise ValueError(f"decided is {described(values['decided'])}, expected True or False")

    def _follow(self, values: Mapping[str, Any]) -> None:
        # Measurements that were not complete begin anew.
        super()._follow(values)
        self._rows = None if values.get("decided") else []


def measure_cost(method: Method, cluster: Cluster, gradient: Tensor) -> Linear:
    """Seconds that the synchronization of a group takes, from three sizes, as all workers together find them.

    Args:
        method: how to average; its dense warm-up is left out.
        cluster: the workers.
        gradient: shape (n,), with the type and place of gradients; n bounds the sizes.
    """
    sizes = sorted({max(1, gradient.numel() // share) for share in (64, 8, 1)})
    # A model that drops out entries must draw the same ones as under any other schedule.
    with torch.random.fork_rng([gradient.device] if gradient.device.type == "cuda" else []):
        seconds = [_measure(method, cluster, torch.randn_like(gradient[:size])) for size in sizes]
    return Linear.fit(sizes, seconds) if len(sizes) > 1 else Linear(seconds[0], 0.0)


def _measure(method: Method, cluster: Cluster, gradient: Tensor) -> float:
    layout = Layout.flat(gradient.numel())
    states = [method.init_state(layout, gradient.dtype, gradient.device) for _ in cluster.local_ranks]
    found = []
    for _ in range(_REPEATS):
        for state in states:
            state.step = method.warmup.steps + 1
            method.accumulate(gradient, state)
        pairs = zip(cluster.local_workers, states, strict=True)
        seconds = cluster.time_aside([method.average(worker, state) for worker, state in pairs])
        found.append(fmean(_mean(cluster, [torch.tensor([each], dtype=torch.float64) for each in seconds])))
    return min(found)


def _mean(cluster: Cluster, rows: Sequence[Tensor]) -> list[float]:
    means: list[float] = torch.stack(gather_rows(cluster, rows, counted=cluster.counts_calibration)).mean(0).tolist()
    return means
