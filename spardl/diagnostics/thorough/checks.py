"""All thorough checks, in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from spardl.diagnostics.thorough.laws import check_laws
from spardl.diagnostics.thorough.loops import check_attach
from spardl.diagnostics.thorough.outcome import Outcome, Place
from spardl.diagnostics.thorough.report import check_installation
from spardl.diagnostics.thorough.selecting import check_selection
from spardl.diagnostics.thorough.twins import check_messages, check_triton
from spardl.diagnostics.thorough.waits import check_waits

__all__ = ["Check", "all_checks"]

_RESNET, _BERT = 14_700_000, 133_000_000


class Check(NamedTuple):
    """One check.

    Attributes:
        name: for the report.
        seconds: that it may take.
        run: what it does.
    """

    name: str
    seconds: float
    run: Callable[[Place], Outcome]


def all_checks() -> tuple[Check, ...]:
    """Those that matter most first: together they may take longer than there is time."""
    return (
        Check("installation", 60, check_installation),
        Check("attach, 1 worker", 60, check_attach(1)),
        Check("attach, 2 workers", 60, check_attach(2)),
        Check("laws, 1 worker", 90, check_laws(1)),
        Check("laws, 2 workers", 120, check_laws(2)),
        Check("kernels, float32", 120, check_triton(torch.float32)),
        Check("messages", 90, check_messages),
        Check("selection, 14.7 million entries", 60, check_selection(_RESNET)),
        Check("waits in the backward pass", 60, check_waits),
        Check("laws, 4 workers", 150, check_laws(4)),
        Check("selection, 133 million entries", 90, check_selection(_BERT)),
        Check("kernels, bfloat16", 120, check_triton(torch.bfloat16)),
        Check("kernels, float64", 120, check_triton(torch.float64)),
    )
