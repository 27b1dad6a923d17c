"""Exhibits: their tables, their bookkeeping, the command that makes them, and their trainings as Slurm arrays."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import choices, reproduce
from scripts.exhibits import base, jobs, measures, tables
from scripts.exhibits.charts import style
from scripts.exhibits.kinds import trainings
from spardl.basics.errors import ConfigError, WorkerError

ROOT = Path(__file__).resolve().parents[2]


def double(number: int) -> dict[str, int]:
    return {"twice": 2 * number}


def refuse(number: int) -> dict[str, int]:
    raise ConfigError(f"{number} is no number of mine")


def computation(function: Any = double, number: int = 4, recipe: int = 1) -> Any:
    return jobs.Computation("double", function, (("number", number),), "echo", recipe)


@pytest.fixture
def small() -> Any:
    rows = [
        tables.Row("50% of a|b", [tables.Cell("1.5 ± 0.1", 1.5), tables.Cell("yes & no")], []),
        tables.Row("c_d", [tables.Cell("failed: <lost>", bad=True), tables.Cell("failed", bad=True)], []),
    ]
    return tables.Table("A title", ("method", "metric", "note"), rows)


def test_markdown_and_csv(small: Any) -> None:
    lines = tables.markdown(small).splitlines()
    assert (lines[0], len(lines)) == ("| method | metric | note |", 4)
    assert lines[2] == "| 50% of a\\|b | 1.5 ± 0.1 | yes & no |"
    rows = list(csv.reader(io.StringIO(tables.WRITERS["csv"](small))))  # with bare numbers
    assert rows[1:] == [["50% of a|b", "1.5", "yes & no"], ["c_d", "failed: <lost>", "failed"]]


def test_text_is_escaped(small: Any) -> None:
    latex, html = (tables.WRITERS[form](small) for form in ("tex", "html"))
    assert r"50\% of a|b & 1.5 $\pm$ 0.1 & yes \& no \\" in latex
    assert r"c\_d" in latex
    assert "<td class=bad>failed: &lt;lost&gt;</td>" in html
    assert "<td>yes &amp; no</td>" in html


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row a row must have a cell for each of .*, got 1 cells"):
        tables.Table("T", ("a", "b", "c"), [tables.Row("a row", [tables.Cell("1")], [])])


def test_a_result_is_found_by_all_that_it_depends_on(tmp_path: Path) -> None:
    job = computation()
    assert job.find(tmp_path) is None
    job.perform(tmp_path)
    assert computation().find(tmp_path).data == {"twice": 8}
    assert computation(number=5).find(tmp_path) is None
    assert computation(recipe=2).find(tmp_path) is None


def test_a_training_is_found_by_its_id(composing: None, tmp_path: Path) -> None:
    job = jobs.Training(("cluster.workers=2", "seed=5"))
    assert jobs.Training(("cluster.workers=2", "seed=5", "training.log_every=7")).id == job.id
    assert jobs.Training(("cluster.workers=2", "seed=6")).id != job.id
    folder = tmp_path / f"label-{job.id}"
    folder.mkdir()
    for status, found in (("running", False), ("failed", False), ("finished", True)):
        (folder / "summary.json").write_text(json.dumps({"status": status}))
        assert bool(job.find(tmp_path)) == found


def test_a_failure_is_kept_until_it_is_mended(tmp_path: Path) -> None:
    job = computation()
    for fault, reason in ((None, None), (WorkerError("out of memory"), "out of memory"), (None, None)):
        job.note(tmp_path, fault)
        found = job.failure(tmp_path)
        assert (found and found.reason) == reason


def test_only_what_is_missing_is_done(tmp_path: Path, capfd: Any) -> None:
    work = [computation(number=number) for number in (1, 2)] + [computation(refuse, 3)]
    work[0].perform(tmp_path)
    jobs.complete(work, tmp_path, at_once=2)
    out = capfd.readouterr().out
    assert out.startswith("2 of 3 jobs to do\n")
    assert "failed: 3 is no number of mine" in out
    results = base.Results.on_disk(tmp_path, work)
    assert [results.of(job).data.get("twice") for job in work] == [2, 4, None]
    assert results.of(work[2]).reason == "3 is no number of mine"
    assert results.of(computation(number=9)).reason == "not run yet"


def test_different_words_for_one_run_are_one_job(
    composing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(jobs, "_do", lambda missing, *_: done.extend(job.words for job in missing))
    words = ((), ("compressor.density=1e-2",), ("compressor.density=1e-3",))
    work = [jobs.Training(("cluster.workers=2", *own)) for own in words]
    elsewhere = jobs.Training(("cluster.workers=2",), None, "process_group")  # needs a cluster
    assert jobs.complete([*work, elsewhere], tmp_path / "runs", 1) == [elsewhere]
    assert len(done) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_scale_of_the_paper_is_for_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    folders = [f"--outputs={tmp_path / 'runs'}", f"--report={tmp_path / 'report'}"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "spardl.residuals", "spardl.density", "--scale=paper", *folders])
    assert reproduce.main() == 0
    out = capsys.readouterr().out
    file = tmp_path / "report" / "trainings-paper-14.txt"
    assert f"for a cluster: sbatch --array=0-23%4 --ntasks=14 {ROOT / 'slurm' / 'array.sh'} {file}\n" in out
    assert "Not run yet: 27 runs, 2 rows of unknown time\n" in out
    lines = file.read_text().splitlines()
    assert len(lines) == 12 + 15 - 3  # a density of 1% is the preset's
    assert all("experiment=spardl/vgg16_cifar10" in line for line in lines)


def test_the_interval_of_seeds() -> None:
    # Student's t of two degrees of freedom is 4.303 at 97.5%, the standard deviation is 1.
    assert measures.difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx((2 - 2.4841377, 2, 2 + 2.4841377))
    assert measures.spread([1.0, 2.0, 3.0]) == "2 ± 2.5"
    assert measures.shown_interval([1.0, 2.0, 3.0]) == "-0.4841 to 4.484"
    assert measures.spread([1.0, 3.0]) == "2 (2 seeds)"
    assert measures.shown_interval([2.0]) == "none of 1 seed"
    assert measures.range_of_mean([1.0, 3.0]) == (-math.inf, 2.0, math.inf)


def test_a_comparison_by_hand() -> None:
    plan = trainings.Plan((trainings.Case("Digits", ("model=resnet20",), "digits"),), (), (1, 2, 3), "")
    methods = {"one": ("a=1",), "two": ("a=2",)}
    exhibit = trainings.MethodComparison("x.y", "T", "", "", methods, {"smoke": plan}, basis=base.Basis("", "", ""))
    work, folder = exhibit.jobs("smoke"), Path("x")
    assert [job.words[-2:] for job in work[:2]] == [("a=1", "seed=1"), ("a=1", "seed=2")]
    same = {"metric": "accuracy", "step_bytes": 1.0, "step_bytes_dense": 50.0, "steps": 4}
    figures = zip([0.5, 0.6, 0.7, 0.8, 0.8, 0.8], [10.0] * 3 + [5.0] * 3, strict=True)
    data = [{**same, "final": {"accuracy": value}, "cluster_seconds": seconds} for value, seconds in figures]
    found = {job: jobs.Outcome(folder, each) for job, each in zip(work, data, strict=True)}

    def rows(*lost: Any) -> list[Any]:
        failed = dict.fromkeys(lost, jobs.Outcome(folder, {}, "out of memory"))
        (table,) = exhibit.tables("smoke", base.Results(folder, {**found, **failed}))
        return [row.cells for row in table.rows]

    one, two = ([cell.text for cell in cells] for cells in rows())
    assert (one[0], two[-2]) == ("accuracy 0.6 ± 0.25", "0.5")
    assert one[2:] == ["0.5, 0.6, 0.7", "2.00%", "10", "1", "unknown machine"]
    assert rows(work[4])[1][2] == tables.Cell("0.8, failed: out of memory, 0.8", bad=True)
    assert [cell.text for cell in rows(*work[3:])[1]] == ["failed: out of memory", *["failed"] * 6]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["spardl.nothing"], "error: exhibit 'spardl.nothing' does not exist; choose from spardl.complexity, "),
        ([], "error: no exhibit given; name one, or all (--list prints them)"),
        (["dear.speed", "--jobs=0"], "error: --jobs must be at least 1"),
    ],
)
def test_what_cannot_be_asked_for(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *words])
    assert reproduce.main() == 2
    reported = capsys.readouterr().err
    assert reported.startswith(complaint)
    assert reported.count("\n") == 1


def test_what_draws_is_missed_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(style, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "spardl.complexity", "--own", f"--outputs={tmp_path / 'runs'}"])
    assert reproduce.main() == 2
    missing = "error: figures need matplotlib, which is not installed: pip install -e '.[report]'\n"
    assert capsys.readouterr() == ("", missing)
    assert not list(tmp_path.iterdir())


def test_the_list_names_source_and_cost_of_each(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--list"])
    assert reproduce.main() == 0
    text = capsys.readouterr().out
    for name, exhibit in reproduce.catalogue().items():
        assert f"{name}: {exhibit.title}\n" in text
        assert exhibit.source in text
    assert text.count("  cost: smoke: ") == len(reproduce.catalogue())


def test_the_page_names_every_exhibit() -> None:
    page = (ROOT / "docs" / "reproducing-papers.md").read_text()
    assert set(re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE)) == set(reproduce.catalogue())


def test_what_is_timed_gives_way_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(jobs.Computation):  # type: ignore[misc, name-defined]
        alone = True

    noted = tmp_path / "noted"
    monkeypatch.setattr(os, "nice", lambda by: noted.write_text(f"{noted.read_text() if noted.exists() else ''}{by} "))
    jobs.complete([computation(), Timed("timed", double, (("number", 3),), "echo")], tmp_path / "runs", at_once=1)
    assert noted.read_text() == "10 "


def training(workers: int, seed: int, cluster: str = "process_group") -> Any:
    labels = jobs.Labels("spardl.teams", "B-SAG, d = 2", ("it's", "a, b"))
    return jobs.Training((f"cluster.workers={workers}", f"seed={seed}"), labels, cluster)


@pytest.mark.usefixtures("composing")
def test_labels_reach_the_logger_as_they_are() -> None:
    config = choices.composed(*training(2, 1).batch_words)
    assert config["logger"]["group"] == "spardl.teams"
    assert config["logger"]["job_type"] == "B-SAG, d = 2"
    assert config["logger"]["tags"] == ["it's", "a, b"]


@pytest.mark.usefixtures("composing")
def test_labels_do_not_make_another_run() -> None:
    one = training(2, 1)
    other = jobs.Training(one.words, None, one.cluster)
    assert one == other
    assert one.id == other.id
    assert "logger" not in one.command
    assert training(2, 1, "simulated").id != one.id


def start_array(folder: Path, file: str, number: int) -> subprocess.CompletedProcess[str]:
    """Runs the batch script as Slurm would, with an srun that shows its words."""
    srun = folder / "srun"
    srun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(number)}
    command = ["bash", str(ROOT / "slurm" / "array.sh"), file]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.usefixtures("composing")
def test_an_array_for_every_number_of_workers(tmp_path: Path) -> None:
    work = [training(14, 1), training(4, 1), training(14, 2)]
    lines = jobs.write_arrays(work, tmp_path / "out puts", tmp_path / "report", "paper")
    four, fourteen = (shlex.split(line) for line in lines)
    assert four[:3] == ["sbatch", "--array=0-0%4", "--ntasks=4"]
    assert fourteen[:3] == ["sbatch", "--array=0-1%4", "--ntasks=14"]
    assert Path(fourteen[3]) == ROOT / "slurm" / "array.sh"
    done = start_array(tmp_path, fourteen[4], 1)
    wanted = ["python", "train.py", *work[2].batch_words, f"output_dir={tmp_path / 'out puts'}", "resume=auto"]
    assert done.stdout.splitlines() == wanted
    done = start_array(tmp_path, fourteen[4], 2)
    assert done.returncode == 2
    assert done.stderr == f"error: {fourteen[4]} has no line 3; submit with --array=0-1\n"
