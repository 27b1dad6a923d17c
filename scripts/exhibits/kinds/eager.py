"""SparDL without lazy block-wise sparsification, for comparison, and compressors that count selections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators.base import Synchronization
from spardl.communicators.spardl import Blocks, SparDL, SparDLState, srs_rounds
from spardl.communicators.steps.doubling import Target
from spardl.communicators.steps.split import cut_apart
from spardl.communicators.steps.transfer import BlockExchange
from spardl.compressors import TopK
from spardl.compressors.base import SparseCompressor
from spardl.protocol.programs import Context, Phase, Program, State, Team, whole_team
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Range
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, Sum, concatenate

__all__ = ["CountedTopK", "EagerSparDL", "Tally"]


@dataclass
class Tally:
    """Counts selections.

    Attributes:
        selections: Number of selections.
        entries: Number of entries that they searched.
    """

    selections: int = 0
    entries: int = 0

    def note(self, entries: Iterable[int]) -> None:
        """Adds one selection for each number of searched ``entries``."""
        found = list(entries)
        self.selections += len(found)
        self.entries += sum(found)


@dataclass(frozen=True)
class CountedTopK(TopK):
    """Exact top-k that counts its selections.

    Attributes:
        tally: Counter of the selections.
    """

    tally: Tally = field(default_factory=Tally, compare=False)

    def selector(self, context: Context, state: State) -> Select:
        """Selector that counts the entries that it reads."""
        select = super().selector(context, state)

        def counted(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
            self.tally.note(part.stop - part.start for part in parts)
            return select(accumulated, parts)

        return counted


@dataclass(frozen=True)
class EagerSparDL(SparDL):
    """SparDL without lazy sparsification and without teams.

    Every block is sparsified at the beginning and again after each addition. Entries that are not selected go to the
    residual and are not considered again in this synchronization. Rounds and words are equal to those of SparDL.

    Attributes:
        tally: Counter of the selections after additions; the compressor counts those at the beginning.

    Raises:
        ConfigError: if there is more than one team.
    """

    tally: Tally = field(default_factory=Tally, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teams != 1:
            raise ConfigError(f"eager selection is for one team, got communicator.teams={self.teams}; use teams=1")

    @property
    def splits(self) -> bool:
        """False: this communicator cannot be split into halves."""
        return False

    def reduce(self, sync: Synchronization[SparseCompressor, SparDLState]) -> Program[Sum]:
        """Reduces with a selection after every addition."""
        team = whole_team(sync.context.worker)
        blocks = Blocks(sync.context.layout.length, team.size, -(-sync.compressor.count(sync.context) // team.size))
        select = sync.compressor.selector(sync.context, sync.compression)
        block = yield from self._reduce_scatter(team, sync.accumulated, blocks, select)
        return (yield from BlockExchange.of(sync.accumulated).all_gather_joined(team, block, blocks.slots))

    def _reduce_scatter(
        self, team: Team, accumulated: Accumulator, blocks: Blocks, select: Select
    ) -> Program[SparseVector]:
        """Rounds of SparDL with blocks that are sparse from the beginning."""
        yield Phase.SELECT
        held = [accumulated.take([part], select) for part in blocks.parts]
        transport = BlockExchange.of(accumulated)
        for distance, size in srs_rounds(team.size):
            outgoing, incoming = ([team.at(first + each) for each in range(size)] for first in (distance, 0))
            arrived = yield from transport.exchange(
                to=team.rank(distance),
                vector=concatenate([held[number] for number in outgoing]),
                slot=_room(blocks, outgoing),
                source=team.rank(-distance),
                coming=_room(blocks, incoming),
            )
            borders = list(accumulate((blocks.slots[number].length for number in incoming), initial=0))
            for number, block in zip(incoming, cut_apart(arrived, borders), strict=True):
                self.tally.note([len(held[number]) + len(block)])
                target = Target(accumulated, blocks.parts[number].start, blocks.slots[number])
                held[number] = target.add_up([held[number], block], holders=1)
        return held[team.position]


def _room(blocks: Blocks, numbers: Sequence[int]) -> Slot:
    slots = [blocks.slots[number] for number in numbers]
    return Slot(sum(slot.capacity for slot in slots), sum(slot.length for slot in slots))
