"""Outer steps: workers train alone for some steps, then average how far each has come, through any method.

Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Douillard et al., DiLoCo: Distributed
Low-Communication Training of Language Models, 2023 (arXiv 2311.08105), Algorithm 1: the difference of the weights
before and after is taken for a gradient, whose average over the workers an outer SGD with Nesterov's momentum applies.
Where a residual keeps what is not sent, it takes the momentum's place, as in SparseLoCo (Sarfi et al., 2508.15706).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spardl.basics.checks import check_whole, is_finite
from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.protocol.programs import Phase
from spardl.protocol.state import copied
from spardl.schedules.base import Schedule
from spardl.schedules.engine import Engine
from spardl.schedules.limit import Limit
from spardl.schedules.training import Training
from spardl.vector.sparse import Sum

__all__ = ["OuterSteps"]


@dataclass(frozen=True)
class OuterSteps(Schedule):
    """Each worker's optimizer steps alone; after every so many steps, how far all have come is averaged.

    A gradient's norm is then limited for each worker's own, before its optimizer sees it. Between two exchanges, what
    is evaluated and compared are the weights after the last one; the last step of a training ends with an exchange.

    Args:
        every: steps between two exchanges.
        lr: factor of the outer SGD's steps; 1 without momentum averages weights, as local SGD does.
        momentum: factor of the outer SGD, Nesterov's; 0: none; ``None``: 0.9, and 0 with a method that has a residual.

    Raises:
        ConfigError: if a value is out of range.
    """

    every: int = 30
    lr: float = 0.7
    momentum: float | None = None

    name = "outer"
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        if not (is_finite(self.lr) and self.lr > 0):
            raise ConfigError(f"lr must be a number above 0, got {self.lr!r}; 0.7 is DiLoCo's, and 1 averages weights")
        if self.momentum is not None and not (is_finite(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigError(f"momentum must be at least 0 and below 1, got {self.momentum!r}; 0.9 is DiLoCo's")

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
        """With one group of all layers."""
        return _OuterSteps(method, cluster, training, self)


class _OuterSteps(Engine):
    """Local ranks take turns with the model: each finds its own weights and its own optimizer's state in it."""

    def __init__(self, method: Method, cluster: Cluster, training: Training, outer: OuterSteps) -> None:
        outer.check(method, clips=training.clip_norm is not None)
        if training.optimizer is None:
            raise ConfigError("outer steps need the optimizer, which each worker calls alone; give Training one")
        if training.scale is not None:
            raise ConfigError("outer steps do not take off a scale; leave it out, and use bfloat16 or float32")
        super().__init__(method, cluster, training, [(0, len(training.gradient.layers))])
        self._limit = Limit(training.clip_norm, first=True)
        self._outer, self._optimizer = outer, training.optimizer
        self._rule = outer.rule(self._gradient.parameters, method)
        self._since = 0
        self._inside: int | None = None
        ranks = range(len(cluster.local_ranks))
        self._anchors = self._weights()
        self._own = [[tensor.clone() for tensor in self._anchors] for _ in ranks]
        self._states: list[dict[nn.Parameter, Any]] = [defaultdict(dict) for _ in ranks]

    def _facts(self) -> dict[str, Any]:
        given = self._rule.defaults
        return {**super()._facts(), "every": self._outer.every, "lr": given["lr"], "momentum": given["momentum"]}

    # --- whose weights the model has

    def _weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._gradient.parameters]

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
        self._show(self._anchors)

    # --- the steps of training

    def begin(self, local: int = 0) -> None:
        """From here on passes are those of the local rank ``local``, with its own weights."""
        super().begin(local)
        self._enter(local)

    def collect(self) -> None:
        """A step of the rank's own optimizer."""
        self._clip_first()
        with self._cluster.timed(Phase.UPDATE, [self._local]):
            unused = [self._gradient.parameters[number] for number in self._usage.left_out(self._local)]
            with self._gradient.hidden(unused):
                self._optimizer.step()
            self._clear()

    def _clear(self) -> None:
        for vector in self._gradient.vectors:
            vector.zero_()

    def finish(self) -> None:
        """All ranks have made a step; it may be time for an exchange."""
        self._usage.clear()
        self._since += 1
        if self._since == self._outer.every:
            self._exchange()

    def end(self) -> None:
        """Averages what was done since the last exchange."""
        if self._since:
            self._exchange()

    def _exchange(self) -> None:
        self._leave()
        for local in range(len(self._own)):
            self._local = local
            self._take_difference(local)
            self._hand_over(0)
        (group,) = self._groups
        averages = self._cluster.run(self._programs(0))
        for own, average in zip(self._averages, averages, strict=True):
            own[0] = average
        self._take_over(group, averages[0])
        with self._everybody(Phase.UPDATE):
            self._show(self._anchors)
            self._rule.step()
            self._clear()
            self._anchors = self._weights()
            for own_weights in self._own:
                for tensor, anchor in zip(own_weights, self._anchors, strict=True):
                    tensor.copy_(anchor)
        self._since = 0

    def _take_difference(self, local: int) -> None:
        for number, (anchor, own) in enumerate(zip(self._anchors, self._own[local], strict=True)):
            torch.sub(anchor.view(-1), own.view(-1), out=self._gradient.part(number))

    # --- what others may know

    def averages(self, local: int = 0) -> list[Sum]:
        """Of the last exchange, and the weights that it led to."""
        return [*super().averages(local), *self._anchors]

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
                "since": self._since,
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
        place = list(sources(worker, before)).index(worker.rank % before)
        self._load_own(local, parts[place]["outer"])

    def _load_own(self, local: int, saved: Mapping[str, Any]) -> None:
        self._inside = None
        self._anchors = self._weights()
        self._since = saved["since"]
        for tensor, own in zip(self._own[local], saved["weights"], strict=True):
            tensor.copy_(own)
        parameters = self._gradient.parameters
        state = {parameters[number]: copied(each) for number, each in saved["optimizer"].items()}
        self._states[local] = defaultdict(dict, state)
        self._rule.load_state_dict({**self._rule.state_dict(), "state": copied(saved["rule"])})
