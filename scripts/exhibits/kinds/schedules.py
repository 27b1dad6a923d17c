"""Predictions of DeAR, LayerFusion and other schedules by the timeline model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import mean
from types import MappingProxyType
from typing import Any

from scripts import choices
from scripts.exhibits.kinds import gpu
from scripts.exhibits.kinds.predictions import by_network, sheet
from spardl.clusters.network import PRESETS
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline import model as schedules
from spardl.diagnostics.timeline.model import Lane, Timeline, in_backward
from spardl.schedules.fusion import Linear
from spardl.schedules.tuning import Tuner

OTHERS = ("WFBP (per layer)", "DDP-like 25 MB", "buckets tuned", "MG-WFBP")
ALONE = ("WFBP (per layer)", "DeAR per layer", "DeAR tuned")
DENSE = (*OTHERS, "DeAR 25 MB", "DeAR tuned")
HALVES, FUSED = "WFBP / DeAR, per layer", "per layer / tuned"
OVER_BEST, OVER_LAYERS = "best other / tuned", "WFBP / tuned"
LOW_MB, HIGH_MB, START_MB = 1.0, 256.0, 25.0
TRIALS = (5, 10, 20)


def _costs(workers: int, network: str) -> schedules.MethodCosts:
    with choices.composing():
        method = choices.build("none", "warmup.steps=0")
    return schedules.MethodCosts.of(method, workers, PRESETS[network], gpu.NOTHING)


def _tuned(profile: Profile, costs: schedules.MethodCosts) -> Timeline:
    """Buckets during the backward pass, with the best of the bucket sizes that DeAR can use."""
    sizes = (partial(schedules.groups_by_size, size) for size in schedules.SWEPT_MB)
    return min((schedules.overlapping_backward(cut, profile, costs) for cut in sizes), key=lambda found: found.seconds)


SCHEDULES: Mapping[str, schedules.Predict] = MappingProxyType(
    {
        "WFBP (per layer)": schedules.SCHEDULES["per_layer"],
        "DDP-like 25 MB": schedules.SCHEDULES["wfbp"],
        "buckets tuned": _tuned,
        "MG-WFBP": schedules.SCHEDULES["mg_wfbp"],
        "DeAR per layer": schedules.SCHEDULES["dear_per_layer"],
        "DeAR 25 MB": schedules.SCHEDULES["dear"],
        "DeAR tuned": schedules.SCHEDULES["dear_tuned"],
    }
)


def _predict(column: str, profile: Profile, costs: schedules.MethodCosts) -> Timeline:
    found = SCHEDULES[column](profile, costs)
    assert found is not None  # the dense all-reduce has halves
    return found


def speed(models: Sequence[str]) -> dict[str, Any]:
    """Seconds of an iteration with 64 workers, and the speedup of DeAR over the best other schedule."""
    profiles = gpu.assumed_gpu(models)

    def rows(network: str) -> dict[str, list[float]]:
        costs, found = _costs(gpu.WORKERS, network), {}
        for model, profile in profiles.items():
            seconds = [_predict(column, profile, costs).seconds for column in DENSE]
            found[model] = [*seconds, min(seconds[: len(OTHERS)]) / seconds[-1], seconds[0] / seconds[-1]]
        return found

    return by_network("Seconds of an iteration, 64 workers", ("model", *DENSE, OVER_BEST, OVER_LAYERS), rows)


def no_fusion(models: Sequence[str]) -> dict[str, Any]:
    """Seconds of an iteration with 64 workers by layer, the gain of the halves, and fusion."""
    profiles = gpu.assumed_gpu(models)

    def rows(network: str) -> dict[str, list[float]]:
        costs, found = _costs(gpu.WORKERS, network), {}
        for model, profile in profiles.items():
            whole, halves, tuned = (_predict(column, profile, costs).seconds for column in ALONE)
            found[model] = [whole, halves, tuned, whole / halves, min(whole, halves) / tuned]
        return found

    title = "Seconds of an iteration without fusion, 64 workers"
    return by_network(title, ("model", *ALONE, HALVES, FUSED), rows)


def breakdown(models: Sequence[str]) -> dict[str, Any]:
    """Seconds of computation, communication and exposed communication in an iteration with 64 workers."""
    profiles = gpu.assumed_gpu(models)

    def rows(network: str) -> dict[str, list[float]]:
        costs, found = _costs(gpu.WORKERS, network), {}
        for (model, profile), column in product(profiles.items(), DENSE):
            step = _predict(column, profile, costs)
            computing = step.busy(Lane.COMPUTE)
            found[f"{model}, {column}"] = [computing, step.busy(Lane.NETWORK), step.seconds - computing]
        return found

    columns = ("model, schedule", "computation", "communication", "not hidden")
    return by_network("Where the seconds go, 64 workers", columns, rows)


def scaling(models: Sequence[str], workers: Sequence[int]) -> dict[str, Any]:
    """Throughput of P workers relative to P single workers, for DeAR and the best other schedule."""
    profiles = gpu.assumed_gpu(models)

    def rows(network: str) -> dict[str, list[float]]:
        costs, found = [_costs(size, network) for size in workers], {}
        for (model, profile), column in product(profiles.items(), DENSE[1:]):
            alone = sum(profile.entries) * profile.update + profile.forward + profile.backward
            found[f"{model}, {column}"] = [alone / _predict(column, profile, each).seconds for each in costs]
        return found

    return by_network("Scaling efficiency", ("model, schedule", *(f"P = {size}" for size in workers)), rows)


def tuning(models: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Share of the best speed that Bayesian optimization, random and grid search reach after some trials."""
    rows: dict[str, list[float | str]] = {}
    for network in gpu.NETWORKS:
        costs = _costs(gpu.WORKERS, network)
        for model, profile in gpu.assumed_gpu(models).items():
            curve = _curve(profile, costs)
            best = min(map(curve, _grid(101)))
            for name, search in SEARCHES.items():
                found = [mean(best / search(curve, trials, seed) for seed in seeds) for trials in TRIALS]
                rows[f"{model}, {network}, {name}"] = [min(1.0, share) for share in found]
    columns = ("model, network, search", *(f"{trials} trials" for trials in TRIALS))
    return {"sheets": [sheet("Speed of the size found over that of the best size", columns, rows)]}


Curve = Callable[[float], float]


def _curve(profile: Profile, costs: schedules.MethodCosts) -> Curve:
    """Seconds of an iteration by group size in MB."""

    def seconds(megabytes: float) -> float:
        found = schedules.overlapping_both(megabytes, profile, costs)
        assert found is not None
        return found.seconds

    return seconds


def _grid(points: int) -> list[float]:
    return [LOW_MB * (HIGH_MB / LOW_MB) ** (number / (points - 1)) for number in range(points)]


def _bayesian(curve: Curve, trials: int, seed: int) -> float:
    tuner = Tuner(LOW_MB, HIGH_MB, START_MB, trials, seed)
    while not tuner.done:
        tuner.tell(curve(tuner.proposal))
    return curve(tuner.best)


def _random(curve: Curve, trials: int, seed: int) -> float:
    source = random.Random(seed)
    return min(curve(source.uniform(LOW_MB, HIGH_MB)) for _ in range(trials))


def _regular(curve: Curve, trials: int, seed: int) -> float:
    step = (HIGH_MB - LOW_MB) / (trials - 1)
    return min(curve(LOW_MB + number * step) for number in range(trials))


SEARCHES: Mapping[str, Callable[[Curve, int, int], float]] = MappingProxyType(
    {"Bayesian": _bayesian, "random": _random, "grid": _regular}
)


WORKERS = 16
METHODS = (*gpu.FUSED, "none")
APART, BETTER = "alone / fused", "best other / fused"
BUCKETS = f"{schedules.BUCKET_MB:g} MB buckets"
PARTITIONS = ("every layer alone", BUCKETS, "whole model", "LayerFusion")


def _seconds(models: Sequence[str], network: str) -> dict[tuple[str, str], list[float]]:
    """Seconds of an iteration by model and method for each partition, and without communication."""
    profiles = gpu.assumed_gpu(models)
    lines = gpu.assumed_compression(WORKERS)
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


def fusion(models: Sequence[str]) -> dict[str, Any]:
    """Seconds of an iteration by layer, with buckets, with one group for the model, and with LayerFusion."""

    def rows(network: str) -> dict[str, list[float]]:
        return {
            f"{model}, {method}": [*others, fused, others[0] / fused, min(others) / fused]
            for (model, method), (*others, fused, _) in _seconds(models, network).items()
        }

    columns = ("model, method", *PARTITIONS, APART, BETTER)
    return by_network(f"Seconds of an iteration, {WORKERS} workers", columns, rows)


def fused_scaling(models: Sequence[str]) -> dict[str, Any]:
    """Share of the ideal speed that 16 workers reach."""

    def rows(network: str) -> dict[str, list[float]]:
        return {
            f"{model}, {method}": [alone / seconds for seconds in partitions]
            for (model, method), (*partitions, alone) in _seconds(models, network).items()
        }

    return by_network(f"Scaling efficiency at {WORKERS} workers", ("model, method", *PARTITIONS), rows)
