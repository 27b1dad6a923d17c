"""Ok-Topk: Near-Optimal Sparse Allreduce for Distributed Deep Learning (Li and Hoefler, PPoPP 2022)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from scripts.exhibits.kinds.balance import Balance, BalancePlan, Published
from scripts.exhibits.kinds.counts import CountedCosts
from scripts.exhibits.kinds.gpu import MODELS
from scripts.exhibits.kinds.thresholds import Thresholds
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan
from scripts.exhibits.kinds.updates import Contender, UpdateBreakdown, UpdatePlan
from scripts.exhibits.kinds.watched import WatchedPlan
from scripts.exhibits.kinds.xi import Selections
from scripts.exhibits.notes import OKTOPK
from scripts.exhibits.papers.real import FLOOR, RIVALS, long_digits, only, with_evening
from scripts.exhibits.papers.small import KNOWN, ONE_SEED, PICTURES, SEEDS, SMALL, TINY, VIRTUAL

__all__ = ["EXHIBITS"]

METHODS = MappingProxyType(
    {
        "Ok-Topk": ("compressor=oktopk",),
        "TopkDSA": ("compressor=topkdsa",),
        "TopkA": ("compressor=topka",),
        "gTopk": ("compressor=gtopk",),
        "Gaussian-k": ("compressor=gaussiank",),
        "dense": ("compressor=none",),
    }
)
# Small ones of which a step of 16 workers takes about a third of a second.
DIGITS = Case(
    PICTURES.name,
    (*PICTURES.words, "training.batch_size=4", "training.epochs=3"),
    f"{PICTURES.what}, 3 epochs of batches of 4",
    known=PICTURES.known,
)
SPEECH = Case(
    "LSTM on AN4",
    (
        "model=lstm_an4_small",
        "dataset=synthetic_an4",
        "model.hidden_size=128",
        "training.batch_size=1",
        "training.max_steps=60",
        "training.eval_examples=64",
    ),
    "2 LSTMs of 128 on tones that stand for letters, 60 steps",
    lower=True,
)
TEXT = Case(
    "BERT on Wikipedia",
    (
        "model=bert_tiny",
        "dataset=pydocs",
        "model.num_layers=2",
        "training.batch_size=2",
        "training.max_steps=48",
        "training.eval_examples=128",
    ),
    "a BERT of 2 x 128 on Python's language reference, 48 steps",
    lower=True,
)
CASES = (DIGITS, SPEECH, TEXT)
# Steps in which an entry of average size is sent ten times at 1%; the last step is halfway between two choices of
# regions.
ENOUGH = 1057


def _lasting(case: Case, what: str) -> Case:
    """The same plan with enough steps to observe more than the start of the training."""
    words = (*case.words, "training.epochs=1000", f"training.max_steps={ENOUGH}")
    return replace(case, words=words, what=f"{what}, {ENOUGH:,} steps")


LONG = (
    _lasting(DIGITS, f"{PICTURES.what}, batches of 4"),
    _lasting(SPEECH, "2 LSTMs of 128 on tones that stand for letters"),
    _lasting(TEXT, "a BERT of 2 x 128 on Python's language reference"),
)
DENSITY = MappingProxyType({"vgg16": 0.02, "lstm_an4": 0.02, "bert": 0.01})

VOLUME = CountedCosts(
    name="oktopk.volume",
    title="Words sent",
    source="Table 1 and the claim of less than 6k (abstract: certain)",
    shows="volume of steps that reuse thresholds, and of steps that evaluate them",
    methods=MappingProxyType(
        {
            "Ok-Topk": ("oktopk", ()),
            "TopkDSA": ("topkdsa", ()),
            "gTopk": ("gtopk", ()),
            "TopkA": ("topka", ()),
            "Gaussian-k": ("gaussiank", ()),
            "dense": ("none", ()),
        }
    ),
    workers=MappingProxyType({"smoke": (4, 16), "laptop": (4, 8, 16, 32, 64), "paper": (16, 32, 64, 128, 256)}),
    note=OKTOPK,
)
CONVERGENCE = MethodComparison(
    name="oktopk.convergence",
    title="Training with every method",
    source="accuracy, word error rate and loss against time (numbers from memory, medium)",
    shows="metric and time of each method",
    basis=VIRTUAL,
    note=OKTOPK,
    methods=MappingProxyType({**METHODS, FLOOR: RIVALS[FLOOR]}),
    proposed=("Ok-Topk",),
    leads=True,
    plans=with_evening(
        only(
            METHODS,
            {
                "smoke": Plan((PICTURES,), TINY, ONE_SEED, "seconds each"),
                "laptop": Plan(
                    CASES,
                    (*SMALL, "cluster.workers=16", "training.eval_every=0.25"),
                    SEEDS,
                    "about 10 minutes",
                ),
                "paper": Plan(
                    tuple(
                        Case(
                            preset,
                            (f"experiment=oktopk/{preset}",),
                            "as published",
                            known=KNOWN.get(f"oktopk/{preset}"),
                        )
                        for preset in ("vgg16_cifar10", "lstm_an4", "bert")
                    ),
                    ("cluster.network=infiniband_100g",),
                    SEEDS,
                    "for a cluster of GPUs",
                ),
            },
        ),
        (*METHODS, FLOOR),
        # The words of spardl.convergence, so that its trainings are these.
        (long_digits(1000),),
    ),
)
THRESHOLDS = Thresholds(
    name="oktopk.thresholds",
    title="Entries that thresholds select",
    source="selected local and global values over training; deviation below 11% for Ok-Topk, while Gaussian-k "
    "selects too few (from memory, medium)",
    shows="number of entries, relative to k, that reused thresholds and fitted thresholds select",
    note=f"{OKTOPK} As published: without the first.",
    methods=MappingProxyType(
        {
            "Ok-Topk": (("compressor=oktopk",), True),
            "Ok-Topk, as published": (
                ("compressor=oktopk", "compressor.reevaluate_beyond=null", "communicator.reevaluate_beyond=null"),
                True,
            ),
            "Gaussian-k": (("compressor=gaussiank",), False),
            "exact": (("compressor=oktopk", "compressor.period=1", "communicator.threshold_period=1"), True),
        }
    ),
    plans=MappingProxyType(
        {
            "smoke": WatchedPlan((DIGITS,), ("cluster.workers=2",), 3, "seconds"),
            "laptop": WatchedPlan(CASES, ("cluster.workers=8",), 96, "about 4 minutes"),
            "evening": WatchedPlan(LONG, ("cluster.workers=8",), ENOUGH, "about an hour", every=9),
            "paper": WatchedPlan(CASES, ("cluster.workers=16",), 512, "an hour"),
        }
    ),
)
XI = Selections(
    name="oktopk.xi",
    title="What local selection costs",
    source="empirical xi of Assumption 1, and the distribution of gradients with accurate, reused and fitted "
    "thresholds (from memory, medium; figures unknown)",
    shows="distance between the largest sums and the sums of local selections, and positions of the thresholds",
    note=OKTOPK,
    method=("compressor=oktopk",),
    plans=MappingProxyType(
        {
            "smoke": WatchedPlan((DIGITS,), ("cluster.workers=2",), 3, "seconds"),
            "laptop": WatchedPlan(CASES, ("cluster.workers=8",), 96, "about 2 minutes"),
            "evening": WatchedPlan(LONG, ("cluster.workers=8",), ENOUGH, "about a quarter of an hour", every=9),
            "paper": WatchedPlan(CASES, ("cluster.workers=16",), 512, "an hour"),
        }
    ),
)
BALANCE = Balance(
    name="oktopk.balance",
    title="Balance of load",
    source="balanced against naive reduce and all-gather: 1.13x-1.75x and 1.12x-1.43x (from memory, medium)",
    shows="imbalance of loads when large entries cluster in layers, and the gain of balancing them",
    note=OKTOPK,
    plans=MappingProxyType(
        {
            "smoke": BalancePlan(
                (Published(DIGITS, MODELS["vgg16"].entries),), ("compressor=oktopk", "cluster.workers=4"), 2, "seconds"
            ),
            **{
                scale: BalancePlan(
                    (
                        Published(pictures, MODELS["vgg16"].entries),
                        Published(speech, MODELS["lstm_an4"].entries),
                        Published(text, MODELS["bert"].entries),
                    ),
                    ("compressor=oktopk", "cluster.workers=16"),
                    steps,
                    cost,
                )
                for scale, (pictures, speech, text), steps, cost in (
                    ("laptop", CASES, 97, "about 2 minutes"),
                    ("evening", LONG, ENOUGH, "about half an hour"),
                    ("paper", CASES, 609, "half an hour"),
                )
            },
        }
    ),
    network="infiniband_100g",
)
SCALING = UpdateBreakdown(
    name="oktopk.scaling",
    title="Weak scaling",
    source="weak scaling with breakdown on a Cray XC50; BERT on 256 GPUs 3.29x-12.95x (abstract: certain), VGG on 32 "
    "1.51x-8.83x, LSTM on 64 1.34x-7.71x, efficiency 76.3% (from memory, medium)",
    shows="cost of more workers for each method, by computation, compression and communication",
    note=OKTOPK,
    methods=MappingProxyType(
        {
            "Ok-Topk": Contender("oktopk"),
            "TopkDSA": Contender("topkdsa"),
            "TopkA": Contender("topka"),
            "gTopk": Contender("gtopk"),
            "Gaussian-k": Contender("gaussiank"),
            "dense": Contender("none"),
        }
    ),
    plans=MappingProxyType(
        {
            "smoke": UpdatePlan({"vgg16": (4, 8)}, 512, "seconds"),
            "laptop": UpdatePlan(
                {"vgg16": (16, 32), "lstm_an4": (16, 32, 64), "bert": (32, 64, 256)}, 2048, "about 5 minutes"
            ),
            "paper": UpdatePlan(dict.fromkeys(DENSITY, (16, 32, 64, 128, 256)), 4096, "an hour"),
        }
    ),
    network="infiniband_100g",
    density=DENSITY,
    baseline="dense",
)

EXHIBITS = (VOLUME, CONVERGENCE, THRESHOLDS, XI, BALANCE, SCALING)
