"""All gradients of a model as one vector, without a copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.vector import sparse
from spardl.vector.layout import Layout
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["CopiedGradient", "FlatGradient", "Layer", "Storage", "layers_of", "write"]


# Vectors that hold the gradients of some parameters, end to end.


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


class Storage:
    """One flat order of all entries, in vectors of one type and place each: at first, one for each such run.

    Args:
        named: parameters with their names, in flat order.

    Attributes:
        names: of the parameters.
        parameters: of any shape.
        layout: their shapes.
        layers: neighbours that belong together.
        vectors: of shape (m,) each, m adding up to all entries, in flat order.
        backwards: whether flat order is that of the backward pass.
    """

    backwards: ClassVar[bool] = False

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.layout = Layout.of(parameter.shape for parameter in self.parameters)
        kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
        self.vectors: list[Tensor] = []
        self._begins: list[int] = []
        self._runs: list[tuple[int, int]] = []
        first = 0
        for (dtype, device), count in runs:
            ranges = self.layout.tensors[first : first + count]
            self._begins.append(ranges[0][0])
            self._runs.append((first, first + count))
            self.vectors.append(torch.zeros(ranges[-1][1] - ranges[0][0], dtype=dtype, device=device))
            first += count
        self.layers = list(self._find_layers())

    def _find_layers(self) -> Iterable[Layer]:
        """Each parameter is a layer of its own, unless a subclass knows better."""
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            yield Layer(name, (number, number + 1), parameter.numel())

    def forward(self) -> tuple[list[str], list[nn.Parameter]]:
        """Names and parameters in the order in which the model uses them."""
        step = -1 if self.backwards else 1
        return self.names[::step], self.parameters[::step]

    @property
    def entries(self) -> list[int]:
        """Entries of each layer."""
        return [layer.entries for layer in self.layers]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The layers, [start, stop), of each run of one type and place."""
        starts = [layer.tensors[0] for layer in self.layers]
        return [(starts.index(first), sum(start < stop for start in starts)) for first, stop in self._runs]

    def cut(self, vectors: Sequence[Tensor], entries: tuple[int, int]) -> Tensor:
        """A range of vectors like those of this storage.

        Args:
            vectors: of the shapes of ``self.vectors``, or empty ones.
            entries: the first position in flat order, and the one after the last; all in one vector.

        Returns:
            A view, shape (m,).
        """
        place = bisect_right(self._begins, entries[0]) - 1
        begin = self._begins[place]
        return vectors[place][entries[0] - begin : entries[1] - begin]

    def part(self, number: int) -> Tensor:
        """The gradient of a parameter, a view of shape (entries,)."""
        return self.cut(self.vectors, self.layout.tensors[number])

    def layer_of(self) -> dict[nn.Parameter, int]:
        """The number of each parameter's layer."""
        return {
            parameter: number
            for number, layer in enumerate(self.layers)
            for parameter in self.parameters[slice(*layer.tensors)]
        }

    def add_weights(self, multiple: Callable[[nn.Parameter], float], factor: float, tensors: tuple[int, int]) -> None:
        """Adds a multiple of the weights to their gradients: weight decay.

        Args:
            multiple: for each parameter; 0 for none.
            factor: of the gradients, which it is multiplied by.
            tensors: numbers of the first tensor and of the one after the last.
        """
        for number in range(*tensors):
            parameter = self.parameters[number]
            if decay := multiple(parameter):
                self.part(number).add_(parameter.detach().reshape(-1), alpha=decay * factor)

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

    @contextmanager
    def exposed(self, numbers: Iterable[int]) -> Iterator[None]:
        """Lets an optimizer see, for a while, what is here for the parameters of some ``numbers``."""
        pairs = [(self.parameters[number], self.part(number)) for number in numbers]
        with self.hidden(parameter for parameter, _ in pairs):
            for parameter, part in pairs:
                parameter.grad = part.view_as(parameter)
            yield


class CopiedGradient(Storage):
    """Gradients that come from elsewhere, such as the buckets of DDP, and go back there as averages.

    Flat order is that of the backward pass: a group is there as soon as its last entries are.

    Args:
        named: parameters with their names, in the order in which the model uses them.
    """

    backwards = True

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__(list(reversed(named)))

    def split(self, ranges: Sequence[tuple[int, int]], carried: Sequence[list[Tensor]]) -> None:
        """Gives each group a vector of its own: where one begins in memory, matrix products are a little faster.

        Args:
            ranges: the entries of each group; all groups together have all entries, in flat order.
            carried: vectors of the shapes of ``self.vectors``, or empty ones; split as well, they keep what they hold.
        """
        for vectors in (self.vectors, *carried):
            vectors[:] = [self._joined(vectors, entries) for entries in ranges]
        self._begins = [start for start, _ in ranges]

    def _joined(self, vectors: Sequence[Tensor], entries: tuple[int, int]) -> Tensor:
        """A copy of a range that may span several vectors of one type and place, shape (m,)."""
        bounds = zip(self._begins, [*self._begins[1:], self.layout.length], vectors, strict=True)
        parts = [
            vector[max(entries[0], begin) - begin : min(entries[1], end) - begin]
            for begin, end, vector in bounds
            if begin < entries[1] and entries[0] < end
        ]
        return torch.cat(parts) if parts else self.cut(vectors, entries).clone()

    def put(self, number: int, gradient: Tensor | None) -> None:
        """Takes over the gradient of parameter ``number``; ``gradient``: of its shape, or ``None`` for zeros."""
        part = self.part(number)
        if gradient is None:
            part.zero_()
        else:
            part.view(gradient.shape).copy_(gradient.detach())

    def take(self, number: int, into: Tensor) -> None:
        """Copies what is there now for a parameter to ``into``, a tensor of its shape."""
        into.detach().copy_(self.part(number).view(into.shape))


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
        sparse.put(gradient, average.indices, average.values)
    else:
        gradient.copy_(average)
