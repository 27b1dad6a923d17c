"""An optimizer whose state was moved before compression: its step only applies what was averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.method.momentum import Momentum
from spardl.method.moving import check_moved, coupled_decay

__all__ = ["PlainSteps"]


class PlainSteps:
    """Makes each step of an optimizer ``weights = (1 - lr * decay) * weights - lr * average``.

    Learning rate and decay are those of the parameter's group when the step is made, so schedulers go on working; decay
    is 0 where weight decay is a part of the gradient (SGD, Adam), and then goes through the moments as well.

    Args:
        optimizer: of a kind that can be moved. It keeps no state from here on.
        momentum: what takes the place of its state.
        check: is called with the parameters before a step, and may raise.

    Raises:
        ConfigError: if the momentum is no such optimizer's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        momentum: Momentum,
        check: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        check_moved(momentum, optimizer)
        self._optimizer, self._momentum, self._check = optimizer, momentum, check
        self._averages: list[tuple[nn.Parameter, Tensor]] = []
        self._group_of: dict[nn.Parameter, dict[str, Any]] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._hide),
            optimizer.register_step_post_hook(self._apply),
        ]

    def _hide(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(arguments) > 1 or options.get("closure") is not None:
            raise ConfigError("the optimizer's state is each worker's, and a closure would skip it; call step() alone")
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError("a fused optimizer takes off a scale by itself; make it without fused=True")
        check_moved(self._momentum, optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._averages = [(each, each.grad) for each in parameters if each.grad is not None]
        if self._check:
            self._check([each for each, _ in self._averages])
        for parameter, _ in self._averages:
            parameter.grad = None

    @torch.no_grad()
    def _apply(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        averages = dict(self._averages)
        self._averages = []
        for group in optimizer.param_groups:
            rate = float(group["lr"])
            decay = float(group["weight_decay"]) - coupled_decay(optimizer, group)
            for parameter in group["params"]:
                if (average := averages.get(parameter)) is not None:
                    parameter.grad = average
                    if decay:
                        parameter.mul_(1 - rate * decay)
                    parameter.add_(average, alpha=-rate)

    def decay(self, parameter: nn.Parameter) -> float:
        """The multiple of its weights that is added to a ``parameter``'s gradient, before its moments."""
        if parameter not in self._group_of:
            self._group_of = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        group = self._group_of.get(parameter)
        return coupled_decay(self._optimizer, group) if group else 0.0

    def close(self) -> None:
        """The optimizer's steps are its own again; its state begins anew."""
        for hook in self._hooks:
            hook.remove()
