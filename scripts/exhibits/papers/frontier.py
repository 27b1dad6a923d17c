"""The frontier: sending every step, or every so many, measured in one place."""

from __future__ import annotations

from types import MappingProxyType

from scripts.exhibits.base import Basis
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.kinds.frontier_work import Course, Entrant

__all__ = ["EXHIBITS", "FRONTIER"]

# Gbit/s.
LINKS = (0.05, 0.2, 1.0)
SEEDS = (1, 2, 3)
# What SparseLoCo sends (Sarfi et al. 2025): the largest of each chunk, in 2 bits; the rest decays.
CHUNKS = "lr=1.0,scope=chunk,wire=int2,residual_decay=0.95"
SPARSE_LOCO = f"outer.topka,{CHUNKS},density=0.015625"
# At the same density an all-reduce brings the entries of one worker where an all-gather brings those of four.
OURS = f"outer.spardl,{CHUNKS},density=0.0625"
# DiLoCo's outer rate and momentum (Douillard et al. 2023); local SGD averages weights.
DILOCO, LOCAL_SGD = "outer.none,lr=0.7,momentum=0.9", "outer.none,lr=1.0,momentum=0.0"


def _entrants(dense: float, casts: float, moved: float, local: float, tried: tuple[float, ...]) -> tuple[Entrant, ...]:
    """All of them.

    Args:
        dense: learning rate of plain DDP.
        casts: of 16 and 8 bits, and of low ranks.
        moved: of SparDL, which is given the optimizer.
        local: of local steps.
        tried: of each besides its own.
    """

    def entrant(name: str, case: str, rate: float, *, whole: bool = False) -> Entrant:
        return Entrant(name, case, rate, tried, whole)

    return (
        entrant("dense DDP", "ddp", dense, whole=True),
        entrant("bf16 (torch)", "torch.bf16", casts),
        entrant("PowerSGD (torch)", "torch.powersgd,rank=4", casts),
        entrant("int8", "spardl.int8", casts),
        entrant("SparDL", "spardl.spardl,density=0.01,optimizer=True", moved),
        entrant("local SGD, every 15", f"{LOCAL_SGD},every=15", local),
        entrant("DiLoCo, every 15", f"{DILOCO},every=15", local),
        entrant("SparseLoCo, every 15", f"{SPARSE_LOCO},every=15", local),
        entrant("SparDL, every 15", f"{OURS},every=15", local, whole=True),
        entrant("DiLoCo, every 5", f"{DILOCO},every=5", local),
        entrant("SparDL, every 5", f"{OURS},every=5", local),
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
        Entrant("SparDL, every 5", f"{OURS},every=5", 0.01, (0.02,)),
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
