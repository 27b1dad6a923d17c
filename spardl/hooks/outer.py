"""Outer steps: workers train alone for some steps, then average how far each has come, through any method.

Source: that of :class:`spardl.OuterSteps`, which does the same in the trainer, for real and simulated workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spardl.basics.checks import check_kind, check_real, check_seconds
from spardl.basics.errors import ConfigError
from spardl.clusters.precompile import prepare
from spardl.hooks.averager import Averager, Beside
from spardl.hooks.choosing import choose_method, choose_schedule, options_of
from spardl.hooks.stats import Meter, Stats
from spardl.hooks.synchronizer import named_parameters
from spardl.method.method import Method
from spardl.method.moving import definite
from spardl.method.names import MethodName
from spardl.method.provenance import check_whole
from spardl.protocol.state import copied
from spardl.schedules import OuterSteps, Training
from spardl.vector.storage import CopiedGradient

__all__ = ["Outer"]


class Outer:
    """Calls ``optimizer.step()``, and after every so many steps averages how far the workers have come.

    In place of ``optimizer.step()``::

        outer = spardl.Outer(model.named_parameters(), optimizer, "spardl", every=30, density=0.01)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            outer.step()

    The model is not wrapped in DDP, or only within a node, with ``group`` between nodes. Parameters that are trained
    begin as rank 0 of the group has them, and are equal on all workers after each exchange; what is not trained, such
    as the statistics of batch normalization, stays each worker's own, and so does the optimizer's state. A residual
    keeps what a method does not send of a difference. With a ``GradScaler`` call ``scaler.step(optimizer)`` and then
    ``outer.count()`` in place of ``outer.step()``.

    Args:
        parameters: as ``model.named_parameters()`` or ``model.parameters()`` has them.
        optimizer: of these parameters, which each worker calls alone.
        method: a name (``spardl.method_names()``), or a :class:`Method`.
        every: steps between two exchanges.
        lr: factor of the outer SGD's steps; 1 without momentum averages weights, as local SGD does.
        momentum: factor of the outer SGD, Nesterov's; 0: none; ``None``: 0.9, and 0 with a method that has a residual.
        group: a process group; ``None`` for the default one.
        bucket_mb: most megabytes (2^20 bytes) of differences that are averaged together.
        timeout: seconds after which a silent worker counts as lost.
        **options: of the method, for instance ``density=0.01``; see :class:`Recipe`.

    Attributes:
        method: how differences are averaged.
        momentum: factor of the outer SGD.

    Raises:
        ConfigError: if there are no parameters, or a value is out of range, or the method or an option is unknown, or
            does not fit so many workers, or the method has a momentum of its own.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> outer = spardl.Outer(model.named_parameters(), optimizer, "none", every=2, lr=1.0, momentum=0.0)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(5, 100)).square().mean().backward()
        ...     outer.step()
        >>> outer.stats().steps
        2
        >>> outer.close()
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        method: MethodName | str | Method = "spardl",
        *,
        every: int = 30,
        lr: float = 0.7,
        momentum: float | None = None,
        group: Any = None,
        bucket_mb: float | None = None,
        timeout: float = 1800.0,
        **options: Any,
    ) -> None:
        check_kind("optimizer", optimizer, torch.optim.Optimizer)
        outer = OuterSteps(every, lr, momentum)
        check_seconds("timeout", timeout)
        named = [pair for pair in named_parameters(parameters) if pair.parameter.requires_grad]
        if not named:
            raise ConfigError("there are no parameters to average")
        check_real(named)
        self.method = definite(choose_method(method, options), None)
        outer.check(self.method, clips=False)
        self._optimizer, self._every, self._since = optimizer, every, 0
        gradient = CopiedGradient(named)
        self._parameters = gradient.parameters
        self._cluster = Beside(group, self._parameters[0].device, timeout)
        prepare(self.method, self._cluster.size, self._parameters, tells=self._cluster.leads)
        self._cluster.open()
        schedule = choose_schedule("wfbp", bucket_mb)
        self._anchors = [nn.Parameter(parameter.detach().clone()) for parameter in self._parameters]
        self._rule = outer.rule(self._anchors, self.method)
        self.momentum: float = self._rule.defaults["momentum"]
        given = {"handle": "Outer", "every": every, "lr": lr, "momentum": self.momentum, **options_of(schedule)}
        self._averager = Averager(self.method, schedule, Training(None, gradient, None), self._cluster, given)
        self._meter = Meter(self._cluster.ledgers[0], self._cluster.size)
        self._begin_alike(group)

    @torch.no_grad()
    def _begin_alike(self, group: Any) -> None:
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            # Memory is what travels, and workers may have laid theirs out differently.
            first = parameter.contiguous()
            dist.broadcast(first, dist.get_global_rank(group, 0) if group else 0, group)
            parameter.copy_(first)
            anchor.copy_(first)

    @property
    def since(self) -> int:
        """Steps since the last exchange, or since the beginning."""
        return self._since

    def step(self) -> None:
        """A step of this worker's own, and an exchange if one is due.

        Raises:
            ConfigError: on all workers, in the first exchange, if they were not given the same.
            PeerError: if another worker is lost, or does not answer in time.
        """
        self._optimizer.step()
        self.count()

    def count(self) -> None:
        """Is told of a step that somebody else made, and exchanges if it is time.

        Raises:
            ConfigError: on all workers, in the first exchange, if they were not given the same.
            PeerError: if another worker is lost, or does not answer in time.
        """
        self._since += 1
        if self._since >= self._every:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Averages how far all workers have come since the last exchange, and sets their weights equal.

        Raises:
            ConfigError: on all workers, in the first exchange, if they were not given the same.
            PeerError: if another worker is lost, or does not answer in time.
        """
        for number, (parameter, anchor) in enumerate(zip(self._parameters, self._anchors, strict=True)):
            self._averager.put(number, anchor - parameter)
        self._averager.wait()
        self._meter.step()
        self._since = 0
        for number, anchor in enumerate(self._anchors):
            anchor.grad = torch.empty_like(anchor)
            self._averager.gradient.take(number, anchor.grad)
        self._rule.step()
        for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
            anchor.grad = None
            parameter.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        """What this worker carries from step to step, its weights included; to be saved by each rank."""
        return {
            **self._averager.state_dict(),
            "outer": {
                "since": self._since,
                "weights": [parameter.detach().clone() for parameter in self._parameters],
                "anchors": [anchor.detach().clone() for anchor in self._anchors],
                "rule": copied(self._rule.state_dict()["state"]),
            },
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave on the same rank, of as many; load the optimizer's, too.

        Weights become those that were saved with it. The outer rate and momentum stay what this was made with.

        Args:
            values: as saved.

        Raises:
            ConfigError: if it is of another rank, another number of workers, another method, other parameters, or of
                another ``bucket_mb``, or lacks something; nothing is changed then.
        """
        if not isinstance(values, Mapping) or "outer" not in values:
            raise ConfigError("this is no state of an Outer; load what its state_dict() gave")
        own = values["outer"]
        check_whole(own, {"since": 0, "weights": [], "anchors": [], "rule": {}}, "outer")
        shapes = [parameter.shape for parameter in self._parameters]
        if any([saved.shape for saved in own[name]] != shapes for name in ("weights", "anchors")):
            raise ConfigError("this state is of other parameters; load it where it was saved")
        self._averager.load_state_dict({name: value for name, value in values.items() if name != "outer"})
        self._since = own["since"]
        self._rule.load_state_dict({**self._rule.state_dict(), "state": copied(own["rule"])})
        with torch.no_grad():
            for into, name in ((self._parameters, "weights"), (self._anchors, "anchors")):
                for tensor, saved in zip(into, own[name], strict=True):
                    tensor.copy_(saved)

    def stats(self) -> Stats:
        """What this worker sent and spent so far; a step of it is an exchange; see :class:`Stats`."""
        nbytes = sum(parameter.nbytes for parameter in self._parameters)
        return self._meter.stats(nbytes, self._averager.refused, self._averager.engine.waiting())

    def close(self) -> None:
        """Gives back what this took of the process group."""
        self._cluster.release()
