"""All-gather in ceil(log2 m) rounds for any number of workers.

Source: Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport Message-Passing
Systems, IEEE TPDS 1997.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spardl.programs import Exchange, Program, Receive, Send, Team

__all__ = ["all_gather"]


def all_gather(team: Team, item: Tensor, sizes: Sequence[int], words: Sequence[int]) -> Program[list[Tensor]]:
    """Gives every member the items of all members.

    In the round with distance g a member holds the items of itself and the g - 1 members after it, and
    sends as many of them as are missing g places before it.

    Args:
        team: who takes part.
        item: this member's, 1-D.
        sizes: number of elements of each member's item, by position.
        words: the same in the papers' unit.

    Returns:
        The items, by position in the team.
    """
    held = [item]
    while len(held) < team.size:
        gap = len(held)
        count = min(gap, team.size - gap)
        coming = [sizes[team.at(gap + j)] for j in range(count)]
        sent_words = sum(words[team.at(j)] for j in range(count))
        arrived = yield Exchange(
            sends=[Send(team.rank(-gap), torch.cat(held[:count]), sent_words)],
            receives=[Receive(team.rank(gap), sum(coming), item.dtype)],
        )
        held.extend(arrived[0].split(coming))
    return [held[(position - team.position) % team.size] for position in range(team.size)]
