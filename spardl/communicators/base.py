"""What every communicator declares, and the one thing it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.compressors.base import Compressor, DenseCompressor, Output
from spardl.protocol.programs import Context, Cost, Program, State, Worker
from spardl.vector.accumulator import Accumulator
from spardl.vector.sparse import Sum

__all__ = ["Communicator", "DenseCommunicator"]

C = TypeVar("C", bound=Compressor)


class Communicator(ABC, Generic[C]):
    """How P workers turn P gradients into one sum.

    Attributes:
        name: how configurations call it.
        sums: the compressors' outputs that it can add up.
        drops: whether it leaves something out of the sum on the way, which only the global residual keeps.
        sends_whole: whether each of its messages holds all entries that were rounded together, and no others, so that
            their values can share limits.
    """

    name: ClassVar[str]
    sums: ClassVar[frozenset[Output]]
    drops: ClassVar[bool] = False
    sends_whole: ClassVar[bool] = False

    @property
    def splits(self) -> bool:
        """Whether every sum passes a ``Boundary``, after which it may rest until it is needed."""
        return False

    def check_workers(self, workers: int) -> None:
        """Accepts a number of ``workers``.

        Raises:
            ConfigError: if this communicator, as configured, does not run on so many.
        """

    def runs_on(self, workers: int) -> bool:
        """Whether ``check_workers`` accepts a number of ``workers``."""
        try:
            self.check_workers(workers)
        except ConfigError:
            return False
        return True

    def init_state(self) -> State:
        """A fresh state for one worker."""
        return State()

    @abstractmethod
    def reduce(
        self, context: Context, accumulated: Accumulator, compressor: C, compression: State, state: State
    ) -> Program[Sum]:
        """The program of one worker for one synchronization.

        Args:
            context: who runs it, on what.
            accumulated: gradient plus residual. Selected entries are taken out of it, and what this worker
                drops of others' entries is added to it.
            compressor: what to send.
            compression: the compressor's state on this worker.
            state: this communicator's state on this worker.

        Returns:
            The sum over all workers, bit-identical on each of them.
        """

    @abstractmethod
    def cost(self, context: Context, compressor: C) -> Cost:
        """What ``reduce`` will cost any worker, certainly.

        Args:
            context: of the synchronization.
            compressor: what is sent.

        Returns:
            Rounds and words, as limits where only those are known.
        """

    def published_cost(self, context: Context, compressor: C) -> Cost:
        """The published formula, where that supposes entries to be spread evenly: the mean over all workers.

        Args:
            context: of the synchronization.
            compressor: what is sent.

        Returns:
            Rounds and words.
        """
        return self.cost(context, compressor)

    def half_costs(self, context: Context, compressor: C) -> tuple[Cost, Cost]:
        """The published formula for both halves; called if ``splits``.

        Args:
            context: of the synchronization.
            compressor: what is sent.

        Returns:
            Rounds and words up to the boundary, and after it.
        """
        raise NotImplementedError


class DenseCommunicator(Communicator[DenseCompressor]):
    """Base of the communicators that sum dense tensors."""

    sums = frozenset({Output.DENSE})

    @abstractmethod
    def total(self, worker: Worker, tensor: Tensor) -> Program[Tensor]:
        """Sums a tensor over all workers.

        Args:
            worker: who runs it.
            tensor: shape (m,); may be overwritten.

        Returns:
            The sum, shape (m,).
        """

    @abstractmethod
    def total_cost(self, workers: int, length: int) -> Cost:
        """What one sum of ``length`` entries costs each of ``workers`` workers."""

    def half_total_costs(self, workers: int, length: int) -> tuple[Cost, Cost]:
        """What it costs up to the boundary, and after it, by ``workers`` and ``length``; called if ``splits``."""
        raise NotImplementedError

    def cost(self, context: Context, compressor: DenseCompressor) -> Cost:
        """That of all the sums that the compressor asks for."""
        return Cost.total(self.total_cost(context.worker.size, length) for length in compressor.sizes(context))

    def half_costs(self, context: Context, compressor: DenseCompressor) -> tuple[Cost, Cost]:
        """Those of the one sum."""
        (length,) = compressor.sizes(context)
        return self.half_total_costs(context.worker.size, length)

    def reduce(
        self,
        context: Context,
        accumulated: Accumulator,
        compressor: DenseCompressor,
        compression: State,
        state: State,
    ) -> Program[Sum]:
        """Lets the compressor call ``total`` as often as it needs."""
        return (
            yield from compressor.rounds(
                accumulated, context, lambda tensor: self.total(context.worker, tensor), compression
            )
        )
