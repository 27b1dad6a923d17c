"""SparDL: Distributed Deep Learning Training with Efficient Sparse Communication (Zhao et al., ICDE 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from scripts.exhibits.kinds import lab
from scripts.exhibits.kinds.counts import CountedCosts
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan
from scripts.exhibits.kinds.updates import Contender, UpdateBreakdown, UpdatePlan
from scripts.exhibits.notes import OKTOPK
from scripts.exhibits.papers.small import PICTURES, SEEDS, SMALL, TINY, VIRTUAL, as_published

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

MORE_PICTURES = Case(
    "VGG-19 on CIFAR-100",
    ("model=resnet32", "dataset=digits", "optimizer.lr=0.1", "training.epochs=12"),
    "ResNet-32 on digits instead",
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
    "ResNet-20 tells by how many degrees a digit is turned instead",
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
    "the same network on docstrings of six subjects instead",
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
    "an LSTM of 2 x 128 on Python's language reference instead",
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
    "a BERT of 2 x 128 on Python's language reference instead",
    lower=True,
)
CASES = (PICTURES, MORE_PICTURES, PRICES, REVIEWS, NEWS, WIKIPEDIA)


def _plans(smoke: tuple[Case, ...], laptop: Plan, *paper: str) -> Mapping[str, Plan]:
    return MappingProxyType(
        {
            "smoke": Plan(smoke, TINY, SEEDS, "seconds each"),
            "laptop": laptop,
            "paper": as_published(*(f"spardl/{preset}" for preset in paper)),
        }
    )


COMPLEXITY = CountedCosts(
    name="spardl.complexity",
    title="Rounds and words",
    source="Table I, complexity of sparse all-reduce methods; formulas derived and checked (docs/methods.md)",
    shows="that every message is counted, and that no count leaves its formula",
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
    shows="what each method reaches, and in how many seconds",
    basis=VIRTUAL,
    note=OKTOPK,
    methods=ALL,
    plans=_plans(
        (PICTURES,),
        Plan(CASES, (*FOURTEEN, "training.epochs=12", "cluster.network=ethernet_1g"), SEEDS, "about 45 minutes"),
        "vgg16_cifar10",
        "vgg19_cifar100",
        "vgg11_house",
        "lstm_imdb",
        "lstm_ptb",
        "bert_wikipedia",
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
        Plan((PICTURES,), (*FOURTEEN, "compressor.density=0.001", "training.epochs=15"), SEEDS, "about 6 minutes"),
        "vgg16_cifar10",
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
        "vgg16_cifar10",
    ),
)
WORKERS = MethodComparison(
    name="spardl.workers",
    title="Number of workers",
    source="5 to 14 workers (from memory, low)",
    shows="that any number of workers will do, and what more of them cost",
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
        "vgg16_cifar10",
    ),
)
CONTENDERS = MappingProxyType(
    {
        "SparDL, d = 1": Contender("spardl"),
        "SparDL, B-SAG, d = 7": Contender("spardl", ("communicator.teams=7", "communicator.gather=bruck"), 40),
        "Ok-Topk": Contender("oktopk"),
        "TopkDSA": Contender("topkdsa"),
        "TopkA": Contender("topka"),
        "gTopk": Contender("gtopk"),
        "dense": Contender("none"),
    }
)
PUBLISHED_MODELS = ("vgg16", "vgg19", "resnet50", "vgg11", "lstm_imdb", "lstm_ptb", "bert")
ONE_PERCENT = MappingProxyType(dict.fromkeys(PUBLISHED_MODELS, 0.01))


def _updates(smoke: str, *models: str) -> Mapping[str, UpdatePlan]:
    """Plans that share their counts: all at 14 workers."""
    return MappingProxyType(
        {
            "smoke": UpdatePlan({smoke: (14,)}, 512, "seconds"),
            **{scale: UpdatePlan(dict.fromkeys(models, (14,)), 4096, "a minute") for scale in ("laptop", "paper")},
        }
    )


BREAKDOWN = UpdateBreakdown(
    name="spardl.breakdown",
    title="Where an update's time goes",
    source="per-update time of seven cases on 14 workers, in computation and communication; up to 4.9x faster "
    "communication than Ok-Topk (numbers from memory, medium)",
    shows="which part of an update each method saves, and whether latency or bandwidth decides",
    note=OKTOPK,
    methods=CONTENDERS,
    plans=_updates("vgg16", *PUBLISHED_MODELS),
    network="ethernet_1g",
    density=ONE_PERCENT,
    baseline="Ok-Topk",
)
FAST_NETWORK = UpdateBreakdown(
    name="spardl.fast_network",
    title="Where an update's time goes on a fast network",
    source="ResNet-50 and BERT on an RDMA network (numbers unknown)",
    shows="what is left of the gain where messages are cheap",
    note=OKTOPK,
    methods=CONTENDERS,
    plans=_updates("resnet50", "resnet50", "bert"),
    network="infiniband_100g",
    density=ONE_PERCENT,
    baseline="Ok-Topk",
)

EXHIBITS = (COMPLEXITY, CONVERGENCE, RESIDUALS, DENSITY, WORKERS, TEAMS, BREAKDOWN, FAST_NETWORK, lab.SPARDL)
