"""Measurements: in the network lab, in processes of this machine, and of whole updates; predictions next to them."""

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
from scripts.exhibits import base, jobs
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.kinds import lab
from scripts.exhibits.kinds.gpu import MODELS
from spardl.basics.errors import ConfigError, TrainingError
from spardl.clusters.profile import Profile
from tests.support import shown
from tests.support.labs import in_a_lab
from tests.support.measuring import undisturbed

ROOT = Path(__file__).resolve().parents[2]
SETTING = {"workers": 3, "gbit": 0.5, "limit": 70.0, "words": ("scripts/bench_sync.py", "--model=profile:scripts/x")}
SYNC = catalogue()["spardl.lab"]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], int]], None]:
    """Puts something in the lab's place."""
    return lambda run: monkeypatch.setattr(lab.netlab, "run", run)


def table(made: Any) -> list[dict[str, Any]]:
    return [dict(zip(made["columns"], row, strict=True)) for row in made["rows"]]


def test_a_bench_is_run_by_every_worker(answer: Any, capfd: Any) -> None:
    asked = []

    def run(arguments: Any) -> int:
        asked.append(arguments)
        os.write(1, b"a table\n")
        (file,) = (word.removeprefix("--json=") for word in arguments.command if word.startswith("--json="))
        Path(file).write_text(json.dumps({"found": 7}))
        return 0

    answer(run)
    assert lab.in_lab(**SETTING) == lab.in_lab(**SETTING, delay_ms=2.5) == {"found": 7}
    arguments, delayed = asked
    assert (arguments.workers, arguments.gbit, arguments.timeout) == (3, 0.5, 70.0)
    assert (arguments.delay_ms, delayed.delay_ms) == (0.0, 2.5)
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
def test_a_lab_that_fails_says_why(answer: Any, said: bytes, reason: str) -> None:
    answer(lambda arguments: os.write(2, said) and 3)
    with pytest.raises(TrainingError, match=f"^{reason}$"):
        lab.in_lab(**SETTING)


ROW = {"method": "none", "schedule": "wfbp", "groups": 5, "ideal": None, "compute": 1.25, "alpha": 0.002, "gbit": 0.9}


def test_steps_next_to_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "in_lab", lambda **_: [{**ROW, "seconds": [2.0, 4.0, 2.5], "predicted": 2.0}])
    steps, start = lab.schedules(**SETTING)["sheets"]
    (found,) = table(steps)
    assert found["method, schedule"] == "none, wfbp"
    assert (found["median s"], found["least"], found["most"]) == (2.5, 2.0, 4.0)
    assert (found["predicted"], found["predicted / median"]) == (2.0, 0.8)
    assert (found["groups"], found["ideal"], found["every turn"]) == (5.0, "no halves", "2, 4, 2.5")
    assert [value for _, value in start["rows"]] == [1.25, 2.0, 0.9]


def test_steps_with_delays_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(delay_ms: float, **_: Any) -> list[dict[str, Any]]:
        one = {**ROW, "seconds": [2.0 * delay_ms], "predicted": 1.0, "streams": 1}
        return [one, {**one, "seconds": [delay_ms], "predicted": None, "streams": 4}]

    monkeypatch.setattr(lab, "in_lab", run)
    first, second = lab.delayed((0.1, 5.0), **SETTING)["sheets"]
    assert second["title"].endswith("0.5 Gbit/s, delayed by 5 ms")
    assert [row[:2] for row in first["rows"]] == [["none, wfbp", 0.2], ["none, wfbp, 4 streams", 0.1]]
    assert second["rows"][1][4] == "not counted"
    commands = [shlex.split(each) for each in catalogue()["settings.streams"].job("laptop").command.split("; ")]
    assert [lab.netlab.parse(words[2:]).delay_ms for words in commands] == [0.1, 5.0, 20.0]


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> Any:
    header = ["", "rounds", "bytes", "alone", "messages, predicted", "predicted"]
    timed = [{"name": "torch", "seconds": [0.5]}, {"name": "spardl, exact", "seconds": [0.1, 0.3, 0.2]}]
    breakdown = [header, ["spardl, exact", 4, 2_500_000, 30.0, 20.0, 150.0]]
    found = {"cases": {"n = 9": timed}, "setting": {"breakdown": breakdown}}
    monkeypatch.setattr(lab, "in_lab", lambda **_: found)
    return lab.synchronizations(**SETTING)


def test_synchronizations_next_to_counts(synchronized: Any) -> None:
    (made,) = synchronized["sheets"]
    torchs, ours = table(made)
    assert made["title"].endswith("n = 9, 0.5 Gbit/s")
    assert (ours["method"], ours["median s"], ours["predicted"]) == ("spardl", 0.2, 0.15)
    assert ours["predicted / median"] == pytest.approx(0.75)
    assert (ours["messages, predicted"], ours["messages alone"]) == (0.02, 0.03)
    assert (ours["rounds"], ours["MB sent"]) == (4.0, 2.5)
    assert {torchs[name] for name in ("predicted", "rounds", "messages alone")} == {"not counted"}


def test_picture_has_bars_and_prediction_marks(synchronized: Any) -> None:
    (picture,) = SYNC.pictures("smoke", shown.results({SYNC.job("smoke"): synchronized}))
    axes = shown.axes(picture)
    assert [bar.get_width() for bar in axes.patches] == [0.5, 0.2]
    marks = next(line for line in axes.lines if line.get_label() == "predicted")
    assert (list(marks.get_xdata()), list(marks.get_ydata())) == ([0.15], [1])


def test_without_a_lab_the_table_says_so() -> None:
    outcome = jobs.Outcome(Path("x"), {}, "missing programs: tc")
    results = base.Results(Path("x"), {SYNC.job("smoke"): outcome})
    ((row,),) = (made.rows for made in SYNC.tables("smoke", results))
    assert (row.cells[0].text, row.cells[0].bad) == ("failed: missing programs: tc", True)
    assert SYNC.pictures("smoke", results) == []


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
        assert arguments.workers == (2 if scale == "smoke" else 4)
        assert arguments.command[:2] == ["python", "scripts/bench.py"]
        assert arguments.command[2] in bench.benchmarks()
        assert arguments.command[3:-2] == list(dict(job.arguments)["words"])[1:]
        for word in arguments.command[2:]:
            assert not word.startswith("profile:") or (ROOT / word.removeprefix("profile:")).exists()
    assert not catalogue()["dear.speed"].job("smoke").alone


@in_a_lab
@pytest.mark.timeout(900)
def test_synchronizations_in_a_lab() -> None:
    """All methods; a prediction that is less than its messages, or than nothing, would be wrong."""
    words = ("scripts/bench_sync.py", "--wires=exact", "--methods=spardl,none", "--entries=20000", "--settle=2")
    setting = {"workers": 2, "gbit": 0.1, "limit": 240.0, "words": (*words, "--repetitions=2")}

    def measured() -> dict[str, dict[str, Any]]:
        (made,) = lab.synchronizations(**setting)["sheets"]
        ours = {row["method"]: row for row in table(made) if row["rounds"] != "not counted"}
        assert set(ours) == {"spardl", "none"}
        assert (ours["none"]["rounds"], ours["none"]["MB sent"]) == (2.0, 0.08)
        assert ours["spardl"]["MB sent"] < 0.01 * ours["none"]["MB sent"] * 3
        assert all(row["predicted"] > row["messages, predicted"] > 0 for row in ours.values())
        return ours

    # 80 kB at 0.1 Gbit/s: the link really is as slow as that.
    undisturbed(measured, lambda ours: ours["none"]["messages, predicted"] > 0.5 * 0.0064)


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
    jobs.complete([*measuring, *others], tmp_path, at_once=5)
    first, second = (job.find(tmp_path).data for job in measuring)
    assert first == ["other0", "other1", "other2"]
    assert second == ["other", "other0", "other1", "other2"]


# --- benchmarks without a lab

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


def test_each_run_has_its_tables_and_equal_titles_share_one(script: str) -> None:
    first, second = lab.timed(script, (("a", "b"), ("c",)), "floor", 0)["sheets"]
    assert (first["title"], second["title"]) == ("a b alone", "c alone")
    assert first["columns"] == ["what", "median ms", "least", "most", "x floor"]
    assert first["rows"] == [["floor", 2.0, 1.0, 3.0, 1.0], ["ours", 5.0, 4.0, 10.0, 2.5]]
    (made,) = lab.timed(script, (("a", "ours"), ("a", "floor")), "floor", 0)["sheets"]
    assert [(row[0], row[-1]) for row in made["rows"]] == [("floor", 1.0), ("ours", 2.5)]


def test_further_columns_are_shown_and_torchrun_starts_several(script: str) -> None:
    (made,) = lab.timed(script, (("a",),), "floor", 2, ("exact",))["sheets"]
    assert made["title"] == "a 2"
    assert made["columns"][-2:] == ["x floor", "exact"]
    assert made["rows"][1] == ["ours", 5.0, 4.0, 10.0, 2.5, "True"]


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
    jobs.complete([job], tmp_path, at_once=1)
    (made,) = exhibit.tables("smoke", base.Results.on_disk(tmp_path, [job]))
    times = {row.name: [cell.value for cell in row.cells] for row in made.rows}
    assert all(len(values) == 4 + len(given.get("beside", ())) for values in times.values())
    assert times[given["floor"]][3] == 1
    assert all(0 < least <= middle <= most for middle, least, most, *_ in times.values())
    assert any(name.startswith(ours) for name in times)


@pytest.mark.parametrize("exhibit", BENCHES, ids=lambda exhibit: exhibit.name)
def test_what_is_typed_names_the_script_and_all_words(exhibit: Any) -> None:
    job = exhibit.job("laptop")
    given = dict(job.arguments)
    commands = [shlex.split(command) for command in job.command.split("; ")]
    for command, words in zip(commands, given["runs"], strict=True):
        place = command.index("scripts/bench.py")
        assert command[place:] == bench.current([given["script"], *words])
        started = ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
        assert command[:place] == (started if given["workers"] else ["python"])
    assert job.command in exhibit.caption("laptop")


# --- whole updates

UPDATES = catalogue()["spardl.lab_updates"]


def turns(ours: list[float], other: list[float]) -> dict[str, Any]:
    seconds = {"spardl": ours, "oktopk": other, "topka": ours, "none": [10 * each for each in ours]}
    rows = [{"method": name, "seconds": each, "predicted": sum(each) / 10} for name, each in seconds.items()]
    return {"rows": rows, "cores": 2}


def updates(scale: str, *answers: Any) -> base.Results:
    return shown.results(dict(zip(UPDATES.jobs(scale), answers, strict=False)))


def test_ratios_are_turn_by_turn() -> None:
    ratios, seconds = UPDATES.tables("smoke", updates("smoke", turns([0.1, 0.2, 0.4], [0.3, 0.4, 0.4])))
    cells = shown.cells(ratios, "P = 2, 1 Gbit/s")
    # 3, 2 and 1 times as long: their median, where medians of seconds would also have it, but not least and most.
    assert cells["SparDL over Ok-Topk"].text == "2x (1..3)"
    assert cells["SparDL over dense"].value == pytest.approx(10)
    assert cells["SparDL over Ok-Topk, predicted"].value == pytest.approx(0.11 / 0.07)
    assert cells["cores"].value == 2
    cells = shown.cells(seconds, "P = 2, 1 Gbit/s")
    assert cells["SparDL, ms"].value == pytest.approx(200)
    assert cells["Ok-Topk, predicted"].value == pytest.approx(110)
    assert cells["every turn"].text.startswith("SparDL: 100, 200, 400; Ok-Topk: ")


def test_updates_that_were_not_measured_say_so() -> None:
    results = updates("laptop", turns([0.1] * 3, [0.3] * 3))
    for made in UPDATES.tables("laptop", results):
        assert [row.cells[0].text == "not run yet" for row in made.rows] == [False, *[True] * 5]
    assert [picture.title for picture in UPDATES.pictures("laptop", results)] == ["1 Gbit/s"]


def test_the_picture_has_measured_and_predicted_ratios() -> None:
    answers = [turns([0.1, 0.1, 0.2], [0.1 * place, 0.2 * place, 0.2 * place]) for place in range(1, 7)]
    fast, slow = UPDATES.pictures("laptop", updates("laptop", *answers))
    assert (fast.title, slow.title) == ("1 Gbit/s", "0.1 Gbit/s")
    assert set(slow.key) == {"Ok-Topk", "TopkA", "dense"}
    axes = shown.axes(slow)
    assert axes.get_yscale() == "log"
    lines = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in lines] == [[4, 8, 14]] * 3
    assert list(lines[0].get_ydata()) == pytest.approx([0.5 * place / 0.4 for place in (2, 4, 6)])


def test_updates_can_be_typed_and_sleep_as_long_as_is_assumed() -> None:
    places = [lab.netlab.parse(shlex.split(job.command)[2:]) for job in UPDATES.jobs("evening")]
    assert [(each.workers, each.gbit) for each in places] == [(4, 1), (4, 0.1), (8, 1), (8, 0.1), (14, 1), (14, 0.1)]
    words = places[0].command
    assert float(words[words.index("--compute") + 1]) == pytest.approx(MODELS["lstm_imdb"].seconds, rel=0.01)
    path = words[words.index("--model") + 1].removeprefix("profile:")
    assert sum(Profile.read(ROOT / path).entries) == MODELS["lstm_imdb"].entries
    assert all(job.alone for job in UPDATES.jobs("evening"))


@in_a_lab
@pytest.mark.timeout(600)
def test_updates_in_a_lab() -> None:
    (job,) = UPDATES.jobs("smoke")
    found = lab.timed_updates(**dict(job.arguments))
    assert json.loads(json.dumps(found)) == found
    by_name = {row["method"]: row for row in found["rows"]}
    assert list(by_name) == list(UPDATES.methods.values())
    for row in by_name.values():
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0.02  # the passes
        assert row["predicted"] > 0.02
