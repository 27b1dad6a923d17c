"""Frontier of synchronous and local steps, measured on one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


# As published first, then what is tried in their place. Local SGD averages weights; DiLoCo has Nesterov's momentum
# (Douillard et al. 2023); SparseLoCo has none, nor have ours.
LOCAL_SGD = (Outer(1.0, 0.0),)
DILOCO = (Outer(0.7, 0.9), Outer(0.4, 0.9), Outer(0.7, 0.5))
SPARSE = (Outer(1.0), Outer(0.7), Outer(1.5))


class Tuned(NamedTuple):
    """What ended best with the first seed, of what :class:`Entrant` says is tried.

    Attributes:
        rate: the learning rate.
        outer: the outer steps; ``None``: as published, or none at all.
        more: learning rates that were tried besides those of the course.
        around: see :class:`Entrant`; none: its own learning rate.
    """

    rate: float
    outer: Outer | None = None
    more: tuple[float, ...] = ()
    around: tuple[float, ...] = ()


class Way(NamedTuple):
    """What takes part, before it is tuned.

    Attributes:
        name: of it.
        sent: of bench_accuracy.py; where steps are local, without their words.
        every: steps between two exchanges; 1: no local steps.
        steps: outer ones, of local steps.
        whole: see :class:`Entrant`.
    """

    name: str
    sent: str
    every: int = 1
    steps: Sequence[Outer] = ()
    whole: bool = False

    @property
    def title(self) -> str:
        """Names it in tables."""
        return f"{self.name}, every {self.every}" if self.steps else self.name

    def entrant(self, tuned: Tuned, tried: tuple[float, ...]) -> Entrant:
        """It takes part so; ``tried``: learning rates of all."""
        rates = (*tried, *tuned.more)
        if not self.steps:
            return Entrant(self.title, self.sent, tuned.rate, rates, whole=self.whole)
        own = (tuned.outer or self.steps[0]).case(self.sent, self.every)
        cases = tuple(each.case(self.sent, self.every) for each in self.steps)
        return Entrant(self.title, own, tuned.rate, rates, cases, tuned.around or (tuned.rate,), self.whole)


WAYS = (
    Way("dense DDP", "ddp", whole=True),
    Way("bf16 (torch)", "torch.bf16"),
    Way("PowerSGD (torch)", "torch.powersgd,rank=4"),
    Way("int8", "spardl.int8"),
    Way("SparDL", "spardl.spardl,density=0.01,scope=model,optimizer=True"),
    Way("local SGD", ALL, 15, LOCAL_SGD),
    Way("DiLoCo", ALL, 15, DILOCO),
    Way("SparseLoCo", SPARSE_LOCO, 15, SPARSE),
    Way("SparDL", OURS, 15, SPARSE, whole=True),
    Way("DiLoCo", ALL, 5, DILOCO),
    Way("SparDL", OURS, 5, SPARSE),
)


def _entrants(tried: tuple[float, ...], rest: Tuned, tuned: Mapping[str, Tuned]) -> tuple[Entrant, ...]:
    """All of them.

    Args:
        tried: learning rates.
        rest: of those that ``tuned`` does not name.
        tuned: by title.
    """
    return tuple(way.entrant(tuned.get(way.title, rest), tried) for way in WAYS)


LETTERS = Course(
    "GPT on characters, AdamW",
    ("model=gpt_chars", "lr_schedule.warmup_epochs=0", "lr_schedule.warmup_fraction=0.2"),
    _entrants(
        (0.005, 0.01, 0.02),
        Tuned(0.01),
        {
            "bf16 (torch)": Tuned(0.02),
            "int8": Tuned(0.02),
            "SparDL": Tuned(0.01, more=(0.03,)),
            "DiLoCo, every 15": Tuned(0.01, Outer(0.7, 0.5)),
            "SparseLoCo, every 15": Tuned(0.02, Outer(1.5), around=(0.01, 0.02)),
            "SparDL, every 15": Tuned(0.01, Outer(1.5)),
            "DiLoCo, every 5": Tuned(0.01, Outer(0.7, 0.5)),
            "SparDL, every 5": Tuned(0.01, Outer(1.5), around=(0.01, 0.02)),
        },
    ),
    LINKS,
    SEEDS,
    steps=300,
    every=15,
    pace=0.2,
)
BOTH = (0.025, 0.05)
DIGITS = Course(
    "ResNet-20 on digits, SGD",
    ("model=resnet20", "dataset=digits", "lr_schedule.warmup_epochs=0", "lr_schedule.warmup_fraction=0.05"),
    _entrants(
        (0.025, 0.05, 0.1),
        Tuned(0.05),
        {
            "bf16 (torch)": Tuned(0.025),
            "PowerSGD (torch)": Tuned(0.025),
            "int8": Tuned(0.1),
            "local SGD, every 15": Tuned(0.025),
            "DiLoCo, every 15": Tuned(0.025, Outer(0.7, 0.5), around=BOTH),
            "SparseLoCo, every 15": Tuned(0.025, Outer(1.5), around=BOTH),
            "SparDL, every 15": Tuned(0.025, around=BOTH),
            "DiLoCo, every 5": Tuned(0.025, Outer(0.7, 0.5), around=BOTH),
            "SparDL, every 5": Tuned(0.025, Outer(1.5), around=BOTH),
        },
    ),
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
        Way("SparDL", OURS, 5, SPARSE[:2]).entrant(Tuned(0.01), (0.02,)),
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
    shows="bandwidth below which local steps are faster, over which method, and their cost in loss",
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
