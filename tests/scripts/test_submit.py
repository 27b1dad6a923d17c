"""scripts/submit.py and the batch files, without Slurm: what is planned, written, shown, and run on this machine."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from scripts import choices
from scripts import slurm_lab as lab
from scripts import submit as script
from scripts.submission import cluster
from scripts.submission import here as places
from scripts.submission import sweeps as sweeping
from scripts.submission.site import DEFAULT, Job, Queued, Site, read_site
from scripts.submission.standing import standing
from scripts.submission.submissions import Entry, Submission, find_submission, new_submission, submitting
from spardl.basics.errors import ConfigError
from tests.support.labs import processes_with
from tests.support.slurms import ROOT, SMALL, table
from trainer.runs import Run, new_run

SLURM = ROOT / "slurm"


@pytest.fixture
def sweeps() -> Iterator[Any]:
    with choices.composing():
        yield sweeping


def test_a_sweep_is_hydras(sweeps: Any) -> None:
    words = ("compressor=spardl,oktopk", "cluster=slurm", "seed=range(1,3)", "logger.tags=[a,b]")
    assert sweeps.expand(words, True) == [
        (f"compressor={name}", "cluster=slurm", f"seed={seed}", "logger.tags=[a,b]")
        for name in ("spardl", "oktopk")
        for seed in (1, 2)
    ]
    assert sweeps.expand(words, False) == [words]
    continuous = r"^optimizer.lr=interval\(0,1\): a sweep needs discrete values, such as optimizer.lr=1,2,3 or "
    with pytest.raises(ConfigError, match=continuous):
        sweeps.expand(["seed=1,2", "optimizer.lr=interval(0,1)"], True)


@pytest.mark.parametrize(
    "words",
    [
        ("seed=range(1,4)", "training.clip_norm=choice(1,2)", "compressor=glob(top*)"),
        ("+a='x, y','z, w'", "output_dir=/tmp/a b", "logger.tags=[a,b]"),
        ("seed=1,2", "model=resnet20,vgg16", "optimizer.lr=0.1", "seed=5"),
    ],
    ids=["choice and glob", "values with commas", "configured and repeated keys"],
)
def test_values_and_their_order_are_hydras(
    words: tuple[str, ...], sweeps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the configuration defines a sweep, whose values the command line overrides."""
    hydra = SimpleNamespace(mode=None, sweeper=SimpleNamespace(params={"model": "lstm,bert", "optimizer": "sgd,adam"}))
    monkeypatch.setattr(sweeps, "compose", lambda *_, **__: SimpleNamespace(hydra=hydra))
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides(["model=lstm,bert", "optimizer=sgd,adam", *words])
    basic: Any
    basic, *_ = (kind for kind in Plugins.instance().discover(Sweeper) if kind.__name__ == "BasicSweeper")
    (batch,) = basic.split_arguments(overrides, None)
    assert sweeps.expand(words, True) == [tuple(run) for run in batch]
    assert len(batch) >= 4


def test_a_configuration_that_is_a_sweep(sweeps: Any) -> None:
    runs = sweeps.expand(["experiment=sparse_communication_study", "seed=1,2"], False)
    assert len(runs) > 50
    assert all(run[1] == "experiment=sparse_communication_study" and run[0].startswith("+point=") for run in runs)


def test_what_a_run_is_and_how_many_processes_it_needs(sweeps: Any) -> None:
    names = ("process_group", "slurm", "local")
    slurm, group, local = (sweeps.plan([f"cluster={name}", "cluster.workers=3"]) for name in names)
    assert slurm.id == group.id == local.id
    assert [run.tasks for run in (slurm, group, local)] == [3, 3, 3]
    assert sweeps.plan(["cluster=simulated", "cluster.workers=14"]).tasks == 1
    planned = sweeps.plan(["cluster=slurm", "logger.tags=['a b', c]"])
    assert planned.tasks == 4
    assert planned.words == ("cluster=slurm", "logger.tags=['a b', c]", "resume=auto", "hydra.mode=RUN")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("site.time=0", "site.time must be an integer, at least 1"),
        ("site.tme=5", "site.tme: Key 'tme' not in 'Site'"),
        ("site.time=soon", "site.time: Value 'soon'"),
        ("site.signal_seconds=99999", "must be less than the time limit"),
        ("site.stage_from=/data", "belong together"),
        ("site.options=3", "site"),
        ("site.setup=[", "site"),
    ],
)
def test_bad_settings_of_the_site(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as found:
        read_site(DEFAULT, [word])
    assert "\n" not in str(found.value)


def test_the_sites_file_and_the_words_that_override_it(tmp_path: Path) -> None:
    assert read_site(DEFAULT, []) == Site()
    (tmp_path / "mine.yaml").write_text("partition: fast\ntime: 30\noptions: {constraint: a100, exclusive: true}\n")
    found = read_site(tmp_path / "mine.yaml", ["site.time=90", "site.workers_per_node=8"])
    assert (found.partition, found.time, found.options) == ("fast", 90, {"constraint": "a100", "exclusive": True})
    assert [found.nodes(tasks) for tasks in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    with pytest.raises(ConfigError, match="cannot read --site"):
        read_site(tmp_path / "none.yaml", [])
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"cannot read --site .*binary\.yaml: "):
        read_site(tmp_path / "binary.yaml", [])


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that come before all others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["submit.py", *words])
        code: int = script.main()
        return code

    return run


@pytest.fixture
def queued(programs: Path) -> Path:
    """A Slurm that takes everything and lets it wait."""
    for name in ("srun", "scancel"):
        stand_in(programs, name, f'echo "$@" >> {programs}/{name}.txt')
    stand_in(programs, "sbatch", f"cp $1 {programs}/batch.sh; echo Submitted batch job 7")
    stand_in(programs, "squeue", "printf '7_0|PENDING|None|N/A\\n7_1|RUNNING|None|N/A\\n'")
    return programs


def test_the_queue_is_explained(
    queued: Path, submit: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "7_0|PENDING|Priority|2026-11-30T10:00:00\\n7_1|PENDING|JobHeldUser|N/A\\n"
    stand_in(queued, "squeue", f"printf '{lines}'")
    assert submit("-m", "seed=1,2", "cluster=slurm", f"output_dir={tmp_path / 'out'}") == 0
    capsys.readouterr()
    assert submit("status", f"--outputs={tmp_path / 'out'}") == 0
    assert table(capsys.readouterr().out) == {
        1: ("queued", "Priority; expected start 2026-11-30 10:00:00", "seed=1"),
        2: ("queued", "JobHeldUser", "seed=2"),
    }


def test_lines_of_squeue_are_read_safely(queued: Path) -> None:
    lines = r"7_0|PENDING|a|b|2026-11-30T10:00:00\n7_1|PENDING|Priority\n7_2|RUNNING\n7_3|PENDING\nnoise\n\n"
    stand_in(queued, "squeue", f"printf '{lines}'")
    waiting = Job(Queued.WAITING)
    assert cluster._states("7") == {
        "7_0": Job(Queued.WAITING, "a|b; expected start 2026-11-30 10:00:00"),
        "7_1": waiting,
        "7_2": Job(Queued.RUNNING),
        "7_3": waiting,
    }


def test_what_is_submitted(
    queued: Path, submit: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = tmp_path / "out"
    words = ("-m", "seed=1,2,3", "cluster=slurm", f"output_dir={outputs}", "cluster.workers=5")
    site = (
        "site.at_once=2",
        "site.time=90",
        "site.account=us",
        "site.memory=8G",
        "site.requeues=3",
        "site.setup=[a b]",
    )
    done, lock = new_run(outputs, "x", _identity("seed=2", *words[2:]))
    os.close(lock)
    done.write_summary({"id": done.id, "status": "finished", "metric": "accuracy", "final": {"accuracy": 0.5}})
    staged = ("site.stage_from=/data", "site.stage_to=$TMPDIR/data", "site.options={exclusive: true}")
    assert submit(*words, *site, *staged) == 0
    reported = capsys.readouterr().out
    assert f"skipped: {done.folder} is finished" in reported
    assert "submitted array 7: 2 runs, 2 at once, 5 tasks on 2 nodes each" in reported
    batch = (queued / "batch.sh").read_text()
    wanted = "account=us array=0-1%2 mem=8G nodes=2 ntasks=5 ntasks-per-node=4 signal=USR1@120 time=90"
    for option in (*wanted.split(), "requeue", "exclusive", "open-mode=append"):
        assert f"#SBATCH --{option}\n" in batch
    own = f"export PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"
    assert f'\na b\n{own}\n. {SLURM}/stage.sh "/data" "$TMPDIR/data"\n' in batch
    assert batch.rstrip().endswith(f'exec bash {SLURM}/after.sh "$?" 3')
    assert "--kill-on-bad-exit=0 --wait=60" in batch

    assert submit("status", "--outputs", str(outputs)) == 0
    assert table(capsys.readouterr().out) == {1: ("queued", "", "seed=1"), 2: ("running", "starting", "seed=3")}
    assert submit("resubmit", "--outputs", str(outputs)) == 0
    assert capsys.readouterr().out == "skipped: 2 of 2 runs, finished or queued\n"
    assert submit("cancel", "--outputs", str(outputs)) == 0
    assert (queued / "scancel.txt").read_text() == "7_0 7_1\n"


def test_jobs_without_a_record_are_found(
    queued: Path, submit: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The submitting process was killed after sbatch had accepted the array and before it wrote the record."""
    outputs = tmp_path / "out"
    words = ("-m", "seed=1,2", "cluster=slurm", f"output_dir={outputs}")
    assert submit(*words) == 0
    (record,) = outputs.glob(".submissions/*/submission.json")
    complete = json.loads(record.read_text())
    killed = {**complete, "entries": [{**entry, "job": None, "log": None} for entry in complete["entries"]]}
    batch = f"{record.parent}/submission_file.sh"
    stand_in(
        queued,
        "squeue",
        f"case \"$*\" in *%o*) echo '7|{batch}'; echo '8|/other.sh';; *) echo '7_0|PENDING|None|N/A';; esac",
    )
    for command, said in {"status": "queued", "cancel": "cancelled: 1 of 2 runs"}.items():
        record.write_text(json.dumps(killed))
        capsys.readouterr()
        assert submit(command, "--outputs", str(outputs)) == 0
        assert said in capsys.readouterr().out
        assert json.loads(record.read_text()) == complete
    assert (queued / "scancel.txt").read_text() == "7_0\n"
    record.write_text(json.dumps(killed))
    assert submit(*words) == 0
    assert f"waits or runs in submission {record.parent.name}" in capsys.readouterr().out


def test_what_waits_or_runs_is_not_submitted_again(
    queued: Path, submit: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cluster=slurm", f"output_dir={tmp_path / 'out'}")
    assert submit("-m", "seed=1,2", *words) == 0
    (first,) = re.findall(r"^submission (\S+):", capsys.readouterr().out, re.MULTILINE)
    (queued / "batch.sh").unlink()
    assert submit("-m", "seed=1,2", *words, "force=true") == 0
    out = capsys.readouterr().out
    assert len(re.findall(rf"^skipped: \w{{10}} waits or runs in submission {first}$", out, re.MULTILINE)) == 2
    assert out.endswith("nothing to submit\n")
    assert not (queued / "batch.sh").exists()
    assert submit("-m", "seed=1,2,3", *words) == 0
    assert "submitted job 7: one run" in capsys.readouterr().out


def _identity(*words: str) -> str:
    with choices.composing():
        identity: str = sweeping.plan(words).id
    return identity


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-m", "seed=1,2", "compressor=spardl,foo"), "Could not find 'compressor/foo'"),
        (("seed=1,2",), "Ambiguous value for argument 'seed=1,2'"),
        pytest.param(("-m", "compressor.density=0.1,7"), "density", marks=pytest.mark.slow),
        (("cluster.workers=0",), "cluster.workers must be an integer"),
        pytest.param(("-m", "cluster=local,slurm"), "submit them separately", marks=pytest.mark.slow),
        (("-m", "output_dir=a,b"), "different output_dir or force"),
        (("status", "--outputs", "none"), "no submissions in"),
        (("site.tme=5",), "site.tme"),
    ],
)
def test_bad_input_is_one_line_and_submits_nothing(
    words: tuple[str, ...],
    message: str,
    queued: Path,
    submit: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert submit(*words) == 2
    found = capsys.readouterr()
    (line,) = found.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (queued / "batch.sh").exists()
    assert not (tmp_path / "outputs").exists()


def test_without_slurm_the_way_out_is_named(
    submit: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit("cluster=slurm", f"output_dir={tmp_path}/out") == 2
    words = "Slurm is not available (missing sbatch, srun, squeue, scancel); use cluster=local"
    assert words in capsys.readouterr().err


STANDINGS = {
    "finished": (
        {"status": "finished", "metric": "loss", "final": {"loss": 0.25}},
        None,
        "",
        ("finished", "loss 0.25"),
    ),
    "failed": ({"status": "failed", "reason": "why"}, None, "", ("failed", "why")),
    "stopped": ({"status": "stopped", "reason": "at 3"}, None, "", ("stopped", "at 3")),
    "interrupted": ({"status": "interrupted"}, None, "", ("interrupted", "step 20")),
    "died": ({"status": "running"}, None, "slurmstepd: error: *** JOB 7 ON n0 CANCELLED DUE TO TIME LIMIT ***\n", None),
    "queued again": ({"status": "stopped", "reason": "at 3"}, "WAITING", "", ("queued", "at 3")),
    "running": ({"status": "running"}, "RUNNING", "", ("running", "step 20")),
    "starting": ({}, "RUNNING", "", ("running", "starting")),
    "never began": (
        {},
        None,
        "error: no data\nsrun: error: n0: task 0: Exited with exit code 2\n",
        ("failed", "no data"),
    ),
    "stopped early": (
        {},
        None,
        "stopped on request before training began\nsrun: error: n0: task 0: Exited with exit code 75\n",
        ("stopped", "before training began"),
    ),
    "unknown": ({"status": "running"}, "UNKNOWN", "", ("running", "the queue does not answer")),
}


@pytest.mark.parametrize("case", STANDINGS)
def test_how_a_run_stands(case: str, tmp_path: Path) -> None:
    summary, queued, log, wanted = STANDINGS[case]
    wanted = wanted or ("died", "step 20; JOB 7 ON n0 CANCELLED DUE TO TIME LIMIT")
    entry = Entry(("seed=1",), "0123456789", 1, "7", "log.txt")
    made = new_submission(tmp_path, "slurm", False, {}, [entry])
    (made.folder / "log.txt").write_text(log)
    if summary:
        run = Run("0123456789", tmp_path / "x-0123456789")
        run.folder.mkdir()
        run.write_summary(summary)
        run.metrics_file.write_text('{"kind": "train", "step": 10}\n{"kind": "train", "step": 20}\n{"kind": "tr')
    found = standing(made, entry, {"7": Job(Queued[queued])} if queued else {})
    assert found[:2] == wanted
    assert found.live == (queued is not None and case != "finished")


def test_a_forced_run_is_finished_only_when_it_was_done_again(tmp_path: Path) -> None:
    run, lock = new_run(tmp_path, "x", "0123456789")
    os.close(lock)
    run.write_summary({"status": "finished", "metric": "loss", "final": {}})
    os.utime(run.summary_file, (1, 1))
    entry = Entry(("seed=1",), run.id, 1, "7", "log.txt")
    made = new_submission(tmp_path, "slurm", True, {}, [entry])
    assert standing(made, entry, {}).state == "not begun"
    os.utime(run.summary_file)
    assert standing(made, entry, {}).state == "finished"


def test_submissions_are_found_again_and_never_collide(tmp_path: Path) -> None:
    entry = Entry(("seed=1", "resume=auto"), "0123456789", 4)
    made = [new_submission(tmp_path, "slurm", False, {"time": 5}, [entry]) for _ in range(12)]
    assert len({one.name for one in made}) == 12
    assert find_submission(tmp_path, None) == made[-1]
    assert find_submission(tmp_path, made[3].name) == made[3]
    with pytest.raises(ConfigError, match="submission nope does not exist"):
        find_submission(tmp_path, "nope")
    (made[-1].folder / "submission.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read record"):
        find_submission(tmp_path, None)


SOUND = {"place": "here", "outputs": "o", "since": 1, "force": False, "site": {}}
RUN = {"words": ["seed=1"], "id": "0123456789", "tasks": 1, "job": None, "log": None}
BROKEN = {
    "[]": "is not a submission",
    "{}": "missing field 'place'",
    "[" * 100_000: "nested too deeply",
    json.dumps({**SOUND, "entries": []}): "no runs",
    json.dumps({**SOUND, "entries": [{"words": 5}]}): "is not",
    json.dumps({**SOUND, "entries": [RUN], "place": "there"}): "an unknown place 'there'",
    '{"place": "here", "outputs": "o", "since": "x", "force": false, "site": {}, "entries": [1]}': "field since has",
    **{
        json.dumps({**SOUND, "entries": [{**RUN, name: value}]}): "invalid entry"
        for name, value in (
            ("words", "seed=1"),
            ("words", [1]),
            ("id", "../x"),
            ("tasks", "2"),
            ("job", 7),
            ("log", []),
        )
    },
    json.dumps({**SOUND, "entries": [RUN], "site": []}): "field site has",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_record_breaks_only_its_submission(text: str, tmp_path: Path) -> None:
    entry = Entry(("seed=1",), "0123456789", 1)
    made = new_submission(tmp_path, "here", False, {}, [entry])
    older, newer = (made.folder.with_name(name) for name in ("20200101-000000", "29990101-000000"))
    older.mkdir()
    (older / "submission.json").write_text(text)
    assert find_submission(tmp_path, None) == made
    with pytest.raises(ConfigError, match=f"{older.name}.*{BROKEN[text]}.*; delete its folder, or name another"):
        find_submission(tmp_path, older.name)
    older.rename(newer)
    with pytest.raises(ConfigError, match=f"{newer.name}.*{BROKEN[text]}"):  # an older one is not what is meant
        find_submission(tmp_path, None)
    assert find_submission(tmp_path, made.name) == made


@pytest.mark.parametrize(
    "text", ["[]", '{"status": "finished"}', '{"status": []}', '{"status": "finished", "final": 5}']
)
def test_a_broken_summary_breaks_no_table(text: str, tmp_path: Path) -> None:
    entry = Entry(("seed=1",), "0123456789", 1, "1", "1.txt")
    made = new_submission(tmp_path, "here", False, {}, [entry])
    run = Run("0123456789", tmp_path / "x-0123456789")
    run.folder.mkdir()
    run.summary_file.write_text(text)
    run.metrics_file.write_text("[]}")
    assert standing(made, entry, {}).state in ("finished", "not begun")
    assert math.isnan(run.metric())


@pytest.mark.parametrize(
    ("code", "restarts", "state", "asked"),
    [
        (0, 0, "RUNNING", False),
        (1, 0, "RUNNING", False),
        (75, 0, "RUNNING", True),
        (75, 2, "RUNNING", True),
        (75, 3, "RUNNING", False),
        (75, 0, "CANCELLED", False),
        (143, 0, "RUNNING", True),
        (137, 0, "RUNNING", False),
    ],
)
@pytest.mark.parametrize("array", [{}, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}], ids=["job", "array"])
def test_who_goes_back_into_the_queue(
    array: dict[str, str], code: int, restarts: int, state: str, asked: bool, programs: Path
) -> None:
    """Of an array one task alone: its last one has the number of the whole array for a job's."""
    stand_in(programs, "scontrol", f'echo "$@" >> {programs}/asked.txt; echo JobId=7 JobState={state} Requeue=1')
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), **array}
    command = ["bash", str(SLURM / "after.sh"), str(code), "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code
    reported = (programs / "asked.txt").read_text() if (programs / "asked.txt").exists() else ""
    assert (f"requeue 7{'_2' if array else ''}\n" in reported) == asked
    assert ("not put into the queue again after 3 times" in done.stderr) == (restarts == 3)


def test_a_copy_is_made_once_by_many_and_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "data", tmp_path / "disk" / "data"
    source.mkdir()
    (source / "file").write_text("x" * 1000)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "data.part").mkdir()  # of a copy that was cut off
    command = ["bash", str(SLURM / "copy.sh"), str(source), str(target)]
    jobs = [subprocess.Popen(command) for _ in range(4)]
    assert [job.wait(20) for job in jobs] == [0] * 4
    assert [path.name for path in target.rglob("*")] == ["file"]
    assert (target / "file").read_text() == "x" * 1000
    done = subprocess.run(
        [*command[:2], f"{tmp_path}/none", "x"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no folder")


def test_the_lab_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lab.Lab(tmp_path / "lab")
    for words, message in ((0, "--nodes must be"), (65, "--nodes must be")):
        with pytest.raises(lab.LabError, match=message):
            lab.up(folder, words)
    with pytest.raises(lab.LabError, match="no lab in"):
        lab.down(folder)
    with pytest.raises(lab.LabError, match="start one with"):
        lab.env(folder)
    folder.folder.mkdir()
    (folder.folder / "mine").touch()
    with pytest.raises(lab.LabError, match="was not created by this script and is kept"):
        lab.down(folder)
    assert (folder.folder / "mine").exists()
    with pytest.raises(lab.LabError, match="too long for a socket path"):
        lab.up(lab.Lab(tmp_path / ("x" * 120)), 1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(lab.LabError, match="need root"):
        lab.up(folder, 1)


def test_a_dead_daemon_is_reported_before_a_request(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "daemon.txt").write_text("error: no key\n")
    with subprocess.Popen(("false",)) as daemon:
        daemon.wait(60)
    with pytest.raises(lab.LabError, match="one of false exited: error: no key; see"):
        lab._await(lambda: pytest.fail("a dead daemon was asked"), [daemon], lab.Lab(tmp_path))


@contextmanager
def here(*words: str, outputs: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A sweep in the foreground, of which nothing is left in the end."""
    command = [sys.executable, "scripts/submit.py", *words, *SMALL, "cluster=local", f"output_dir={outputs}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            for pid in processes_with(str(outputs)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def later(*words: str, outputs: Path) -> str:
    command = [sys.executable, "scripts/submit.py", *words, "--outputs", str(outputs)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout


@pytest.mark.slow
def test_a_sweep_here_goes_on_after_a_failure(tmp_path: Path) -> None:
    words = ("-m", "optimizer.lr=1e30,0.01,0.02", "compressor=none", "training.max_steps=3", "cluster.workers=1")
    with here(*words, "site.at_once=2", outputs=tmp_path) as process:
        out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (1, "")
    assert re.search(r"^\[1/3\] \w{10}  optimizer.lr=1e\+30: failed: the loss is nan", out, flags=re.MULTILINE)
    started = [match.start() for match in re.finditer(": started", out)]
    ended = [match.start() for match in re.finditer(": (failed|finished): ", out)]
    assert len(started) == len(ended) == 3
    assert started[1] < ended[0] < started[2]
    assert [row[0] for row in table(later("status", outputs=tmp_path)).values()] == ["failed", "finished", "finished"]
    assert "error: the loss is nan" in later("logs", outputs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["terminal", "cancel"])
def test_the_end_of_a_sweep_here_saves_what_runs(how: str, tmp_path: Path) -> None:
    words = ("-m", "seed=1,2,3", "training.max_steps=100000", "training.epochs=100000", "cluster.workers=2")
    with here(*words, "site.at_once=1", outputs=tmp_path, start_new_session=True) as process:
        _until(lambda: any(path.read_text().count("\n") > 3 for path in tmp_path.glob("*/metrics.jsonl")))
        rows = table(later("status", outputs=tmp_path))
        assert [row[0] for row in rows.values()] == ["running", "queued", "queued"]
        if how == "terminal":
            os.killpg(process.pid, signal.SIGINT)
        else:
            assert later("cancel", outputs=tmp_path) == "cancelled: 3 of 3 runs\n"
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert err == "stopping: runs save a checkpoint and exit; press Ctrl-C again to end them immediately\n"
    assert ": stopped: stopped at step " in out
    rows = table(later("status", outputs=tmp_path))
    assert [row[0] for row in rows.values()] == ["stopped", "not begun", "not begun"]
    (folder,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    assert list(folder.glob("checkpoints/step-*"))


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A train.py that starts a child and sleeps; what is left of it is killed in the end."""
    path = tmp_path / "sleeper.py"
    path.write_text("import os, time\nos.fork()\ntime.sleep(600)\n")
    monkeypatch.setattr(places, "TRAIN", path)
    yield path
    for pid in processes_with(str(path)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _submission(outputs: Path, *ids: str, force: bool = False) -> Submission:
    entries = [Entry((f"seed={identity}",), identity, 1) for identity in ids]
    return new_submission(outputs, "here", force, {"at_once": 1}, entries)


def _killed_after_the_start(made: Submission, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Submits, and stops where a kill -9 is worst: the run exists, but its process id is not recorded."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> None:
        begun.append(subprocess.Popen(*arguments, **options))
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(places, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
        places.Here().submit(made)
    return begun[0]


@pytest.mark.parametrize("leader", ["alive", "killed"])
def test_cancel_finds_the_run_of_a_killed_submit(
    leader: str, sleeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _killed_after_the_start(_submission(tmp_path, "0123456789"), monkeypatch)
    here, made = places.Here(), find_submission(tmp_path, None)
    _until(lambda: len(processes_with(str(sleeper))) == 2)
    assert here.queue(made) == {"1": Job(Queued.RUNNING)}
    if leader == "killed":
        process.kill()
        process.wait(60)
        assert here.queue(made) == {"1": Job(Queued.RUNNING)}
    here.cancel(made, ["1"])
    if leader == "killed":
        _until(lambda: here.queue(made) == {})
    else:
        assert process.wait(60) == -signal.SIGTERM  # train.py itself ends its workers


@pytest.mark.parametrize("force", [False, True])
def test_two_submissions_train_a_run_once(
    force: bool, sleeper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper.write_text(f"import sys\nopen({str(tmp_path / 'trained')!r}, 'a').write(sys.argv[1] + ' ')\n")
    made = _submission(tmp_path, "a1", "b2", force=force)
    lock = os.open(made.run_lock(made.entries[0]), os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    run, claim = new_run(tmp_path, "x", "b2")
    os.close(claim)
    run.write_summary({"status": "finished", "metric": "loss", "final": {"loss": 0.5}})
    assert places.Here().submit(made) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\[1/2\] a1  seed=a1: skipped: another submission is running it$", out, re.MULTILINE)
    assert re.search(r"^\[2/2\] b2  seed=b2: skipped: another submission has finished it$", out, re.MULTILINE)
    assert not (tmp_path / "trained").exists()
    assert places.Here().queue(find_submission(tmp_path, None)) == {"1": Job(Queued.RUNNING)}
    os.close(lock)
    places.Here().submit(made)
    assert (tmp_path / "trained").read_text() == "seed=a1 "


def test_one_process_submits_at_a_time(tmp_path: Path) -> None:
    with submitting(tmp_path), pytest.raises(ConfigError, match="has been submitting runs"), submitting(tmp_path, 0.2):
        pass
    with submitting(tmp_path):
        pass


def _until(holds: Callable[[], Any], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.1)
