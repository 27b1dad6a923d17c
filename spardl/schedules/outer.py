"""Outer steps: workers train alone for some steps, then average how far each has come, through any method.

Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al., DiLoCo: Distributed
Low-Communication Training of Language Models, 2023 (arXiv 2311.08105), Algorithm 1: the difference of the weights
before and after is taken for a gradient, whose average over the workers an outer SGD with Nesterov's momentum applies.
Where a residual keeps what is not sent, it takes the momentum's place, as in SparseLoCo (Sarfi et al., 2508.15706).
Parts of the model in turns, sent beside the next local steps and mixed with what those led to: Douillard et al.,
Streaming DiLoCo with overlapping communication, 2025 (2501.18512).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from spardl.basics.checks import check_whole, is_finite
from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster, Flight
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.protocol.programs import Phase, copied
from spardl.schedules.engine import Engine, Schedule, Training
from spardl.schedules.fusion import by_share
from spardl.schedules.scaling import Limit
from spardl.vector.norms import largest
from spardl.vector.sparse import Sum

__all__ = ["Due", "OuterSteps", "Turns", "go_on"]


# When fragments of a model are sent, and when workers go on from what that led to; see :class:`OuterSteps`.


class Due(NamedTuple):
    """What happens after a step, in this order.

    Attributes:
        landing: numbers of fragments that were sent long enough ago.
        leaving: numbers of fragments that are to be sent.
    """

    landing: list[int]
    leaving: list[int]


class Turns:
    """Counts local steps.

    Args:
        every: steps between two exchanges of a fragment.
        fragments: how many take turns, at equal distances.

    Attributes:
        left: steps until each is sent.
        aloft: steps until workers go on from what each led to, of those that are under way.
    """

    def __init__(self, every: int, fragments: int) -> None:
        self.every = every
        self.left = [math.ceil((number + 1) * every / fragments) for number in range(fragments)]
        self.aloft: dict[int, int] = {}

    def step(self) -> Due:
        """All have made a step."""
        self.left = [left - 1 for left in self.left]
        self.aloft = {number: left - 1 for number, left in self.aloft.items()}
        landing = [number for number, left in self.aloft.items() if not left]
        return Due(landing, [number for number, left in enumerate(self.left) if not left])

    def leave(self, number: int, delay: int) -> None:
        """A fragment is sent, beside so many steps."""
        self.aloft[number], self.left[number] = delay, self.every

    def land(self, number: int) -> None:
        """Workers go on from what a fragment led to."""
        del self.aloft[number]

    @property
    def begun(self) -> list[int]:
        """Fragments that have made steps since they were sent."""
        return [number for number, left in enumerate(self.left) if left < self.every]


@torch.no_grad()
def go_on(own: Tensor, anchor: Tensor, mixing: float) -> None:
    """A worker goes on from what an exchange led to.

    Args:
        own: weights of the worker, of any shape.
        anchor: those that all agree on, of the same shape.
        mixing: share of these; 1 keeps nothing of one's own, as one that has diverged is not mixed with anything.
    """
    own.lerp_(anchor, mixing) if mixing < 1 else own.copy_(anchor)


@dataclass(frozen=True)
class OuterSteps(Schedule):
    """Each worker's optimizer steps alone; after every so many steps, how far all have come is averaged.

    A gradient's norm is then limited for each worker's own, before its optimizer sees it. Between two exchanges, what
    is evaluated and compared are the weights after the last one; the last step of a training ends with an exchange.

    Args:
        every: steps between two exchanges.
        lr: factor of the outer SGD's steps; 1 without momentum averages weights, as local SGD does.
        momentum: factor of the outer SGD, Nesterov's; 0: none; ``None``: 0.9, and 0 with a method that has a residual.
        fragments: parts of the model, of neighbouring layers and nearly as many entries each, that are exchanged in
            turns, each after every ``every`` steps.
        delay: local steps beside which a fragment is sent; 0: workers wait for it.
        mixing: share of the weights that an exchange led to in those that a worker goes on with; the rest is its own.

    Raises:
        ConfigError: if a value is out of range.
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
        check_whole("every", self.every, least=1)
        if not (is_finite(self.lr) and self.lr > 0):
            raise ConfigError(f"lr must be a number above 0, got {self.lr!r}; 0.7 is DiLoCo's, and 1 averages weights")
        if self.momentum is not None and not (is_finite(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigError(f"momentum must be at least 0 and below 1, got {self.momentum!r}; 0.9 is DiLoCo's")
        check_whole("fragments", self.fragments, least=1)
        check_whole("delay", self.delay, least=0)
        if max(self.fragments, self.delay + 1) > self.every:
            raise ConfigError(
                f"fragments={self.fragments} and delay={self.delay} do not fit into every={self.every} steps: have at "
                "most as many fragments, and a delay below that"
            )
        if not (is_finite(self.mixing) and 0 < self.mixing <= 1):
            raise ConfigError(
                f"mixing must be above 0 and at most 1, got {self.mixing!r}; 1 keeps nothing of one's own"
            )

    def check(self, method: Method, *, clips: bool) -> None:
        """Refuses a method with a momentum of its own."""
        if method.momentum.remembers:
            raise ConfigError(
                f"momentum={method.momentum.name} comes on top of the outer SGD's; use a method without one, such as "
                '"spardl" or "topka", with momentum=optimizer, and the momentum= of the outer steps'
            )

    def rule(self, parameters: Iterable[nn.Parameter], method: Method) -> torch.optim.SGD:
        """The outer optimizer.

        Args:
            parameters: whose gradients will be the averaged differences.
            method: that averages them.

        Returns:
            SGD with this rate and momentum.
        """
        momentum = self.momentum if self.momentum is not None else 0.0 if method.residual.remembers else 0.9
        return torch.optim.SGD(parameters, self.lr, momentum, nesterov=momentum > 0)

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """With a group for each fragment."""
        return _OuterSteps(method, cluster, training, self)


class _OuterSteps(Engine):
    """Local ranks take turns with the model: each finds its own weights and its own optimizer's state in it.

    The weights that all agree on are parameters of their own: anchors, whose gradients are the averaged differences.
    """

    def __init__(self, method: Method, cluster: Cluster, training: Training, outer: OuterSteps) -> None:
        outer.check(method, clips=training.clip_norm is not None)
        if training.optimizer is None:
            raise ConfigError("outer steps need the optimizer, which each worker calls alone; give Training one")
        if training.scale is not None:
            raise ConfigError("outer steps do not take off a scale; leave it out, and use bfloat16 or float32")
        super().__init__(method, cluster, training, by_share(training.gradient.entries, outer.fragments))
        self._limit = Limit(training.clip_norm, first=True)
        self._outer, self._optimizer = outer, training.optimizer
        self._anchors = [nn.Parameter(parameter.detach().clone()) for parameter in self._gradient.parameters]
        for number, anchor in enumerate(self._anchors):
            anchor.grad = self._gradient.part(number).view_as(anchor)
        self._rule = outer.rule(self._anchors, method)
        self._turns = Turns(outer.every, len(self._groups))
        # Of those aloft whose outer step is not made yet.
        self._flights: dict[int, Flight[Sum]] = {}
        self._inside: int | None = None
        ranks = range(len(cluster.local_ranks))
        self._own = [[anchor.detach().clone() for anchor in self._anchors] for _ in ranks]
        self._states: list[dict[nn.Parameter, Any]] = [defaultdict(dict) for _ in ranks]

    def facts(self, given: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Those of every schedule, and the settings."""
        return {**super().facts(given), **{name: str(value) for name, value in asdict(self._outer).items()}}

    # --- whose weights the model has

    @torch.no_grad()
    def _show(self, weights: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._gradient.parameters, weights, strict=True):
            parameter.copy_(tensor)

    def _enter(self, local: int) -> None:
        """Gives the model to a local rank."""
        if self._inside == local:
            return
        self._leave()
        self._show(self._own[local])
        self._optimizer.state = self._states[local]  # type: ignore[assignment]
        self._inside = local

    @torch.no_grad()
    def _leave(self) -> None:
        """Puts away what the rank did that has the model."""
        if self._inside is None:
            return
        for tensor, parameter in zip(self._own[self._inside], self._gradient.parameters, strict=True):
            tensor.copy_(parameter)
        self._optimizer.state = defaultdict(dict)
        self._inside = None

    def flush(self) -> None:
        """The model has the weights that all workers agree on: those after the last exchange."""
        self._leave()
        for number in self._turns.aloft:
            self._outer_step(number)
        self._show(self._anchors)

    def close(self) -> None:
        """Leaves the model with the weights that all workers agree on."""
        self.flush()
        super().close()

    # --- the steps of training

    def begin(self, local: int = 0) -> None:
        """From here on passes are those of the local rank ``local``, with its own weights."""
        super().begin(local)
        self._enter(local)

    def collect(self) -> None:
        """A step of the rank's own optimizer, unless a gradient that is not finite would stay in its state."""
        self._clip_first()
        with self._cluster.timed(Phase.UPDATE, [self._local]):
            if math.isfinite(largest(self._gradient.vectors)):
                unused = [self._gradient.parameters[number] for number in self._usage.left_out(self._local)]
                with self._gradient.hidden(unused):
                    self._optimizer.step()
            else:
                self._groups[0].states[self._local].refuse()
            for vector in self._gradient.vectors:
                vector.zero_()

    def finish(self) -> None:
        """All ranks have made a step: what was sent long enough ago arrives, and what is due is sent."""
        self._usage.clear()
        due = self._turns.step()
        for number in due.landing:
            self._land(number)
        for number in due.leaving:
            self._exchange(number, self._outer.delay)

    def end(self) -> None:
        """Averages what was done since the last exchange."""
        for number in list(self._turns.aloft):
            self._land(number)
        for number in self._turns.begun:
            self._exchange(number, 0)

    def _exchange(self, number: int, delay: int) -> None:
        """Sends how far each local rank has come in a fragment; its weights follow after so many steps."""
        self._leave()
        for local in range(len(self._own)):
            self._local = local
            self._take_difference(number, local)
            self._hand_over(number)
        flight = self._cluster.flight(self._programs(number))
        for local in range(len(self._own)):
            flight.release(local)
        self._flights[number] = flight
        self._turns.leave(number, delay)
        if not delay:
            self._land(number)

    def _take_difference(self, number: int, local: int) -> None:
        for each in range(*self._groups[number].tensors):
            anchor = self._anchors[each].detach()
            torch.sub(anchor, self._own[local][each], out=self._gradient.part(each).view(anchor.shape))

    def _outer_step(self, number: int) -> None:
        """The outer step of a fragment, once it has been sent."""
        flight, group = self._flights.pop(number, None), self._groups[number]
        if flight is None:
            return
        for local, own in enumerate(self._averages):
            own[number] = flight.wait(local)
        self._take_over(group, self._averages[0][number])
        others = [each for place, each in enumerate(self._anchors) if not group.tensors[0] <= place < group.tensors[1]]
        with self._everybody(Phase.UPDATE):
            with self._gradient.hidden(others):
                self._rule.step()
            self._part(group).zero_()

    def _land(self, number: int) -> None:
        """Workers go on from what an exchange led to."""
        self._leave()
        self._outer_step(number)
        self._turns.land(number)
        for own in self._own:
            for each in range(*self._groups[number].tensors):
                go_on(own[each], self._anchors[each], self._outer.mixing)

    # --- what others may know

    def averages(self, local: int = 0) -> list[Sum]:
        """Of the last exchanges, and the weights that they led to."""
        return [*super().averages(local), *(anchor.detach() for anchor in self._anchors)]

    def lasting(self, local: int = 0) -> dict[str, Sequence[Tensor]]:
        """Weights and moments of the local rank ``local``."""
        moments = [value for state in self._states[local].values() for value in state.values()]
        return {
            **super().lasting(local),
            "worker's weights are": self._own[local],
            "worker's optimizer's state is": [value for value in moments if isinstance(value, Tensor)],
        }

    def state_dict(self, local: int = 0) -> dict[str, Any]:
        """What the local rank ``local`` carries from step to step, its weights and its optimizer's state among it."""
        numbers = {parameter: number for number, parameter in enumerate(self._gradient.parameters)}
        return {
            **super().state_dict(local),
            "outer": {
                "left": list(self._turns.left),
                "aloft": dict(self._turns.aloft),
                "weights": self._own[local],
                "optimizer": {numbers[parameter]: state for parameter, state in self._states[local].items()},
                "rule": self._rule.state_dict()["state"],
            },
        }

    def load_state_dict(self, local: int, values: Mapping[str, Any]) -> None:
        """Continues from ``values`` of the same rank, ``local``; the model has the weights after the last exchange."""
        super().load_state_dict(local, values)
        self._load_own(local, values["outer"])

    def adopt(self, local: int, parts: Sequence[Mapping[str, Any]], before: int) -> None:
        """Continues from what another number of workers saved: who joins, as one of them; who left, is not missed."""
        super().adopt(local, parts, before)
        worker = self._cluster.local_workers[local]
        place = sources(worker, before).index(worker.rank % before)
        self._load_own(local, parts[place]["outer"])

    @torch.no_grad()
    def _load_own(self, local: int, saved: Mapping[str, Any]) -> None:
        self._inside = None
        self._turns.left, self._turns.aloft = list(saved["left"]), dict(saved["aloft"])
        self._flights = {}
        for anchor, parameter in zip(self._anchors, self._gradient.parameters, strict=True):
            anchor.copy_(parameter)
        for tensor, own in zip(self._own[local], saved["weights"], strict=True):
            tensor.copy_(own)
        parameters = self._gradient.parameters
        state = {parameters[number]: copied(each) for number, each in saved["optimizer"].items()}
        self._states[local] = defaultdict(dict, state)
        self._rule.load_state_dict({**self._rule.state_dict(), "state": copied(saved["rule"])})
