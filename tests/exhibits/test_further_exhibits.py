"""Exhibits of settings, contrasts and counts, of schedules without fusion and of many teams."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import Any

import pytest

from scripts import choices
from scripts.exhibits import jobs
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.claims import figures as claims
from scripts.exhibits.kinds import counts, schedules
from scripts.exhibits.kinds.trainings import LEFT_OUT
from scripts.pages.methods import documented
from tests.support import shown
from trainer.build import build_dataset, build_plan


def test_without_fusion_the_halves_start_as_many_messages() -> None:
    """Buckets are tuned as groups are, so the best other schedule is one that was tuned."""
    (made, _) = schedules.no_fusion(("resnet50",))["sheets"]
    gains = ["WFBP / DeAR, per layer", "per layer / tuned"]
    assert made["columns"] == ["model", "WFBP (per layer)", "DeAR per layer", "DeAR tuned", *gains]
    ((model, whole, halves, tuned, gain, fusion),) = made["rows"]
    assert model == "resnet50"
    assert gain == whole / halves
    assert fusion == min(whole, halves) / tuned > 1  # on 10 GbE, 161 messages start too often
    (table, _) = schedules.speed(("resnet50",))["sheets"]
    columns = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert (columns["WFBP (per layer)"], columns["DeAR tuned"]) == (whole, tuned)
    assert columns["buckets tuned"] <= columns["DDP-like 25 MB"]
    assert columns["best other / tuned"] == min(columns[name] for name in schedules.OTHERS) / columns["DeAR tuned"]


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_teams_divide_the_workers(scale: str) -> None:
    exhibit = catalogue()["spardl.many_teams"]
    plan = exhibit.plans[scale]
    with choices.composing():
        configs = {name: exhibit.job(plan, plan.cases[0], name, 1).config for name in exhibit.methods}
    assert {config["cluster"]["workers"] for config in configs.values()} == {16}
    teams = [config["communicator"]["teams"] for name, config in configs.items() if name.startswith("R-SAG")]
    assert teams == [2, 4, 8, 16]


WARM_UP, WIRE = (catalogue()[f"settings.{name}"] for name in ("warm_up", "wire"))
BASE = ("recipe=published", "compressor=spardl", "cluster.workers=4", "seed=1")


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("exhibit", "place", "row", "words"),
    [
        (WARM_UP, 0, "no warm-up", ("compressor.density=0.001", "warmup.steps=0")),
        (WARM_UP, 0, "density falls, a tenth of the steps", ("compressor.density=0.001", "compressor.warmup_steps=66")),
        (WARM_UP, 0, "dense, a tenth of the steps", ("compressor.density=0.001", "warmup.steps=66")),
        (WARM_UP, 0, "dense, a third", ("compressor.density=0.001", "warmup.steps=220")),
        (WARM_UP, 1, "dense, a third", ("cluster.workers=8", "warmup.steps=110")),
        (WIRE, 0, "wire=exact", ()),
        (WIRE, 0, "wire=int4", ("wire=int4",)),
    ],
)
def test_trainings_are_those_of_the_page(exhibit: Any, place: int, row: str, words: tuple[str, ...]) -> None:
    plan = exhibit.plans["laptop"]
    assert exhibit.job(plan, plan.cases[place], row, 1).id == jobs.Training((*BASE, *words)).id


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("exhibit", [WARM_UP, WIRE], ids=lambda exhibit: exhibit.name)
def test_every_training_is_valid(exhibit: Any) -> None:
    for job in exhibit.jobs("laptop"):
        if "seed=1" in job.words:
            build_plan(job.config, build_dataset(job.config)).check(job.workers)


def test_every_method_on_the_page_has_a_row_or_is_left_out() -> None:
    """A method of one's own, which is on no page, asks for no training."""
    rows = [*catalogue()["settings.methods"].methods]
    assert rows[:2] == ["none", "alone"]
    assert {*rows, *LEFT_OUT} - {"alone"} == {*documented()}
    assert not {*rows[1:]} & LEFT_OUT


RESIDUALS_WHY: Any = catalogue()["spardl.residuals_why"]
REAL_DATA_WHY: Any = catalogue()["spardl.real_data_why"]
ROW = "share per block, momentum 0.9"


def contrast(ours: list[float], theirs: list[float], row: str = ROW, exhibit: Any = RESIDUALS_WHY) -> list[str]:
    """A row of the table of an evening, with the metrics of GRES and LRES by seed; others were not run."""
    metrics, found = {f"GRES, {ROW}": ours, f"LRES, {ROW}": theirs}, {}
    for job in exhibit.jobs("evening"):
        values = metrics.get(job.labels.job_type, [])
        seed = int(job.words[-1].removeprefix("seed="))
        if seed <= len(values):
            sizes = {"cluster_seconds": 1.0, "step_bytes": 1.0, "step_bytes_dense": 100.0}
            found[job] = {"metric": "accuracy", "final": {"accuracy": values[seed - 1]}, **sizes}
    _, table = exhibit.tables("evening", shown.results(found))
    return list(shown.texts(table, row).values())


LOWER = replace(
    RESIDUALS_WHY,
    plans={
        scale: replace(plan, cases=tuple(replace(case, lower=True) for case in plan.cases))
        for scale, plan in RESIDUALS_WHY.plans.items()
    },
)


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([0.91, 0.95, 0.93], f"GRES, {ROW} is better"),
        ([0.85, 0.89, 0.87], f"LRES, {ROW} is better"),
        ([0.95, 0.89, 0.90], "no difference beyond the seeds'"),
    ],
)
def test_who_is_better(ours: list[float], says: str) -> None:
    theirs = [0.88, 0.92, 0.90]
    assert contrast(ours, theirs)[2] == says
    assert contrast(ours, theirs, "whole vector, no momentum") == ["not run yet"] * 3


def test_equal_seeds_are_compared() -> None:
    """Accuracies spread over 0.2, their differences not at all; two seeds say nothing."""
    figures = [0.71, 0.81, 0.91], [0.7, 0.8, 0.9]
    assert contrast(*figures) == ["+0.0100", "+0.0100 to +0.0100", f"GRES, {ROW} is better"]
    assert contrast(*figures, exhibit=LOWER)[2] == f"LRES, {ROW} is better"
    assert contrast([0.91, 0.92], [0.1, 0.1, 0.1])[1:] == ["none of 2 seeds", "too few seeds to say"]


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


@pytest.mark.parametrize("workers", [4, 8])
def test_the_path_through_a_tree_is_longer_than_its_mean(workers: int) -> None:
    """4k log2 P words one after the other, where a worker sends 4k(P-1)/P on average."""
    (kind,) = counts.count_costs("gtopk", (), workers)["kinds"]
    assert kind["path"][0] / kind["k"] == pytest.approx(4 * log2(workers), rel=0.02)
    assert kind["words"][0] / kind["k"] == pytest.approx(4 * (workers - 1) / workers, rel=0.02)
    (alike,) = counts.count_costs("spardl", (), workers)["kinds"]
    assert alike["path"] == alike["words"]


def test_words_over_a_cycle_by_hand() -> None:
    exhibit = catalogue()["oktopk.volume"]
    both = {"k": 10.0, "rounds": [2, 2], "bounds": [0, 100], "within": True}
    costs = ((0.25, 80.0), (0.75, 40.0))
    kinds = [{"share": share, "words": [words] * 2, "path": [2 * words] * 2, **both} for share, words in costs]
    results = shown.results({key: {"kinds": kinds} for key in exhibit.jobs("smoke")})
    assert counts.amortized(kinds) == 5.0
    cell = exhibit.tables("smoke", results)[0].rows[0].cells[0].text
    assert cell == "2 rounds, 8 k [0..10 k], path 16 k; 2 rounds, 4 k [0..10 k], path 8 k; over a cycle 5 k"
    figures = claims.volume(exhibit, "smoke", results)
    assert [figure.values for figure in figures] == [(4.0,), (5.0,)] * 2
    assert [figure.remark for figure in figures] == ["", "steps that evaluate thresholds: 8k"] * 2


def test_spardl_selects_as_many_blocks_as_there_are_workers() -> None:
    """Half a millisecond, and 39 microseconds a block; of 64 blocks it is 3 ms."""
    lines = schedules.gpu.assumed_compression
    assert lines(64)["spardl"].fixed == pytest.approx(3e-3)
    assert lines(16)["spardl"].fixed == pytest.approx(0.5e-3 + 16 * 2.5e-3 / 64)
    assert lines(16)["topka"] == lines(64)["topka"]


@pytest.mark.slow
def test_what_fusion_gains_where_launches_are_those_of_16_blocks() -> None:
    found = schedules._seconds(("densenet201",), "ethernet_10g")["densenet201", "spardl"]
    layers, buckets, _, fused, _ = found
    assert layers / fused == pytest.approx(2.455, abs=1e-3)
    assert buckets / fused == pytest.approx(1.0, abs=0.01)
