"""What the network lab measures: synchronizations and schedules of four workers, on links that are really slow."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from scripts.exhibits.base import Basis
from scripts.exhibits.kinds.lab import Measured, schedules, synchronizations
from scripts.exhibits.notes import OKTOPK

__all__ = ["DEAR", "SPARDL"]


def _arguments(limit: float, *words: str) -> tuple[tuple[str, Any], ...]:
    return (("workers", 4), ("gbit", 1.0), ("limit", limit), ("words", words))


def _overlap(profile: str, schedules: str, *words: str) -> tuple[str, ...]:
    return (
        "scripts/bench_overlap.py",
        "--model",
        f"profile:scripts/profiles/{profile}.json",
        "--schedules",
        schedules,
        *words,
    )


def _sync(*words: str) -> tuple[str, ...]:
    methods = "spardl,oktopk,topkdsa,topka,gtopk,none"
    return ("scripts/bench_sync.py", "--wires", "exact", "--methods", methods, *words)


def _scales(smoke: tuple[str, ...], laptop: tuple[str, ...], limit: float) -> Mapping[str, tuple[tuple[str, Any], ...]]:
    """A lab is on one machine, so the paper's scale is the laptop's."""
    whole = _arguments(limit, *laptop)
    return MappingProxyType({"smoke": _arguments(200.0, *smoke), "laptop": whole, "paper": whole})


# Rivals are given the same sizes as DeAR, and MG-WFBP's search.
TUNED = ",".join(
    (
        "after_backward",
        "mg_wfbp",
        *(f"wfbp:bucket_mb={size}" for size in (8, 25, 64)),
        *(f"dear:threshold_mb={size}" for size in (8, 25, 64)),
    )
)
FOUR = "links shaped to 1 Gbit/s between four processes on one machine, whose cores they share"
DEAR = Measured(
    name="dear.lab",
    title="Schedules on a real network",
    source="the comparison of schedules, on our four workers instead; up to 83% faster on 10 GbE (abstract: certain)",
    shows="whether what the timeline model predicts comes true where messages really take time",
    basis=Basis(
        simulated="nothing but the predictions beside",
        measured=f"seconds of training steps over {FOUR}; gradients, messages and updates are real",
        assumed="the passes: workers sleep for the times of a profile, scaled, as if each had a GPU",
    ),
    function=schedules,
    arguments=_scales(
        _overlap(
            "resnet20",
            "after_backward,wfbp,wfbp:bucket_mb=0.5,dear",
            "--compute",
            "0.06",
            "--rounds",
            "2",
            "--steps",
            "1",
            "--settle",
            "2",
        ),
        _overlap("resnet50", TUNED, "--compute", "1.2", "--rounds", "5", "--steps", "1", "--settle", "3"),
        900.0,
    ),
    shell="",
    words="Medians of turns that alternate; the model starts from a profile and a network measured just before.",
    time="smoke: 30 s; else 5 minutes, alone on the machine",
)
SPARDL = Measured(
    name="spardl.lab",
    title="Synchronizations on a real network",
    source="per-update time of every method, on our four workers instead; numbers unknown",
    shows="how long a synchronization really takes, its own work included, beside what counted messages say",
    basis=Basis(
        simulated="nothing but the predictions beside",
        measured=f"seconds, rounds and bytes of synchronizations over {FOUR}; the network, as rounds of messages",
        assumed="gradients: a part that all workers share, and noise",
    ),
    function=synchronizations,
    arguments=_scales(
        _sync("--entries", "100000", "--settle", "3", "--repetitions", "2"),
        _sync("--entries", "14700000", "--settle", "20", "--repetitions", "9"),
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
