"""All gradients of a model as one vector, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.vector import entries
from spardl.vector.layout import Layout
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["FlatGradient", "Layer", "write"]


class Layer(NamedTuple):
    """Neighbouring tensors of one module: what a schedule never cuts.

    Attributes:
        name: path of the module; of a shared parameter, that of the first module which has it.
        tensors: numbers of the first one and of the one after the last.
        entries: entries of all of them.
    """

    name: str
    tensors: tuple[int, int]
    entries: int


class FlatGradient:
    """The vector that every parameter's ``.grad`` is a view of.

    A backward pass adds straight into it, and an optimizer reads straight from it. The layout is the order of
    the parameters and belongs to the library: unlike DDP's buckets it never changes.

    Args:
        named: parameters to be trained with their names, each once, as ``model.named_parameters()`` has them; all of
            one type and on one device.

    Attributes:
        names: of the parameters.
        parameters: those that are trained.
        layout: their shapes.
        layers: neighbours that belong together.
        vector: shape (n,).

    Raises:
        ConfigError: if there are no parameters, or they differ in type or device.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> gradient = spardl.FlatGradient(model.named_parameters())
        >>> print([f"layer {layer.name}: {layer.entries} entries" for layer in gradient.layers])
        ['layer 0: 15 entries', 'layer 1: 8 entries']
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> gradient.vector[-2:], model[1].bias.grad
        (tensor([1., 1.]), tensor([1., 1.]))
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        pairs = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.names = [name for name, _ in pairs]
        self.parameters = [parameter for _, parameter in pairs]
        kinds = {(parameter.dtype, parameter.device) for parameter in self.parameters}
        if len(kinds) != 1:
            raise ConfigError(
                "the model's trainable parameters must all have one type and be on one device, found "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds)) or 'none'}"
            )
        (dtype, device) = kinds.pop()
        self.layout = Layout.of(parameter.shape for parameter in self.parameters)
        self.layers = list(self._find_layers())
        self.vector: Tensor = torch.zeros(self.layout.length, dtype=dtype, device=device)
        self._attach()

    def _find_layers(self) -> Iterator[Layer]:
        numbered = enumerate(name.rpartition(".")[0] for name in self.names)
        for owner, members in groupby(numbered, key=lambda pair: pair[1]):
            numbers = [number for number, _ in members]
            tensors = (numbers[0], numbers[-1] + 1)
            yield Layer(owner, tensors, sum(self.parameters[number].numel() for number in numbers))

    def layer_of(self) -> dict[nn.Parameter, int]:
        """The number of each parameter's layer."""
        return {
            parameter: number
            for number, layer in enumerate(self.layers)
            for parameter in self.parameters[slice(*layer.tensors)]
        }

    def _attach(self) -> None:
        for parameter, (start, stop) in zip(self.parameters, self.layout.tensors, strict=True):
            parameter.grad = self.vector[start:stop].view_as(parameter)

    @contextmanager
    def hidden(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Takes the gradients of some ``parameters`` away for a while: an optimizer leaves out what has none."""
        taken = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in taken:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in taken:
                parameter.grad = gradient

    def zero(self) -> None:
        """Clears all gradients; ``optimizer.zero_grad()`` would cut the views off."""
        self.vector.zero_()

    def add_weights(self, factor: float, tensors: tuple[int, int]) -> None:
        """Adds a multiple of the weights to their gradients: weight decay.

        Args:
            factor: the multiple.
            tensors: numbers of the first tensor and of the one after the last.
        """
        for number in range(*tensors):
            start, stop = self.layout.tensors[number]
            self.vector[start:stop].add_(self.parameters[number].detach().reshape(-1), alpha=factor)


def write(average: Sum, gradient: Tensor, *, clear: bool = True) -> None:
    """Replaces a part of a flat gradient by an average.

    Args:
        average: sparse, or shape (n,).
        gradient: shape (n,).
        clear: whether it may hold anything but zeros.
    """
    if isinstance(average, SparseVector):
        if clear:
            gradient.zero_()
        entries.put(gradient, average.indices, average.values)
    else:
        gradient.copy_(average)
