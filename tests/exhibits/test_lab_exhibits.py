"""Exhibits measured in the network lab: how the lab is asked, what is read from its answer, and what fails."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import bench
from scripts.exhibits import base, jobs, working
from scripts.exhibits.kinds import lab
from scripts.exhibits.papers.catalogue import catalogue
from spardl.basics.errors import ConfigError, TrainingError
from tests.support.labs import in_a_lab
from tests.support.measuring import undisturbed

ROOT = Path(__file__).resolve().parents[2]
SETTING = {"workers": 3, "gbit": 0.5, "limit": 70.0, "words": ("scripts/bench_sync.py", "--model=profile:scripts/x")}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], int]], None]:
    """Puts something in the lab's place."""
    return lambda run: monkeypatch.setattr(lab.netlab, "run", run)


def test_a_bench_is_run_by_every_worker(answer: Any, capfd: Any) -> None:
    asked = []

    def run(arguments: Any) -> int:
        asked.append(arguments)
        os.write(1, b"a table\n")
        (file,) = (word.removeprefix("--json=") for word in arguments.command if word.startswith("--json="))
        Path(file).write_text(json.dumps({"found": 7}))
        return 0

    answer(run)
    assert lab.in_lab(**SETTING) == {"found": 7}
    (arguments,) = asked
    assert (arguments.workers, arguments.gbit, arguments.timeout) == (3, 0.5, 70.0)
    assert arguments.command[:3] == [sys.executable, str(ROOT / "scripts" / "bench.py"), "sync"]
    assert f"--model=profile:{ROOT}/scripts/x" in arguments.command
    assert "--gbit=0.5" in arguments.command
    # What the lab said is not this process's output, and afterwards it has its own again.
    os.write(1, b"mine\n")
    assert capfd.readouterr().out == "mine\n"


def test_no_lab_is_one_line(answer: Any) -> None:
    def run(arguments: Any) -> int:
        raise lab.LabError("namespaces are not allowed here (no):\n run as root")

    answer(run)
    with pytest.raises(ConfigError, match=r"^namespaces are not allowed here \(no\): run as root$"):
        lab.in_lab(**SETTING)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"[1] error: no such model\nerror: worker 1 ended with exit code 2; ending all\n", "no such model"),
        (b"Traceback\nValueError: x\n", "the lab ended with exit code 3"),
    ],
)
def test_a_bench_that_fails_says_why(answer: Any, said: bytes, reason: str) -> None:
    def run(arguments: Any) -> int:
        os.write(2, said)
        return 3

    answer(run)
    with pytest.raises(TrainingError, match=f"^{reason}$"):
        lab.in_lab(**SETTING)


def test_steps_beside_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"method": "none", "schedule": "wfbp", "groups": 5, "seconds": [2.0, 4.0, 2.5], "predicted": 2.0}
    row |= {"ideal": None, "compute": 1.25, "alpha": 0.002, "gbit": 0.9}
    monkeypatch.setattr(lab, "in_lab", lambda **_: [row])
    steps, start = lab.schedules(**SETTING)["sheets"]
    found = dict(zip(steps["columns"], steps["rows"][0], strict=True))
    assert found["method, schedule"] == "none, wfbp"
    assert (found["median s"], found["least"], found["most"]) == (2.5, 2.0, 4.0)
    assert (found["predicted"], found["predicted / median"]) == (2.0, 0.8)
    assert (found["groups"], found["ideal"], found["every turn"]) == (5.0, "no halves", "2, 4, 2.5")
    assert [value for _, value in start["rows"]] == [1.25, 2.0, 0.9]


def test_steps_with_delays_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(delay_ms: float, **_: Any) -> list[dict[str, Any]]:
        asked.append(delay_ms)
        row = {"method": "none", "schedule": "wfbp", "groups": 5, "ideal": None, "compute": 1.0, "alpha": 1, "gbit": 1}
        one = {**row, "seconds": [2.0 * delay_ms], "predicted": 1.0, "streams": 1}
        return [one, {**one, "seconds": [delay_ms], "predicted": None, "streams": 4}]

    monkeypatch.setattr(lab, "in_lab", run)
    first, second = lab.delayed((0.1, 5.0), **SETTING)["sheets"]
    assert asked == [0.1, 5.0]
    assert second["title"].endswith("0.5 Gbit/s, delayed by 5 ms")
    assert [row[:2] for row in first["rows"]] == [["none, wfbp", 0.2], ["none, wfbp, 4 streams", 0.1]]
    assert second["rows"][1][4] == "not counted"


def test_a_lab_is_told_the_delay(answer: Any) -> None:
    asked = []
    answer(lambda arguments: asked.append(arguments.delay_ms) or 3)
    for setting in (SETTING, {**SETTING, "delay_ms": 2.5}):
        with pytest.raises(TrainingError):
            lab.in_lab(**setting)
    assert asked == [0.0, 2.5]


def test_what_is_typed_names_each_delay() -> None:
    commands = [shlex.split(each) for each in catalogue()["settings.streams"].job("laptop").command.split("; ")]
    assert [lab.netlab.parse(words[2:]).delay_ms for words in commands] == [0.1, 5.0, 20.0]


@pytest.fixture
def synchronized() -> dict[str, Any]:
    header = ["", "rounds", "bytes", "alone", "messages, predicted", "predicted"]
    timed = [{"name": "torch", "seconds": [0.5]}, {"name": "spardl, exact", "seconds": [0.1, 0.3, 0.2]}]
    breakdown = [header, ["spardl, exact", 4, 2_500_000, 30.0, 20.0, 150.0]]
    return {"cases": {"n = 9": timed}, "setting": {"breakdown": breakdown}}


def test_synchronizations_beside_counts(monkeypatch: pytest.MonkeyPatch, synchronized: Any) -> None:
    monkeypatch.setattr(lab, "in_lab", lambda **_: synchronized)
    (made,) = lab.synchronizations(**SETTING)["sheets"]
    torchs, ours = (dict(zip(made["columns"], row, strict=True)) for row in made["rows"])
    assert made["title"].endswith("n = 9, 0.5 Gbit/s")
    assert (ours["method"], ours["median s"], ours["predicted"], ours["predicted / median"]) == (
        "spardl",
        0.2,
        0.15,
        pytest.approx(0.75),
    )
    assert (ours["messages, predicted"], ours["messages alone"]) == (0.02, 0.03)
    assert (ours["rounds"], ours["MB sent"]) == (4.0, 2.5)
    assert {torchs[name] for name in ("predicted", "rounds", "messages alone")} == {"not counted"}


@pytest.mark.parametrize(
    "name",
    ["dear.lab", "spardl.lab", "sketch_fusion.lab", "sketch_fusion.lab_small", "settings.bucket_mb", "settings.groups"],
)
def test_jobs_can_be_typed_and_want_the_machine_for_themselves(name: str) -> None:
    exhibit = catalogue()[name]
    assert exhibit.job("laptop").id == exhibit.job("paper").id != exhibit.job("smoke").id
    for scale in ("smoke", "laptop"):
        job = exhibit.job(scale)
        words = shlex.split(job.command)
        assert job.alone
        assert words[:2] == ["python", "scripts/netlab.py"]
        arguments = lab.netlab.parse(words[2:])
        assert arguments.workers == 4
        assert arguments.command[:2] == ["python", "scripts/bench.py"]
        assert arguments.command[2] in bench.benchmarks()
        assert arguments.command[3:-2] == list(dict(job.arguments)["words"])[1:]
        for word in arguments.command[2:]:
            assert not word.startswith("profile:") or (ROOT / word.removeprefix("profile:")).exists()
    assert not catalogue()["dear.speed"].job("smoke").alone


def results_of(folder: Path, data: Any, reason: str | None = None) -> Any:
    return base.Results(folder, {catalogue()["spardl.lab"].job("smoke"): jobs.Outcome(folder, data, reason)})


def test_without_a_lab_the_table_says_so(tmp_path: Path) -> None:
    results = results_of(tmp_path, {}, "missing programs: tc")
    ((row,),) = (table.rows for table in catalogue()["spardl.lab"].tables("smoke", results))
    assert (row.cells[0].text, row.cells[0].bad) == ("failed: missing programs: tc", True)
    assert catalogue()["spardl.lab"].pictures("smoke", results) == []


def test_picture_has_bars_and_prediction_marks(
    monkeypatch: pytest.MonkeyPatch, synchronized: Any, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setattr(lab, "in_lab", lambda **_: synchronized)
    (picture,) = catalogue()["spardl.lab"].pictures("smoke", results_of(tmp_path, lab.synchronizations(**SETTING)))
    figure = Figure()
    picture.draw(figure)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.5, 0.2]
    marks = next(line for line in axes.lines if line.get_label() == "predicted")
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([0.15], [1])


@in_a_lab
@pytest.mark.timeout(600)
def test_synchronizations_in_a_lab() -> None:
    """All methods; a prediction that is less than its messages, or than nothing, would be wrong."""
    words = ("scripts/bench_sync.py", "--wires=exact", "--methods=spardl,none", "--entries=20000", "--settle=2")
    setting = {"workers": 2, "gbit": 0.1, "limit": 240.0, "words": (*words, "--repetitions=2")}

    def measured() -> dict[str, dict[str, Any]]:
        (made,) = lab.synchronizations(**setting)["sheets"]
        rows = [dict(zip(made["columns"], row, strict=True)) for row in made["rows"]]
        ours = {row["method"]: row for row in rows if row["rounds"] != "not counted"}
        assert set(ours) == {"spardl", "none"}
        assert (ours["none"]["rounds"], ours["none"]["MB sent"]) == (2.0, 0.08)
        assert ours["spardl"]["MB sent"] < 0.01 * ours["none"]["MB sent"] * 3
        return ours

    def holds(ours: dict[str, dict[str, Any]]) -> bool:
        """80 kB at 0.1 Gbit/s: the link really is as slow as that."""
        sound = all(row["predicted"] > row["messages, predicted"] > 0 for row in ours.values())
        return sound and ours["none"]["messages, predicted"] > 0.5 * 0.0064

    undisturbed(measured, holds)


@in_a_lab
def test_a_refusal_inside_the_lab_comes_out() -> None:
    setting = {"workers": 2, "gbit": 0.1, "limit": 240.0, "words": ("scripts/bench_sync.py", "--methods=nothing")}
    with pytest.raises(TrainingError, match="compressor=nothing does not exist; choose one of"):
        lab.in_lab(**setting)


def done_before(folder: str) -> list[str]:
    """The results of the other jobs that are there when this one begins."""
    return sorted(path.name.partition("-")[0] for path in (Path(folder) / "computed").glob("other*"))


def nothing() -> list[str]:
    return []


def test_what_measures_time_waits_for_all_else(tmp_path: Path) -> None:
    arguments = (("folder", str(tmp_path)),)
    measuring = [lab.Measurement(name, done_before, arguments, "echo") for name in ("other-timed", "timed")]
    others = [jobs.Computation(f"other{number}", nothing, (), "echo") for number in range(3)]
    working.complete([*measuring, *others], tmp_path, at_once=5)
    first, second = (job.find(tmp_path).data for job in measuring)
    assert first == ["other0", "other1", "other2"]
    assert second == ["other", "other0", "other1", "other2"]
