"""All-gather of encoded vectors: every worker gathers the messages of all workers, decodes them, and sums the results.

Source: the synchronization of QSGD (Alistarh et al., NeurIPS 2017), with the all-gather of Bruck et al., IEEE TPDS
1997. ceil(log2 P) rounds and w(P-1) words per worker, for messages of w words of 32 bits. Every worker decodes P
vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spardl.communicators.base import Communicator, Synchronization
from spardl.communicators.steps.transfer import all_gather
from spardl.compressors.base import CodeCompressor, Output
from spardl.protocol.programs import Bounds, Context, Cost, Phase, Program, State, log2_ceil, whole_team
from spardl.vector.sparse import Sum

__all__ = ["AllGatherCodes"]


@dataclass(frozen=True)
class AllGatherCodes(Communicator[CodeCompressor, State]):
    """Sums encoded (for example quantized) vectors with one all-gather."""

    name = "allgather_codes"
    sums = frozenset({Output.CODES})

    def cost(self, context: Context, compressor: CodeCompressor) -> Cost:
        """Returns the cost of P - 1 messages per worker."""
        others = context.worker.size - 1
        return Cost(
            Bounds.exactly(log2_ceil(context.worker.size)), Bounds.exactly(others * _words(context, compressor))
        )

    def reduce(self, sync: Synchronization[CodeCompressor, State]) -> Program[Sum]:
        """Encodes this worker's vector, gathers all messages, and sums the decoded messages in the order of ranks."""
        yield Phase.PACK
        context, compressor = sync.context, sync.compressor
        worker, values = context.worker, sync.accumulated.values
        own = compressor.encode(values, context, sync.compression)
        sizes, words = ([count] * worker.size for count in (own.numel(), _words(context, compressor)))
        messages = yield from all_gather(whole_team(worker), own, sizes, words)
        yield Phase.MERGE
        total = torch.zeros_like(values)
        for rank, message in enumerate(messages):
            decoded = compressor.decode(message, context, values.dtype)
            if rank == worker.rank:
                # Subtract the decoded values, so that the compression error remains for the residual.
                values.sub_(decoded)
            total.add_(decoded)
        return total


def _words(context: Context, compressor: CodeCompressor) -> int:
    """Returns the number of words in a message; 32 bits of codes, or one scale of any type, count as one word."""
    return -(-compressor.size(context) // 4)
