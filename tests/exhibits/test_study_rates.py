"""The study with several learning rates: which points, and what is chosen how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as MatplotlibFigure

from scripts import choices
from scripts.exhibits import base, jobs
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.judging import NoEvidence
from scripts.exhibits.claims.study import random_block
from scripts.exhibits.kinds import study_points, study_rates
from scripts.exhibits.papers.catalogue import catalogue

POINTS = study_rates.plain(study_points.points())
EXHIBIT = catalogue()["study.rates"].with_seeds(3)
CASE = EXHIBIT.plans["smoke"].cases[0]
TOPK = "topk,layer,local,after,allgather"


def test_every_way_to_send_and_to_keep_is_there_once() -> None:
    pairs = [(point.sent, point.residual) for point in POINTS]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(point.sent, point.residual) for point in study_points.points()}
    assert {point.momentum for point in POINTS} == {"after"}


def test_trainings_are_long_enough_and_have_three_rates() -> None:
    plan = EXHIBIT.plans["laptop"]
    with choices.composing():
        configs = [EXHIBIT.job(plan, CASE, name, 1).config for name in EXHIBIT.methods if name.startswith(TOPK)]
    assert [config["optimizer"]["lr"] for config in configs] == [0.01, 0.04, 0.16]
    assert {config["training"]["max_steps"] for config in configs} == {960}
    assert {config["compressor"]["density"] for config in configs} == {0.1}


def outcome(value: float | None) -> Any:
    data = {
        "metric": "accuracy",
        "final": {"accuracy": value},
        "best": value,
        "step_bytes": 1.0,
        "step_bytes_dense": 4.0,
        "steps": 960,
    }
    return jobs.Outcome(Path("x"), {} if value is None else data, "diverged" if value is None else None)


def results(values: dict[str, list[float | None]]) -> base.Results:
    plan = EXHIBIT.plans["smoke"]
    found = {
        EXHIBIT.job(plan, CASE, name, seed): outcome(value)
        for name, seeds in values.items()
        for seed, value in zip(plan.seeds, seeds, strict=True)
    }
    return base.Results(Path("x"), found)


def tables(values: dict[str, list[float | None]]) -> Any:
    return EXHIBIT.tables("smoke", results(values))


VALUES: dict[str, list[float | None]] = {
    "dense, lr 0.01": [0.5, 0.5, 0.5],
    "dense, lr 0.04": [0.9, 0.9, 0.9],
    "dense, lr 0.16": [0.8, 0.8, 0.8],
    f"{TOPK}, lr 0.01": [0.8, 0.8, 0.5],
    f"{TOPK}, lr 0.04": [0.7, 0.7, 0.9],
    f"{TOPK}, lr 0.16": [None, 0.9, 0.9],
}


def test_rates_are_chosen_on_the_other_seeds_by_hand() -> None:
    rows, compressors = tables(VALUES)
    dense, topk, _ = rows.rows
    assert [cell.text for cell in dense.cells[:2]] == ["lr 0.04", "0.9 ± 0"]
    # Without the first seed 0.04 is best (0.8 to 0.65), likewise without the second; without the third 0.01 is.
    assert topk.cells[1].value == (0.7 + 0.7 + 0.5) / 3
    assert topk.cells[3].text == "lr 0.01: 0.7, lr 0.04: 0.7667, lr 0.16: failed"
    assert topk.cells[4].value is not None
    assert abs(topk.cells[4].value + 0.8 / 3) < 1e-9
    assert topk.cells[6].text == "25.00%"
    assert [row.name for row in compressors.rows] == ["dense", "topk", "random_block"]
    assert compressors.rows[1].cells[0].text == "layer,local,after,allgather, lr 0.04"


def test_the_picture_has_a_line_for_each_row_that_was_trained() -> None:
    (picture,) = EXHIBIT.pictures("smoke", results(VALUES))
    figure = MatplotlibFigure()
    picture.draw(figure)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [TOPK]
    assert list(axes.lines[0].get_xdata()) == [0.7, 0.7, 0.5]
    assert list(axes.lines[-1].get_xdata()) == pytest.approx([0.9, 0.9])
    assert not EXHIBIT.pictures("smoke", results({}))


def test_what_was_not_run_is_not_chosen_without() -> None:
    some = {name: values for name, values in VALUES.items() if name != f"{TOPK}, lr 0.04"}
    rows, _ = tables(some)
    assert any(cell.text == "not run yet" or "not run" in cell.text for cell in rows.rows[1].cells)


BLOCK = "random_block,layer,local,after,dense"
BLOCKS: dict[str, list[float | None]] = {
    "dense, lr 0.01": [0.992, 0.992, 0.96],
    "dense, lr 0.04": [0.988, 0.988, 0.992],
    "dense, lr 0.16": [None, 0.9, 0.9],
    f"{BLOCK}, lr 0.01": [0.9, 0.9, 0.8],
    f"{BLOCK}, lr 0.04": [0.8, 0.8, 0.95],
    f"{BLOCK}, lr 0.16": [None, None, None],
}


def claim(values: dict[str, list[float | None]]) -> Figure:
    with choices.composing():
        (found,) = random_block(EXHIBIT, "smoke", results(values))
    return found


def test_blocks_and_dense_use_rates_of_other_runs() -> None:
    found = claim(BLOCKS)
    # Without one of the first two seeds 0.04 is best for both, without the third 0.01 is.
    assert found.values == [0.8, 0.8, 0.8]
    assert found.against == [0.988, 0.988, 0.96]
    assert not found.hindrances


def test_no_verdict_without_a_trained_baseline() -> None:
    slow: dict[str, list[float | None]] = {"dense, lr 0.01": [0.97] * 3, "dense, lr 0.04": [0.9] * 3}
    assert "the dense baseline reached only 0.97; reference 0.985" in claim({**BLOCKS, **slow}).hindrances[0]


def test_what_failed_at_every_rate_or_was_not_run_is_no_evidence() -> None:
    nothing: dict[str, list[float | None]] = {name: [None] * 3 for name in BLOCKS if name.startswith(BLOCK)}
    with pytest.raises(NoEvidence, match="all settings failed"):
        claim({**BLOCKS, **nothing})
    some = {name: values for name, values in BLOCKS.items() if name != "dense, lr 0.01"}
    with pytest.raises(NoEvidence, match="3 of 12 required results are missing"):
        claim(some)
