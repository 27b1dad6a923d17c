"""Which parameters some worker used in a step.

A parameter that nobody used has no gradient, and the optimizer must leave it alone; zeros would still be decayed, or
moved by their momentum. To find out costs a message, so it is done in the first step, and again only where some worker
did not use all of them then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Usage"]


class Usage:
    """Keeps count for some local ranks.

    Args:
        local: how many they are.
        parameters: of the model.
        always: whether it is asked in every step.
    """

    def __init__(self, local: int, parameters: int, *, always: bool = False) -> None:
        self._used = [bytearray(parameters) for _ in range(local)]
        self._watching, self._always = True, always

    def clear(self) -> None:
        """A step ends."""
        for used in self._used:
            used[:] = bytes(len(used))

    def note(self, local: int, number: int) -> None:
        """A local rank used a parameter."""
        self._used[local][number] = 1

    def left_out(self, local: int) -> list[int]:
        """The parameters that a local rank did not use."""
        return [number for number, used in enumerate(self._used[local]) if not used]

    def rows(self) -> list[Tensor]:
        """What all workers must exchange now: a row of shape (parameters,) per local rank; or nothing."""
        return [torch.tensor(used, dtype=torch.uint8) for used in self._used] if self._watching else []

    def unused(self, gathered: Sequence[Tensor]) -> list[int]:
        """The parameters that no worker used.

        Args:
            gathered: the rows of all ranks, shape (parameters,) each, if ``rows`` gave any.

        Returns:
            Their numbers.
        """
        if not gathered:
            return []
        table = torch.stack(list(gathered)).cpu()
        self._watching = self._always or not bool(table.all())
        return (table.amax(0) == 0).nonzero().squeeze(1).tolist()

    def state_dict(self) -> bool:
        """Whether rows are exchanged."""
        return self._watching

    def load_state_dict(self, value: bool) -> None:
        """Continues from what ``state_dict`` gave, of one that asks in every step or not."""
        self._watching = self._always or value
