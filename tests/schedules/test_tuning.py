"""Bayesian tuning: quality of the search, and resuming without a difference."""

from __future__ import annotations

import importlib
import json
import logging
import math
import random
import warnings
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.clusters.network import PRESETS
from spardl.clusters.profile import Profile
from spardl.diagnostics.timeline.model import halves, in_halves
from spardl.schedules.fusion import by_size
from spardl.schedules.tuning import Tuner
from tests.support.harness import dense

Curve = Callable[[float], float]

LOW, HIGH, START, TRIALS = 1, 256, 25, 15
SWEEP = [LOW * (HIGH / LOW) ** (number / 100) for number in range(101)]
PROFILES = Path(__file__).resolve().parents[2] / "scripts" / "profiles"
MODELS = ["resnet50", "densenet201", "inception_v4", "bert_base", "bert_large"]


def tuned(curve: Curve, noise: float = 0.0, seed: int = 0, trials: int = TRIALS) -> Tuner:
    """A finished tuner, for times with a relative error."""
    errors = random.Random(seed)
    tuner = Tuner(LOW, HIGH, START, trials, seed)
    while not tuner.done:
        tuner.tell(curve(tuner.proposal) * math.exp(noise * errors.gauss(0, 1)))
    return tuner


def smooth(best: float, depth: float) -> Curve:
    """a / x + b * x with its minimum 1 at ``best``; ``depth`` is the share that depends on the size."""
    return lambda size: 1 - depth + depth * (best / size + size / best) / 2


def stepped(best: float, depth: float) -> Curve:
    """The same with jumps, as where another layer fits into a group."""
    return lambda size: smooth(best, depth)(size) + 0.03 * (int(6 * math.log2(size)) % 2)


def nearness(curve: Curve, tuner: Tuner) -> float:
    """Best time of an exhaustive sweep divided by the time of the tuner's choice."""
    return min(map(curve, SWEEP)) / curve(tuner.best)


# Every pair of a curve's minimum, its shape, the noise and a seed.
CURVES = [
    ((smooth, stepped)[(place + seed + 1) % 2], *minimum, (0.0, 0.02)[(place + (seed + 1) // 2) % 2], seed)
    for (place, minimum), seed in product(enumerate([(1, 0.3), (3, 0.5), (15, 0.7), (40, 0.9), (256, 0.5)]), (0, 1, 2))
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "best", "depth", "noise", "seed"), CURVES)
def test_comes_near_whatever_the_seed(
    shape: Callable[[float, float], Curve], best: float, depth: float, noise: float, seed: int
) -> None:
    curve = shape(best, depth)
    assert nearness(curve, tuned(curve, noise, seed)) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("model", "preset"), [*zip(MODELS, cycle(["ethernet_10g", "infiniband_100g"]), strict=False)])
def test_comes_near_the_best_of_a_sweep_on_the_timeline_model(model: str, preset: str) -> None:
    """DeAR at P = 64; the passes take 0.3 s as on the paper's GPUs, so that the network matters."""
    profile = Profile.read(PROFILES / f"{model}.json").scaled(0.3)
    first, second = halves(dense(), 64, PRESETS[preset], lambda entries: 0.0)

    def seconds(megabytes: float) -> float:
        return in_halves(profile, by_size(profile.entries, megabytes * 1e6 / 4), first, second).seconds

    assert nearness(seconds, tuned(seconds)) >= 0.95


@pytest.mark.slow
def test_the_model_is_what_finds_it() -> None:
    """The last five proposals lie where a smooth curve is flat, unlike random points."""
    points = tuned(smooth(7, 0.9)).state_dict()["points"]
    assert points[0] == START
    assert all(LOW <= point <= HIGH for point in points)
    assert all(smooth(7, 0.9)(point) < 1.05 for point in points[-5:])


@pytest.fixture(scope="module")
def unbroken() -> Tuner:
    """An uninterrupted tuner with 6 trials."""
    return tuned(stepped(9, 0.5), seed=3, trials=6)


@pytest.mark.parametrize("measured", [0, 1, 4, 6])
def test_a_tuner_that_was_saved_goes_on_as_if_it_had_not_been(measured: int, unbroken: Tuner) -> None:
    first = Tuner(LOW, HIGH, START, 6, 3)
    for _ in range(measured):
        first.tell(stepped(9, 0.5)(first.proposal))
    second = Tuner(LOW, HIGH, START, 6, 3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.proposal == first.proposal
    while not second.done:
        second.tell(stepped(9, 0.5)(second.proposal))
    assert second.state_dict() == unbroken.state_dict()
    assert second.best == unbroken.best


def test_the_seed_has_a_say() -> None:
    one, other = (tuned(smooth(9, 0.5), seed=seed, trials=4).state_dict()["points"] for seed in (0, 1))
    assert one != other


def test_the_state_is_a_copy() -> None:
    tuner = Tuner(LOW, HIGH, START, 3, 0)
    before = tuner.state_dict()
    tuner.tell(1.0)
    assert before == {"points": [25.0], "seconds": []}
    other = Tuner(LOW, HIGH, START, 3, 0)
    state = tuner.state_dict()
    other.load_state_dict(state)
    other.tell(1.0)
    assert state == tuner.state_dict()


def test_more_trials_after_a_break() -> None:
    short, long = Tuner(LOW, HIGH, START, 2, 0), Tuner(LOW, HIGH, START, 3, 0)
    for tuner in (short, long):
        tuner.tell(2.0)
        tuner.tell(1.0)
    assert short.done
    resumed = Tuner(LOW, HIGH, START, 3, 0)
    resumed.load_state_dict(short.state_dict())
    assert not resumed.done
    assert resumed.proposal == long.proposal


def test_the_best_is_the_earliest_with_the_least_time() -> None:
    tuner = Tuner(LOW, HIGH, START, 4, 0)
    assert tuner.best == START
    for seconds in (3.0, 1.0, 1.0, 2.0):
        assert not tuner.done
        tuner.tell(seconds)
    assert tuner.done
    points = tuner.state_dict()["points"]
    assert len(points) == 4
    assert tuner.best == tuner.proposal == points[1]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0 and finite"):
        Tuner(LOW, HIGH, START, 1, 0).tell(seconds)


def test_no_measurement_after_the_end() -> None:
    tuner = Tuner(LOW, HIGH, START, 1, 0)
    tuner.tell(1.0)
    with pytest.raises(ValueError, match="done"):
        tuner.tell(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": 0}, "numbers above 0"),
        ({"high": math.inf}, "numbers above 0"),
        ({"start": "25"}, "numbers above 0"),
        ({"start": math.nan}, "numbers above 0"),
        ({"low": 256, "start": 256}, "low must be below high"),
        ({"start": 257}, "start from low to high"),
        ({"trials": 0}, "tuner.trials must be an integer, at least 1"),
        ({"trials": 1.5}, "tuner.trials must be"),
        ({"seed": -1}, "tuner.seed must be"),
    ],
)
def test_settings_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"low": LOW, "high": HIGH, "start": START, "trials": TRIALS, "seed": 0}
    with pytest.raises(ConfigError, match=message):
        Tuner(**{**settings, **change})


def test_bounds_that_a_resume_changed() -> None:
    tuner = Tuner(LOW, 20, 10, TRIALS, 0)
    with pytest.raises(ConfigError, match=r"outside \[1, 20\]"):
        tuner.load_state_dict(Tuner(LOW, HIGH, START, TRIALS, 0).state_dict())


@pytest.mark.parametrize("missing", ["optuna", "scipy"])
def test_what_is_not_installed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module

    def absent(name: str) -> object:
        if name == missing:
            raise ImportError(f"No module named {name!r}")
        return load(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=rf"{missing}.*pip install optuna scipy") as caught:
        Tuner(LOW, HIGH, START, TRIALS, 0)
    assert "\n" not in str(caught.value)


def test_optuna_keeps_quiet_and_its_settings(capfd: pytest.CaptureFixture[str]) -> None:
    from optuna import logging as notes

    notes.set_verbosity(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuner = Tuner(LOW, HIGH, START, 4, 0)
        while not tuner.done:
            tuner.tell(1.0)
    assert not caught
    assert capfd.readouterr() == ("", "")
    assert notes.get_verbosity() == logging.INFO


def test_the_random_numbers_of_training_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    tuned(smooth(5, 0.5), trials=4)
    assert states() == before
