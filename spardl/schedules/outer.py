"""Outer steps: workers train independently for some steps, then average their progress through any method.

Sources: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al., DiLoCo: Distributed
Low-Communication Training of Language Models, 2023 (arXiv 2311.08105), Algorithm 1: the difference between the weights
before and after the local steps serves as a gradient, and an outer SGD with Nesterov momentum applies its average over
the workers. Where a residual keeps the entries that are not sent, it replaces the momentum, as in SparseLoCo (Sarfi et
al., 2508.15706). Fragments that are sent in turn during the local steps and mixed with the local weights: Douillard et
al., Streaming DiLoCo with overlapping communication, 2025 (2501.18512).

A *local rank* is one of the workers that this process runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from spardl.basics.checks import check_integer, is_finite
from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster, Work
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.protocol.programs import Phase, clone_data
from spardl.schedules.averaging import gradient_of
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.fusion import by_share
from spardl.vector.norms import largest_magnitude
from spardl.vector.sparse import Sum

__all__ = ["Due", "FragmentSchedule", "OuterSteps", "mix"]


# The schedule of fragments.


class Due(NamedTuple):
    """Fragments to handle after a step; averages are applied first, then fragments are sent.

    Attributes:
        apply: Numbers of the fragments whose averages are applied now.
        send: Numbers of the fragments that are sent now.
    """

    apply: list[int]
    send: list[int]


class FragmentSchedule:
    """Decides after each local step which fragments are sent, and which averages are applied.

    Args:
        every: Number of steps from one exchange of a fragment to the next.
        fragments: Number of fragments (groups of layers), which are sent at equally spaced steps.

    Attributes:
        remaining: Number of steps until each fragment is sent.
        in_flight: Number of steps until the average of each fragment in flight is applied, by fragment.
    """

    def __init__(self, every: int, fragments: int) -> None:
        self.every = every
        # Equal distances between the fragments spread the traffic evenly over the steps.
        self.remaining = [math.ceil((number + 1) * every / fragments) for number in range(fragments)]
        self.in_flight: dict[int, int] = {}

    def step(self) -> Due:
        """Counts a step that all workers have made, and returns the fragments to handle after this step."""
        self.remaining = [left - 1 for left in self.remaining]
        self.in_flight = {number: left - 1 for number, left in self.in_flight.items()}
        apply = [number for number, left in self.in_flight.items() if not left]
        return Due(apply, [number for number, left in enumerate(self.remaining) if not left])

    def send(self, number: int, delay: int) -> None:
        """Records that fragment ``number`` is sent, and that its average is applied after ``delay`` steps."""
        self.in_flight[number], self.remaining[number] = delay, self.every

    def apply(self, number: int) -> None:
        """Records that the average of fragment ``number`` is applied."""
        del self.in_flight[number]

    @property
    def changed(self) -> list[int]:
        """Numbers of the fragments whose weights have changed in local steps since they were last sent."""
        return [number for number, left in enumerate(self.remaining) if left < self.every]


@torch.no_grad()
def mix(own: Tensor, anchor: Tensor, mixing: float) -> None:
    """Replaces a worker's weights by a weighted mean of them and the global weights, in place.

    Args:
        own: Weights of the worker, of any shape.
        anchor: Global weights, of the same shape.
        mixing: Share of the global weights in the mean; 1 replaces the worker's weights, even if they are non-finite.
    """
    # Unlike copy_, lerp with a weight of 1 keeps NaN of the worker's weights.
    own.lerp_(anchor, mixing) if mixing < 1 else own.copy_(anchor)


@dataclass(frozen=True)
class OuterSteps(Schedule):
    """Each worker's optimizer steps independently; every few steps, the progress of all workers is averaged.

    The progress of a worker is the difference between the global weights and its own. Gradient clipping applies to each
    worker's own gradient, before its optimizer uses it. Between two exchanges, evaluations and comparisons of workers
    use the global weights, as of the last exchange. The last step of a training ends with an exchange.

    Args:
        every: Number of steps from one exchange to the next.
        lr: Learning rate of the outer SGD (a factor); 1 without momentum averages weights, as local SGD does.
        momentum: Nesterov momentum factor of the outer SGD. ``None`` uses 0.9, or 0 if the method has a residual.
        fragments: Number of groups of neighboring layers, of similar size, that are exchanged in turn; each is
            exchanged once in ``every`` steps.
        delay: Number of local steps that each worker makes while a fragment is sent; with 0, workers wait for it.
        mixing: Share of the global weights in a worker's new weights; the rest comes from its own weights.

    Raises:
        ConfigError: If a value is out of range.
    """

    every: int = 30
    lr: float = 0.7
    momentum: float | None = None
    fragments: int = 1
    delay: int = 0
    mixing: float = 1.0

    name = "outer"
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("every", self.every, least=1)
        if not (is_finite(self.lr) and self.lr > 0):
            raise ConfigError(f"lr must be a number above 0, got {self.lr!r}; use 0.7 (DiLoCo) or 1 (averages weights)")
        if self.momentum is not None and not (is_finite(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigError(f"momentum must be at least 0 and below 1, got {self.momentum!r}; use 0.9 (DiLoCo)")
        check_integer("fragments", self.fragments, least=1)
        check_integer("delay", self.delay, least=0)
        if max(self.fragments, self.delay + 1) > self.every:
            raise ConfigError(
                f"fragments must be at most every={self.every} and delay below it, got fragments={self.fragments} and "
                f"delay={self.delay}"
            )
        if not (is_finite(self.mixing) and 0 < self.mixing <= 1):
            raise ConfigError(
                f"mixing must be above 0 and at most 1, got {self.mixing!r}; use 1 to replace the local weights"
            )

    def check(self, method: Method, *, clips: bool) -> None:
        """Checks that the method applies no momentum, because the outer SGD does."""
        if method.momentum.remembers:
            raise ConfigError(
                f"momentum={method.momentum.name} would be applied in addition to the momentum of the outer SGD; use a "
                'method with momentum=optimizer, such as "spardl" or "topka", and set momentum= of the outer steps'
            )

    def rule(self, parameters: Iterable[nn.Parameter], method: Method) -> torch.optim.SGD:
        """Creates the optimizer that applies the averaged differences of weights.

        Args:
            parameters: Parameters whose gradients will be the averaged differences.
            method: Method that averages the differences.

        Returns:
            SGD with the configured learning rate and momentum.
        """
        momentum = self.momentum if self.momentum is not None else 0.0 if method.residual.remembers else 0.9
        return torch.optim.SGD(parameters, self.lr, momentum, nesterov=momentum > 0)

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine, with one group of layers per fragment."""
        return _OuterSteps(method, cluster, training, self)


class _OuterSteps(Engine):
    """Engine of outer steps. The local ranks share one model: each loads its own weights and optimizer state into it.

    The global weights are separate parameters, the anchors, whose gradients are the averaged differences.
    """

    # The average is a difference of weights, so ``clip_norm`` limits the gradients that the workers' optimizers use.
    _clips_own = True

    def __init__(self, method: Method, cluster: Cluster, training: Training, outer: OuterSteps) -> None:
        outer.check(method, clips=training.clip_norm is not None)
        if training.optimizer is None:
            raise ConfigError("outer steps need each worker's optimizer; pass Training(optimizer=...)")
        if training.scale is not None:
            raise ConfigError(
                "outer steps do not support loss scaling; remove Training(scale=...) and use bfloat16 or float32"
            )
        self._anchors = [nn.Parameter(parameter.detach().clone()) for parameter in training.gradient.parameters]
        changing = training._replace(weights=self._anchors)
        super().__init__(method, cluster, changing, by_share(training.gradient.entries, outer.fragments))
        self._outer, self._optimizer = outer, training.optimizer
        for number, anchor in enumerate(self._anchors):
            # The outer SGD reads the averaged difference where the model's optimizer reads its gradient.
            anchor.grad = self._gradient.part(number).view_as(anchor)
        self._rule = outer.rule(self._anchors, method)
        self._fragments = FragmentSchedule(outer.every, len(self.gradient_state.groups))
        # Fragments in flight without an outer step; ``flush`` may run the step before the average is applied.
        self._works: dict[int, Work[Sum]] = {}
        self._loaded: int | None = None
        ranks = range(len(cluster.local_ranks))
        self._weights = [[anchor.detach().clone() for anchor in self._anchors] for _ in ranks]
        # Local ranks share one optimizer object; each swaps in its own state, like its weights.
        self._states: list[dict[nn.Parameter, Any]] = [defaultdict(dict) for _ in ranks]

    def facts(self, given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Returns settings and state of the engine as text, with the settings of the outer steps."""
        return {**super().facts(given), **{name: str(value) for name, value in asdict(self._outer).items()}}

    # --- the rank whose weights are in the model

    @torch.no_grad()
    def _write_weights(self, weights: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._gradient.parameters, weights, strict=True):
            parameter.copy_(tensor)

    def _load_rank(self, local: int) -> None:
        """Loads the weights and the optimizer state of a local rank into the shared model."""
        if self._loaded == local:
            return
        self._save_rank()
        self._write_weights(self._weights[local])
        self._optimizer.state = self._states[local]  # type: ignore[assignment]
        self._loaded = local

    @torch.no_grad()
    def _save_rank(self) -> None:
        """Saves weights and optimizer state of the local rank whose weights the shared model holds."""
        if self._loaded is None:
            return
        for tensor, parameter in zip(self._weights[self._loaded], self._gradient.parameters, strict=True):
            tensor.copy_(parameter)
        self._optimizer.state = defaultdict(dict)
        self._loaded = None

    def flush(self) -> None:
        """Loads the global weights after the last exchange into the model."""
        self._save_rank()
        for number in self._fragments.in_flight:
            self._outer_step(number)
        self._write_weights(self._anchors)

    def close(self) -> None:
        """Loads the global weights into the model, and removes all hooks."""
        self.flush()
        super().close()

    # --- the steps of training

    def begin(self, local: int = 0) -> None:
        """Starts the passes of the local rank ``local``, with its own weights."""
        super().begin(local)
        self._load_rank(local)

    def collect(self) -> None:
        """Runs a step of the current local rank's own optimizer, unless its gradient is non-finite."""
        super().collect()
        local = self._step.local
        self._averaging.clip_own(local)
        with self._cluster.timed(Phase.UPDATE, [local]):
            # A non-finite gradient would stay in the optimizer's moments.
            if math.isfinite(largest_magnitude(self._gradient.vectors)):
                unused = [self._gradient.parameters[number] for number in self._usage.left_out(local)]
                with self._gradient.hidden(unused):
                    self._optimizer.step()
            else:
                self.gradient_state.groups[0].states[local].refuse()
            for vector in self._gradient.vectors:
                vector.zero_()

    def finish(self) -> None:
        """Applies the averages that are due and sends the fragments that are due."""
        # Only the local optimizer's step needs the usage: anchors always have a gradient.
        self._usage.clear()
        due = self._fragments.step()
        for number in due.apply:
            self._apply(number)
        for number in due.send:
            self._exchange(number, self._outer.delay)
        self._step.end()

    def end(self) -> None:
        """Exchanges the progress of the workers since the last exchange."""
        # Apply averages in flight first: a fragment can only be sent again afterwards.
        for number in list(self._fragments.in_flight):
            self._apply(number)
        for number in self._fragments.changed:
            self._exchange(number, 0)

    def _exchange(self, number: int, delay: int) -> None:
        """Sends each local rank's progress in a fragment; the average is applied after ``delay`` steps."""
        self._save_rank()
        for local in range(len(self._weights)):
            self._take_difference(number, local)
            self._averaging.hand_over(number, local)
        work = self._cluster.enqueue(self._averaging.programs(number))
        for local in range(len(self._weights)):
            work.release(local)
        self._works[number] = work
        self._fragments.send(number, delay)
        if not delay:
            self._apply(number)

    def _take_difference(self, number: int, local: int) -> None:
        for each in range(*self.gradient_state.groups[number].tensors):
            anchor = self._anchors[each].detach()
            torch.sub(anchor, self._weights[local][each], out=self._gradient.part(each).view(anchor.shape))

    def _outer_step(self, number: int) -> None:
        """Runs the outer optimizer step of a fragment, unless it has already run."""
        work, group = self._works.pop(number, None), self.gradient_state.groups[number]
        if work is None:
            return
        for local, own in enumerate(self._step.averages):
            own[number] = work.wait(local)
        self.kept += self._update.store(group, self._step.averages[0][number])
        # The step must not change the momentum of other fragments.
        others = [each for place, each in enumerate(self._anchors) if not group.tensors[0] <= place < group.tensors[1]]
        with self._update.timed():
            with self._gradient.hidden(others):
                self._rule.step()
            gradient_of(self._gradient, group).zero_()

    def _apply(self, number: int) -> None:
        self._save_rank()
        self._outer_step(number)
        self._fragments.apply(number)
        for own in self._weights:
            for each in range(*self.gradient_state.groups[number].tensors):
                mix(own[each], self._anchors[each], self._outer.mixing)

    # --- state

    def averages(self, local: int = 0) -> list[Sum]:
        """Returns the averages of the last exchange of each fragment, and the global weights after these exchanges."""
        return [*super().averages(local), *(anchor.detach() for anchor in self._anchors)]

    def local_tensors(self, local: int = 0) -> dict[str, Sequence[Tensor]]:
        """Returns the weights and moments of the local rank ``local``, of any shape, by name."""
        moments = [value for state in self._states[local].values() for value in state.values()]
        return {
            **super().local_tensors(local),
            "worker's weights are": self._weights[local],
            "worker's optimizer's state is": [value for value in moments if isinstance(value, Tensor)],
        }

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """Returns the state of the local rank ``local``, with its weights and its optimizer's state."""
        numbers = {parameter: number for number, parameter in enumerate(self._gradient.parameters)}
        return {
            **super().state_dict(local),
            "outer": {
                "left": list(self._fragments.remaining),
                "aloft": dict(self._fragments.in_flight),
                "weights": self._weights[local],
                "optimizer": {numbers[parameter]: state for parameter, state in self._states[local].items()},
                "rule": self._rule.state_dict()["state"],
            },
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Loads ``values`` into the local rank ``local``; the model must already have the saved global weights."""
        super().load_state_dict(local, values)
        self._load_outer(local, values["outer"])

    def adopt(self, local: int, parts: Sequence[Mapping[str, Any]], before: int) -> None:
        """Loads states that another number of workers saved; takes weights and optimizer state from one of them."""
        super().adopt(local, parts, before)
        worker = self._cluster.local_workers[local]
        # Weights and optimizer state cannot be averaged over workers: take those of one source.
        place = sources(worker, before).index(worker.rank % before)
        self._load_outer(local, parts[place]["outer"])

    @torch.no_grad()
    def _load_outer(self, local: int, saved: Mapping[str, Any]) -> None:
        self._loaded = None
        self._fragments.remaining, self._fragments.in_flight = list(saved["left"]), dict(saved["aloft"])
        self._works = {}
        # The model in a checkpoint contains the global weights, see ``flush``.
        for anchor, parameter in zip(self._anchors, self._gradient.parameters, strict=True):
            anchor.copy_(parameter)
        for tensor, own in zip(self._weights[local], saved["weights"], strict=True):
            tensor.copy_(own)
        parameters = self._gradient.parameters
        state = {parameters[number]: clone_data(each) for number, each in saved["optimizer"].items()}
        self._states[local] = defaultdict(dict, state)
        self._rule.load_state_dict({**self._rule.state_dict(), "state": clone_data(saved["rule"])})
