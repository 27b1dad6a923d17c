"""The ledger counts what is sent."""

from __future__ import annotations

import torch

from spardl.clusters import Ledger
from spardl.protocol.programs import Exchange, Phase, Receive, Send


def test_counts_and_round_trip() -> None:
    ledger = Ledger()
    sends = [Send(1, torch.zeros(4, dtype=torch.uint8), 2), Send(2, torch.zeros(0), 0)]
    ledger.count_exchange(Exchange(sends, [Receive(1, 3, torch.float64)]))
    ledger.count_collective(rounds=6, elements=12, itemsize=4)
    ledger.seconds[Phase.PACK] += 0.5
    assert (ledger.rounds, ledger.messages, ledger.words) == (7, 7, 14)
    assert (ledger.bytes_sent, ledger.bytes_received) == (52, 72)
    copy = Ledger()
    copy.load_state_dict(ledger.state_dict())
    assert copy == ledger
