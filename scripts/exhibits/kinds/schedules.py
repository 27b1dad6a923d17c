"""Predictions of DeAR and other schedules by the timeline model, with dense gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean
from types import MappingProxyType
from typing import Any, TypeAlias

from scripts import bench_schedules, choices
from scripts.exhibits.kinds.predictions import sheet
from spardl.clusters.network import PRESETS
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline import model as schedules
from spardl.diagnostics.timeline.model import Lane, Timeline
from spardl.schedules.tuning import Tuner

__all__ = ["OTHERS", "breakdown", "no_fusion", "scaling", "speed", "tuning"]

OTHERS = ("WFBP (per layer)", "DDP-like 25 MB", "buckets tuned", "MG-WFBP")
ALONE = ("WFBP (per layer)", "DeAR per layer", "DeAR tuned")
DENSE = (*OTHERS, "DeAR 25 MB", "DeAR tuned")
HALVES, FUSED = "WFBP / DeAR, per layer", "per layer / tuned"
OVER_BEST, OVER_LAYERS = "best other / tuned", "WFBP / tuned"
LOW_MB, HIGH_MB, START_MB = 1.0, 256.0, 25.0
TRIALS = (5, 10, 20)
# Model, file and digest of each --profile.
Files: TypeAlias = Sequence[tuple[str, str, str]]


def _costs(workers: int, network: str) -> schedules.MethodCosts:
    with choices.composing():
        method = choices.build("none", "warmup.steps=0")
    return schedules.MethodCosts.of(method, workers, PRESETS[network], bench_schedules.NOTHING)


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


def speed(models: Sequence[str], measured: Files = ()) -> dict[str, Any]:
    """Seconds of an iteration with 64 workers, and the speedup of DeAR over the best other schedule."""
    sheets = []
    for network in bench_schedules.NETWORKS:
        costs = _costs(bench_schedules.WORKERS, network)
        rows = {}
        for model, profile in bench_schedules.assumed_gpu(models, measured).profiles.items():
            seconds = [_predict(column, profile, costs).seconds for column in DENSE]
            rows[model] = [*seconds, min(seconds[: len(OTHERS)]) / seconds[-1], seconds[0] / seconds[-1]]
        columns = ("model", *DENSE, OVER_BEST, OVER_LAYERS)
        sheets.append(sheet(f"Seconds of an iteration, 64 workers, {network}", columns, rows))
    return {"sheets": sheets}


def no_fusion(models: Sequence[str], measured: Files = ()) -> dict[str, Any]:
    """Seconds of an iteration with 64 workers by layer, the gain of the halves, and fusion."""
    sheets = []
    for network in bench_schedules.NETWORKS:
        costs = _costs(bench_schedules.WORKERS, network)
        rows = {}
        for model, profile in bench_schedules.assumed_gpu(models, measured).profiles.items():
            whole, halves, tuned = (_predict(column, profile, costs).seconds for column in ALONE)
            rows[model] = [whole, halves, tuned, whole / halves, min(whole, halves) / tuned]
        columns = ("model", *ALONE, HALVES, FUSED)
        sheets.append(sheet(f"Seconds of an iteration without fusion, 64 workers, {network}", columns, rows))
    return {"sheets": sheets}


def breakdown(models: Sequence[str], measured: Files = ()) -> dict[str, Any]:
    """Seconds of computation, communication and exposed communication in an iteration with 64 workers."""
    sheets = []
    for network in bench_schedules.NETWORKS:
        costs = _costs(bench_schedules.WORKERS, network)
        rows = {}
        for model, profile in bench_schedules.assumed_gpu(models, measured).profiles.items():
            for column in DENSE:
                found = _predict(column, profile, costs)
                computing = found.busy(Lane.COMPUTE)
                rows[f"{model}, {column}"] = [computing, found.busy(Lane.NETWORK), found.seconds - computing]
        columns = ("model, schedule", "computation", "communication", "not hidden")
        sheets.append(sheet(f"Where the seconds go, 64 workers, {network}", columns, rows))
    return {"sheets": sheets}


def scaling(models: Sequence[str], workers: Sequence[int], measured: Files = ()) -> dict[str, Any]:
    """Throughput of P workers relative to P single workers, for DeAR and the best other schedule."""
    sheets = []
    for network in bench_schedules.NETWORKS:
        rows: dict[str, list[float | str]] = {}
        for model, profile in bench_schedules.assumed_gpu(models, measured).profiles.items():
            alone = sum(profile.entries) * profile.update + profile.forward + profile.backward
            for column in DENSE[1:]:
                found = [_predict(column, profile, _costs(size, network)).seconds for size in workers]
                rows[f"{model}, {column}"] = [alone / seconds for seconds in found]
        columns = ("model, schedule", *(f"P = {size}" for size in workers))
        sheets.append(sheet(f"Scaling efficiency, {network}", columns, rows))
    return {"sheets": sheets}


def tuning(models: Sequence[str], seeds: Sequence[int], measured: Files = ()) -> dict[str, Any]:
    """Share of the best speed that Bayesian optimization, random and grid search reach after some trials."""
    rows: dict[str, list[float | str]] = {}
    for network in bench_schedules.NETWORKS:
        costs = _costs(bench_schedules.WORKERS, network)
        for model, profile in bench_schedules.assumed_gpu(models, measured).profiles.items():
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
