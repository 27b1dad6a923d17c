"""Ok-Topk: Near-Optimal Sparse Allreduce for Distributed Deep Learning (Li and Hoefler, PPoPP 2022)."""

from __future__ import annotations

from types import MappingProxyType

from exhibits.counts import CountedCosts
from exhibits.small import PICTURES, SEEDS, SMALL, TINY, VIRTUAL
from exhibits.trainings import Case, MethodComparison, Plan

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

VOLUME = CountedCosts(
    name="oktopk.volume",
    title="Words sent",
    source="Table 1 and the claim of less than 6k (abstract: certain)",
    shows="what steps with reused thresholds send, and what those that evaluate them send",
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
)
CONVERGENCE = MethodComparison(
    name="oktopk.convergence",
    title="Training with every method",
    source="accuracy, word error rate and loss against time (numbers from memory, medium)",
    shows="what each method reaches, and in how many seconds",
    basis=VIRTUAL,
    methods=METHODS,
    plans=MappingProxyType(
        {
            "smoke": Plan((PICTURES,), TINY, SEEDS, "seconds each"),
            "laptop": Plan(
                (PICTURES,),
                (*SMALL, "cluster.workers=16", "training.epochs=15"),
                SEEDS,
                "about 15 minutes",
            ),
            "paper": Plan(
                tuple(
                    Case(preset, (f"experiment=oktopk/{preset}",), "as published")
                    for preset in ("vgg16_cifar10", "lstm_an4", "bert")
                ),
                ("cluster.network=infiniband_100g",),
                SEEDS,
                "for a cluster of GPUs",
            ),
        }
    ),
)

EXHIBITS = (VOLUME, CONVERGENCE)
