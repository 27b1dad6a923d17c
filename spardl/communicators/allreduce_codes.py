"""All-reduce of codes: coded blocks go straight to their owners, who add up and code the sums for everybody.

Source: the quantized reduce-scatter of ZeRO++ (qgZ; Wang et al., ICLR 2024, arXiv 2306.10209), by all-to-all rather
than around a ring, so that an entry is coded once on its way; then an all-gather of coded sums. P - 1 + ceil(log2 P)
rounds and 2w(P-1)/P words per worker, where a message of the whole vector takes w words of 32 bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.communicators.base import Communicator
from spardl.communicators.steps.transfer import all_gather_around
from spardl.compressors.base import CodeCompressor, Output
from spardl.protocol.programs import (
    Boundary,
    Bounds,
    Context,
    Cost,
    Exchange,
    Phase,
    Program,
    Receive,
    Send,
    State,
    log2_ceil,
    whole_team,
)
from spardl.vector.accumulator import Accumulator
from spardl.vector.layout import Layout
from spardl.vector.norms import largest
from spardl.vector.sparse import Sum

__all__ = ["AllReduceCodes"]


class _Block(NamedTuple):
    """A range of the vector, which one worker adds up."""

    start: int
    stop: int
    layout: Layout


@lru_cache(maxsize=256)
def _cut(layout: Layout, count: int) -> tuple[_Block, ...]:
    """One object for all workers that a process plays, and for all steps."""
    borders = [number * layout.length // count for number in range(count + 1)]
    return tuple(_Block(start, stop, layout.part(start, stop)) for start, stop in pairwise(borders))


@dataclass
class SumState(State):
    """The memory of the last sum, which the next one takes: to get as much of the system takes longer than to write it.

    It is not saved, since no result depends on it.
    """

    def __post_init__(self) -> None:
        self._sum = torch.empty(0)

    def room(self, like: Tensor) -> Tensor:
        """Memory for a sum, of the shape and kind of ``like``, shape (n,)."""
        if (self._sum.shape, self._sum.dtype, self._sum.device) != (like.shape, like.dtype, like.device):
            self._sum = torch.empty_like(like)
        return self._sum


@dataclass(frozen=True)
class AllReduceCodes(Communicator[CodeCompressor]):
    """Sums coded vectors: each worker decodes and adds up one block, and codes the sum.

    What a code lacks of the sum stays with the worker that added it up, as what lacks of a gradient stays with the one
    that sent it: so with a residual nothing is lost.
    """

    name = "allreduce_codes"
    sums = frozenset({Output.CODES})

    @property
    def splits(self) -> bool:
        """Reduce-scatter, then all-gather."""
        return True

    def cost(self, context: Context, compressor: CodeCompressor) -> Cost:
        """That of both halves."""
        return Cost.total(self.half_costs(context, compressor))

    def half_costs(self, context: Context, compressor: CodeCompressor) -> tuple[Cost, Cost]:
        """As many messages as there are others, twice; blocks differ by an entry, and in what is coded of them."""
        size = context.worker.size
        found = [_words(each, compressor) for each in _contexts(context)]
        words = Bounds((size - 1) * min(found), (size - 1) * max(found))
        return Cost(Bounds.exactly(size - 1), words), Cost(Bounds.exactly(log2_ceil(size)), words)

    def init_state(self) -> SumState:
        """No memory yet."""
        return SumState()

    def reduce(
        self,
        context: Context,
        accumulated: Accumulator,
        compressor: CodeCompressor,
        compression: State,
        state: State,
    ) -> Program[Sum]:
        """Both halves; the vector keeps what this worker's codes lack."""
        assert isinstance(state, SumState)
        values, team = accumulated.values, whole_team(context.worker)
        blocks = [values[block.start : block.stop] for block in _cut(context.layout, team.size)]
        peak = yield from _reduce_scatter(context, blocks, compressor, compression)
        yield Phase.PACK
        sums = _contexts(context, number=team.size)
        message = compressor.take(blocks[team.position], sums[team.position], compression)
        total = state.room(values) if accumulated.room is None else accumulated.room
        places = [total[block.start : block.stop] for block in _cut(context.layout, team.size)]
        compressor.decode_into(places[team.position], message, sums[team.position])
        yield Boundary(places[team.position])
        yield Phase.MERGE

        def use(position: int, message: Tensor) -> None:
            if position != team.position:
                compressor.decode_into(places[position], message, sums[position])
            elif compressor.lessens:
                accumulated.settle(peak)
            else:
                # This one is known already; what the vector keeps is not touched any more.
                accumulated.forget_overflows()

        sizes = [compressor.size(each, values.dtype) for each in sums]
        yield from all_gather_around(team, message, sizes, [_words(each, compressor) for each in sums], use)
        return total


def _contexts(context: Context, number: int | None = None) -> list[Context]:
    """What a compressor knows of each block: its tensors, and a step of its own, so that no two messages draw alike.

    Args:
        context: of the synchronization.
        number: of the messages among those of a worker and step; ``None``: that of the block.
    """
    size = context.worker.size
    return [
        Context(context.worker, block.layout, context.step * (size + 1) + (rank if number is None else number))
        for rank, block in enumerate(_cut(context.layout, size))
    ]


def _reduce_scatter(
    context: Context, blocks: Sequence[Tensor], compressor: CodeCompressor, compression: State
) -> Program[float]:
    """Makes a worker's own block the sum of all; its own part of that is not coded. Others' keep what codes lack.

    While a message is under way, the one that came before it is added up, and the next one is written.

    Returns:
        The largest magnitude of the sum.
    """
    team, contexts = whole_team(context.worker), _contexts(context)
    own, total = contexts[team.position], blocks[team.position]
    outgoing, arrived = deque[Tensor](), deque[Tensor]()

    def write(distance: int) -> None:
        if distance < team.size:
            to = team.at(distance)
            outgoing.append(compressor.take(blocks[to], contexts[to], compression))

    def work(distance: int) -> None:
        while arrived:
            compressor.decode_into(total, arrived.popleft(), own, add=True)
        write(distance)

    yield Phase.PACK
    write(1)
    for distance in range(1, team.size):
        arrived += yield Exchange(
            sends=[Send(team.rank(distance), outgoing.popleft(), _words(contexts[team.at(distance)], compressor))],
            receives=[Receive(team.rank(-distance), compressor.size(own, total.dtype), torch.uint8)],
            meanwhile=partial(work, distance + 1),
        )
    yield Phase.MERGE
    work(team.size)
    peak, limit = largest([total]), torch.finfo(total.dtype).max
    if peak > limit:
        # A sum that overflowed could not be coded; the method sees that it was cut.
        total.clamp_(-limit, limit)
    return min(peak, limit)


def _words(context: Context, compressor: CodeCompressor) -> int:
    """Words of a message: 32 bits of codes are one word, and so is a scale, whatever its type."""
    return -(-compressor.size(context) // 4)
