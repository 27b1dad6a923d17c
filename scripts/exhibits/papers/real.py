"""Trainings of real length: compared methods, and tasks on real data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.kinds.trainings import ALONE, Case, Known, Own, Plan
from scripts.exhibits.papers.small import KNOWN, ON_DIGITS

__all__ = [
    "EVENING",
    "FIVE",
    "FLOOR",
    "OURS",
    "REAL",
    "REFERENCES",
    "RIVALS",
    "SYNTHETIC",
    "Pace",
    "hours",
    "long_digits",
    "only",
    "pace_of",
    "with_evening",
]

OURS, FLOOR = "SparDL, our recipe", "alone"
# Baselines in addition to dense training: no communication, half the bytes, and torch's low-rank compression.
RIVALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        FLOOR: ALONE,
        "bf16": ("compressor=bf16",),
        "PowerSGD": ("compressor=powersgd", "compressor.rank=4"),
        OURS: ("compressor=spardl", "recipe=recommended"),
    }
)
REFERENCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"dense": ("compressor=none",), "SparDL": ("compressor=spardl",), **RIVALS}
)
FIVE = (1, 2, 3, 4, 5)
ON_CIFAR = Known(0.85, "a sixteenth of the 64,000 steps in which He et al. 2016 reach 91.25%", 0.005)
ON_PTB = Known(120.0, "the small network of Zaremba et al. 2014, of 2 x 200: 114.5 on test data", 0.5)
WORKERS = 14
# Hundreds of epochs, so that the number of steps ends a training and sets the warm-up for any number of workers.
EVENING = (
    "training.check_every=1000",
    "training.log_every=50",
    f"cluster.workers={WORKERS}",
    "cluster.network=ethernet_1g",
    "training.epochs=1000",
    "lr_schedule.warmup_epochs=0",
)


class Pace(NamedTuple):
    """A task and its costs.

    Attributes:
        case: Case of the task.
        steps: Number of training steps.
        seconds: Core seconds per step of 14 workers with SparDL, measured (Intel Xeon; CIFAR-10: AMD EPYC under other
            load) and rounded up.
        workers: Number of workers.
    """

    case: Case
    steps: int
    seconds: float
    workers: int = WORKERS

    @property
    def timed(self) -> Case:
        """Case with its duration."""
        return replace(self.case, worker_seconds=self.steps * self.seconds / WORKERS)


def hours(paces: Sequence[Pace], rows: Sequence[str], seeds: Sequence[int]) -> str:
    """Duration of trainings; a single worker takes its share of the time of all workers."""
    seconds = sum(
        pace.steps * pace.seconds * (1 if row == FLOOR else pace.workers) / WORKERS for pace in paces for row in rows
    )
    return f"about {seconds * len(seeds) / 3600:.1f} hours of a core"


def only(methods: Iterable[str], plans: Mapping[str, Plan]) -> Mapping[str, Plan]:
    """Plans that train only these methods of an exhibit."""
    return {scale: replace(plan, only=tuple(methods)) for scale, plan in plans.items()}


def with_evening(
    plans: Mapping[str, Plan], rows: Sequence[str], paces: Sequence[Pace], sparse: tuple[str, ...] = ()
) -> Mapping[str, Plan]:
    """Adds a plan of real length with five seeds.

    Args:
        plans: Other plans.
        rows: Methods of the new plan.
        paces: Tasks of the new plan.
        sparse: Further arguments of all rows except dense training.
    """
    evening = Plan(tuple(pace.timed for pace in paces), EVENING, FIVE, hours(paces, rows, FIVE), sparse=sparse)
    return MappingProxyType({**plans, "evening": evening})


def long_digits(steps: int, *words: str, name: str = "", own: Own = (), workers: int = WORKERS) -> Pace:
    """ResNet-20 on digits for some steps.

    Args:
        steps: Number of steps of each training.
        words: Additional arguments of train.py.
        name: Suffix that distinguishes the task.
        own: Further arguments of single methods.
        workers: Number of workers.
    """
    several = () if workers == WORKERS else (f"cluster.workers={workers}",)
    common = ("model=resnet20", "dataset=digits", f"training.max_steps={steps}", "training.eval_every=10")
    task = f"ResNet-20 on digits{name}"
    words = (*common, "lr_schedule.warmup_fraction=0.05", *several, *words)
    return Pace(Case(task, words, f"{task}, {steps:,} steps", own=own, known=ON_DIGITS), steps, 0.25, workers)


def _rates(published: float, ours: float) -> Own:
    """Learning rates of rows that want another one than dense: see docs/tables/learning.md."""
    return (("SparDL", (f"optimizer.lr={published:g}",)), (OURS, (f"optimizer.lr={ours:g}",)))


def _cases(data: Mapping[str, str], few: int | None = None, *last: str) -> tuple[Pace, ...]:
    """The tasks.

    Args:
        data: choices of dataset=, by the names of those that are real.
        few: steps, in place of those of an evening.
        last: further words.
    """
    pictures = (
        "model=resnet20",
        f"dataset={data['cifar10']}",
        "optimizer.lr=0.1",
        "lr_schedule.warmup_fraction=0.05",
        "training.batch_size=12",
        "training.eval_every=3",
    )
    news = (
        "model=lstm_ptb",
        f"dataset={data['ptb']}",
        "model.embedding_size=200",
        "model.hidden_size=200",
        "model.dropout=0.2",
        "lr_schedule.warmup_fraction=0.01",
        "training.batch_size=5",
        "training.eval_every=1",
    )
    reviews = (
        "model=lstm_imdb",
        f"dataset={data['imdb']}",
        "lr_schedule.warmup_fraction=0.05",
        "training.batch_size=8",
        "training.eval_every=4",
    )
    articles = (
        "model=bert_tiny",
        f"dataset={data['wikitext2_articles']}",
        "model.num_layers=2",
        "optimizer.lr=0.0005",
        "lr_schedule=linear",
        "lr_schedule.warmup_fraction=0.1",
        "training.batch_size=2",
        "training.eval_every=5",
        "training.eval_examples=1000",
    )
    # These data sets have only a few hundred examples each, so four workers are enough.
    few_examples = ("cluster.workers=4", "lr_schedule.warmup_fraction=0.05", "training.eval_every=5")
    houses = ("model=vgg11_house", f"dataset={data['houses']}", "dataset.image_size=32", *few_examples)
    letters = ("model=lstm_an4_small", f"dataset={data['an4']}", *few_examples)
    # Dense training is best before 2,000 steps there, and overfits afterwards; its longest run shows that.
    lengths = (few,) if few else (1800, 3000)
    return (
        _pace("ResNet-20 on CIFAR-10", (*pictures, *last), few or 4000, 0.75, known=ON_CIFAR),
        _pace("LSTM of 2 x 200 on Penn Treebank", (*news, *last), few or 3000, 1.0, True, known=ON_PTB),
        *(_pace("LSTM on IMDB", (*reviews, *last), steps, 0.5, known=KNOWN["spardl/lstm_imdb"]) for steps in lengths),
        _pace("BERT of 2 x 128 on WikiText-2", (*articles, *last), few or 4000, 0.75, True, _rates(0.0002, 0.001)),
        _pace("VGG-11 on Houses", (*houses, *last), few or 1000, 1.6, True, workers=4),
        _pace("LSTM on AN4", (*letters, *last), few or 1000, 0.9, True, workers=4),
    )


def _pace(
    name: str,
    words: tuple[str, ...],
    steps: int,
    seconds: float,
    lower: bool = False,
    own: Own = (),
    known: Known | None = None,
    workers: int = WORKERS,
) -> Pace:
    length = f"training.max_steps={steps}"
    return Pace(Case(name, (*words, length), f"{name}, {steps:,} steps", lower, own, known), steps, seconds, workers)


_NAMES = ("cifar10", "ptb", "imdb", "wikitext2_articles", "houses", "an4")
REAL = _cases({name: name for name in _NAMES})
SYNTHETIC = _cases(
    {name: f"synthetic_{name}" for name in _NAMES},
    2,
    "logger.mode=disabled",
    "training.eval_examples=8",
    "training.batch_size=2",
)


def pace_of(name: str, paces: Sequence[Pace] = REAL) -> Pace:
    """The task of this ``name``, at the first of its lengths."""
    return next(pace for pace in paces if pace.case.name == name)
