"""Schedules that choose groups of layers from times measured in the first steps: MG-WFBP and LayerFusion.

Sources: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and TPDS 2021, Algorithm 1; Dai et al., Sketch-Fusion SGD, JPDC 185,
2024.

A *group* is a range of neighboring layers that are synchronized together, and a *partition* is a list of groups that
contains every layer once. *Flat order* is the order of the layers in the flat gradient. A *local rank* is one of the
workers that this process runs.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json
from spardl.clusters.base import Cluster, gather_rows
from spardl.method.method import Method
from spardl.protocol.programs import describe
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.fusion import Linear, Range, flat_order
from spardl.schedules.wfbp import InBackward
from spardl.vector.layout import Layout

__all__ = [
    "Decide",
    "Groups",
    "LayerFusion",
    "Measured",
    "Measuring",
    "MgWfbp",
    "agreed_groups",
    "measure_cost",
    "merge",
    "optimal",
]


# Files of groups that one run chose, for other runs.


class Groups(NamedTuple):
    """Partition of a model's layers into groups, and the sizes of the layers; the content of a ``groups.json``.

    Attributes:
        entries: Number of entries of each layer in flat order, which identifies the model.
        ranges: Groups of layers in flat order.
    """

    entries: Sequence[int]
    ranges: Sequence[Range]

    def text(self) -> str:
        """Returns the content of a ``groups.json`` file, which ``read`` accepts."""
        return json.dumps({"entries": list(self.entries), "groups": [list(each) for each in self.ranges]}) + "\n"

    @classmethod
    def read(cls, file: Path) -> Groups:
        """Reads groups that ``text`` wrote to ``file``.

        Raises:
            ConfigError: If the file cannot be read, or its groups do not contain every layer exactly once.
        """
        where = f"schedule.groups={file}"
        try:
            content: Any = read_json(file)
            entries, ranges = list(content["entries"]), [(start, stop) for start, stop in content["groups"]]
        except OSError as error:
            raise ConfigError(
                f"{where} cannot be read: {error.strerror}; pass RUN/groups.json of another run"
            ) from error
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{where} contains no groups of layers; pass RUN/groups.json of another run") from error
        ends = [0, *(stop for _, stop in ranges)]
        numbers = all(is_number(int, number) for number in (*entries, *ends))
        if not numbers or ranges != list(pairwise(ends)) or ends != sorted({*ends, len(entries)}):
            raise ConfigError(
                f"{where} must contain each of its {len(entries)} layers exactly once; pass RUN/groups.json of another "
                "run"
            )
        return cls(entries, ranges)


def agreed_groups(file: Path, cluster: Cluster, training: Training) -> list[Range]:
    """Reads the groups of a file for the current model; all workers must call this at the same time.

    Args:
        file: File ``groups.json`` of another run.
        cluster: Cluster that runs the workers.
        training: Training of the model to divide into groups.

    Returns:
        Groups of layers in flat order.

    Raises:
        ConfigError: If the file belongs to another model, or workers read different groups.
    """
    found = Groups.read(file)
    entries = [layer.entries for layer in training.gradient.layers]
    if list(found.entries) != entries:
        raise ConfigError(
            f"schedule.groups={file} belongs to another model with {len(found.entries)} layers and "
            f"{sum(found.entries):,} entries, expected {len(entries)} layers and {sum(entries):,} entries; use a file "
            "of this model"
        )
    # Encode the partition as a row of fixed length, which workers can gather even if their partitions differ.
    begins = torch.zeros(len(entries), dtype=torch.int64)
    begins[[start for start, _ in found.ranges]] = 1
    rows = gather_rows(cluster, [begins for _ in cluster.local_ranks])
    odd = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if odd:
        raise ConfigError(f"schedule.groups={file} differs on ranks {odd} from rank 0; copy the same file to all nodes")
    return list(found.ranges)


Decide: TypeAlias = Callable[[Sequence[int], Sequence[float], Linear], list[Range]]
"""``decide(entries, ready, cost)``: the partition for layers with ``entries`` entries, whose gradients are complete
``ready`` seconds after the start of the backward pass, if synchronizing a group takes ``cost(entries)`` seconds."""

# Number of steps that are skipped (the first one allocates memory and has cold caches) and measured.
_SKIPPED, _COUNTED = 1, 5
_REPEATS = 3


@dataclass(frozen=True)
class Measuring(Schedule):
    """Schedule whose groups are chosen by measurements in the first steps, or by another run.

    Measured times differ from run to run. The groups may therefore differ as well and, with sparse methods, also the
    result.

    Args:
        groups: File with the groups that another run chose (``groups.json`` in its folder), to use from the first step
            on; ``None`` to measure.

    Raises:
        ConfigError: If the file does not contain groups.
    """

    groups: str | None = None

    def __post_init__(self) -> None:
        if self.groups is not None:
            Groups.read(Path(str(self.groups)))

    @abstractmethod
    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """Chooses the partition from measurements.

        Args:
            entries: Number of entries of each layer, in flat order.
            ready: Time at which the gradient of each layer is complete, in seconds after the start of the backward
                pass.
            cost: Function that returns the seconds that the synchronization of a number of entries takes.

        Returns:
            The partition in flat order.
        """

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates an engine that chooses groups after some measured steps, or uses those of ``groups`` at once."""
        if self.groups is None:
            return Measured(method, cluster, training, self.decide)
        return InBackward(method, cluster, training, agreed_groups(Path(str(self.groups)), cluster, training))


class Measured(InBackward):
    """Engine that sends all layers as one group in the first steps, measures them, and then chooses a partition.

    Args:
        method: Method that averages the gradients.
        cluster: Cluster that runs the workers.
        training: Model, gradients and optimizer to train.
        decide: Function that chooses the partition.
    """

    fixed = False

    def __init__(self, method: Method, cluster: Cluster, training: Training, decide: Decide) -> None:
        self._decide = decide
        self._ready_times: list[list[float]] | None = []
        self._backward_start = 0.0
        layers = training.gradient.layers
        self._layer_of = [number for number, layer in enumerate(layers) for _ in range(*layer.tensors)]
        super().__init__(method, cluster, training, [(0, len(layers))])

    def begin(self, local: int = 0) -> None:
        """Begins a step; after enough measured steps, first chooses the partition."""
        if local == 0 and self._ready_times is not None:
            if len(self._ready_times) == _SKIPPED + _COUNTED:
                self._regroup(self._choose(self._ready_times[_SKIPPED:]))
                self._decided(True)
            else:
                self._ready_times.append([0.0] * len(self._gradient.layers))
        super().begin(local)

    def before_backward(self, *, last: bool) -> None:
        """Announces a backward pass, and stores its start as time 0 of the measured times."""
        super().before_backward(last=last)
        if self._ready_times is not None:
            self._backward_start = self._cluster.now(self._step.local)

    def complete(self, number: int) -> None:
        """Stores the time at which the gradient of parameter ``number`` is complete, while steps are measured."""
        # Local ranks run the same model: measure the first one.
        if self._ready_times is not None and self._step.local == 0:
            layer = self._layer_of[number]
            self._cluster.reach(self._step.local, [layer], backward=True)
            self._ready_times[-1][layer] = self._cluster.now(self._step.local) - self._backward_start
        super().complete(number)

    def _choose(self, rows: Sequence[Sequence[float]]) -> list[Range]:
        """Computes the partition from the measurements of all workers; equal on all workers."""
        # The median ignores steps that other processes on the machine disturbed.
        mine = torch.tensor([median(times) for times in zip(*rows, strict=True)], dtype=torch.float64)
        ready = _mean(self._cluster, [mine for _ in self._cluster.local_ranks])
        cost = measure_cost(self._method, self._cluster, max(self._gradient.vectors, key=Tensor.numel))
        entries = self._gradient.entries
        return flat_order(
            self._gradient,
            lambda order: self._decide([entries[each] for each in order], [ready[each] for each in order], cost),
        )

    def _decided(self, decided: bool) -> None:
        """Sets whether the current partition is final; otherwise measures again."""
        self._ready_times = None if decided else []
        self.chosen = self.partition if decided else None

    def facts(self, given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Returns settings and state of the engine as text, with the number of measured steps."""
        return {
            **super().facts(given),
            "steps measured": "all" if self._ready_times is None else str(len(self._ready_times)),
        }

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """Returns the state of the local rank ``local``, and whether the partition has been chosen."""
        return {**super().state_dict(local), "decided": self._ready_times is None}

    def check_state(self, values: Mapping[str, Any]) -> None:
        """Checks a saved state, also one of another schedule, whose groups are then used until a choice is made.

        Args:
            values: Saved state.

        Raises:
            ValueError: If a value has a wrong type or shape.
        """
        super().check_state(values)
        if type(values.get("decided", False)) is not bool:
            raise ValueError(f"'decided' must be True or False, got {describe(values['decided'])}")

    def _load_common(self, values: Mapping[str, Any]) -> None:
        # Incomplete measurements start again: the run may have resumed on another machine.
        super()._load_common(values)
        self._decided(bool(values.get("decided")))


def measure_cost(method: Method, cluster: Cluster, gradient: Tensor) -> Linear:
    """Returns the time of a synchronization as a linear function of its size, fitted to measurements on all workers.

    Three sizes are measured; all workers must call this at the same time.

    Args:
        method: Method that averages the gradients; its dense warm-up is skipped.
        cluster: Cluster that runs the workers.
        gradient: Tensor of shape (n,) with the dtype and device to measure; n is the largest measured size.
    """
    # Small sizes determine the start-up time, large ones the time per entry.
    sizes = sorted({max(1, gradient.numel() // share) for share in (64, 8, 1)})
    # Fork, so that dropout draws the same random numbers as with any other schedule.
    with torch.random.fork_rng([gradient.device] if gradient.device.type == "cuda" else []):
        seconds = [_measure(method, cluster, torch.randn_like(gradient[:size])) for size in sizes]
    return Linear.fit(sizes, seconds) if len(sizes) > 1 else Linear(seconds[0], 0.0)


def _measure(method: Method, cluster: Cluster, gradient: Tensor) -> float:
    layout = Layout.flat(gradient.numel())
    states = [method.init_state(layout, gradient.dtype, gradient.device) for _ in cluster.local_ranks]
    found = []
    for _ in range(_REPEATS):
        for state in states:
            # Measure the sparse method, not the dense synchronization of the warm-up.
            state.step = method.warmup.steps + 1
            method.accumulate(gradient, state)
        pairs = zip(cluster.local_workers, states, strict=True)
        seconds = cluster.time_uncounted([method.average(worker, state) for worker, state in pairs])
        found.append(fmean(_mean(cluster, [torch.tensor([each], dtype=torch.float64) for each in seconds])))
    # The minimum, because other processes on the machine can only add time.
    return min(found)


def _mean(cluster: Cluster, rows: Sequence[Tensor]) -> list[float]:
    means: list[float] = torch.stack(gather_rows(cluster, rows, counted=cluster.counts_calibration)).mean(0).tolist()
    return means


# LayerFusion.


Table: TypeAlias = npt.NDArray[np.float64]


def optimal(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]) -> list[Range]:
    """Returns the partition with which the last synchronization ends earliest, according to ``fusion.finish``.

    This follows LayerFusion in Dai et al.: Sketch-Fusion SGD (JPDC 185, 2024), which chooses groups of layers by
    measured times and without a hyper-parameter. The paper's equations were not available: this is our formulation of
    the objective that its abstract states, not a copy of its algorithm. With f[i] the earliest end of layer i and all
    later layers,

        f[i] = min over j > i of max(f[j], ready[i:j]) + cost(entries[i:j]),    f[L] = 0,

    which is exact for any ready times and any cost, because an earlier end of the later layers is never a disadvantage.
    It takes O(L^2) calls of ``cost``, time and memory. A second pass then finds the smallest number of groups that ends
    equally early, because a group without benefit would still add a message. It takes O(L^2) time for each group.

    Args:
        entries: Number of entries of each layer, in flat order.
        ready: Time at which the gradient of each layer is complete, in seconds after the start of the backward pass.
        cost: Function that returns the seconds (at least 0) that the compression and synchronization of a number of
            entries takes.

    Returns:
        The partition in flat order; empty if there are no layers.

    Raises:
        ConfigError: If a time is not finite.
    """
    layers = len(entries)
    waits, costs = _tables(entries, ready, cost)
    earliest = np.zeros(layers + 1)
    for layer in reversed(range(layers)):
        after = slice(layer + 1, None)
        earliest[layer] = (np.maximum(earliest[after], waits[layer, after]) + costs[layer, after]).min()
    if not np.isfinite(earliest).all():
        raise ConfigError(
            "layer_fusion: a measured time is not finite; start the run again, or measure again (spardl profile)"
        )
    return _fewest(waits, costs, float(earliest[0]))


def _tables(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]) -> tuple[Table, Table]:
    """Returns ready time and cost of the group of layers [i, j) at index [i, j]; infinite unless i < j."""
    layers = len(entries)
    waits = np.full((layers + 1, layers + 1), np.inf)
    costs = waits.copy()
    for layer in range(layers):
        waits[layer, layer + 1 :] = np.maximum.accumulate(ready[layer:])
        costs[layer, layer + 1 :] = [cost(size) for size in accumulate(entries[layer:])]
    return waits, costs


def _fewest(waits: Table, costs: Table, goal: float) -> list[Range]:
    """Finds the smallest number of groups with which the last synchronization ends at ``goal``, a reachable time.

    Row g of the search is the earliest end of layer i and all later layers in exactly g groups. Both passes round in
    the same way, so the comparison with the goal is exact.
    """
    layers = len(waits) - 1
    found = np.full(layers + 1, np.inf)
    found[layers] = 0.0
    nexts: list[npt.NDArray[np.intp]] = []
    while found[0] > goal:
        candidates = np.maximum(found, waits) + costs
        nexts.append(candidates.argmin(axis=1))
        found = candidates.min(axis=1)
    groups: list[Range] = []
    start = 0
    for best in reversed(nexts):
        stop = int(best[start])
        groups.append((start, stop))
        start = stop
    return groups


@dataclass(frozen=True)
class LayerFusion(Measuring):
    """Chooses the groups with which the last synchronization ends earliest, from times measured in the first steps."""

    name = "layer_fusion"

    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """Chooses the best partition with ``optimal``.

        Args:
            entries: Number of entries of each layer, in flat order.
            ready: Time at which the gradient of each layer is complete, in seconds after the start of the backward
                pass.
            cost: Function that returns the seconds that the synchronization of a number of entries takes.

        Returns:
            The partition in flat order.

        Raises:
            ConfigError: If a time is not finite.
        """
        return optimal(entries, ready, cost)


# MG-WFBP: merged-gradient wait-free backpropagation.


def merge(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float], startup: float) -> list[Range]:
    """Forms groups from the last layer to the first: decides for each layer whether it joins the current group.

    Algorithm 1 of Shi, Chu, Li: MG-WFBP (INFOCOM 2019, TPDS 2021). Let ``begin`` be the earliest start of the current
    group's synchronization (all its gradients are complete, and the groups after it have ended), and let ``next`` be
    the time at which the gradient of the layer before it is complete. That layer joins the group if

    * ``next <= begin``: its gradient is complete before the group could start, so it causes no delay; or
    * ``next - begin < startup``: waiting costs less than the start-up time that one message fewer saves.

    Otherwise the group is closed, and ends at ``begin + cost(its entries)``. The paper writes both conditions as
    ``next < begin + startup``, which differs only for a ``startup`` of 0: here, layers that cause no delay still join.
    The paper's cost is ``startup + beta * bytes``; here it may be any function of the size. The rule looks one layer
    ahead, so the result is not always the best partition; ``optimal`` finds that one.

    Args:
        entries: Number of entries of each layer, in flat order.
        ready: Time at which the gradient of each layer is complete, in seconds after the start of the backward pass.
        cost: Function that returns the seconds that the synchronization of a number of entries takes.
        startup: Part of the cost that does not depend on the size (alpha in the paper), in seconds.

    Returns:
        The partition in flat order; empty if there are no layers.
    """
    if not entries:
        return []
    groups: list[Range] = []
    stop, begin = len(entries), max(0.0, ready[-1])
    for layer in reversed(range(len(entries) - 1)):
        if ready[layer] > begin and ready[layer] - begin >= startup:
            groups.append((layer + 1, stop))
            begin += cost(sum(entries[layer + 1 : stop]))
            stop = layer + 1
        begin = max(begin, ready[layer])
    return [(0, stop), *reversed(groups)]


@dataclass(frozen=True)
class MgWfbp(Measuring):
    """Merges layers into groups by times measured in the first steps; sends groups during the backward pass."""

    name = "mg_wfbp"

    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """Chooses a partition with ``merge``.

        Args:
            entries: Number of entries of each layer, in flat order.
            ready: Time at which the gradient of each layer is complete, in seconds after the start of the backward
                pass.
            cost: Function that returns the seconds that the synchronization of a number of entries takes.

        Returns:
            The partition in flat order.
        """
        return merge(entries, ready, cost, cost.fixed)
