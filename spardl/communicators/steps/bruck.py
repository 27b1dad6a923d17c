"""All-gather in ceil(log2 m) rounds for any number of workers.

Source: Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
Systems, IEEE TPDS 1997.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeAlias

from torch import Tensor

from spardl.protocol.programs import Exchange, Program, Receive, Send, Team

__all__ = ["Use", "all_gather", "all_gather_around"]


Use: TypeAlias = Callable[[int, Tensor], None]
"""Is told the position of a member, and its item, shape (m,)."""


def all_gather(team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int]) -> Program[list[Tensor]]:
    """Gives every member the items of all members.

    Args:
        team: who takes part.
        item: this member's, shape (m,).
        sizes: number of elements of each member's item, by position.
        words: the same in the papers' unit.

    Returns:
        The items, shape (sizes[position],) each, by position in the team.
    """
    around = yield from all_gather_around(team, item, sizes, words)
    held = around.split([sizes[team.at(j)] for j in range(team.size)])
    return [held[(position - team.position) % team.size] for position in range(team.size)]


def all_gather_around(
    team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int], use: Use | None = None
) -> Program[Tensor]:
    """The same; all items end to end, this member's first, then those of the members after it, counted around.

    In the round with distance g a member holds the items of itself and the g - 1 members after it, and sends as many
    of them as are missing g places before it. What arrives is received where it belongs.

    Args:
        team: who takes part.
        item: this member's, shape (m,).
        sizes: number of elements of each member's item, by position.
        words: the same in the papers' unit.
        use: is told each item once, this member's first: all but the last ones while others are under way.

    Returns:
        Shape (sum of sizes,).
    """
    ends, words_to = _Around(sizes, team.position), _Around(words, team.position)
    around = item.new_empty(ends.at(team.size))
    around[: ends.at(1)] = item

    def tell(start: int, stop: int) -> None:
        if use is not None:
            for j in range(start, stop):
                use(team.at(j), around[ends.at(j) : ends.at(j + 1)])

    told, gap = 0, 1
    while gap < team.size:
        count = min(gap, team.size - gap)
        outgoing, incoming = around[: ends.at(count)], around[ends.at(gap) : ends.at(gap + count)]
        yield Exchange(
            sends=[Send(team.rank(-gap), outgoing, words_to.at(count))],
            receives=[Receive(team.rank(gap), incoming.numel(), item.dtype, incoming)],
            meanwhile=partial(tell, told, gap) if use is not None else None,
        )
        told, gap = gap, gap + count
    tell(told, team.size)
    return around


class _Around:
    """Where items end that lie end to end, counted around from one position on.

    Args:
        sizes: of each item, by position.
        position: of the first one.
    """

    def __init__(self, sizes: Sequence[int], position: int) -> None:
        self._sums, self._first = _sums_of_two(tuple(sizes)), position

    def at(self, count: int) -> int:
        """The sum of the first ``count`` sizes."""
        return self._sums[self._first + count] - self._sums[self._first]


@lru_cache(maxsize=256)
def _sums_of_two(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sums from the first on, twice around: once for all workers that a process plays."""
    return tuple(accumulate(sizes * 2, initial=0))
