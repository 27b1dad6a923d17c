"""Predictions of LayerFusion and other partitions of layers by the timeline model, with several compressors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts import bench_schedules, choices
from scripts.exhibits.kinds.predictions import Files, by_network
from spardl.clusters.network import PRESETS
from spardl.diagnostics.timeline import model as schedules
from spardl.diagnostics.timeline.model import in_backward
from spardl.schedules.fusion import Linear

__all__ = ["PARTITIONS", "fusion", "scaling"]

WORKERS = 16
METHODS = (*bench_schedules.FUSED, "none")
ALONE, BETTER = "alone / fused", "best other / fused"
BUCKETS = f"{schedules.BUCKET_MB:g} MB buckets"
PARTITIONS = ("every layer alone", BUCKETS, "whole model", "LayerFusion")


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

    def rows(network: str) -> dict[str, list[float]]:
        return {
            f"{model}, {method}": [*others, fused, others[0] / fused, min(others) / fused]
            for (model, method), (*others, fused, _) in _seconds(models, network, measured).items()
        }

    columns = ("model, method", *PARTITIONS, ALONE, BETTER)
    return by_network(f"Seconds of an iteration, {WORKERS} workers", columns, rows)


def scaling(models: Sequence[str], measured: Files = ()) -> dict[str, Any]:
    """Share of the ideal speed that 16 workers reach."""

    def rows(network: str) -> dict[str, list[float]]:
        return {
            f"{model}, {method}": [alone / seconds for seconds in partitions]
            for (model, method), (*partitions, alone) in _seconds(models, network, measured).items()
        }

    return by_network(f"Scaling efficiency at {WORKERS} workers", ("model, method", *PARTITIONS), rows)
