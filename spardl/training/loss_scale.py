"""A loss that is multiplied so that gradients in float16 neither vanish nor overflow.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2; how the factor changes is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

__all__ = ["LossScale"]


class LossScale:
    """torch's ``GradScaler`` for averages that somebody else looks at: it is told whether they overflowed.

    Args:
        device: where losses are.
        enabled: whether losses are scaled at all.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._scaler = GradScaler(device.type, enabled=enabled)
        # A scaler learns of an overflow from the gradients of an optimizer.
        self._probe = nn.Parameter(torch.zeros(1, device=device))
        self._optimizer = torch.optim.SGD([self._probe])
        self.enabled = enabled

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, of shape (), times the factor; ``loss``: likewise."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def factor(self) -> float:
        """It, now."""
        return self._scaler.get_scale()

    def update(self, *, overflowed: bool) -> None:
        """Ends a step; ``overflowed``: whether its averages were left out."""
        if not self.enabled:
            return
        self._probe.grad = torch.full_like(self._probe, math.inf if overflowed else 0.0)
        self._scaler.unscale_(self._optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The factor, and since when it has not changed; empty where losses are not scaled."""
        return self._scaler.state_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave, if it gave anything."""
        if values:
            self._scaler.load_state_dict(dict(values))
