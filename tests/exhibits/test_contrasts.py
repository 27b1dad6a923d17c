"""Trainings compared pair by pair: equal seeds are compared, and none is better within the seeds' spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits.base import Results
from scripts.exhibits.jobs import Outcome
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.tables import Table

RESIDUALS_WHY: Any = catalogue()["spardl.residuals_why"]
REAL_DATA_WHY: Any = catalogue()["spardl.real_data_why"]
ROW = "share per block, momentum 0.9"


def _results(metrics: dict[str, list[float]], folder: Path) -> Results:
    """Outcomes of an evening: a list of a method's metrics, by seed; others were not run."""
    found = {}
    for job in RESIDUALS_WHY.jobs("evening"):
        values = metrics.get(job.labels.job_type if job.labels else "", [])
        seed = int(job.words[-1].removeprefix("seed="))
        if seed <= len(values):
            data = {
                "metric": "accuracy",
                "final": {"accuracy": values[seed - 1]},
                "cluster_seconds": 1.0,
                "step_bytes": 1.0,
                "step_bytes_dense": 100.0,
            }
            found[job] = Outcome(folder, data)
    return Results(folder, found)


def _table(metrics: dict[str, list[float]], folder: Path, exhibit: Any = RESIDUALS_WHY) -> Table:
    _, table = exhibit.tables("evening", _results(metrics, folder))
    return table


def _row(table: Table, name: str = ROW) -> list[str]:
    (row,) = (row for row in table.rows if row.name == name)
    return [cell.text for cell in row.cells]


@pytest.mark.parametrize(
    ("global_", "says"),
    [
        ([0.91, 0.95, 0.93], f"GRES, {ROW} is better"),
        ([0.85, 0.89, 0.87], f"LRES, {ROW} is better"),
        ([0.95, 0.89, 0.90], "no difference beyond the seeds'"),
    ],
)
def test_who_is_better(global_: list[float], says: str, tmp_path: Path) -> None:
    table = _table({f"GRES, {ROW}": global_, f"LRES, {ROW}": [0.88, 0.92, 0.90]}, tmp_path)
    assert _row(table)[2] == says
    assert _row(table, "whole vector, no momentum") == ["not run yet"] * 3


def test_equal_seeds_are_compared(tmp_path: Path) -> None:
    """Accuracies spread over 0.2, their differences not at all."""
    table = _table({f"GRES, {ROW}": [0.71, 0.81, 0.91], f"LRES, {ROW}": [0.7, 0.8, 0.9]}, tmp_path)
    assert _row(table) == ["+0.0100", "+0.0100 to +0.0100", f"GRES, {ROW} is better"]


def test_where_less_is_better(tmp_path: Path) -> None:
    plans = {
        scale: replace(plan, cases=tuple(replace(case, lower=True) for case in plan.cases))
        for scale, plan in RESIDUALS_WHY.plans.items()
    }
    metrics = {f"GRES, {ROW}": [0.71, 0.81, 0.91], f"LRES, {ROW}": [0.7, 0.8, 0.9]}
    assert _row(_table(metrics, tmp_path, replace(RESIDUALS_WHY, plans=plans)))[2] == f"LRES, {ROW} is better"


def test_two_seeds_say_nothing(tmp_path: Path) -> None:
    table = _table({f"GRES, {ROW}": [0.91, 0.92], f"LRES, {ROW}": [0.1, 0.1, 0.1]}, tmp_path)
    assert _row(table)[1:] == ["none of 2 seeds", "too few seeds to say"]


def test_pairs_differ_in_the_residual_alone() -> None:
    for one, other in RESIDUALS_WHY.pairs.values():
        first, second = (
            {word for word in RESIDUALS_WHY.methods[name] if not word.startswith("residual")} for name in (one, other)
        )
        assert first == second
        assert "residual=global" in RESIDUALS_WHY.methods[one]
        assert "residual=local" in RESIDUALS_WHY.methods[other]


def test_comparison_with_dense_meets_conditions(composing: None) -> None:
    configs = {job.labels.job_type: job.config for job in REAL_DATA_WHY.jobs("evening") if job.labels}
    for conditions, (name, other) in REAL_DATA_WHY.pairs.items():
        config = configs[name]
        sums, compressor = "of the sum" in conditions, config["compressor"]
        assert f"{compressor['density']:.0%}" == conditions.split()[0]
        assert config["communicator"]["_target_"].endswith("SparDL" if sums else "AllGather")
        assert config["recipe"] == ("recommended" if "our recipe" in conditions else "published")
        assert ("int4" in str(config.get("wire"))) == ("4 bits" in conditions)
        assert other == "dense"
    assert len(configs) == len(REAL_DATA_WHY.pairs) + 2
