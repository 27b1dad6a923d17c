"""SparDL: Distributed Deep Learning Training with Efficient Sparse Communication (Zhao et al., ICDE 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from exhibits.counts import CountedCosts
from exhibits.small import PICTURES, SEEDS, SMALL, TINY, VIRTUAL
from exhibits.trainings import Case, MethodComparison, Plan

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
FOURTEEN = (*SMALL, "cluster.workers=14")
PUBLISHED = ("cluster.network=ethernet_1g",)

MORE_PICTURES = Case(
    "VGG-19 on CIFAR-100", ("model=resnet32", "dataset=digits", "optimizer.lr=0.1"), "ResNet-32 on digits instead"
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
    ),
    "ResNet-20 tells by how many degrees a digit is turned instead",
)
REVIEWS = Case(
    "LSTM on IMDB",
    ("model=lstm_imdb", "dataset=docstrings", "training.batch_size=8"),
    "the same network on docstrings of six subjects instead",
)
NEWS = Case(
    "LSTM on PTB",
    ("model=lstm", "dataset=pydocs", "training.batch_size=2", "model.embedding_size=128", "model.hidden_size=128"),
    "an LSTM of 2 x 128 on Python's language reference instead",
)
WIKIPEDIA = Case(
    "BERT on Wikipedia",
    ("model=bert_tiny", "dataset=pydocs", "training.batch_size=2", "model.num_layers=2"),
    "a BERT of 2 x 128 on Python's language reference instead",
)
CASES = (PICTURES, MORE_PICTURES, PRICES, REVIEWS, NEWS, WIKIPEDIA)


def _as_published(*presets: str) -> tuple[Case, ...]:
    return tuple(Case(preset, (f"experiment=spardl/{preset}",), "as published") for preset in presets)


def _plans(smoke: tuple[Case, ...], laptop: Plan, paper: tuple[Case, ...]) -> Mapping[str, Plan]:
    return MappingProxyType(
        {
            "smoke": Plan(smoke, TINY, SEEDS, "seconds each"),
            "laptop": laptop,
            "paper": Plan(paper, PUBLISHED, SEEDS, "for a cluster of GPUs"),
        }
    )


COMPLEXITY = CountedCosts(
    name="spardl.complexity",
    title="Rounds and words",
    source="Table I, complexity of sparse all-reduce methods; formulas derived and checked (docs/methods.md)",
    shows="that every message is counted, and that no count leaves its formula",
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
    shows="what each method reaches, and in how many seconds",
    basis=VIRTUAL,
    methods=ALL,
    plans=_plans(
        (PICTURES,),
        Plan(CASES, (*FOURTEEN, "training.epochs=8", "cluster.network=ethernet_1g"), SEEDS, "about 45 minutes"),
        _as_published("vgg16_cifar10", "vgg19_cifar100", "vgg11_house", "lstm_imdb", "lstm_ptb", "bert_wikipedia"),
    ),
)
RESIDUALS = MethodComparison(
    name="spardl.residuals",
    title="Residual collection",
    source="GRES against PRES and LRES; numbers unknown, from memory (medium)",
    shows="whether mass that is lost on the way, and not only at a worker's own selection, matters",
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            "GRES": ("compressor=spardl", "residual=global"),
            "PRES": ("compressor=spardl", "residual=partial"),
            "LRES": ("compressor=spardl", "residual=local"),
        }
    ),
    plans=_plans(
        (PICTURES,),
        Plan((PICTURES,), (*FOURTEEN, "compressor.density=0.001", "training.epochs=20"), SEEDS, "about 6 minutes"),
        _as_published("vgg16_cifar10"),
    ),
)
DENSITY = MethodComparison(
    name="spardl.density",
    title="Density",
    source="densities from 1e-1 to 1e-5 (from memory, medium)",
    shows="how much may be left behind",
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
        _as_published("vgg16_cifar10"),
    ),
)
WORKERS = MethodComparison(
    name="spardl.workers",
    title="Number of workers",
    source="5 to 14 workers (from memory, low)",
    shows="that any number of workers will do, and what more of them cost",
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            f"{name}, P = {workers}": (*words, f"cluster.workers={workers}")
            for workers in (5, 6, 8, 10, 12, 14)
            for name, words in (("SparDL", ("compressor=spardl",)), ("Ok-Topk", ("compressor=oktopk",)))
        }
    ),
    plans=_plans(
        (PICTURES,),
        Plan((PICTURES,), (*SMALL, "training.max_steps=40"), SEEDS, "about 8 minutes"),
        _as_published("vgg16_cifar10"),
    ),
)
TEAMS = MethodComparison(
    name="spardl.teams",
    title="Teams",
    source="number of teams d, R-SAG and B-SAG (from memory, medium)",
    shows="how many rounds teams save, and what they cost in accuracy",
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
        _as_published("vgg16_cifar10"),
    ),
)

EXHIBITS = (COMPLEXITY, CONVERGENCE, RESIDUALS, DENSITY, WORKERS, TEAMS)
