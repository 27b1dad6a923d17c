"""gTopk: sums sparse vectors pairwise and cuts every sum to its k largest entries.

Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
Networks, ICDCS 2019 (arXiv 1901.04359). Every message holds k entries, 2k words. With L = ceil(log2 P), per worker and
synchronization:

=========================  ======  ==================================================================
variant                    rounds  words
=========================  ======  ==================================================================
tree                       2 L     4kL on the longest path; 4k(P-1) in total: a worker sends 2k to its
                                   parent and 2k to each child, rank 0 sends 2kL
doubling, P = 2^L          L       2kL
doubling, P = 2^(L-1) + s  L + 1   2k(L-1); s of these workers send 2k more, and the other s workers 2k
=========================  ======  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from spardl.basics.checks import check_choice
from spardl.communicators.base import Communicator, Synchronization
from spardl.communicators.steps.doubling import Target, recursive_doubling
from spardl.compressors.base import Output, SparseCompressor
from spardl.protocol.programs import (
    Bounds,
    Combination,
    Context,
    Cost,
    Exchange,
    Phase,
    Program,
    State,
    Team,
    log2_ceil,
    whole_team,
)
from spardl.vector.packing import Slot
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["METHODS", "VARIANTS", "GTopk", "Variant", "folded_doubling", "tree"]

METHODS = (Combination("gtopk", compressor="topk", communicator="gtopk", residual="partial", momentum="auto"),)


def tree(team: Team, own: SparseVector, target: Target) -> Program[SparseVector]:
    """Sums along a binomial tree to the first member, cuts each partial sum, and sends the result back.

    Args:
        team: Members in a fixed order, of any number.
        own: Entries of this member, at most ``target.slot.capacity``.
        target: Range of the vector that holds the entries.

    Returns:
        The sum, bit-identical on all members.
    """
    # The parent's position is this member's position without its lowest set bit; children are at smaller distances.
    reach = team.position & -team.position or team.size
    distances = [1 << level for level in range(log2_ceil(team.size)) if 1 << level < reach]
    children = [team.rank(distance) for distance in distances if team.position + distance < team.size]
    merged = own
    for child in children:
        arrived = yield from _receive(child, target)
        merged = target.add_up([merged, arrived], holders=1)
    if team.position:
        parent = team.rank(-reach)
        yield from _send(parent, merged, target)
        merged = yield from _receive(parent, target)
    for child in reversed(children):
        yield from _send(child, merged, target)
    return merged


def folded_doubling(team: Team, own: SparseVector, target: Target) -> Program[SparseVector]:
    """Sums by recursive doubling, and cuts each partial sum; for any number of members.

    The first 2^j members take part, where 2^j is the largest power of two that is not above their number. Every other
    member first sends its entries to one of them, and receives the result at the end. Arguments and result are the same
    as for ``tree``.
    """
    core = 1 << (team.size.bit_length() - 1)
    if team.position >= core:
        partner = team.rank(-core)
        yield from _send(partner, own, target)
        return (yield from _receive(partner, target))
    extra = [team.rank(core)] if team.position + core < team.size else []
    merged = own
    for source in extra:
        arrived = yield from _receive(source, target)
        merged = target.add_up([merged, arrived], holders=1)
    merged = yield from recursive_doubling(Team(team.members[:core], team.position), merged, target)
    for source in extra:
        yield from _send(source, merged, target)
    return merged


def _send(to: int, block: SparseVector, target: Target) -> Program[None]:
    yield Phase.PACK
    yield Exchange([target.transport.send(to, block, target.slot)], [])


def _receive(source: int, target: Target) -> Program[SparseVector]:
    yield Phase.PACK
    transport = target.transport
    (message,) = yield Exchange([], [transport.receive(source, target.slot)])
    block = transport.open(message, target.slot)
    yield Phase.MERGE
    return block


def _tree_cost(workers: int, k: int) -> Cost:
    """Returns bounds of the cost: from a leaf, which exchanges messages only with its parent, to the root."""
    least, levels = min(workers - 1, 1), log2_ceil(workers)
    return Cost(Bounds(2 * least, 2 * levels), Bounds(2 * k * least, 2 * k * levels))


def _doubling_cost(workers: int, k: int) -> Cost:
    """Returns bounds of the cost; workers beyond the power of two send the least, and their partners the most."""
    levels = workers.bit_length() - 1
    if workers == 1 << levels:
        return Cost(Bounds.exactly(levels), Bounds.exactly(2 * k * levels))
    return Cost(Bounds(min(levels, 2), levels + 2), Bounds(2 * k, 2 * k * (levels + 1)))


AddUp: TypeAlias = Callable[[Team, SparseVector, Target], Program[SparseVector]]


class Variant(NamedTuple):
    """An algorithm that sums and cuts sparse vectors.

    Attributes:
        add_up: Generator function that sums the entries of all members; each member runs it.
        cost: Function that returns bounds of the cost, from the number of workers and k, the entries per message.
    """

    add_up: AddUp
    cost: Callable[[int, int], Cost]


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {"tree": Variant(tree, _tree_cost), "doubling": Variant(folded_doubling, _doubling_cost)}
)


@dataclass(frozen=True)
class GTopk(Communicator[SparseCompressor, State]):
    """Sums sparse vectors pairwise, and cuts every sum to its k largest entries.

    Dropped entries are added to the vectors of the workers that computed the sum.

    Args:
        variant: ``tree`` (reduce to one worker, then broadcast, as published) or ``doubling`` (recursive doubling:
            half the rounds, and equal load on all workers if their number is a power of two).

    Raises:
        ConfigError: If the variant is unknown.
    """

    variant: str = "tree"

    name = "gtopk"
    sums = frozenset({Output.AT_MOST_K})
    drops = True
    sends_whole = True

    def __post_init__(self) -> None:
        check_choice("communicator.variant", self.variant, VARIANTS)

    def cost(self, context: Context, compressor: SparseCompressor) -> Cost:
        """Returns bounds that hold for all workers; the module docstring gives the cost of each worker."""
        return VARIANTS[self.variant].cost(context.worker.size, compressor.count(context))

    def reduce(self, sync: Synchronization[SparseCompressor, State]) -> Program[Sum]:
        """Selects k entries of the whole vector and sums them."""
        yield Phase.SELECT
        whole = sync.compressor.whole(sync.context)
        own = sync.accumulated.take([whole], sync.compressor.selector(sync.context, sync.compression))
        target = Target(sync.accumulated, 0, Slot(whole.k, own.length), sync.compressor.fills)
        return (yield from VARIANTS[self.variant].add_up(whole_team(sync.context.worker), own, target))
