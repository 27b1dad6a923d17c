"""Time of an update with SparDL and the methods that its paper compares it with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from scripts.exhibits.kinds.regimes import Formula, Regimes
from scripts.exhibits.kinds.updates import Contender, UpdateBreakdown, UpdatePlan
from scripts.exhibits.notes import OKTOPK

__all__ = ["BREAKDOWN", "FAST_NETWORK", "REGIMES"]

WORKERS, DENSITY = 14, 0.01
# Entries sent of the counted gradients.
SMOKE, LAPTOP = 512, 4096

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
ONE_PERCENT = MappingProxyType(dict.fromkeys(PUBLISHED_MODELS, DENSITY))


def _updates(smoke: str, *models: str) -> Mapping[str, UpdatePlan]:
    """Plans that share their counts, all with 14 workers."""
    return MappingProxyType(
        {
            "smoke": UpdatePlan({smoke: (WORKERS,)}, SMOKE, "seconds"),
            **{
                scale: UpdatePlan(dict.fromkeys(models, (WORKERS,)), LAPTOP, "a minute")
                for scale in ("laptop", "paper")
            },
        }
    )


BREAKDOWN = UpdateBreakdown(
    name="spardl.breakdown",
    title="Where an update's time goes",
    source="per-update time of seven cases on 14 workers, in computation and communication; up to 4.9x faster "
    "communication than Ok-Topk (numbers from memory, medium)",
    shows="part of an update that each method saves, and whether latency or bandwidth dominates",
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
    shows="remaining gain when communication is fast",
    note=OKTOPK,
    methods=CONTENDERS,
    plans=_updates("resnet50", "resnet50", "bert"),
    network="infiniband_100g",
    density=ONE_PERCENT,
    baseline="Ok-Topk",
)


def _of_spardl(teams: int) -> Formula:
    """Published words: 4k(P-1)/P without teams; with B-SAG the minimum for the unions of teams, 2k(2P-d-1)/P."""
    size = WORKERS // teams
    rounds = 2 * math.ceil(math.log2(size)) + math.ceil(math.log2(teams))
    return Formula(rounds, DENSITY * 2 * (2 * WORKERS - teams - 1) / WORKERS)


# For Ok-Topk the maximum: 2P + 2 log2 P rounds and 6k(P-1)/P words.
_OF_OKTOPK = Formula(2 * WORKERS + 2 * math.log2(WORKERS), DENSITY * 6 * (WORKERS - 1) / WORKERS)
REGIMES = Regimes(
    name="spardl.regimes",
    title="Where SparDL is how much faster",
    source="up to 4.9x faster than other sparse all-reduces, read in a summary; over which of them, and on which "
    "network, is not stated there. Ok-Topk's formula is from a summary by others, SparDL's from its algorithm",
    shows="networks and model sizes for which the published speedup would be reached",
    note=OKTOPK,
    methods=CONTENDERS,
    formulas=MappingProxyType(
        {"SparDL, d = 1": _of_spardl(1), "SparDL, B-SAG, d = 7": _of_spardl(7), "Ok-Topk": _OF_OKTOPK}
    ),
    ours="SparDL",
    rival="Ok-Topk",
    dense="dense",
    claimed=4.9,
    workers=WORKERS,
    density=DENSITY,
    kept=MappingProxyType({"smoke": SMOKE, "laptop": LAPTOP, "paper": LAPTOP}),
    models=("lstm_imdb", "vgg16", "resnet50", "bert"),
    latencies=(2e-6, 10e-6, 50e-6, 250e-6, 1e-3, 5e-3),
    bandwidths=(0.1, 1, 10, 100),
    settings=(
        *((model, BREAKDOWN.network) for model in PUBLISHED_MODELS),
        *((model, FAST_NETWORK.network) for model in FAST_NETWORK.plans["paper"].workers),
    ),
)
