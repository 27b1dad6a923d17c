"""Settings and local cost: not from a paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from scripts import bench_simulated
from scripts.exhibits.base import Basis
from scripts.exhibits.kinds import benches
from scripts.exhibits.kinds.trainings import ALONE, DENSE, Case, MethodComparison, Plan
from scripts.exhibits.notes import OKTOPK
from scripts.exhibits.papers import labs
from scripts.exhibits.papers.labs import OURS
from scripts.exhibits.papers.small import ON_DIGITS, ONE_SEED, PICTURES, SEEDS, TINY, VIRTUAL
from scripts.pages.methods import documented

__all__ = ["EXHIBITS"]

SPARDL = ("compressor=spardl",)
FALLING, TENTH, THIRD = "density falls, a tenth of the steps", "dense, a tenth of the steps", "dense, a third"


def _plans(cost: str, *cases: Case) -> Mapping[str, Plan]:
    """Arguments by size; the size of the paper is that of a laptop, because no paper has these figures."""
    tiny, whole = Plan((PICTURES,), TINY, ONE_SEED, "seconds each"), Plan(cases, (), SEEDS, cost)
    return MappingProxyType({"smoke": tiny, "laptop": whole, "paper": whole})


def _digits(workers: int, steps: int) -> Case:
    """ResNet-20 on digits for 30 epochs, given as a number of steps."""
    what = f"ResNet-20 on digits, {workers} workers, {steps} steps"
    return Case(what, ("model=resnet20", "dataset=digits", f"cluster.workers={workers}"), what, known=ON_DIGITS)


def _warmed(workers: int, steps: int, density: float) -> Case:
    """The same trainings with warm-ups as shares of these steps."""
    case, sent = _digits(workers, steps), f"compressor.density={density}"
    own = {
        "no warm-up": (sent,),
        FALLING: (sent, f"compressor.warmup_steps={steps // 10}"),
        TENTH: (sent, f"warmup.steps={steps // 10}"),
        THIRD: (sent, f"warmup.steps={steps // 3}"),
    }
    what = f"{case.what}, {100 * density:g}%"
    return replace(case, name=what, what=what, own=tuple(own.items()))


WARM_UP = MethodComparison(
    name="settings.warm_up",
    title="Warm-up",
    source=f"{OURS}; densities that fall are from Deep Gradient Compression (Lin et al., ICLR 2018)",
    shows="effect of denser first steps on the metric, and their cost in bytes",
    basis=VIRTUAL,
    leads=True,
    methods=MappingProxyType({**dict.fromkeys(("no warm-up", FALLING, TENTH, THIRD), SPARDL), "dense": DENSE}),
    plans=_plans("about 20 minutes", _warmed(4, 660, 0.001), _warmed(8, 330, 0.01)),
)
# Parts of other methods, and methods with a dense warm-up longer than these trainings.
LEFT_OUT = frozenset({"none", "topk", "cast", "quantized", "oktopk_vgg", "oktopk_lstm", "oktopk_bert"})
# PowerSGD sets its own momentum. A single worker trains as many steps as all workers; an equal number of epochs would
# be eight times as many steps.
ITS_OWN = (
    ("arc_topk_ef21", ("optimizer.momentum=0", "optimizer.lr=0.5")),
    ("alone", ("training.max_steps=330",)),
)
METHODS = MethodComparison(
    name="settings.methods",
    title="Every method, as published",
    source=OURS,
    shows="metric and bytes of each choice of compressor= under equal training",
    basis=VIRTUAL,
    note=OKTOPK,
    methods=MappingProxyType(
        {
            "none": DENSE,
            "alone": ALONE,
            **{each: (f"compressor={each}",) for each in sorted(documented()) if each not in LEFT_OUT},
        }
    ),
    plans=_plans("about an hour", replace(_digits(8, 330), own=ITS_OWN)),
)
WIRE = MethodComparison(
    name="settings.wire",
    title="Values in fewer bits",
    source=OURS,
    shows="cost of rounding the values of sparse messages when the rounding error stays in the residual",
    basis=VIRTUAL,
    methods=MappingProxyType(
        {
            **{f"wire={name}": (*SPARDL, f"wire={name}") for name in ("exact", "bfloat16", "int8", "int4", "int2")},
            "dense": DENSE,
        }
    ),
    plans=_plans("about 10 minutes", _digits(4, 660)),
)


def _bench(
    name: str, title: str, shows: str, whole: Mapping[str, Any], few: tuple[str, ...], note: str = ""
) -> benches.Timed:
    """Exhibit of a benchmark of the repository.

    Args:
        name: Name of the exhibit.
        title: Title of the exhibit.
        shows: What a reader can learn from the exhibit.
        whole: Arguments of :func:`benches.timed`.
        few: Options of a small run that replace the others.
        note: Note of the exhibit.
    """
    laptop, smoke = tuple(whole.items()), tuple({**whole, "runs": (few,)}.items())
    return benches.Timed(
        name=name,
        title=title,
        source=OURS,
        shows=shows,
        basis=Basis("nothing", "milliseconds of this machine", "gradients: a part that all share, and noise"),
        function=benches.timed,
        arguments=MappingProxyType({"smoke": smoke, "laptop": laptop, "paper": laptop}),
        shell="",
        words="Medians of alternating turns, with minimum and maximum.",
        time="smoke: 20 s; else 3 minutes, alone on the machine",
        note=note,
    )


FEW = ("--entries", "100000", "--settle", "2", "--repetitions", "2")
SELECTION = _bench(
    "settings.selection",
    "Residual and selection",
    "local cost of error feedback and exact top-k, compared with an addition and torch.topk",
    {
        "script": "scripts/bench_selection.py",
        "runs": tuple(
            ("--dtype", dtype, "--repetitions", "15") for dtype in ("float32", "bfloat16", "float16", "float64")
        ),
        "floor": "residual.add_(gradient)",
        "workers": 0,
    },
    FEW,
)
LOOPBACK = _bench(
    "settings.loopback",
    "Synchronizations without a network",
    "what whole synchronizations of four workers take where messages cost next to nothing",
    {
        "script": "scripts/bench_sync.py",
        "runs": (("--methods", "spardl,oktopk", "--repetitions", "15"),),
        "floor": "torch dense all-reduce",
        "workers": 4,
    },
    FEW,
    OKTOPK,
)
SIMULATED = replace(
    _bench(
        "settings.simulated",
        "Many simulated workers",
        "what a synchronization takes where one process plays all workers, and how much memory",
        {
            "script": "scripts/bench_simulated.py",
            "runs": (
                *(("--workers", str(workers), "--settle", "5") for workers in (16, 64, 256)),
                *(
                    ("--workers", "1024", "--entries", entries, "--repetitions", "3")
                    for entries in ("100000", "1000000")
                ),
            ),
            "floor": "16 workers, 1,000,000 entries",
            "workers": 0,
            "beside": (bench_simulated.PER_WORKER, bench_simulated.MEMORY),
        },
        ("--workers", "16,32", "--repetitions", "2"),
    ),
    basis=Basis("the cluster: one process plays all workers", "milliseconds and memory of this machine", "gradients"),
    words="Medians of steps with minimum and maximum, of all workers together, on one core.",
)

EXHIBITS = (
    METHODS,
    WARM_UP,
    WIRE,
    labs.FEWER_BITS,
    labs.BUCKETS,
    labs.GROUPS,
    labs.STREAMS,
    labs.STREAMS_SMALL,
    SELECTION,
    LOOPBACK,
    SIMULATED,
)
