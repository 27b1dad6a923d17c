"""Schedules that choose groups of layers from times measured in the first steps: MG-WFBP and LayerFusion.

Sources: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and TPDS 2021, Algorithm 1; Dai et al., Sketch-Fusion SGD, JPDC 185,
2024.
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

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json
from spardl.clusters.base import Cluster, gather_rows
from spardl.method.method import Method
from spardl.protocol.programs import described
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


# Groups of layers in a file: those that one run chose, for others to use.


_WAY_OUT = "name RUN/groups.json of another run"


class Groups(NamedTuple):
    """A partition of a model's layers.

    Attributes:
        entries: of each layer, in flat order; they tell models apart.
        ranges: the groups, in flat order.
    """

    entries: Sequence[int]
    ranges: Sequence[Range]

    def text(self) -> str:
        """The content of a file that ``read`` reads."""
        return json.dumps({"entries": list(self.entries), "groups": [list(each) for each in self.ranges]}) + "\n"

    @classmethod
    def read(cls, file: Path) -> Groups:
        """Reads what ``text`` gave.

        Raises:
            ConfigError: if it cannot be read, or its groups do not hold every layer once.
        """
        where = f"schedule.groups={file}"
        try:
            content: Any = read_json(file)
            entries, ranges = list(content["entries"]), [(start, stop) for start, stop in content["groups"]]
        except OSError as error:
            raise ConfigError(
                f"{where} cannot be read: {error.strerror}; name RUN/groups.json of another run"
            ) from error
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{where} holds no groups; name RUN/groups.json of another run") from error
        ends = [0, *(stop for _, stop in ranges)]
        numbers = all(is_a(int, number) for number in (*entries, *ends))
        if not numbers or ranges != list(pairwise(ends)) or ends != sorted({*ends, len(entries)}):
            raise ConfigError(f"{where}: its groups do not hold each of {len(entries)} layers once, in order")
        return cls(entries, ranges)


def agreed_groups(file: Path, cluster: Cluster, training: Training) -> list[Range]:
    """The groups of a file, for the model at hand; all workers must call this at once.

    Raises:
        ConfigError: if the file is of another model, or workers read different groups.
    """
    found = Groups.read(file)
    entries = [layer.entries for layer in training.gradient.layers]
    if list(found.entries) != entries:
        raise ConfigError(
            f"schedule.groups={file} is of another model: {len(found.entries)} layers with {sum(found.entries):,} "
            f"entries, and this one has {len(entries)} with {sum(entries):,}"
        )
    begins = torch.zeros(len(entries), dtype=torch.int64)
    begins[[start for start, _ in found.ranges]] = 1
    rows = gather_rows(cluster, [begins for _ in cluster.local_ranks])
    odd = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if odd:
        raise ConfigError(f"schedule.groups={file} has other groups where ranks {odd} read it than for rank 0")
    return list(found.ranges)


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


# LayerFusion: the groups of layers with which the last synchronization ends first.
#
# Source: Dai et al., Sketch-Fusion SGD, JPDC 185, 2024, by what its abstract states; the formulation is ours, see
# ``optimal``.


Table: TypeAlias = npt.NDArray[np.float64]


def optimal(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]) -> list[Range]:
    """Of all partitions of the layers, the one with which the last synchronization ends first, by ``fusion.finish``.

    After LayerFusion in Dai et al.: Sketch-Fusion SGD (JPDC 185, 2024), which chooses groups of layers by measured
    times and without a hyper-parameter. Its equations were not at hand: this is our formulation of the objective that
    its abstract states, not a copy of its algorithm. With f[i] the earliest end of layers i and after,

        f[i] = min over j > i of max(f[j], ready[i:j]) + cost(entries[i:j]),    f[L] = 0,

    which is exact for any ready times and any cost, since an earlier end of the layers behind never hurts. It takes
    O(L^2) calls of ``cost``, time and memory. A second pass then takes the fewest groups that end as early: a group
    that gains nothing would still add a message. It takes O(L^2) for each group.

    Args:
        entries: of each layer, in flat order.
        ready: when the gradient of each layer is there, in seconds since the backward pass began.
        cost: seconds that compressing and synchronizing a group of so many entries takes, at least 0.

    Returns:
        The partition, in flat order: empty if there is no layer.

    Raises:
        ConfigError: if a time is not finite.
    """
    layers = len(entries)
    waits, costs = _tables(entries, ready, cost)
    earliest = np.zeros(layers + 1)
    for layer in reversed(range(layers)):
        after = slice(layer + 1, None)
        earliest[layer] = (np.maximum(earliest[after], waits[layer, after]) + costs[layer, after]).min()
    if not np.isfinite(earliest).all():
        raise ConfigError("layer_fusion: a ready time or a cost is not finite; measure the profile again")
    return _fewest(waits, costs, float(earliest[0]))


def _tables(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float]) -> tuple[Table, Table]:
    """At [i, j] when layers [i, j) are all there, and what they cost: infinite where i < j does not hold."""
    layers = len(entries)
    waits = np.full((layers + 1, layers + 1), np.inf)
    costs = waits.copy()
    for layer in range(layers):
        waits[layer, layer + 1 :] = np.maximum.accumulate(ready[layer:])
        costs[layer, layer + 1 :] = [cost(size) for size in accumulate(entries[layer:])]
    return waits, costs


def _fewest(waits: Table, costs: Table, goal: float) -> list[Range]:
    """The fewest groups with which the last synchronization ends at ``goal``, which must be within reach.

    Row g of the search is the earliest end of layers i and after in exactly g groups. Both passes round alike, so
    that the goal is met to the last bit.
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
    """Cuts the gradient where the last synchronization ends first, by what the first steps measure."""

    name = "layer_fusion"

    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """The best partition: see ``optimal``.

        Args:
            entries: of each layer, in flat order.
            ready: when the gradient of each layer is there, in seconds since the backward pass began.
            cost: seconds that the synchronization of so many entries takes.

        Returns:
            It, in flat order.

        Raises:
            ConfigError: if a time is not finite.
        """
        return optimal(entries, ready, cost)


# Merged-gradient wait-free backpropagation: neighbouring layers share a start-up time where that pays.
#
# Source: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and TPDS 2021, Algorithm 1.


def merge(entries: Sequence[int], ready: Sequence[float], cost: Callable[[int], float], startup: float) -> list[Range]:
    """Decides from the last layer to the first whether the group so far waits for the next layer.

    Algorithm 1 of Shi, Chu, Li: MG-WFBP (INFOCOM 2019, TPDS 2021). Let a group be begun, let ``begin`` be the time
    at which its synchronization could start (all its gradients are there, and the groups behind it have ended), and
    let ``next`` be the time at which the gradient of the layer before it is there. That layer joins the group if

    * ``next <= begin``: it is there before the group could be sent, so nobody waits for it; or
    * ``next - begin < startup``: waiting costs less than the start-up time that one message less saves.

    Otherwise the group is closed, and ends at ``begin + cost(its entries)``. The paper writes both as
    ``next < begin + startup``; they differ only if ``startup`` is 0, where layers that are there anyway still join.
    Its cost is ``startup + beta * bytes``; here it may be any function of the size. The rule sees one layer ahead, so
    the result is not always the best partition: see ``spardl.schedules.measured.optimal``.

    Args:
        entries: of each layer, in flat order.
        ready: when the gradient of each layer is there, in seconds since the backward pass began.
        cost: seconds that the synchronization of so many entries takes.
        startup: the part of it that does not depend on the size (alpha in the paper), in seconds.

    Returns:
        The partition, in flat order: empty if there is no layer.
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
    """Merges layers by what the first steps measure, and sends them during the backward pass."""

    name = "mg_wfbp"

    def decide(self, entries: Sequence[int], ready: Sequence[float], cost: Linear) -> list[Range]:
        """The partition that merging leads to: see ``merge``.

        Args:
            entries: of each layer, in flat order.
            ready: when the gradient of each layer is there, in seconds since the backward pass began.
            cost: seconds that the synchronization of so many entries takes.

        Returns:
            It, in flat order.
        """
        return merge(entries, ready, cost, cost.fixed)
