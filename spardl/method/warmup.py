"""Dense warm-up: the first steps of a run are not compressed, since gradients still change fast.

Source: the official Ok-Topk code trains its first 512 (VGG) or 128 (LSTM) steps densely; torch's PowerSGD hook its
first ``start_powerSGD_iter``.
"""

from __future__ import annotations

from dataclasses import dataclass

from spardl.basics.checks import check_integer
from spardl.basics.errors import ConfigError
from spardl.communicators.base import DenseCommunicator
from spardl.communicators.dense import Dense

__all__ = ["Warmup"]


@dataclass(frozen=True)
class Warmup:
    """Number and communicator of the uncompressed steps at the beginning of a run.

    Args:
        steps: Number of synchronizations that send the whole gradient.
        communicator: Dense communicator that sums the whole gradients.

    Raises:
        ConfigError: If ``steps`` is not an integer of at least 0, or the communicator is not a dense one.
    """

    steps: int = 0
    communicator: DenseCommunicator = Dense()  # noqa: RUF009 - immutable

    def __post_init__(self) -> None:
        check_integer("warmup.steps", self.steps, least=0)
        if not isinstance(self.communicator, DenseCommunicator):
            raise ConfigError(
                "warmup.communicator must be dense, backend or allgather_dense, got "
                f"{getattr(self.communicator, 'name', self.communicator)!r}"
            )
