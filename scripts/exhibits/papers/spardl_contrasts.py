"""Causes of two results: the order of the residual rules, and the loss of accuracy at 1%."""

from __future__ import annotations

from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from scripts.exhibits.kinds.contrasts import Contrasts, Pair
from scripts.exhibits.kinds.trainings import Plan
from scripts.exhibits.papers.real import (
    EVENING,
    FIVE,
    FLOOR,
    OURS,
    REFERENCES,
    SYNTHETIC,
    hours,
    long_digits,
    pace_of,
)
from scripts.exhibits.papers.small import ONE_SEED, PICTURES, SEEDS, SMALL, TINY, VIRTUAL, as_published

__all__ = ["REAL_DATA_WHY", "RESIDUALS_WHY"]


class Condition(NamedTuple):
    """Conditions under which two rules are compared.

    Attributes:
        words: Arguments of train.py.
        forgets: Whether to compare the rule that forgets parts of the residual as well.
    """

    words: tuple[str, ...]
    forgets: bool


# In SparDL each block has its own share of the entries. gTopk also drops entries wherever sums are merged, but selects
# from the whole vector.
SELECTIONS = MappingProxyType({"share per block": "spardl", "whole vector": "gtopk"})
# Without momentum the learning rate is scaled to the total effect of a gradient with momentum. Nothing amplifies late
# entries then, so the rule that forgets them is not compared.
MOMENTA = MappingProxyType(
    {
        "momentum 0.9": Condition((), forgets=True),
        "no momentum": Condition(("optimizer.momentum=0", "optimizer.lr=0.5"), forgets=False),
    }
)
CONDITIONS = MappingProxyType(
    {
        f"{selection}, {momentum}": found._replace(words=(f"compressor={name}", *found.words))
        for (selection, name), (momentum, found) in product(SELECTIONS.items(), MOMENTA.items())
    }
)
GRES, FORGETFUL, LRES = "GRES", "GRES that forgets", "LRES"
RULES = MappingProxyType(
    {
        GRES: ("residual=global",),
        FORGETFUL: ("residual=global", "residual.decay=0.99"),
        LRES: ("residual=local",),
    }
)
CELLS = MappingProxyType(
    {
        f"{rule}, {name}": (*found.words, *words)
        for (name, found), (rule, words) in product(CONDITIONS.items(), RULES.items())
        if rule != FORGETFUL or found.forgets
    }
)
PAIRS = {name: Pair(f"{GRES}, {name}", f"{LRES}, {name}") for name in CONDITIONS}
FORGETTING = {
    f"{name}, a residual that forgets": Pair(f"{FORGETFUL}, {name}", f"{LRES}, {name}")
    for name, found in CONDITIONS.items()
    if found.forgets
}
WORKERS = 8
EIGHT = f"cluster.workers={WORKERS}"
LONG = long_digits(900, "optimizer.lr=0.05", "compressor.density=0.001", name=", 8 workers, 0.1%", workers=WORKERS)

RESIDUALS_WHY = Contrasts(
    name="spardl.residuals_why",
    title="What residual collection hangs on",
    source="not in the paper: GRES ends below LRES where few steps meet a low density, and above it elsewhere",
    shows="whether the cause is momentum, which amplifies late entries, or the separate share of entries of each block",
    basis=VIRTUAL,
    methods=CELLS,
    pairs=MappingProxyType(PAIRS | FORGETTING),
    question="GRES less LRES:",
    plans=MappingProxyType(
        {
            "smoke": Plan((PICTURES,), (*TINY, EIGHT), ONE_SEED, "seconds each"),
            "laptop": Plan((PICTURES,), (*SMALL, EIGHT, "training.max_steps=300"), SEEDS, "about 25 minutes"),
            "evening": Plan((LONG.timed,), EVENING, FIVE, hours((LONG,), tuple(CELLS), FIVE)),
            "paper": as_published("spardl/vgg16_cifar10"),
        }
    ),
)

# SparDL's budget applies to the sum of all workers, that of TopkA to each worker. All but two rows share their
# runs with spardl.real_data.
DENSE, PUBLISHED, EACH, MORE = "dense", "SparDL", "TopkA", f"{OURS}, 10% in 4 bits"
PRICES = MappingProxyType(
    {
        "1% of the sum, as published": Pair(PUBLISHED, DENSE),
        "1% of the sum, our recipe": Pair(OURS, DENSE),
        "1% of each worker, as published": Pair(EACH, DENSE),
        "10% of the sum in 4 bits, our recipe": Pair(MORE, DENSE),
    }
)
ON_PICTURES = "ResNet-20 on CIFAR-10"
PICTURE, STAND_IN = pace_of(ON_PICTURES), pace_of(ON_PICTURES, SYNTHETIC)
BUDGETS = MappingProxyType(
    {
        **{name: REFERENCES[name] for name in (DENSE, PUBLISHED, OURS, FLOOR)},
        EACH: ("compressor=topka",),
        MORE: (*REFERENCES[OURS], "compressor.density=0.1", "wire=int4"),
    }
)
REAL_DATA_WHY = Contrasts(
    name="spardl.real_data_why",
    title="What the price of 1% hangs on",
    source="not in the paper: 14 workers that send 1% of their sum end several points below dense training",
    shows="whether the cause is momentum after compression, or the small share of the sum that is sent",
    basis=VIRTUAL,
    methods=BUDGETS,
    pairs=PRICES,
    question="Accuracy less that of dense training:",
    plans=MappingProxyType(
        {
            "smoke": Plan((STAND_IN.case,), EVENING, ONE_SEED, "seconds each"),
            "laptop": Plan(
                (PICTURES,), (*SMALL, "cluster.workers=14", "training.max_steps=190"), SEEDS, "about 10 minutes"
            ),
            "evening": Plan((PICTURE.timed,), EVENING, SEEDS, hours((PICTURE,), tuple(BUDGETS), SEEDS)),
            "paper": as_published("spardl/vgg16_cifar10"),
        }
    ),
)
