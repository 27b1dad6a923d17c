"""Base classes of all communicators.

``reduce`` is a program: a generator that requests the messages of one worker. A cluster runs it (see
``spardl.protocol.programs``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.compressors.base import Compressor, DenseCompressor, Output
from spardl.protocol.programs import Context, Cost, Program, State, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import Sum

__all__ = ["Communicator", "DenseCommunicator", "Synchronization"]

C = TypeVar("C", bound=Compressor)
S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Synchronization(Generic[C, S]):
    """Input of a communicator: one synchronization of one worker.

    Attributes:
        context: Worker, layout and step of the synchronization.
        accumulated: Gradient plus residual. Selected entries are removed from it; entries that this worker drops from
            partial sums are added to it.
        compressor: Compressor of the method.
        compression: State of the compressor on this worker.
        state: State of the communicator on this worker.
    """

    context: Context
    accumulated: Accumulator
    compressor: C
    compression: State
    state: S


class Communicator(ABC, Generic[C, S]):
    """An algorithm that sums the compressed gradients of P workers.

    The class is generic in the type of its compressors, and in the type of its state on one worker.

    Attributes:
        name: Name of the communicator in configurations.
        sums: Forms of compressor output that this communicator can sum.
        drops: Whether the communicator drops entries of partial sums, which only :class:`GlobalResidual` keeps.
        sends_whole: Whether every message holds exactly the entries that were rounded together, so that quantized wire
            formats can store one scale per chunk.
        collective: Whether sums are collectives of the backend, over all workers of the process group.
    """

    name: ClassVar[str]
    sums: ClassVar[frozenset[Output]]
    drops: ClassVar[bool] = False
    sends_whole: ClassVar[bool] = False
    collective: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Earlier versions passed the fields of a ``Synchronization`` as arguments; reject such classes immediately.
        if "reduce" in vars(cls) and len(signature(cls.reduce).parameters) != 2:
            raise TypeError(
                f"{cls.__name__}.reduce has the arguments of an earlier version; define reduce(self, sync), where the "
                "Synchronization sync has these arguments as fields"
            )

    @property
    def splits(self) -> bool:
        """Whether every all-reduce yields a ``Boundary`` between its reduce-scatter and its all-gather."""
        return False

    def check_workers(self, workers: int) -> None:
        """Checks that this communicator supports a number of workers.

        Args:
            workers: Number of workers.

        Raises:
            ConfigError: If this communicator, as configured, does not support ``workers`` workers.
        """

    def runs_on(self, workers: int) -> bool:
        """Returns whether this communicator supports this number of ``workers``."""
        try:
            self.check_workers(workers)
        except ConfigError:
            return False
        return True

    def init_state(self) -> S:
        """Returns the initial state of one worker; communicators with a state override this method."""
        return State()  # type: ignore[return-value]  # S is State unless it is overridden

    @abstractmethod
    def reduce(self, sync: Synchronization[C, S]) -> Program[Sum]:
        """Sums the compressed gradients of all workers; a program (generator) that every worker runs.

        Args:
            sync: Vector, compressor, context and states of this worker.

        Returns:
            The sum over all workers, bit-identical on each of them.
        """

    @abstractmethod
    def cost(self, context: Context, compressor: C) -> Cost:
        """Returns the cost of ``reduce``, as bounds that hold for every worker.

        Args:
            context: Worker, layout and step of the synchronization.
            compressor: Compressor of the method.

        Returns:
            Rounds and words; bounds where the exact numbers depend on the data.
        """

    def published_cost(self, context: Context, compressor: C) -> Cost:
        """Returns the cost by the paper's formula.

        Some formulas are means over all workers, for entries that are spread evenly over the vector.

        Args:
            context: Worker, layout and step of the synchronization.
            compressor: Compressor of the method.

        Returns:
            Rounds and words.
        """
        return self.cost(context, compressor)

    def half_costs(self, context: Context, compressor: C) -> tuple[Cost, Cost]:
        """Returns the costs of the two halves of ``reduce`` by the published formula; called only if ``splits``.

        Args:
            context: Worker, layout and step of the synchronization.
            compressor: Compressor of the method.

        Returns:
            Cost before the ``Boundary`` (reduce-scatter), and cost after it (all-gather).
        """
        raise NotImplementedError


class DenseCommunicator(Communicator[DenseCompressor, State]):
    """Base class of communicators that sum dense tensors."""

    sums = frozenset({Output.DENSE})

    @abstractmethod
    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Sums a tensor over all workers; a program (generator) that every worker runs.

        Args:
            worker: Worker that runs this generator.
            tensor: Tensor of shape (m,); may be overwritten.

        Returns:
            The sum, shape (m,).
        """

    @abstractmethod
    def total_cost(self, workers: int, length: int) -> Cost:
        """Returns the cost of one sum of ``length`` entries, for each of ``workers`` workers."""

    def half_total_costs(self, workers: int, length: int) -> tuple[Cost, Cost]:
        """Returns the costs of reduce-scatter and all-gather of ``length`` entries for each of ``workers`` workers.

        Called only if ``splits``.
        """
        raise NotImplementedError

    def cost(self, context: Context, compressor: DenseCompressor) -> Cost:
        """Returns the total cost of all sums that the compressor requests."""
        return Cost.total(self.total_cost(context.worker.size, length) for length in compressor.sizes(context))

    def half_costs(self, context: Context, compressor: DenseCompressor) -> tuple[Cost, Cost]:
        """Returns the costs of the two halves of the compressor's single sum."""
        (length,) = compressor.sizes(context)
        return self.half_total_costs(context.worker.size, length)

    def reduce(self, sync: Synchronization[DenseCompressor, State]) -> Program[Sum]:
        """Runs ``compressor.rounds``, which calls ``total`` for each dense sum."""
        worker = sync.context.worker
        return (
            yield from sync.compressor.rounds(
                sync.accumulated, sync.context, lambda tensor: self.total(worker, tensor), sync.compression
            )
        )
