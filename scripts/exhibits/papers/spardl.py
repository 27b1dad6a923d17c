"""SparDL: Distributed Deep Learning Training with Efficient Sparse Communication (Zhao et al., ICDE 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from scripts.exhibits.kinds.adaptation import Adaptation, AdaptationPlan
from scripts.exhibits.kinds.counts import CountedCosts
from scripts.exhibits.kinds.lazy import Laziness
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan
from scripts.exhibits.kinds.watched import WatchedPlan
from scripts.exhibits.notes import OKTOPK
from scripts.exhibits.papers import labs, spardl_contrasts, spardl_lab, spardl_race, spardl_updates
from scripts.exhibits.papers.real import (
    EVENING,
    OURS,
    REAL,
    REFERENCES,
    RIVALS,
    SYNTHETIC,
    hours,
    long_digits,
    only,
    pace_of,
    with_evening,
)
from scripts.exhibits.papers.small import ON_DIGITS, ONE_SEED, PICTURES, SEEDS, SMALL, TINY, VIRTUAL, as_published

__all__ = ["EXHIBITS"]

ALL = MappingProxyType(
    {
        "SparDL": ("compressor=spardl",),
        "Ok-Topk": ("compressor=oktopk",),
        "TopkDSA": ("compressor=topkdsa",),
        "TopkA": ("compressor=topka",),
        "gTopk": ("compressor=gtopk",),
        "dense": ("compressor=none",),
    }
)
FOURTEEN, SIXTEEN = (*SMALL, "cluster.workers=14"), "cluster.workers=16"

MORE_PICTURES = Case(
    "VGG-19 on CIFAR-100",
    ("model=resnet32", "dataset=digits", "optimizer.lr=0.1", "training.epochs=12"),
    "ResNet-32 on digits",
    known=ON_DIGITS,
)
PRICES = Case(
    "VGG-11 on House",
    (
        "model=resnet20",
        "task._target_=tasks.image_regression.image_regression",
        "dataset=rotated_digits",
        "dataset.image_size=16",
        "optimizer.lr=0.02",
        "training.clip_norm=2",
        "training.epochs=10",
    ),
    "ResNet-20 tells by how many degrees a digit is turned",
    lower=True,
)
REVIEWS = Case(
    "LSTM on IMDB",
    (
        "model=lstm_imdb",
        "dataset=docstrings",
        "training.batch_size=8",
        "training.epochs=2",
        "training.eval_every=0.5",
    ),
    "the same LSTM on docstrings of six subjects",
)
NEWS = Case(
    "LSTM on PTB",
    (
        "model=lstm",
        "dataset=pydocs",
        "training.batch_size=2",
        "model.embedding_size=128",
        "model.hidden_size=128",
        "training.epochs=0.8",
        "training.eval_every=0.2",
    ),
    "an LSTM of 2 x 128 on Python's language reference",
    lower=True,
)
WIKIPEDIA = Case(
    "BERT on Wikipedia",
    (
        "model=bert_tiny",
        "dataset=pydocs",
        "training.batch_size=2",
        "model.num_layers=2",
        "training.epochs=0.9",
        "training.eval_every=0.25",
    ),
    "a BERT of 2 x 128 on Python's language reference",
    lower=True,
)
CASES = (PICTURES, MORE_PICTURES, PRICES, REVIEWS, NEWS, WIKIPEDIA)


def _plans(smoke: tuple[Case, ...], laptop: Plan, *paper: str) -> Mapping[str, Plan]:
    return MappingProxyType(
        {
            "smoke": Plan(smoke, TINY, ONE_SEED, "seconds each"),
            "laptop": laptop,
            "paper": as_published(*(f"spardl/{preset}" for preset in paper)),
        }
    )


COMPLEXITY = CountedCosts(
    name="spardl.complexity",
    title="Rounds and words",
    source="Table I, complexity of sparse all-reduce methods; formulas derived and checked (docs/methods.md)",
    shows="that every message is counted, and that all counts match their formulas",
    note=OKTOPK,
    methods=MappingProxyType(
        {
            "SparDL": ("spardl", ()),
            "SparDL, R-SAG, 2 teams": ("spardl", ("communicator.teams=2", "communicator.gather=recursive")),
            "SparDL, R-SAG, 4 teams": ("spardl", ("communicator.teams=4", "communicator.gather=recursive")),
            "SparDL, B-SAG, 2 teams": ("spardl", ("communicator.teams=2", "communicator.gather=bruck")),
            "SparDL, B-SAG, 7 teams": ("spardl", ("communicator.teams=7", "communicator.gather=bruck")),
            "Ok-Topk": ("oktopk", ()),
            "TopkDSA": ("topkdsa", ()),
            "gTopk": ("gtopk", ()),
            "TopkA": ("topka", ()),
            "dense": ("none", ()),
        }
    ),
    workers=MappingProxyType({"smoke": (4, 14), "laptop": (4, 7, 8, 14, 16, 64), "paper": (4, 7, 8, 14, 16, 64, 256)}),
)
CONVERGENCE = MethodComparison(
    name="spardl.convergence",
    title="Training with every method",
    source="loss and metric against time for each task; 14 workers, from memory (medium)",
    shows="metric and time of each method",
    basis=VIRTUAL,
    note=OKTOPK,
    proposed=("SparDL",),
    leads=True,
    methods=MappingProxyType({**ALL, **RIVALS}),
    plans=with_evening(
        only(
            ALL,
            _plans(
                (PICTURES,),
                Plan(
                    CASES, (*FOURTEEN, "training.epochs=12", "cluster.network=ethernet_1g"), SEEDS, "about 45 minutes"
                ),
                "vgg16_cifar10",
                "vgg19_cifar100",
                "vgg11_house",
                "lstm_imdb",
                "lstm_ptb",
                "bert_wikipedia",
            ),
        ),
        (*ALL, *RIVALS),
        (long_digits(1000),),
    ),
)
REAL_DATA = MethodComparison(
    name="spardl.real_data",
    title="Training on real data, at real length",
    source="loss and metric against time for each task, on the models and data that two cores can train in a night",
    shows="loss of the published form against dense training, 16-bit gradients, PowerSGD and the recommended recipe",
    basis=VIRTUAL,
    proposed=("SparDL",),
    methods=REFERENCES,
    plans=MappingProxyType(
        {
            "smoke": Plan(
                tuple(pace.case for pace in SYNTHETIC),
                EVENING,
                ONE_SEED,
                "seconds each",
                only=("dense", "SparDL", OURS),
            ),
            "laptop": Plan((PICTURES,), (*FOURTEEN, "training.max_steps=190"), SEEDS, "about 15 minutes"),
            "evening": Plan(tuple(pace.timed for pace in REAL), EVENING, SEEDS, hours(REAL, tuple(REFERENCES), SEEDS)),
            "paper": as_published(
                "spardl/vgg16_cifar10", "spardl/lstm_imdb", "spardl/lstm_ptb", "spardl/bert_wikipedia"
            ),
        }
    ),
)
COLLECTING = MappingProxyType(
    {
        "GRES": ("compressor=spardl", "residual=global"),
        "PRES": ("compressor=spardl", "residual=partial"),
        "LRES": ("compressor=spardl", "residual=local"),
        "dense": ALL["dense"],
    }
)
FEW = ("compressor.density=0.001",)
AT_ONE_PERCENT = tuple((name, ("compressor.density=0.01",)) for name in COLLECTING if name != "dense")
RESIDUALS = MethodComparison(
    name="spardl.residuals",
    title="Residual collection",
    source="GRES against PRES and LRES; numbers unknown, from memory (medium)",
    shows="whether it matters to keep values that are dropped during the reduction as well as by local selection",
    basis=VIRTUAL,
    proposed=("GRES",),
    methods=COLLECTING,
    plans=with_evening(
        _plans(
            (PICTURES,),
            Plan((PICTURES,), (*FOURTEEN, "training.epochs=15"), SEEDS, "about 8 minutes", sparse=FEW),
            "vgg16_cifar10",
        ),
        tuple(COLLECTING),
        [
            # Every entry can be sent ten times instead of once at the published density: long enough for a verdict.
            long_digits(1000, name=", 1%", own=AT_ONE_PERCENT),
            *(
                long_digits(900, f"optimizer.lr={rate}", name=f", 8 workers, learning rate {rate}, 0.1%", workers=8)
                for rate in (0.01, 0.02, 0.05)
            ),
        ],
        FEW,
    ),
)
# The shortest task with 14 workers; dense training and GRES share their runs with spardl.real_data.
READING, STAND_IN = pace_of("LSTM on IMDB"), pace_of("LSTM on IMDB", SYNTHETIC)
RESIDUALS_REAL = replace(
    RESIDUALS,
    name="spardl.residuals_real",
    title="Residual collection on real data",
    plans=MappingProxyType(
        {
            "smoke": Plan((STAND_IN.case,), EVENING, ONE_SEED, "seconds each"),
            "laptop": Plan((PICTURES,), (*FOURTEEN, "training.max_steps=190"), SEEDS, "about 8 minutes"),
            "evening": Plan((READING.timed,), EVENING, SEEDS, hours((READING,), tuple(COLLECTING), SEEDS)),
            "paper": as_published("spardl/lstm_imdb"),
        }
    ),
)
DENSITY = MethodComparison(
    name="spardl.density",
    title="Density",
    source="densities from 1e-1 to 1e-5 (from memory, medium)",
    shows="lowest density that still trains",
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            f"density {density}": ("compressor=spardl", f"compressor.density={density}")
            for density in ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5")
        }
    ),
    plans=_plans(
        (PICTURES,),
        Plan((PICTURES,), (*FOURTEEN, "training.epochs=15"), SEEDS, "about 8 minutes"),
        "vgg16_cifar10",
    ),
)
WORKERS = MethodComparison(
    name="spardl.workers",
    title="Number of workers",
    source="5 to 14 workers (from memory, low)",
    shows="that any number of workers is supported, and the cost of more workers",
    note=OKTOPK,
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            f"{name}, P = {workers}": (*words, f"cluster.workers={workers}")
            for workers in (5, 8, 11, 14)
            for name, words in (("SparDL", ("compressor=spardl",)), ("Ok-Topk", ("compressor=oktopk",)))
        }
    ),
    plans=_plans(
        (PICTURES,),
        Plan((PICTURES,), (*SMALL, "training.max_steps=40"), SEEDS, "about 8 minutes"),
        "vgg16_cifar10",
    ),
)
TEAMS = MethodComparison(
    name="spardl.teams",
    title="Teams",
    source="number of teams d, R-SAG and B-SAG (from memory, medium)",
    shows="rounds that teams save, and their cost in accuracy",
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            "d = 1": ("compressor=spardl",),
            **{
                f"B-SAG, d = {teams}": (
                    "compressor=spardl",
                    f"communicator.teams={teams}",
                    "communicator.gather=bruck",
                )
                for teams in (2, 7, 14)
            },
            "R-SAG, d = 2": ("compressor=spardl", "communicator.teams=2", "communicator.gather=recursive"),
        }
    ),
    plans=_plans(
        (PICTURES,),
        Plan((PICTURES,), (*FOURTEEN, "training.epochs=15"), SEEDS, "about 8 minutes"),
        "vgg16_cifar10",
    ),
)
MANY_TEAMS = MethodComparison(
    name="spardl.many_teams",
    title="More teams",
    source="R-SAG with more than 2 teams, compared with B-SAG (from memory, medium); 16 workers, since R-SAG takes a "
    "power of two of teams, and of those only 2 divide 14",
    shows="trade-off between rounds and words as the teams of R-SAG grow; accuracies are of an early stage",
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            "d = 1": ("compressor=spardl",),
            **{
                f"{title}, d = {teams}": (
                    "compressor=spardl",
                    f"communicator.teams={teams}",
                    f"communicator.gather={gather}",
                )
                for title, gather in (("R-SAG", "recursive"), ("B-SAG", "bruck"))
                for teams in (2, 4, 8, 16)
            },
            "dense": ("compressor=none",),
        }
    ),
    plans=MappingProxyType(
        {
            "smoke": Plan((PICTURES,), (*TINY, SIXTEEN), ONE_SEED, "seconds each"),
            "laptop": Plan((PICTURES,), (*SMALL, SIXTEEN, "training.epochs=15"), SEEDS, "about 15 minutes"),
            "paper": replace(as_published("spardl/vgg16_cifar10"), words=(SIXTEEN,)),
        }
    ),
)
ADAPTATION = Adaptation(
    name="spardl.adaptation",
    title="Adaptation of h",
    source="the entries h that a team sends in B-SAG, adapted so that the union of all teams' holds k (from memory, "
    "medium; figures unknown)",
    shows="number of steps until h settles, and the distance of the union from k",
    plans=MappingProxyType(
        {
            "smoke": AdaptationPlan((PICTURES,), ("cluster.workers=4",), (2,), 3, "seconds"),
            "laptop": AdaptationPlan((PICTURES, NEWS), ("cluster.workers=14",), (2, 7, 14), 96, "about 5 minutes"),
            "paper": AdaptationPlan((PICTURES, NEWS), ("cluster.workers=14",), (2, 7, 14), 512, "half an hour"),
        }
    ),
)
LAZY = Laziness(
    name="spardl.lazy",
    title="Lazy block-wise sparsification",
    source="an optimization of Spar-Reduce-Scatter: a block is cut only when it is about to be sent (read in the "
    "official code); without it, it is cut after each addition (from memory, medium; figures unknown)",
    shows="number of selections that it saves, and whether it changes the sent entries",
    plans=MappingProxyType(
        {
            "smoke": WatchedPlan((PICTURES,), ("cluster.workers=3",), 2, "seconds"),
            "laptop": WatchedPlan((PICTURES, NEWS), ("cluster.workers=14",), 48, "about 2 minutes"),
            "paper": WatchedPlan((PICTURES, NEWS), ("cluster.workers=14",), 512, "half an hour"),
        }
    ),
)

EXHIBITS = (
    COMPLEXITY,
    CONVERGENCE,
    REAL_DATA,
    spardl_contrasts.REAL_DATA_WHY,
    RESIDUALS,
    RESIDUALS_REAL,
    spardl_contrasts.RESIDUALS_WHY,
    DENSITY,
    WORKERS,
    TEAMS,
    MANY_TEAMS,
    ADAPTATION,
    LAZY,
    spardl_updates.BREAKDOWN,
    spardl_updates.FAST_NETWORK,
    spardl_updates.REGIMES,
    spardl_lab.LAB_UPDATES,
    labs.SPARDL,
    spardl_race.RACE,
)
