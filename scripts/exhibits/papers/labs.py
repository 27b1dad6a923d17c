"""Measurements in the network lab: synchronizations and schedules of four workers on slow links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from scripts.exhibits.base import Basis
from scripts.exhibits.kinds.lab import Measured, delayed, schedules, synchronizations
from scripts.exhibits.notes import OKTOPK

__all__ = [
    "BUCKETS",
    "DEAR",
    "FEWER_BITS",
    "GROUPS",
    "LAYER_FUSION",
    "LAYER_FUSION_SMALL",
    "OURS",
    "SPARDL",
    "STREAMS",
    "STREAMS_SMALL",
]


def _arguments(gbit: float, limit: float, *words: str) -> tuple[tuple[str, Any], ...]:
    return (("workers", 4), ("gbit", gbit), ("limit", limit), ("words", words))


def _overlap(profile: str, schedules: str, *words: str) -> tuple[str, ...]:
    return (
        "scripts/bench_overlap.py",
        "--model",
        f"profile:scripts/profiles/{profile}.json",
        "--schedules",
        schedules,
        *words,
    )


def _sync(methods: str, *words: str) -> tuple[str, ...]:
    return ("scripts/bench_sync.py", "--wires", "exact", "--methods", methods, *words)


def _scales(
    smoke: tuple[str, ...], laptop: tuple[str, ...], limit: float, gbit: float = 1.0
) -> Mapping[str, tuple[tuple[str, Any], ...]]:
    """Arguments by size; the size of the paper is that of a laptop, because a lab runs on one machine."""
    whole = _arguments(gbit, limit, *laptop)
    return MappingProxyType({"smoke": _arguments(gbit, 200.0, *smoke), "laptop": whole, "paper": whole})


# Rivals can use the same bucket sizes as DeAR, and the search of MG-WFBP.
TUNED = ",".join(
    (
        "after_backward",
        "mg_wfbp",
        *(f"wfbp:bucket_mb={size}" for size in (8, 25, 64)),
        *(f"dear:threshold_mb={size}" for size in (8, 25, 64)),
    )
)
QUICK = ("--compute", "0.06", "--rounds", "2", "--steps", "1", "--settle", "2")
FOUR = "links shaped to 1 Gbit/s between four processes on one machine, whose cores they share"
DEAR = Measured(
    name="dear.lab",
    title="Schedules on a real network",
    source="the comparison of schedules, on our four workers instead; up to 83% faster on 10 GbE (abstract: certain)",
    shows="whether measurements over slow links confirm the predictions of the timeline model",
    basis=Basis(
        simulated="only the predictions",
        measured=f"seconds of training steps over {FOUR}; gradients, messages and updates are real",
        assumed="passes: workers sleep for the scaled times of a profile, as if each had a GPU",
    ),
    function=schedules,
    arguments=_scales(
        _overlap("resnet20", "after_backward,wfbp,wfbp:bucket_mb=0.5,dear", *QUICK),
        _overlap("resnet50", TUNED, "--compute", "1.2", "--rounds", "5", "--steps", "1", "--settle", "3"),
        900.0,
    ),
    shell="",
    words="Medians of turns that alternate; the model starts from a profile and a network measured just before.",
    time="smoke: 30 s; else 5 minutes, alone on the machine",
)
SPARSE = "spardl,oktopk,topkdsa,topka,gtopk,none"
FEW_ENTRIES = ("--entries", "100000", "--settle", "3", "--repetitions", "2")
SPARDL = Measured(
    name="spardl.lab",
    title="Synchronizations on a real network",
    source="per-update time of every method, on our four workers instead; numbers unknown",
    shows="measured time of a synchronization with its local work, compared with the prediction from counted messages",
    basis=Basis(
        simulated="only the predictions",
        measured=f"seconds, rounds and bytes of synchronizations over {FOUR}; the network, as rounds of messages",
        assumed="gradients: a common part and noise",
    ),
    function=synchronizations,
    arguments=_scales(
        _sync(SPARSE, *FEW_ENTRIES),
        _sync(SPARSE, "--entries", "14700000", "--settle", "20", "--repetitions", "9"),
        400.0,
    ),
    shell="",
    words=(
        "Medians of turns that alternate. Predicted: the busiest worker's own work, and rounds x alpha + bytes x beta. "
        "Messages alone: the same ones without any work in between. none: our dense ring. torch's "
        "own are there for comparison."
    ),
    time="smoke: 20 s; else 2 minutes, alone on the machine",
    note=OKTOPK,
)
OURS = "no paper's"
FEWER_BITS = replace(
    SPARDL,
    name="settings.fewer_bits",
    title="Every entry, in fewer bits",
    source=OURS,
    shows="time of quantized all-reduces with their local work, compared with the hooks of torch",
    arguments=_scales(
        _sync("int8,int4", *FEW_ENTRIES),
        _sync("fp8,int8,int4,int2", "--entries", "14700000", "--settle", "8", "--repetitions", "9"),
        400.0,
    ),
    note="",
)


def _grouped(name: str, title: str, source: str, shows: str, laptop: tuple[str, ...], gbit: float = 1.0) -> Measured:
    """Partitions of layers into groups, for several methods."""
    return replace(
        DEAR,
        name=name,
        title=title,
        source=source,
        shows=shows,
        basis=DEAR.basis._replace(measured=DEAR.basis.measured.replace("1 Gbit/s", f"{gbit:g} Gbit/s")),
        arguments=_scales(_overlap("resnet20", "wfbp:bucket_mb=0.5,wfbp:bucket_mb=inf", *FEW), laptop, 900.0, gbit),
    )


FEW = (*QUICK, "--methods", "spardl")
CUTS = "wfbp:bucket_mb=0,wfbp,wfbp:bucket_mb=inf,layer_fusion"
FUSING = "LayerFusion for other compressors, on our four workers instead; up to 2.87x (abstract: certain)"
LAYER_FUSION = _grouped(
    "sketch_fusion.lab",
    "LayerFusion on a real network",
    FUSING,
    "what the best partition gains over every layer alone, 25 MB buckets and one group where messages really take time",
    _overlap(
        "resnet50",
        CUTS,
        *("--compute", "0.6", "--rounds", "5", "--steps", "1", "--methods", "spardl,topka"),
    ),
)
LAYER_FUSION_SMALL = _grouped(
    "sketch_fusion.lab_small",
    "LayerFusion on a real network, a small model",
    FUSING,
    "the same of a model small enough for the sketch, at a tenth of the bandwidth",
    _overlap(
        "resnet20",
        CUTS,
        *("--compute", "0.3", "--rounds", "5", "--steps", "2", "--methods", "count_sketch,spardl,topka,none"),
    ),
    0.1,
)
BUCKETS = _grouped(
    "settings.bucket_mb",
    "Sizes of groups",
    OURS,
    "best size of the groups that are sent during the backward pass, with and without a sparse method",
    _overlap(
        "resnet50",
        "wfbp:bucket_mb=1,wfbp:bucket_mb=5,wfbp,wfbp:bucket_mb=inf",
        *("--compute", "0.3", "--rounds", "5", "--steps", "1", "--methods", "spardl,none"),
    ),
)
GROUPS = _grouped(
    "settings.groups",
    "What a group costs",
    OURS,
    "how much longer several groups take than one synchronization, where no passes hide them",
    _overlap(
        "resnet50",
        "after_backward,wfbp:bucket_mb=16,wfbp:bucket_mb=4",
        *("--compute", "0.01", "--rounds", "9", "--steps", "2", "--settle", "6", "--methods", "spardl"),
    ),
)
DELAYS = (0.1, 5.0, 20.0)


def _streamed(name: str, model: str, schedules: str, *words: str) -> Measured:
    """Several groups in flight on links with several delays."""
    made = _grouped(name, "Groups under way at once", OURS, "", _overlap(model, schedules, *words))
    several = {scale: (*given, ("delays_ms", DELAYS)) for scale, given in made.arguments.items()}
    few = _arguments(1.0, 200.0, *_overlap("resnet20", "wfbp:bucket_mb=0.5", *FEW, "--streams", "1,2"))
    return replace(
        made,
        shows=f"what cluster.streams gains where round trips take time; {model}, delays one way",
        function=delayed,
        arguments=MappingProxyType({**several, "smoke": (*few, ("delays_ms", (0.5,)))}),
        words="Medians of alternating turns. Delayed messages wait in a process of the lab.",
        time="smoke: 30 s; else 20 minutes, alone on the machine",
    )


def _several(streams: str) -> tuple[str, ...]:
    return ("--methods", "spardl,none", "--streams", streams, "--rounds", "5", "--settle", "2")


# Each case keeps a model, its gradient and a residual per worker: six cases per method do not fit into 24 GB.
STREAMS = _streamed(
    "settings.streams",
    "resnet50",
    "after_backward,wfbp:bucket_mb=16",
    *("--compute", "0.3", "--steps", "1", *_several("1,4")),
)
STREAMS_SMALL = _streamed(
    "settings.streams_small",
    "resnet20",
    "after_backward,wfbp:bucket_mb=0.12",
    *("--compute", "0.1", "--steps", "2", *_several("1,2,4")),
)
