"""All gradients of a model as one vector, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.vector import entries
from spardl.vector.sparse import SparseVector, Sum
from spardl.vector.storage import Layer, Storage

__all__ = ["FlatGradient", "layers_of", "write"]


class FlatGradient(Storage):
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
        kinds = {(parameter.dtype, parameter.device) for _, parameter in pairs}
        if len(kinds) != 1:
            raise ConfigError(
                "the model's trainable parameters must all have one type and be on one device, found "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds)) or 'none'}"
            )
        super().__init__(pairs)
        (self.vector,) = self.vectors
        self._places: list[int] = []
        for number, parameter in enumerate(self.parameters):
            parameter.grad = self.part(number).view_as(parameter)
            self._places.append(parameter.grad.data_ptr())

    def _find_layers(self) -> Iterator[Layer]:
        return layers_of(self.names, self.parameters)

    def has(self, number: int, gradient: Tensor | None) -> bool:
        """Whether the gradient of parameter ``number``, ``gradient`` of its shape, still is the view it was given."""
        return gradient is not None and gradient.data_ptr() == self._places[number]

    def zero(self) -> None:
        """Clears all gradients; ``optimizer.zero_grad()`` would cut the views off."""
        self.vector.zero_()


def layers_of(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> Iterator[Layer]:
    """Neighbouring parameters of one module, as their names have it: a layer each.

    Args:
        names: paths, in the order in which the model uses them.
        parameters: of these names.
    """
    numbered = enumerate(name.rpartition(".")[0] for name in names)
    for owner, members in groupby(numbered, key=lambda pair: pair[1]):
        numbers = [number for number, _ in members]
        tensors = (numbers[0], numbers[-1] + 1)
        yield Layer(owner, tensors, sum(parameters[number].numel() for number in numbers))


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
