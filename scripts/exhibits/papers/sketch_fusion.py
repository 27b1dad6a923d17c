"""Sketch-Fusion SGD with LayerFusion (Dai et al., JPDC 185, 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from scripts import bench_schedules, choices
from scripts.exhibits.base import Basis
from scripts.exhibits.charts.sheets import Dots
from scripts.exhibits.kinds.predictions import Computed, sheet
from scripts.exhibits.kinds.trainings import MethodComparison, Plan
from scripts.exhibits.papers import labs
from scripts.exhibits.papers.real import FLOOR, RIVALS, long_digits, only, with_evening
from scripts.exhibits.papers.small import ONE_SEED, PICTURES, SEEDS, SMALL, TINY, VIRTUAL, as_published
from spardl.clusters.network import PRESETS
from spardl.diagnostics.timeline import model as schedules
from spardl.diagnostics.timeline.model import in_backward
from spardl.schedules.fusion import Linear

__all__ = ["EXHIBITS", "fusion", "scaling"]

MODELS = tuple(bench_schedules.ASSUMED)
WORKERS = 16
METHODS = (*bench_schedules.FUSED, "none")
ALONE, BETTER = "alone / fused", "best other / fused"
BUCKETS = f"{schedules.BUCKET_MB:g} MB buckets"
PARTITIONS = ("every layer alone", BUCKETS, "whole model", "LayerFusion")
# Model, file and digest of each --profile.
Files: TypeAlias = Sequence[tuple[str, str, str]]
PARAMETERS = bench_schedules.sizes()
BASIS = Basis(
    simulated="iterations: the timeline model overlaps the passes of a profile with counted bytes on a "
    "modelled network",
    measured="share of each layer, on a CPU (scripts/profiles)",
    assumed="time of each model and each compressor on an RTX 2080 Ti, and the networks",
)


def _seconds(models: Sequence[str], network: str, measured: Files) -> dict[tuple[str, str], list[float]]:
    """Seconds of an iteration by model and method for each partition, and without communication."""
    profiles = bench_schedules.assumed_gpu(models, measured).profiles
    lines = bench_schedules.assumed_compression(WORKERS)
    found = {}
    for method in METHODS:
        with choices.composing():
            made = choices.build(method, "warmup.steps=0")
        compressing = lines.get(method, Linear(0.0, 0.0))
        cost = schedules.MethodCosts.of(made, WORKERS, PRESETS[network], compressing).whole
        for model, profile in profiles.items():
            cuts = (
                schedules.groups_by_size(0, profile, cost),
                schedules.groups_by_size(schedules.BUCKET_MB, profile, cost),
                schedules.groups_by_size(float("inf"), profile, cost),
                schedules.fused(profile, cost),
            )
            alone = profile.forward + profile.backward + profile.update * sum(profile.entries)
            found[model, method] = [*(in_backward(profile, groups, cost).seconds for groups in cuts), alone]
    return found


def fusion(models: Sequence[str], measured: Files = ()) -> dict[str, Any]:
    """Seconds of an iteration by layer, with buckets, with one group for the model, and with LayerFusion."""
    sheets = []
    for network in bench_schedules.NETWORKS:
        rows = {
            f"{model}, {method}": [*others, fused, others[0] / fused, min(others) / fused]
            for (model, method), (*others, fused, _) in _seconds(models, network, measured).items()
        }
        columns = ("model, method", *PARTITIONS, ALONE, BETTER)
        sheets.append(sheet(f"Seconds of an iteration, {WORKERS} workers, {network}", columns, rows))
    return {"sheets": sheets}


def scaling(models: Sequence[str], measured: Files = ()) -> dict[str, Any]:
    """Share of the ideal speed that 16 workers reach."""
    sheets = []
    for network in bench_schedules.NETWORKS:
        rows = {
            f"{model}, {method}": [alone / seconds for seconds in partitions]
            for (model, method), (*partitions, alone) in _seconds(models, network, measured).items()
        }
        sheets.append(
            sheet(f"Scaling efficiency at {WORKERS} workers, {network}", ("model, method", *PARTITIONS), rows)
        )
    return {"sheets": sheets}


SCALES = MappingProxyType(
    {"smoke": (("models", MODELS[:1]),), "laptop": (("models", MODELS),), "paper": (("models", MODELS),)}
)
FUSION = Computed(
    name="sketch_fusion.fusion",
    title="Layer-wise against fused",
    source="LayerFusion with several compressors; up to 18.6% better efficiency and 2.87x scaling (abstract: certain)",
    shows="time that fusing layers saves, for each compressor",
    basis=BASIS,
    function=fusion,
    sizes=PARAMETERS,
    compresses=True,
    arguments=SCALES,
    shell="python scripts/bench_schedules.py",
    words="Predicted seconds of an iteration; groups are sent during the backward pass.",
    charts=(
        Dots("seconds of an iteration", ", by model", columns=PARTITIONS),
        Dots("times as fast", ": others' over those of fused groups", columns=(ALONE, BETTER), ratio=True),
    ),
    recipe=2,
)
SCALING = Computed(
    name="sketch_fusion.scaling",
    title="Scaling efficiency at 16 workers",
    source="scaling efficiency on 16 GPUs (numbers unknown)",
    shows="scaling efficiency of each partition at 16 workers",
    basis=BASIS,
    function=scaling,
    sizes=PARAMETERS,
    compresses=True,
    arguments=SCALES,
    shell="python scripts/timeline.py scripts/profiles/MODEL.json --workers 16 --network NETWORK",
    words="An iteration of one worker without communication, over one of 16 workers.",
    charts=(Dots("efficiency", ", by model"),),
    recipe=2,
)
SKETCHES = MappingProxyType(
    {
        "dense": ("compressor=none",),
        "sketch of the model": ("compressor=sketch_fusion",),
        "sketches of groups": ("compressor=sketch_fusion", "schedule=layer_fusion"),
        "sketches of layers": ("compressor=sketch_fusion", "schedule=wfbp", "schedule.bucket_mb=0"),
    }
)
ACCURACY = MethodComparison(
    name="sketch_fusion.accuracy",
    title="Accuracy with sketches",
    source="no loss of accuracy (abstract: certain; numbers unknown)",
    proposed=("sketch of the model", "sketches of groups", "sketches of layers"),
    leads=True,
    shows="metric with sketches of layers, of groups and of the whole model",
    basis=VIRTUAL,
    methods=MappingProxyType({**SKETCHES, FLOOR: RIVALS[FLOOR]}),
    plans=with_evening(
        only(
            SKETCHES,
            {
                "smoke": Plan((PICTURES,), TINY, ONE_SEED, "seconds each"),
                "laptop": Plan(
                    (PICTURES,), (*SMALL, "cluster.workers=16", "training.epochs=12"), SEEDS, "about 10 minutes"
                ),
                "paper": as_published("sketch_fusion/resnet20_cifar10"),
            },
        ),
        (*SKETCHES, FLOOR),
        (long_digits(1000),),
    ),
)

EXHIBITS = (FUSION, SCALING, labs.LAYER_FUSION, labs.LAYER_FUSION_SMALL, ACCURACY)
