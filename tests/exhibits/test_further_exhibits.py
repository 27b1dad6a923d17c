"""Exhibits of settings, contrasts, benchmarks and counts, of schedules without fusion and of many teams."""

from __future__ import annotations

import shlex
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import pytest

from scripts import choices
from scripts.exhibits import base, jobs, working
from scripts.exhibits.base import Results
from scripts.exhibits.claims import oktopk as claims
from scripts.exhibits.jobs import Outcome
from scripts.exhibits.kinds import counts, lab, schedules
from scripts.exhibits.kinds.trainings import LEFT_OUT
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.tables import Table
from scripts.pages.methods import documented
from spardl.basics.errors import TrainingError
from trainer.build import build_dataset, build_plan


def test_without_fusion_the_halves_start_as_many_messages() -> None:
    (made, _) = schedules.no_fusion(("resnet50",))["sheets"]
    assert made["columns"] == [
        "model",
        "WFBP (per layer)",
        "DeAR per layer",
        "DeAR tuned",
        "WFBP / DeAR, per layer",
        "per layer / tuned",
    ]
    ((model, whole, halves, tuned, gain, fusion),) = made["rows"]
    assert model == "resnet50"
    assert gain == whole / halves
    assert fusion == min(whole, halves) / tuned > 1  # on 10 GbE, 161 messages start too often
    (table, _) = schedules.speed(("resnet50",))["sheets"]
    columns = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert (columns["WFBP (per layer)"], columns["DeAR tuned"]) == (whole, tuned)


def test_buckets_are_tuned_as_groups_are() -> None:
    """So no bucket size that is tried beats them, and the best other schedule is one that was tuned."""
    (table, _) = schedules.speed(("resnet50",))["sheets"]
    columns = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert columns["buckets tuned"] <= columns["DDP-like 25 MB"]
    best = min(columns[name] for name in schedules.OTHERS)
    assert columns["best other / tuned"] == best / columns["DeAR tuned"]


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


def trained(exhibit: Any, row: str, place: int = 0) -> str:
    """The id of a training with seed 1."""
    plan = exhibit.plans["laptop"]
    return str(exhibit.job(plan, plan.cases[place], row, 1).id)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("no warm-up", ("warmup.steps=0",)),
        ("density falls, a tenth of the steps", ("compressor.warmup_steps=66",)),
        ("dense, a tenth of the steps", ("warmup.steps=66",)),
        ("dense, a third", ("warmup.steps=220",)),
    ],
)
def test_warm_ups_of_four_workers_are_those_of_the_page(row: str, words: tuple[str, ...]) -> None:
    assert trained(WARM_UP, row) == jobs.Training((*BASE, "compressor.density=0.001", *words)).id


@pytest.mark.usefixtures("composing")
def test_warm_ups_of_eight_are_as_long_a_share() -> None:
    words = ("recipe=published", "compressor=spardl", "cluster.workers=8", "seed=1", "warmup.steps=33")
    assert trained(WARM_UP, "dense, a tenth of the steps", 1) == jobs.Training(words).id
    assert trained(WARM_UP, "dense, a third", 1) == jobs.Training((*words, "warmup.steps=110")).id


@pytest.mark.usefixtures("composing")
def test_wires_are_those_of_the_page() -> None:
    for name in ("exact", "bfloat16", "int4"):
        assert trained(WIRE, f"wire={name}") == jobs.Training((*BASE, f"wire={name}")).id
    assert trained(WIRE, "wire=exact") == jobs.Training(BASE).id


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


BENCHES = [catalogue()["settings.selection"], catalogue()["settings.loopback"], catalogue()["settings.simulated"]]
BENCH = """
import json, os, sys
rank = int(os.environ.get("RANK", 0))
file = next(word.removeprefix("--json=") for word in sys.argv if word.startswith("--json="))
if "fails" in sys.argv:
    print("error: no such method", file=sys.stderr)
if {"fails", "dies"} & {*sys.argv}:
    sys.exit(3)
if rank == 0:
    times = {"floor": [0.001, 0.003, 0.002], "ours": [0.005, 0.01, 0.004]}
    asked = {*times} - {*sys.argv}
    rows = [{"name": name, "seconds": times[name], "exact": "True"} for name in sorted(asked)]
    words = [word for word in sys.argv[1:-1] if word not in times]
    title = " ".join([*words, os.environ.get("WORLD_SIZE", "alone")])
    open(file, "w").write(json.dumps({"cases": {title: rows}}))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "bench.py"
    path.write_text(BENCH)
    return str(path)


def test_each_run_has_its_tables(script: str) -> None:
    first, second = lab.timed(script, (("a", "b"), ("c",)), "floor", 0)["sheets"]
    assert (first["title"], second["title"]) == ("a b alone", "c alone")
    assert first["columns"] == ["what", "median ms", "least", "most", "x floor"]
    floor, ours = first["rows"]
    assert floor == ["floor", 2.0, 1.0, 3.0, 1.0]
    assert ours == ["ours", 5.0, 4.0, 10.0, 2.5]


def test_rows_with_equal_title_share_a_table(script: str) -> None:
    (made,) = lab.timed(script, (("a", "ours"), ("a", "floor")), "floor", 0)["sheets"]
    assert [row[0] for row in made["rows"]] == ["floor", "ours"]
    assert made["rows"][1][-1] == 2.5


def test_what_a_bench_knows_beside_is_shown(script: str) -> None:
    (made,) = lab.timed(script, (("a",),), "floor", 0, ("exact",))["sheets"]
    assert made["columns"][-2:] == ["x floor", "exact"]
    assert made["rows"][1] == ["ours", 5.0, 4.0, 10.0, 2.5, "True"]


def test_torchrun_starts_several(script: str) -> None:
    (made,) = lab.timed(script, (("a",),), "floor", 2)["sheets"]
    assert made["title"] == "a 2"


@pytest.mark.parametrize(
    ("word", "reason"), [("fails", "^no such method$"), ("dies", r"bench\.py ended with exit code 3$")]
)
def test_a_bench_that_fails_says_why(script: str, word: str, reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        lab.timed(script, ((word,),), "floor", 0)


def test_a_bench_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.py"
    path.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(lab, "TIMEOUT", 0.5)
    with pytest.raises(TrainingError, match=r"bench\.py did not end within 0\.5 s"):
        lab.timed(str(path), ((),), "floor", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exhibit", "ours"),
    [pytest.param(*pair, id=pair[0].name) for pair in zip(BENCHES, ("spardl", "spardl", "32 workers"), strict=True)],
)
def test_small_benches_run_alone_and_have_a_floor(exhibit: Any, ours: str, tmp_path: Path) -> None:
    job = exhibit.job("smoke")
    given = dict(job.arguments)
    assert job.alone
    assert exhibit.job("laptop").id == exhibit.job("paper").id != job.id
    working.complete([job], tmp_path, at_once=1)
    (table,) = exhibit.tables("smoke", base.Results.on_disk(tmp_path, [job]))
    times = {row.name: [cell.value for cell in row.cells] for row in table.rows}
    figures = {name: values[:4] for name, values in times.items()}
    assert all(len(values) == 4 + len(given.get("beside", ())) for values in times.values())
    assert figures[given["floor"]][-1] == 1
    assert all(0 < least <= middle <= most for middle, least, most, _ in figures.values())
    assert any(name.startswith(ours) for name in times)


@pytest.mark.parametrize("exhibit", BENCHES, ids=lambda exhibit: exhibit.name)
def test_what_is_typed_names_the_script_and_all_words(exhibit: Any) -> None:
    job = exhibit.job("laptop")
    given = dict(job.arguments)
    commands = [shlex.split(command) for command in job.command.split("; ")]
    for command, words in zip(commands, given["runs"], strict=True):
        place = command.index(given["script"])
        assert command[place + 1 :] == list(words)
        started = ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
        assert command[:place] == (started if given["workers"] else ["python"])
    assert job.command in exhibit.caption("laptop")


@pytest.mark.parametrize("workers", [4, 8])
def test_the_path_through_a_tree_is_longer_than_its_mean(workers: int) -> None:
    """4k log2 P words one after the other, where a worker sends 4k(P-1)/P on average."""
    (kind,) = counts.count_costs("gtopk", (), workers)["kinds"]
    assert kind["path"][0] / kind["k"] == pytest.approx(4 * log2(workers), rel=0.02)
    assert kind["words"][0] / kind["k"] == pytest.approx(4 * (workers - 1) / workers, rel=0.02)


def test_where_all_send_alike_the_path_is_the_mean() -> None:
    (kind,) = counts.count_costs("spardl", (), 8)["kinds"]
    assert kind["path"] == kind["words"]


def kind(share: float, words: float) -> dict[str, object]:
    return {
        "share": share,
        "k": 10.0,
        "rounds": [2, 2],
        "words": [words, words],
        "bounds": [0, 100],
        "path": [2 * words] * 2,
        "within": True,
    }


def test_words_over_a_cycle_by_hand() -> None:
    exhibit = catalogue()["oktopk.volume"]
    kinds = [kind(0.25, 80.0), kind(0.75, 40.0)]
    found = {job: jobs.Outcome(Path("x"), {"kinds": kinds}) for job in exhibit.jobs("smoke")}
    results = base.Results(Path("x"), found)
    assert counts.amortized(kinds) == 5.0
    cell = exhibit.tables("smoke", results)[0].rows[0].cells[0].text
    assert cell == "2 rounds, 8 k [0..10 k], path 16 k; 2 rounds, 4 k [0..10 k], path 8 k; over a cycle 5 k"
    figures = claims.volume(exhibit, "smoke", results)
    assert [figure.values for figure in figures] == [(4.0,), (5.0,)] * 2
    assert [figure.remark for figure in figures] == ["", "steps that evaluate thresholds: 8k"] * 2


def test_shares_are_of_a_whole_cycle() -> None:
    kinds = counts.count_costs("oktopk", (), 4)["kinds"]
    assert [kind["share"] for kind in kinds] == [2 / 128, 124 / 128, 2 / 128]


def test_spardl_selects_as_many_blocks_as_there_are_workers() -> None:
    """Half a millisecond, and 39 microseconds a block; of 64 blocks it is 3 ms."""
    lines = schedules.bench_schedules.assumed_compression
    assert lines(64)["spardl"].fixed == pytest.approx(3e-3)
    assert lines(16)["spardl"].fixed == pytest.approx(0.5e-3 + 16 * 2.5e-3 / 64)
    assert lines(16)["topka"] == lines(64)["topka"]


@pytest.mark.slow
def test_what_fusion_gains_where_launches_are_those_of_16_blocks() -> None:
    found = schedules._seconds(("densenet201",), "ethernet_10g", ())["densenet201", "spardl"]
    layers, buckets, _, fused, _ = found
    assert layers / fused == pytest.approx(2.455, abs=1e-3)
    assert buckets / fused == pytest.approx(1.0, abs=0.01)
