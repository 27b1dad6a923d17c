from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from spardl.basics.errors import ConfigError
from tests.support.driver import (
    background_run,
    events,
    here,
    only_run,
    processes,
    results,
    steps_logged,
    summary,
    wait_until,
)
from tests.support.measuring import undisturbed
from trainer.display import LogFile
from trainer.learner import Learner
from trainer.loggers import Csv, Several, TensorBoard
from trainer.observers import Logger, MetricsFile, NoLogger, Observer, Wandb, logged_in, without_run_id
from trainer.runs import Run

RUN = ("training.max_steps=4", "cluster=simulated", "cluster.workers=2")


@pytest.fixture(autouse=True)
def without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No key, no settings, an empty home."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_logged_in_by_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert logged_in()


def write_netrc(path: Path, host: str) -> None:
    path.write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
    path.chmod(0o600)


def test_logged_in_by_netrc(without_a_login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_netrc(without_a_login / ".netrc", "api.wandb.ai")
    assert logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example:8080")
    assert not logged_in()
    write_netrc(without_a_login / "elsewhere", "wandb.example")
    monkeypatch.setenv("NETRC", str(without_a_login / "elsewhere"))
    assert logged_in()


@pytest.mark.parametrize("content", [b"", b"machine", b"\xff\xfe", b"machine other.example login a password b"])
def test_not_logged_in_by_an_invalid_netrc(content: bytes, without_a_login: Path) -> None:
    (without_a_login / ".netrc").write_bytes(content)
    (without_a_login / ".netrc").chmod(0o600)
    assert not logged_in()


@pytest.mark.parametrize(("name", "value"), [("mode", "sometimes"), ("timeout", 0), ("timeout", "soon")])
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"logger.{name} must be"):
        Wandb(**{name: value})


def test_no_logger(tmp_path: Path) -> None:
    NoLogger().open(Run("0", tmp_path), {}).close()
    assert not list(tmp_path.iterdir()) or [path.name for path in tmp_path.iterdir()] == ["home"]


class FakeRun:
    """What ``wandb.init`` returns."""

    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.finished = False
        self.axes: list[tuple[str, str | None]] = []
        self.saved: list[tuple[str, str, str]] = []
        self.dir = ""

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def save(self, glob_str: str, base_path: str, policy: str) -> None:
        self.saved.append((glob_str, base_path, policy))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


class FakeWandb:
    """The module: reachable or not."""

    def __init__(self, reachable: bool) -> None:
        self.reachable = reachable
        self.calls: list[dict[str, Any]] = []
        self.run = FakeRun()

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802
        return values

    def init(self, **values: Any) -> FakeRun:
        self.calls.append(values)
        self.run.dir = f"{values['dir']}/files"
        Path(self.run.dir).mkdir(exist_ok=True)
        if values["mode"] == "online" and not self.reachable:
            raise ConnectionError("no route\nto host")
        return self.run


@pytest.mark.parametrize(
    ("mode", "key", "reachable", "tried"),
    [
        ("auto", False, True, ["offline"]),
        ("auto", True, True, ["online"]),
        ("auto", True, False, ["online", "offline"]),
        ("online", False, False, ["online", "offline"]),
        ("offline", True, True, ["offline"]),
        ("disabled", True, True, ["disabled"]),
    ],
)
def test_modes(
    mode: str,
    key: bool,
    reachable: bool,
    tried: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    fake = FakeWandb(reachable)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    Wandb(mode=mode).open(Run("0", tmp_path), {}).close()
    assert [call["mode"] for call in fake.calls] == tried
    warning = "warning: W&B cannot be reached, logging offline: no route\n" if len(tried) > 1 else ""
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("mode", "environment", "said"),
    [
        ("auto", {}, "W&B: offline, nothing is uploaded"),
        ("auto", {"WANDB_API_KEY": "0" * 40}, "W&B: uploaded to project mine at https://wandb.ai"),
        ("auto", {"WANDB_API_KEY": "0" * 40, "WANDB_MODE": "offline"}, "W&B: offline, nothing is uploaded"),
        ("auto", {"WANDB_MODE": "disabled"}, "W&B: disabled"),
        ("online", {"WANDB_ENTITY": "we"}, "W&B: uploaded to https://wandb.ai/we/mine"),
        (
            "online",
            {"WANDB_BASE_URL": "http://me:secret@w.example:8080/", "WANDB_ENTITY": "we"},
            "http://w.example:8080/we",
        ),
        ("disabled", {"WANDB_API_KEY": "0" * 40}, "W&B: disabled"),
    ],
)
def test_the_place_is_known_before_anything_leaves(
    mode: str, environment: Mapping[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = Wandb(project="mine", mode=mode).place()
    assert said in place
    assert "secret" not in place
    assert ("uploaded to" in place) == ("//" in place)


def test_without_a_logger_the_folder_is_the_place() -> None:
    assert NoLogger().place() is None


@pytest.mark.parametrize(("group", "wanted"), [(None, "0"), ("spardl.teams", "spardl.teams")])
def test_where_a_run_stands(group: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb(True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    Wandb(group=group, job_type="d = 2", tags=["a", "b"]).open(Run("0", tmp_path), {}).close()
    (call,) = fake.calls
    assert (call["group"], call["job_type"], call["tags"]) == (wanted, "d = 2", ["a", "b"])


def test_wandb_mode_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb(True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Wandb().open(Run("0", tmp_path), {}).close()
    assert fake.calls[0]["mode"] == "disabled"


def test_what_wandb_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb(True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    observer = Wandb(project="mine", tags=["a"], timeout=3).open(Run("id", tmp_path), {"seed": 1})
    observer.metrics("train", 5, {"loss": 0.5, "time": 7.0, "bytes/total": 80.0})
    observer.end({"best": 0.75})
    observer.close()
    (call,) = fake.calls
    assert (call["project"], call["group"], call["name"]) == ("mine", "id", tmp_path.name)
    assert (call["dir"], call["config"], call["tags"]) == (str(tmp_path), {"seed": 1}, ["a"])
    assert call["settings"]["init_timeout"] == 3
    assert (call["id"], call["resume"]) == ((tmp_path / "wandb-id.txt").read_text(), "allow")
    assert fake.run.logged == [(5, {"train/loss": 0.5, "_timestamp": 7.0, "bytes": 80.0, "step": 5})]
    assert ("train/*", "step") in fake.run.axes
    link = tmp_path / "files" / "output.log"
    assert fake.run.saved == [(str(link), str(link.parent), "live")]
    assert link.readlink() == Path("../output.log")
    assert fake.run.summary == {"best": 0.75}
    assert fake.run.finished


@pytest.mark.parametrize("slow", [1, 3])
def test_a_slow_start_of_wandb_is_tried_again(slow: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb(True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("trainer.observers._PAUSE", 0.0)
    start, over = fake.init, threading.Event()

    def init(**values: Any) -> FakeRun:
        run = start(**values)
        if len(fake.calls) <= slow:
            over.wait(60)
        return run

    monkeypatch.setattr(fake, "init", init)
    # A start that is not slow has time for it on a busy machine.
    observer = Wandb(mode="offline", timeout=1.0 if slow == 1 else 0.1).open(Run("0", tmp_path), {})
    observer.metrics("train", 1, {"loss": 0.5})
    name = (tmp_path / "wandb-id.txt").read_text()
    if slow == 1:
        observer.close()
        assert [call["id"] for call in fake.calls] == [name, f"{name}-1"]
        assert fake.run.logged == [(1, {"train/loss": 0.5, "step": 1})]
    else:
        observer.metrics("train", 2, {"loss": 0.5})
        with pytest.raises(TimeoutError, match="no answer within"):
            observer.metrics("train", 3, {"loss": 0.5})
    over.set()


def test_the_end_waits_for_no_further_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb(True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    over = threading.Event()
    monkeypatch.setattr(fake, "init", lambda **values: over.wait(60))
    observer = Wandb(mode="offline", timeout=0.1).open(Run("0", tmp_path), {})
    observer.metrics("train", 1, {"loss": 0.5})
    with pytest.raises(TimeoutError, match="no answer within"):
        observer.close()
    over.set()


# The first import of requests warns where PySocks is missing, and pytest makes errors of warnings.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SOCKS support")
def test_a_run_resumes_as_the_same_wandb_run(tmp_path: Path) -> None:
    words = (
        "cluster=simulated",
        "cluster.workers=2",
        "logger=wandb",
        "logger.mode=offline",
        f"output_dir={tmp_path / 'out'}",
    )
    assert here("training.max_steps=4", "training.checkpoint_every=2", *words) == 0
    folder = only_run(tmp_path / "out")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    (folder / "summary.json").unlink()
    time.sleep(1.1)  # W&B names its folders by the second
    assert here("training.max_steps=4", "training.checkpoint_every=2", *words, "resume=auto") == 0
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    assert len(files) == 2
    whole = [record for file in files for record in wandb_records(file)]
    runs = [record.run for record in whole if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {(folder / "wandb-id.txt").read_text()}
    assert {run.git.commit for run in runs} == {summary(folder)["environment"]["commit"]}
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in whole
        if record.WhichOneof("record_type") == "history"
    ]
    logged = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert dict(logged) == {event["step"]: event["loss"] for event in events(folder) if event["kind"] == "train"}
    assert [step for step, _ in logged] == [1, 2, 3, 4, 3, 4]
    assert all(abs(row["_timestamp"] - time.time()) < 600 and row["bytes"] > 0 < row["seconds"] for row in rows)
    saved = [file.path for each in whole if each.WhichOneof("record_type") == "files" for file in each.files.files]
    assert saved.count("output.log") == 2
    # Each part of the W&B run has the log of the whole run, which tells how it was resumed.
    logs = {(file.parent / "files" / "output.log").read_text() for file in files}
    (log,) = logs
    lines = log.splitlines()
    assert [line[:10] for line in lines if line.startswith("$ ")] == ["$ python t"] * 2
    starts = [line[:19] for line in lines if line.startswith(("plan:", "run", "training:"))]
    one = ["plan: spardl on res", f"run {summary(folder)['id']}: /tmp"[:19]]
    assert starts == [*one, "training: step 0 of", *one, "training: step 2 of"]
    assert sum(line.startswith("accuracy: ") for line in lines) == 2


def test_the_log_has_the_error_of_a_run(tmp_path: Path) -> None:
    assert here(*RUN, "optimizer.lr=1e30", f"output_dir={tmp_path / 'out'}") == 1
    log = (only_run(tmp_path / "out") / "output.log").read_text()
    assert re.search(r"\nerror: .* at step \d+; lower optimizer.lr or set training.clip_norm, and start again", log)


def test_the_log_names_the_end_once_in_utf8(tmp_path: Path) -> None:
    run = Run("0", tmp_path)
    for text in ("error: \u00e9\udc80", "error: \u00e9\udc80", "error: b"):
        run.log_end(text)
    assert (tmp_path / "output.log").read_bytes() == b"error: \xc3\xa9\\udc80\nerror: b\n"


def test_wandb_works_without_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    fake = FakeWandb(reachable=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    observer = Wandb(mode="offline").open(Run("0", tmp_path), {})
    observer.metrics("train", 1, {"loss": 0.5})
    observer.close()
    assert fake.run.logged


def test_the_log_has_warnings_and_no_activities(tmp_path: Path) -> None:
    log = LogFile(Run("0", tmp_path), simulated=True)
    log.begin(0, 5)
    log.phase("evaluating")
    log.warning("7 gradients were skipped")
    log.close()
    assert (tmp_path / "output.log").read_text().splitlines() == [
        "training: step 0 of 5",
        "warning: 7 gradients were skipped",
    ]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a W&B file, which is a LevelDB log."""
    data, position, part = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (rest := 32768 - position % 32768) < 7:
            position += rest
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def test_all_events_have_totals(tmp_path: Path) -> None:
    assert here(*RUN, "compressor=spardl", "training.untimed_steps=0", f"output_dir={tmp_path / 'out'}") == 0
    found = events(only_run(tmp_path / "out"))
    totals = {"time", "seconds/total", "bytes/total", "density", "samples/second"}
    for kind, more in {"train": {"lr"}, "eval": {"residual/norm"}}.items():
        assert all(event.keys() >= totals | more for event in found if event["kind"] == kind)
    assert [event["bytes/total"] for event in found] == sorted(event["bytes/total"] for event in found)
    assert found[-1]["bytes/total"] > found[0]["bytes/total"] > 0


def test_csv_files_have_all_events(tmp_path: Path) -> None:
    assert here(*RUN, "logger=csv", f"output_dir={tmp_path / 'out'}") == 0
    folder = only_run(tmp_path / "out")
    for kind in ("train", "eval"):
        wanted = [event for event in events(folder) if event["kind"] == kind]
        with (folder / f"{kind}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [{name: float(text) for name, text in row.items() if text} for row in rows] == [
            {name: value for name, value in event.items() if name != "kind"} for event in wanted
        ]


def test_tensorboard_has_all_events(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert here(*RUN, "logger=several", "logger.of=[tensorboard]", f"output_dir={tmp_path / 'out'}") == 0
    folder = only_run(tmp_path / "out")
    found = accumulators.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    losses = [(each.step, each.value, each.wall_time) for each in found.Scalars("train/loss")]
    train = [event for event in events(folder) if event["kind"] == "train"]
    assert losses == [(event["step"], pytest.approx(event["loss"]), pytest.approx(event["time"])) for event in train]
    assert "eval/residual/norm" in found.Tags()["scalars"] or "residual/norm" not in events(folder)[-1]


def test_several_loggers_fail_one_by_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    observer = Several(["wandb", "csv"], wandb=BrokenLogger("log"), csv=Csv()).open(Run("0", tmp_path), {})
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 2, "loss": 0.5}\n')
    observer.metrics("train", 2, {"loss": 0.5})
    observer.close()
    assert capfd.readouterr().err == "warning: BrokenLogger failed and is now disabled: cannot log\n"
    assert (tmp_path / "train.csv").read_text().split() == ["step,loss", "2,0.5"]


@pytest.mark.parametrize("of", [[], ["csv", "mlflow"], "csv"])
def test_several_loggers_need_known_names(of: Any) -> None:
    with pytest.raises(ConfigError, match=r"logger\.of must list some of csv, got"):
        Several(of, csv=Csv())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.loggers.find_spec", lambda name: None)
    Several(["csv"], csv=Csv(), tensorboard=TensorBoard()).check()
    with pytest.raises(ConfigError, match="logger=tensorboard needs the package tensorboard"):
        Several(["csv", "tensorboard"], csv=Csv(), tensorboard=TensorBoard()).check()


class BrokenLogger(Logger):
    """Breaks when it is opened, or in the middle."""

    def __init__(self, where: str) -> None:
        self._where = where

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        if self._where == "open":
            raise RuntimeError("cannot open")
        return _BreaksAtTwo()


class _BreaksAtTwo(Observer):
    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise RuntimeError("cannot log")


@pytest.mark.parametrize("where", ["open", "log"])
def test_a_broken_logger_never_stops_a_run(where: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = f"{__name__}.BrokenLogger"
    words = (*RUN, f"logger._target_={target}", f"+logger.where={where}")
    assert here(*words, f"output_dir={tmp_path / 'out'}") == 0
    assert capfd.readouterr().err == (f"warning: BrokenLogger failed and is now disabled: cannot {where}\n")
    assert summary(only_run(tmp_path / "out"))["status"] == "finished"


class SlowLogger(Logger):
    """Opens only when it sees a step of training in the run's folder, or after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        until = time.monotonic() + self._seconds
        while not (run.metrics_file.exists() and run.metrics_file.stat().st_size) and time.monotonic() < until:
            time.sleep(0.02)
        return _Copying(run.folder / "copy.jsonl")


class _Copying(MetricsFile):
    def end(self, summary: Mapping[str, Any]) -> None:
        self.metrics("end", summary["steps"], {})


def test_a_slow_logger_does_not_delay_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real workers wait for one another's messages for less time than it takes, and it misses nothing."""
    slow = (f"logger._target_={__name__}.SlowLogger", "+logger.seconds=60")
    words = ("training.max_steps=2", "cluster.workers=2", "cluster.timeout=20", *slow)
    assert here(*words, f"output_dir={tmp_path / 'out'}") == 0
    assert capfd.readouterr().err == ""
    folder = only_run(tmp_path / "out")
    copied = [json.loads(line) for line in (folder / "copy.jsonl").read_text().splitlines()]
    assert copied == [*events(folder), {"kind": "end", "step": 2}]


def services(run: int) -> list[int]:
    """The processes that W&B started for a run: grandchildren of its launcher."""
    table = processes()
    children = {pid for pid, fields in table.items() if fields[3] == str(run)}
    return [pid for pid, fields in table.items() if int(fields[3]) in children and fields[1].startswith("wandb")]


def await_in_step_4(path: Path) -> None:
    """Lets the run wait for a file in its fourth step."""
    step = Learner.step

    def held(learner: Learner, number: int) -> object:
        if number == 3:
            wait_until(path.exists)
        return step(learner, number)

    Learner.step = held  # type: ignore[method-assign, assignment]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_service_never_stops_a_run(signum: int, tmp_path: Path) -> None:
    """W&B's own process is killed, or stands still, in the middle of an offline run."""
    attempts = itertools.count()

    def ended() -> float:
        outputs = tmp_path / str(next(attempts)) / "out"
        lost = outputs.parent / "lost"
        short = ("training.max_steps=12", *RUN[1:], "model.depth=8")
        words = (*short, "logger=wandb", "logger.timeout=3", f"output_dir={outputs}")
        with background_run(*words, folder=outputs.parent / "log", before=partial(await_in_step_4, lost)) as run:
            # It starts next to the training.
            wait_until(lambda: (steps_logged(outputs) >= 3 and services(run.pid)) or run.ended())
            found = services(run.pid)
            assert found
            for pid in found:
                os.kill(pid, signum)
            began = time.monotonic()
            lost.touch()
            try:
                assert run.wait() == 0
            finally:
                for pid in {*found} & {*processes()}:
                    os.kill(pid, signal.SIGKILL)
            seconds = time.monotonic() - began
            (line,) = run.stderr.splitlines()
            assert line.startswith("warning: Wandb failed and is now disabled: ")
            wait_until(lambda: not run.members())
        assert summary(only_run(outputs))["status"] == "finished"
        return seconds

    undisturbed(ended, lambda seconds: seconds < 15)


@pytest.mark.slow
def test_an_unreachable_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Logged in, but no server answers: offline after the timeout, and the same results."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert here(*RUN, f"output_dir={tmp_path / 'plain'}") == 0
    attempts = itertools.count()

    def ended() -> float:
        outputs, began = tmp_path / str(next(attempts)), time.monotonic()
        assert here(*RUN, "logger=wandb", "logger.timeout=4", f"output_dir={outputs}") == 0
        seconds = time.monotonic() - began
        assert "warning: W&B cannot be reached, logging offline: " in capfd.readouterr().err
        assert list(only_run(outputs).glob("wandb/offline-run-*/*.wandb"))
        assert results(only_run(outputs)) == results(only_run(tmp_path / "plain"))
        return seconds

    undisturbed(ended, lambda seconds: seconds < 20)


def test_a_run_id_of_several_runs_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    """One WANDB_RUN_ID made all runs of a sweep one run; an id from wandb agent belongs to its sweep."""
    given = {"WANDB_RUN_ID": "abc12345", "HOME": "/root"}
    assert without_run_id(given) == {"HOME": "/root"}
    assert without_run_id(given, warns=False) == {"HOME": "/root"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: WANDB_RUN_ID=abc12345 is ignored, as it would make all runs of this sweep one ")
    for kept in ({**given, "WANDB_SWEEP_ID": "sweep"}, {"HOME": "/root"}):
        assert without_run_id(kept) == kept
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_only_a_single_run_takes_the_given_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "abc12345")

    def ids(folder: Path) -> list[str]:
        return [found.name.rpartition("-")[2] for found in folder.glob("**/offline-run-*/") if found.is_dir()]

    words = (*RUN, "logger=wandb", "logger.mode=offline")
    assert here(*words, f"output_dir={tmp_path / 'one'}") == 0
    assert ids(tmp_path / "one") == ["abc12345"]
    assert "WANDB_RUN_ID" not in capfd.readouterr().err
    assert here("-m", *words, "seed=1,2", f"output_dir={tmp_path / 'two'}") == 0
    found = ids(tmp_path / "two")
    assert (len(found), len({*found} - {"abc12345"})) == (2, 2)
    assert capfd.readouterr().err.count("WANDB_RUN_ID=abc12345 is ignored") == 1


def test_an_experiment_that_sets_a_project_runs_without_a_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Settings of W&B in an experiment made logger=none fail."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nlogger: {project: mine}\n")
    given = (f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine", *RUN, f"output_dir={tmp_path / 'out'}")
    assert here(*given, "logger=none") == 0
    out, err = capfd.readouterr()
    assert "W&B" not in out + err
    assert not list(only_run(tmp_path / "out").glob("wandb"))
    assert "project: mine" in (only_run(tmp_path / "out") / "config.yaml").read_text()


def test_no_logger_accepts_the_settings_of_an_experiment() -> None:
    assert NoLogger(project="mine", mode="offline") != Wandb()
