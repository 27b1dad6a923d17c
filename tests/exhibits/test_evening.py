"""The scale of real length: its configurations are valid; an exhibit without one of its own has the laptop's."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from scripts.exhibits import base, jobs
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.claims.figures import too_short
from scripts.exhibits.kinds import trainings
from scripts.exhibits.kinds.watched import configuration
from trainer.build import build_dataset, build_plan

KNOWN = catalogue()


class Evening(NamedTuple):
    """What an exhibit is at that scale: trainings, workers of cases, steps at least, rows that are another's."""

    jobs: int
    workers: tuple[int, ...] = (14,)
    steps: int = 1000
    shared: int = 0


# Those with trainings of their own.
OWN = MappingProxyType(
    {
        "spardl.convergence": Evening(10 * 5),
        "oktopk.convergence": Evening(7 * 5),
        "sketch_fusion.accuracy": Evening(5 * 5),
        "spardl.real_data": Evening(7 * 6 * 3, workers=(14, 4), steps=1000),
        "spardl.real_data_why": Evening(6 * 3),
        "spardl.residuals": Evening(4 * 4 * 5, workers=(14, 8), steps=900),
        "spardl.residuals_real": Evening(4 * 3),
        "spardl.residuals_why": Evening(10 * 5, workers=(8,), steps=900),
    }
)
# Those with trainings that are watched for longer.
WATCHED = ("oktopk.thresholds", "oktopk.xi", "oktopk.balance")


def test_an_exhibit_without_an_evening_has_the_laptops() -> None:
    assert base.at("evening", {"laptop": 1, "evening": 2}) == 2
    assert base.at("evening", {"laptop": 1}) == 1
    with pytest.raises(KeyError):
        base.at("paper", {"laptop": 1})
    for name, exhibit in KNOWN.items():
        if name not in (*OWN, *WATCHED, "spardl.time_to_accuracy"):
            assert exhibit.jobs("evening") == exhibit.jobs("laptop"), name
        assert "those of the size laptop" not in exhibit.what_ran("laptop")
    assert "The trainings are those of the size laptop." in KNOWN["spardl.teams"].what_ran("evening")
    for name in (*OWN, *WATCHED, "oktopk.volume"):  # the last one trains nothing
        assert "those of the size laptop" not in KNOWN[name].what_ran("evening"), name


def test_what_is_watched_for_an_evening_is_long_enough(composing: None) -> None:
    for name in WATCHED:
        for job in KNOWN[name].jobs("evening"):
            watched = dict(job.arguments)
            assert not too_short(configuration(watched["words"]), watched["steps"])
            assert f"training.max_steps={watched['steps']}" in watched["words"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "spardl.real_data" else name for name in OWN]
)
def test_every_configuration_is_valid(name: str, composing: None) -> None:
    """Parts are built and fit together; for real data, which may not be here, stands what is generated in its shape."""
    exhibit: Any = KNOWN[name]
    evening, work, data = OWN[name], exhibit.jobs("evening"), dict[str, Any]()
    one_of_each = {job.labels.tags: job for job in exhibit.jobs("smoke")}
    twins = {job.config["dataset"]["_target_"]: job.config for job in one_of_each.values()}
    assert len(work) == evening.jobs
    first = [job for job in work if "seed=1" in job.words]
    assert len({job.id for job in first}) == len(first) - evening.shared
    for job in first:
        config = job.config
        alone = job.labels.job_type == "alone"
        assert job.workers in ((1,) if alone else evening.workers)
        assert config["training"]["max_steps"] >= evening.steps
        assert config["recipe"] == ("recommended" if "our recipe" in job.labels.job_type else "published")
        target = config["dataset"]["_target_"]
        data[target] = data.get(target) or build_dataset(twins[target])
        build_plan(config, data[target]).check(job.workers)


@pytest.mark.slow
def test_what_exhibits_share_is_one_training(composing: None) -> None:
    def jobs_of(name: str, row: str) -> set[str]:
        return {job.id for job in KNOWN[name].jobs("evening") if job.labels.job_type == row}

    for row in ("dense", "SparDL"):
        assert len(jobs_of("spardl.convergence", row)) == 5
    assert jobs_of("spardl.convergence", "SparDL") < jobs_of("spardl.residuals", "GRES")
    for name in ("spardl.residuals", "oktopk.convergence", "sketch_fusion.accuracy"):
        assert jobs_of("spardl.convergence", "dense") <= jobs_of(name, "dense"), name
    for row, found in (("GRES", "SparDL"), ("dense", "dense")):
        assert jobs_of("spardl.residuals_real", row) < jobs_of("spardl.real_data", found)
    for row in ("dense", "SparDL", "SparDL, our recipe", "alone"):
        assert jobs_of("spardl.real_data_why", row) < jobs_of("spardl.real_data", row)
    assert jobs_of("spardl.convergence", "Ok-Topk") == jobs_of("oktopk.convergence", "Ok-Topk")


def test_hours_by_hand() -> None:
    """Two tasks of 3,600 steps and 2 core seconds for 14 workers, with two seeds; one worker takes a 14th."""
    rows = {"dense": trainings.DENSE, "alone": trainings.ALONE}

    def cost(workers: int) -> str:
        words, pace = (f"cluster.workers={workers}",), trainings.Pace(3600, 2.0)
        plan = trainings.Plan(tuple(trainings.Case(name, words, "", pace=pace) for name in "XY"), (), (1, 2))
        return trainings.MethodComparison("x.y", "", "", "", rows, {"evening": plan}).cost("evening")

    assert cost(14) == "8 trainings, about 8.6 hours of a core"
    assert cost(7) == "8 trainings, about 4.6 hours of a core"


@pytest.mark.usefixtures("composing")
def test_a_plan_of_trainings_is_reported_in_hours(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker alone takes a fourteenth; what --list says is their sum."""
    monkeypatch.setattr(jobs, "_perform", lambda *_: None)
    work = KNOWN["spardl.real_data"].jobs("evening")
    expected = {job.labels.job_type: job.expected for job in work if "IMDB" in job.labels.tags[0]}
    assert expected["dense"] == pytest.approx(14 * expected["alone"])
    hours = sum(job.expected for job in work) / 3600
    assert f"126 trainings, about {hours:.1f} hours of a core" in KNOWN["spardl.real_data"].cost("evening")
    few = work[::15]
    jobs.complete(few, tmp_path, at_once=1)
    hours = sum(job.expected for job in few) / 3600
    assert capsys.readouterr().out == f"9 of 9 jobs to do: about {hours:.1f} hours of a core\n"
