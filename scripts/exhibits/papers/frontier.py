"""The frontier: sending every step, or every so many, measured in one place."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.base import Basis
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.kinds.frontier_work import Course, Entrant

__all__ = ["EXHIBITS", "FRONTIER"]

# Gbit/s.
LINKS = (0.05, 0.2, 1.0)
SEEDS = (1, 2, 3)
# What is exchanged. SparseLoCo sends the largest of each chunk, in 2 bits, and the rest decays (Sarfi et al. 2025).
ALL, SENT = "outer.none", "scope=chunk,wire=int2,residual_decay=0.95"
SPARSE_LOCO = f"outer.topka,{SENT},density=0.015625"
# At the same density an all-reduce brings the entries of one worker where an all-gather brings those of four.
OURS = f"outer.spardl,{SENT},density=0.0625"


class Outer(NamedTuple):
    """Outer steps.

    Attributes:
        lr: their rate.
        momentum: Nesterov's; ``None``: the method's own.
    """

    lr: float
    momentum: float | None = None

    def case(self, sent: str, every: int) -> str:
        """Of bench_accuracy.py, for something that is sent after so many steps."""
        name, comma, options = sent.partition(",")
        moved = "" if self.momentum is None else f",momentum={self.momentum}"
        return f"{name},lr={self.lr}{moved}{comma}{options},every={every}"


# Averages of weights; DiLoCo's own (Douillard et al. 2023), and what is tried in their place; SparseLoCo's, likewise.
LOCAL_SGD = Outer(1.0, 0.0)
DILOCO, CALMER = Outer(0.7, 0.9), (Outer(0.4, 0.9), Outer(0.7, 0.5))
ONE, AROUND = Outer(1.0), (Outer(0.7), Outer(1.5))


def _entrants(dense: float, casts: float, moved: float, local: float, tried: tuple[float, ...]) -> tuple[Entrant, ...]:
    """All of them.

    Args:
        dense: learning rate of plain DDP.
        casts: of 16 and 8 bits, and of low ranks.
        moved: of SparDL, which is given the optimizer.
        local: of local steps.
        tried: of each besides its own.
    """

    def always(name: str, case: str, rate: float, *, whole: bool = False) -> Entrant:
        return Entrant(name, case, rate, tried, whole=whole)

    def now_and_then(
        name: str, sent: str, every: int, used: Outer, others: Sequence[Outer] = (), *, whole: bool = False
    ) -> Entrant:
        cases = (each.case(sent, every) for each in others)
        return Entrant(f"{name}, every {every}", used.case(sent, every), local, tried, tuple(cases), whole)

    return (
        always("dense DDP", "ddp", dense, whole=True),
        always("bf16 (torch)", "torch.bf16", casts),
        always("PowerSGD (torch)", "torch.powersgd,rank=4", casts),
        always("int8", "spardl.int8", casts),
        always("SparDL", "spardl.spardl,density=0.01,optimizer=True", moved),
        now_and_then("local SGD", ALL, 15, LOCAL_SGD),
        now_and_then("DiLoCo", ALL, 15, DILOCO, CALMER),
        now_and_then("SparseLoCo", SPARSE_LOCO, 15, ONE, AROUND),
        now_and_then("SparDL", OURS, 15, ONE, AROUND, whole=True),
        now_and_then("DiLoCo", ALL, 5, DILOCO, CALMER),
        now_and_then("SparDL", OURS, 5, ONE, AROUND),
    )


LETTERS = Course(
    "GPT on characters, AdamW",
    ("model=gpt_chars", "lr_schedule.warmup_epochs=0", "lr_schedule.warmup_fraction=0.2"),
    _entrants(0.01, 0.02, 0.03, 0.01, (0.01, 0.02)),
    LINKS,
    SEEDS,
    steps=300,
    every=15,
    pace=0.2,
)
DIGITS = Course(
    "ResNet-20 on digits, SGD",
    ("model=resnet20", "dataset=digits", "lr_schedule.warmup_epochs=0", "lr_schedule.warmup_fraction=0.05"),
    _entrants(0.05, 0.05, 0.05, 0.05, (0.05,)),
    LINKS,
    SEEDS,
    steps=300,
    every=15,
    pace=0.25,
)
SMOKE = Course(
    "GPT on characters, AdamW",
    (*LETTERS.words, "model.num_layers=1", "training.batch_size=2", "training.eval_examples=16"),
    (
        Entrant("dense DDP", "ddp", 0.01, (0.01,), whole=True),
        Entrant("SparDL, every 5", ONE.case(OURS, 5), 0.01, (0.02,), (Outer(0.7).case(OURS, 5),)),
    ),
    (0.1,),
    (1,),
    steps=15,
    every=5,
    pace=0.1,
    workers=2,
)
WHOLE = (LETTERS, DIGITS)
FRONTIER = Frontier(
    name="frontier",
    title="Every step, or every so many",
    source="no paper's: published ones lack compression, a clock, or rivals that send every step",
    shows="below which bandwidth local steps pay, over which method, and what they cost in loss",
    basis=Basis(
        simulated="nothing",
        measured="losses of real trainings by four processes; seconds and bytes of their steps on links shaped to "
        "50, 200 and 1,000 Mbit/s, on one machine whose cores they share",
        assumed="that a step takes as long late in training as in the turns that were timed; whole trainings "
        "on the slowest and the fastest link check it",
    ),
    courses=MappingProxyType(
        {
            "smoke": (SMOKE,),
            "laptop": WHOLE,
            "paper": WHOLE,  # a lab is on one machine, whatever the scale
        }
    ),
    leads=True,
)
EXHIBITS = (FRONTIER,)
