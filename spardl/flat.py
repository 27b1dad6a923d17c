"""All gradients of a model as one vector, without a copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from spardl.errors import ConfigError
from spardl.layout import Layout
from spardl.sparse import SparseVector, Sum

__all__ = ["FlatGradient"]


class FlatGradient:
    """The vector that every parameter's ``.grad`` is a view of.

    A backward pass adds straight into it, and an optimizer reads straight from it. The layout is the order of
    the parameters and belongs to the library: unlike DDP's buckets it never changes.

    Args:
        parameters: those to be trained, each once; all of one type and on one device.

    Raises:
        ConfigError: if there are none, or they differ in type or device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        kinds = {(parameter.dtype, parameter.device) for parameter in self._parameters}
        if len(kinds) != 1:
            raise ConfigError(
                "the model's trainable parameters must all have one type and be on one device, found "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds)) or 'none'}"
            )
        (dtype, device) = kinds.pop()
        self.layout = Layout.of(parameter.shape for parameter in self._parameters)
        self.vector: Tensor = torch.zeros(self.layout.length, dtype=dtype, device=device)
        self._attach()

    def _attach(self) -> None:
        for parameter, (start, stop) in zip(self._parameters, self.layout.tensors, strict=True):
            parameter.grad = self.vector[start:stop].view_as(parameter)

    def zero(self) -> None:
        """Clears all gradients; ``optimizer.zero_grad()`` would cut the views off."""
        self.vector.zero_()

    def add_weights(self, factor: float) -> None:
        """Adds a multiple of the weights to the gradients: weight decay."""
        for parameter, (start, stop) in zip(self._parameters, self.layout.tensors, strict=True):
            self.vector[start:stop].add_(parameter.detach().reshape(-1), alpha=factor)

    def write(self, average: Sum) -> None:
        """Replaces all gradients by an average."""
        if isinstance(average, SparseVector):
            self.vector.zero_()
            self.vector[average.indices] = average.values
        else:
            self.vector.copy_(average)
