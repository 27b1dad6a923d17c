"""A method is a compressor, a communicator and a residual that fit together.

gradient -> accumulate -> compress -> communicate -> feed back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spardl import registry
from spardl.accumulator import Accumulator
from spardl.communicators.base import Communicator, Sum
from spardl.compressors.base import Compressor
from spardl.errors import ConfigError
from spardl.programs import Phase, Program, Worker
from spardl.residuals import Residual
from spardl.sparse import SparseVector
from spardl.state import State

__all__ = ["Method", "MethodState", "why_not"]


def why_not(
    compressor: type[Compressor], communicator: type[Communicator[Any]], residual: type[Residual]
) -> str | None:
    """Why three parts do not fit together, naming those that would; ``None`` if they do."""
    if compressor.output not in communicator.sums:
        legal = [name for name, kind in registry.communicators().items() if compressor.output in kind.sums]
        others = [name for name, kind in registry.compressors().items() if kind.output in communicator.sums]
        return (
            f"communicator={communicator.name} cannot add up {compressor.output.value}, which compressor="
            f"{compressor.name} makes; with it use communicator={' or '.join(legal)}, or with "
            f"communicator={communicator.name} use compressor={' or '.join(others)}"
        )
    if residual.remembers and not compressor.discards:
        return (
            f"residual={residual.name} keeps what a compressor discards, and compressor={compressor.name} "
            "discards nothing; use residual=none"
        )
    return None


@dataclass
class MethodState:
    """What one worker carries from step to step.

    Attributes:
        memory: shape (n,): the residual between steps, the accumulated vector within one.
        compression: the compressor's state.
        communication: the communicator's state.
        refused: gradients left out so far because they held a NaN or an infinity.
    """

    memory: Tensor
    compression: State
    communication: State
    refused: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain data; the residual is shared, not copied."""
        return {
            "memory": self.memory,
            "compression": self.compression.state_dict(),
            "communication": self.communication.state_dict(),
            "refused": self.refused,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from saved data; the residual is copied into the memory in place.

        Raises:
            ValueError: if the saved residual has another length.
        """
        if values["memory"].shape != self.memory.shape:
            raise ValueError(f"residual of {values['memory'].numel()} entries, expected {self.memory.numel()}")
        self.memory.copy_(values["memory"])
        self.compression.load_state_dict(values["compression"])
        self.communication.load_state_dict(values["communication"])
        self.refused = values["refused"]


@dataclass(frozen=True)
class Method:
    """One way to turn P gradients into their average.

    Args:
        compressor: what one worker keeps.
        communicator: how the kept is added up.
        residual: where the discarded goes.

    Raises:
        ConfigError: if the three do not fit; the message names those that do.
    """

    compressor: Compressor
    communicator: Communicator[Any]
    residual: Residual

    def __post_init__(self) -> None:
        reason = why_not(type(self.compressor), type(self.communicator), type(self.residual))
        if reason:
            raise ConfigError(reason)

    def init_state(self, length: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> MethodState:
        """A fresh state of one worker for gradients of the given length, type and place."""
        return MethodState(
            memory=torch.zeros(length, dtype=dtype, device=device),
            compression=self.compressor.init_state(),
            communication=self.communicator.init_state(),
        )

    def accumulate(self, gradient: Tensor, state: MethodState) -> None:
        """Adds a worker's gradient, shape (n,), to what it carried over."""
        if not self.residual.accumulate(state.memory, gradient):
            state.refused += 1

    def average(self, worker: Worker, state: MethodState) -> Program[Sum]:
        """The program of one worker: from accumulated gradients to their average over all workers.

        Returns:
            The average, sparse or dense as the communicator has it, bit-identical on every worker. A dense
            one may share the memory of ``state``: use it before the next step.
        """
        yield Phase.SELECT
        accumulated = Accumulator(state.memory)
        total = yield from self.communicator.reduce(
            worker, accumulated, self.compressor, state.compression, state.communication
        )
        yield Phase.MERGE
        if isinstance(total, SparseVector):
            self.residual.keep(accumulated, total.indices)
            return total.divided(worker.size)
        return total.div_(worker.size)
