"""Why residual collection helps or harms: what is sent late, multiplied by momentum, or what a block's share leaves."""

from __future__ import annotations

from itertools import product
from types import MappingProxyType

from scripts.exhibits.kinds.contrasts import Contrasts, Pair
from scripts.exhibits.kinds.trainings import Plan
from scripts.exhibits.papers.real import EVENING, hours, long_digits
from scripts.exhibits.papers.small import PICTURES, SEEDS, SMALL, TINY, VIRTUAL, as_published

__all__ = ["RESIDUALS_WHY"]

# In SparDL each block has a share of the entries for itself. gTopk, too, drops entries wherever sums meet, but of the
# whole vector's: no block has a share there.
SELECTIONS = {"share per block": "spardl", "whole vector": "gtopk"}
# Without momentum a step is as long as all that a gradient adds up to with it.
MOMENTA = {"momentum 0.9": (), "no momentum": ("optimizer.momentum=0", "optimizer.lr=0.5")}
RULES = {
    "GRES": ("residual=global",),
    "GRES that forgets": ("residual=global", "residual.decay=0.99"),
    "LRES": ("residual=local",),
}
CONDITIONS = {
    f"{selection}, {momentum}": (f"compressor={name}", *words)
    for (selection, name), (momentum, words) in product(SELECTIONS.items(), MOMENTA.items())
}
CELLS = {
    f"{rule}, {conditions}": (*words, *rules)
    for (conditions, words), (rule, rules) in product(CONDITIONS.items(), RULES.items())
    if rule != "GRES that forgets" or conditions.endswith("momentum 0.9")
}
EIGHT = "cluster.workers=8"
LONG = long_digits(900, "optimizer.lr=0.05", EIGHT, "compressor.density=0.001", name=", 8 workers, 0.1%")

RESIDUALS_WHY = Contrasts(
    name="spardl.residuals_why",
    title="What residual collection hangs on",
    source="not in the paper: GRES ends below LRES where few steps meet a low density, and above it elsewhere",
    shows="whether that comes of momentum, which multiplies what arrives late, or of each block's own share of entries",
    basis=VIRTUAL,
    methods=MappingProxyType(CELLS),
    pairs=MappingProxyType(
        {
            **{name: Pair(f"GRES, {name}", f"LRES, {name}") for name in CONDITIONS},
            **{
                f"{name}, a residual that forgets": Pair(f"GRES that forgets, {name}", f"LRES, {name}")
                for name in CONDITIONS
                if name.endswith("momentum 0.9")
            },
        }
    ),
    question="GRES less LRES:",
    plans=MappingProxyType(
        {
            "smoke": Plan((PICTURES,), (*TINY, EIGHT), SEEDS, "seconds each"),
            "laptop": Plan((PICTURES,), (*SMALL, EIGHT, "training.max_steps=300"), SEEDS, "about 25 minutes"),
            "evening": Plan((LONG.timed,), EVENING, SEEDS, hours((LONG._replace(seconds=0.17),), tuple(CELLS), SEEDS)),
            "paper": as_published("spardl/vgg16_cifar10"),
        }
    ),
)
