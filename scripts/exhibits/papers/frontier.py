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
# Methods of the exchange. SparseLoCo sends the largest entries of each chunk in 2 bits, and the residual decays (Sarfi
# et al. 2025).
ALL, SENT = "outer.none", "scope=chunk,wire=int2,residual_decay=0.95"
SPARSE_LOCO = f"outer.topka,{SENT},density=0.015625"
# At equal density, an all-gather with four workers brings four times the entries of an all-reduce.
OURS = f"outer.spardl,{SENT},density=0.0625"


class Outer(NamedTuple):
    """Outer steps.

    Attributes:
        lr: Outer learning rate.
        momentum: Nesterov momentum, or ``None`` for the default of the method.
    """

    lr: float
    momentum: float | None = None

    def case(self, sent: str, every: int) -> str:
        """Case of bench_accuracy.py for a message that is sent at regular intervals of steps."""
        name, comma, options = sent.partition(",")
        moved = "" if self.momentum is None else f",momentum={self.momentum}"
        return f"{name},lr={self.lr}{moved}{comma}{options},every={every}"


# The published settings first, then the tried alternatives. Local SGD averages weights; DiLoCo uses Nesterov momentum
# (Douillard et al. 2023); SparseLoCo and our methods use no momentum.
LOCAL_SGD = (Outer(1.0, 0.0),)
DILOCO = (Outer(0.7, 0.9), Outer(0.4, 0.9), Outer(0.7, 0.5))
SPARSE = (Outer(1.0), Outer(0.7), Outer(1.5))


class Tuned(NamedTuple):
    """Best setting with the first seed among those tried, see :class:`Entrant`.

    Attributes:
        rate: Learning rate.
        outer: Outer steps; ``None`` for the published ones, or without local steps.
        more: Tried learning rates in addition to those of the course.
        around: Learning rates of :class:`Entrant`; empty for its own learning rate.
    """

    rate: float
    outer: Outer | None = None
    more: tuple[float, ...] = ()
    around: tuple[float, ...] = ()


class Way(NamedTuple):
    """An entrant before tuning.

    Attributes:
        name: Name of the method.
        sent: Case of bench_accuracy.py, without the options of local steps.
        every: Steps between two exchanges; 1 means no local steps.
        steps: Outer steps of local steps.
        whole: Whether whole trainings check the seconds, see :class:`Entrant`.
    """

    name: str
    sent: str
    every: int = 1
    steps: Sequence[Outer] = ()
    whole: bool = False

    @property
    def title(self) -> str:
        """Name in tables."""
        return f"{self.name}, every {self.every}" if self.steps else self.name

    def entrant(self, tuned: Tuned, tried: tuple[float, ...]) -> Entrant:
        """Entrant with its tuned setting; ``tried`` holds the learning rates of all entrants."""
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
    """All entrants.

    Args:
        tried: Tried learning rates.
        rest: Setting of the entrants that are missing in ``tuned``.
        tuned: Best setting by title.
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
            "paper": WHOLE,  # a lab runs on one machine at every size
        }
    ),
    leads=True,
)
EXHIBITS = (FRONTIER,)
