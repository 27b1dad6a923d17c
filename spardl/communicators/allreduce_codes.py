"""All-reduce of encoded vectors: each worker sums one block of all workers, and sends the encoded sum to all of them.

Source: the quantized reduce-scatter of ZeRO++ (qgZ; Wang et al., ICLR 2024, arXiv 2306.10209), then an all-gather
of coded sums. The reduce-scatter is an all-to-all instead of a ring, so each summand is coded only once. P - 1 +
ceil(log2 P) rounds and 2w(P-1)/P words per worker, for a vector that takes w words of 32 bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.communicators.base import Communicator, Synchronization
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
from spardl.vector.layout import Layout
from spardl.vector.norms import host_reads, largest_magnitude
from spardl.vector.sparse import Sum

__all__ = ["AllReduceCodes"]


class _Block(NamedTuple):
    """A range of the vector that one worker sums."""

    start: int
    stop: int
    layout: Layout


@lru_cache(maxsize=256)
def _blocks_of(layout: Layout, count: int) -> tuple[_Block, ...]:
    # Cached: shared by all steps and by all workers that one process simulates.
    borders = [number * layout.length // count for number in range(count + 1)]
    return tuple(_Block(start, stop, layout.part(start, stop)) for start, stop in pairwise(borders))


@dataclass
class SumState(State):
    """Buffer for the sum, which is allocated once; its content is not part of the state."""

    def __post_init__(self) -> None:
        # Allocating a large tensor in every step takes longer than filling it. Not a field, so that it is not saved.
        self._sum = torch.empty(0)

    def buffer(self, like: Tensor) -> Tensor:
        """Returns uninitialized memory with the dtype, device and shape (n,) of ``like``."""
        if (self._sum.shape, self._sum.dtype, self._sum.device) != (like.shape, like.dtype, like.device):
            self._sum = torch.empty_like(like)
        return self._sum


@dataclass(frozen=True)
class AllReduceCodes(Communicator[CodeCompressor, SumState]):
    """Sums encoded vectors: each worker decodes and sums one block of the vector, and encodes the sum.

    The compression error of a gradient stays with its sender, and the compression error of a sum with the worker that
    computed it. With a residual, both are added to the next gradients, so nothing is lost.
    """

    name = "allreduce_codes"
    sums = frozenset({Output.CODES})

    @property
    def splits(self) -> bool:
        """True: a sum can pause between its reduce-scatter and its all-gather."""
        return True

    def cost(self, context: Context, compressor: CodeCompressor) -> Cost:
        """Returns the total cost of both halves."""
        return Cost.total(self.half_costs(context, compressor))

    def half_costs(self, context: Context, compressor: CodeCompressor) -> tuple[Cost, Cost]:
        """Returns the costs of the reduce-scatter and of the all-gather: P - 1 messages each, of unequal sizes."""
        size = context.worker.size
        found = [_words(each, compressor) for each in _contexts(context)]
        words = Bounds((size - 1) * min(found), (size - 1) * max(found))
        return Cost(Bounds.exactly(size - 1), words), Cost(Bounds.exactly(log2_ceil(size)), words)

    def init_state(self) -> SumState:
        """Returns a state without a buffer."""
        return SumState()

    def reduce(self, sync: Synchronization[CodeCompressor, SumState]) -> Program[Sum]:
        """Runs reduce-scatter and all-gather; the compression errors of this worker stay in ``sync.accumulated``."""
        context, accumulated, compressor = sync.context, sync.accumulated, sync.compressor
        values, team = accumulated.values, whole_team(context.worker)
        blocks = [values[block.start : block.stop] for block in _blocks_of(context.layout, team.size)]
        peak = yield from _reduce_scatter(sync, blocks)
        yield Phase.PACK
        sums = _contexts(context, number=team.size)
        message = compressor.take(blocks[team.position], sums[team.position], sync.compression)
        total = sync.state.buffer(values) if accumulated.sum_buffer is None else accumulated.sum_buffer
        outputs = [total[block.start : block.stop] for block in _blocks_of(context.layout, team.size)]
        # The owner uses the decoded sum like all others, otherwise its weights would differ from theirs.
        compressor.decode_into(outputs[team.position], message, sums[team.position])
        yield Boundary(outputs[team.position])
        yield Phase.MERGE

        def use(position: int, message: Tensor) -> None:
            if position != team.position:
                compressor.decode_into(outputs[position], message, sums[position])
            elif compressor.lessens:
                accumulated.settle(peak)
            else:
                # This worker's block is already decoded, and the residual no longer changes, so scan it now, while
                # other messages are in flight.
                accumulated.forget_overflows()

        sizes = [compressor.size(each, values.dtype) for each in sums]
        yield from all_gather_around(team, message, sizes, [_words(each, compressor) for each in sums], use)
        return total


def _contexts(context: Context, number: int | None = None) -> list[Context]:
    """Returns the context of each block: its tensors and a distinct step, so that no two messages share random numbers.

    Args:
        context: Context of the synchronization.
        number: Number of the message among those of one worker and step; ``None`` uses the number of the block.
    """
    size = context.worker.size
    return [
        Context(context.worker, block.layout, context.step * (size + 1) + (rank if number is None else number))
        for rank, block in enumerate(_blocks_of(context.layout, size))
    ]


def _reduce_scatter(sync: Synchronization[CodeCompressor, SumState], blocks: Sequence[Tensor]) -> Program[float]:
    """Sums this worker's block over all workers; the other blocks keep the compression errors.

    Returns:
        Largest magnitude in the sum.
    """
    team, contexts, compressor = whole_team(sync.context.worker), _contexts(sync.context), sync.compressor
    own, total = contexts[team.position], blocks[team.position]
    # A pipeline: while one message is in flight, decode the previous one and encode the next one.
    outgoing, arrived = deque[Tensor](), deque[Tensor]()

    def write(distance: int) -> None:
        if distance < team.size:
            to = team.at(distance)
            outgoing.append(compressor.take(blocks[to], contexts[to], sync.compression))

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
    limit = torch.finfo(total.dtype).max
    if not host_reads(total):
        # Clamping finite sums changes nothing, and the bound of the residual is not used on a GPU.
        total.clamp_(-limit, limit)
        return math.inf
    peak = largest_magnitude([total])
    if peak > limit:
        # Codes cannot represent infinity. The method recognizes the clamped value as an overflow.
        total.clamp_(-limit, limit)
    return min(peak, limit)


def _words(context: Context, compressor: CodeCompressor) -> int:
    """Returns the number of words in a message; 32 bits of codes, or one scale of any type, count as one word."""
    return -(-compressor.size(context) // 4)
