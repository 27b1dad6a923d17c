"""Flat gradients: all gradients of a model in one vector, of which each ``.grad`` is a view where possible."""

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

__all__ = ["CopiedGradient", "FlatGradient", "Layer", "Storage", "layers_of", "local_part", "write"]


def local_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this process holds, as a view.

    Args:
        tensor: Tensor of any shape; a ``DTensor`` may be sharded among processes.

    Returns:
        The shard of a ``DTensor``, with its own shape; any other tensor itself.
    """
    # Every operation of a DTensor on all of its entries, such as `any`, would communicate.
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    if local is None:
        return tensor
    with torch.no_grad():
        return local()


class Layer(NamedTuple):
    """Adjacent tensors of one module; schedules never split a layer.

    Attributes:
        name: Path of the module; for a shared parameter, of the first module that owns it.
        tensors: Index of the first tensor, and index after the last one, among all tensors of the model.
        entries: Total number of entries.
    """

    name: str
    tensors: tuple[int, int]
    entries: int


class Storage:
    """Storage of all gradients of a model in flat vectors, one for each run of parameters of the same dtype and device.

    *Flat order* is the order of the entries in these vectors. Of a sharded parameter (``DTensor``), the shard of this
    process is stored.

    Args:
        named: Names and parameters, in flat order.

    Attributes:
        names: Names of the parameters.
        parameters: Parameters of any shape, in flat order.
        layout: Shapes of the parameters, and their positions in flat order.
        layers: Adjacent parameters that belong together.
        vectors: Tensors of shape (m,) each that together hold all entries in flat order.
        backwards: Whether flat order is the order of the backward pass.
    """

    backwards: ClassVar[bool] = False

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.layout = Layout.of(local_part(parameter).shape for parameter in self.parameters)
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
        """Yields one layer per parameter; subclasses may group parameters."""
        for number, (name, (start, stop)) in enumerate(zip(self.names, self.layout.tensors, strict=True)):
            yield Layer(name, (number, number + 1), stop - start)

    def forward(self) -> tuple[list[str], list[nn.Parameter]]:
        """Returns names and parameters in the order of the forward pass."""
        step = -1 if self.backwards else 1
        return self.names[::step], self.parameters[::step]

    @property
    def entries(self) -> list[int]:
        """Number of entries of each layer."""
        return [layer.entries for layer in self.layers]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """For each vector, the range [start, stop) of the layers that it holds."""
        starts = [layer.tensors[0] for layer in self.layers]
        return [(starts.index(first), sum(start < stop for start in starts)) for first, stop in self._runs]

    def cut(self, vectors: Sequence[Tensor], entries: tuple[int, int]) -> Tensor:
        """Returns a range of entries from vectors that are laid out like those of this storage.

        Args:
            vectors: Vectors with the shapes of ``self.vectors``, or empty vectors.
            entries: First position in flat order, and position after the last one; both in the same vector.

        Returns:
            A view of shape (m,).
        """
        place = bisect_right(self._begins, entries[0]) - 1
        begin = self._begins[place]
        return vectors[place][entries[0] - begin : entries[1] - begin]

    def part(self, number: int) -> Tensor:
        """Returns the gradient of parameter ``number``, a view of shape (entries,)."""
        return self.cut(self.vectors, self.layout.tensors[number])

    def layer_of(self) -> dict[nn.Parameter, int]:
        """Returns the index of the layer of each parameter."""
        return {
            parameter: number
            for number, layer in enumerate(self.layers)
            for parameter in self.parameters[slice(*layer.tensors)]
        }

    def add_weights(self, multiple: Callable[[nn.Parameter], float], factor: float, tensors: tuple[int, int]) -> None:
        """Adds weight decay: a multiple of each weight is added to its gradient.

        Args:
            multiple: Function that returns the weight decay of a parameter; 0 for none.
            factor: Factor by which the gradients are scaled (loss scale); weight decay is scaled by the same factor.
            tensors: Index of the first parameter, and index after the last one, to which weight decay is added.
        """
        for number in range(*tensors):
            parameter = self.parameters[number]
            if decay := multiple(parameter):
                self.part(number).add_(local_part(parameter).detach().reshape(-1), alpha=decay * factor)

    @contextmanager
    def hidden(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Context manager: inside, ``grad`` of ``parameters`` is ``None``, so that an optimizer skips them."""
        taken = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in taken:
            parameter.grad = None
        try:
            yield
        finally:
            # Restored as the same objects, because gradients may be views of a storage.
            for parameter, gradient in taken:
                parameter.grad = gradient

    @contextmanager
    def exposed(self, numbers: Iterable[int]) -> Iterator[None]:
        """Context manager: inside, ``grad`` of the parameters with these ``numbers`` is a view of this storage."""
        pairs = [(self.parameters[number], self.part(number)) for number in numbers]
        with self.hidden(parameter for parameter, _ in pairs):
            for parameter, part in pairs:
                parameter.grad = part.view_as(parameter)
            yield


class CopiedGradient(Storage):
    """Gradient storage that is copied from and to gradients elsewhere, such as DDP buckets.

    Flat order is the order of the backward pass, so a bucket is complete as soon as its last entries are.

    Args:
        named: Names and parameters, in the order of the forward pass.
    """

    backwards = True

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__(list(reversed(named)))

    def split(self, ranges: Sequence[tuple[int, int]], carried: Sequence[list[Tensor]]) -> None:
        """Stores each bucket in a separate vector.

        Args:
            ranges: Entry ranges of the buckets, in flat order; together they cover all entries.
            carried: Lists of vectors (residuals, moments), each with the shapes of ``self.vectors``, or of empty
                vectors. They are split in the same way and keep their contents.
        """
        # Matrix products are slightly faster on vectors that start at an aligned address.
        for vectors in (self.vectors, *carried):
            vectors[:] = [self._joined(vectors, entries) for entries in ranges]
        self._begins = [start for start, _ in ranges]

    def _joined(self, vectors: Sequence[Tensor], entries: tuple[int, int]) -> Tensor:
        """Returns a copy, shape (m,), of a range that may span several vectors of the same dtype and device."""
        bounds = zip(self._begins, [*self._begins[1:], self.layout.length], vectors, strict=True)
        parts = [
            vector[max(entries[0], begin) - begin : min(entries[1], end) - begin]
            for begin, end, vector in bounds
            if begin < entries[1] and entries[0] < end
        ]
        # An empty range has no parts.
        return torch.cat(parts) if parts else self.cut(vectors, entries).clone()

    def put(self, number: int, gradient: Tensor | None) -> None:
        """Copies ``gradient`` (of its parameter's shape; ``None``: zeros) to the storage of parameter ``number``."""
        part = self.part(number)
        if gradient is None:
            part.zero_()
        else:
            own = local_part(gradient).detach()
            part.view(own.shape).copy_(own)

    def take(self, number: int, into: Tensor) -> None:
        """Copies the gradient of parameter ``number`` to ``into``, a tensor of its shape."""
        own = local_part(into).detach()
        own.copy_(self.part(number).view(own.shape))


class FlatGradient(Storage):
    """All gradients of a model in one vector; every ``.grad`` is a view of it.

    The backward pass accumulates directly into the vector, and the optimizer reads directly from it. The layout is the
    order of the parameters; unlike DDP's buckets it never changes.

    Args:
        named: Names and parameters, each once, as from ``model.named_parameters()``; trainable ones must share one
            dtype and one device.

    Attributes:
        names: Names of the trainable parameters.
        parameters: Trainable parameters.
        layout: Shapes of the parameters, and their positions in the vector.
        layers: Adjacent parameters that belong together.
        vector: Flat gradient of shape (n,).

    Raises:
        ConfigError: If there are no trainable parameters, or they differ in dtype or device.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> gradient = spardl.vector.FlatGradient(model.named_parameters())
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
                "trainable parameters must share one dtype and one device, found "
                f"{', '.join(sorted(f'{dtype} on {device}' for dtype, device in kinds)) or 'no parameters'}"
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
        """Returns whether ``gradient``, of the shape of parameter ``number``, is still its view of the vector."""
        return gradient is not None and gradient.data_ptr() == self._places[number]

    def zero(self) -> None:
        """Sets all gradients to zero. ``optimizer.zero_grad()`` would detach the views instead."""
        self.vector.zero_()


def layers_of(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> Iterator[Layer]:
    """Groups adjacent parameters of the same module, according to their names, into layers.

    Args:
        names: Names of the parameters, in the order of the forward pass.
        parameters: Parameters with these names, in the same order.
    """
    numbered = enumerate(name.rpartition(".")[0] for name in names)
    for owner, members in groupby(numbered, key=lambda pair: pair[1]):
        numbers = [number for number, _ in members]
        tensors = (numbers[0], numbers[-1] + 1)
        yield Layer(owner, tensors, sum(parameters[number].numel() for number in numbers))


def write(average: Sum, gradient: Tensor, *, clear: bool = True) -> None:
    """Overwrites a flat gradient, or a range of one, with an average.

    Args:
        average: Sparse average, or dense one of shape (n,).
        gradient: Vector of shape (n,) to overwrite.
        clear: Whether to set the entries that a sparse average lacks to zero; false if they are known to be zero.
    """
    if isinstance(average, SparseVector):
        if clear:
            gradient.zero_()
        sparse.put(gradient, average.indices, average.values)
    else:
        gradient.copy_(average)
