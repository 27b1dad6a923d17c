"""Workers and launchers that are killed or stopped: the others end soon, and one line says who and when."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spardl.clusters.workers.processes import _ORPHANED
from tests.support.driver import (
    BackgroundRun,
    background_run,
    command,
    free_port,
    here,
    only_run,
    processes,
    steps_logged,
    summary,
    wait_until,
)
from tests.support.measuring import undisturbed
from trainer.experiment import Experiment
from trainer.learner import Learner

LONG = ("training.max_steps=100000", "training.epochs=10000", "training.checkpoint_every=4", "training.eval_every=1000")
CLUSTERS = {"process_group": ("cluster.workers=3",), "simulated": ("cluster=simulated", "cluster.workers=3")}


def once_it_trains(run: BackgroundRun, outputs: Path, steps: int = 6) -> list[int]:
    """The workers, when some steps and a checkpoint are done."""
    wait_until(lambda: steps_logged(outputs) >= steps or run.ended())
    assert not run.ended(), run.stderr
    return run.workers()


def check_end(run: BackgroundRun, pattern: str) -> int:
    """Exit code 1, one line, no process left; returns the step that the line names."""
    assert run.wait(45) == 1  # before cluster.timeout, unless it is set
    assert not run.members()
    (line,) = run.stderr.splitlines()
    found = re.fullmatch(pattern, line)
    assert found, line
    return int(found["step"])


@pytest.mark.parametrize(("cluster", "rank"), [("process_group", 2), ("process_group", 0), ("simulated", 0)])
def test_a_killed_worker(cluster: str, rank: int, tmp_path: Path) -> None:
    attempts = itertools.count()

    def ended() -> float:
        outputs = tmp_path / str(next(attempts)) / "out"
        with background_run(*LONG, *CLUSTERS[cluster], f"output_dir={outputs}", folder=outputs.parent / "log") as run:
            workers = once_it_trains(run, outputs)
            began = time.monotonic()
            os.kill(workers[rank], signal.SIGKILL)
            said = rf"error: worker {rank} was killed by SIGKILL at step (?P<step>\d+); the other workers were stopped"
            step = check_end(run, said)
            seconds = time.monotonic() - began
        assert step >= 5
        folder = only_run(outputs)
        assert summary(folder)["status"] == "failed"
        assert f"worker {rank} was killed" in summary(folder)["reason"]
        assert (folder / "checkpoints").exists()
        return seconds

    undisturbed(ended, lambda seconds: seconds < 15)


def test_what_a_killed_worker_leaves_can_be_continued(tmp_path: Path) -> None:
    words = ("training.max_steps=12", "training.checkpoint_every=2", *CLUSTERS["process_group"])
    words = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    with background_run(*words, folder=tmp_path / "log") as run:
        os.kill(once_it_trains(run, tmp_path / "out", 5)[1], signal.SIGKILL)
        check_end(run, r"error: worker 1 .* at step (?P<step>\d+); .*")
    assert here(*words) == 0
    assert summary(only_run(tmp_path / "out"))["steps"] == 12


def short_waits(monkeypatch: pytest.MonkeyPatch, notice: float, obey: float) -> None:
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", notice)
    monkeypatch.setattr("spardl.clusters.workers.processes._OBEY", obey)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_worker(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine must not be late for them: a live worker that is would be taken for the stopped one.
    short_waits(monkeypatch, 3.0, 0.5)
    words = (*LONG, *CLUSTERS["process_group"], "cluster.timeout=6", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log") as run:
        workers = once_it_trains(run, tmp_path / "out")
        os.kill(workers[rank], signal.SIGSTOP)
        step = check_end(run, rf"error: worker {rank} stopped answering at step (?P<step>\d+)")
    assert step >= 5


def test_a_short_stop_does_no_harm(tmp_path: Path) -> None:
    words = (*LONG, *CLUSTERS["process_group"], "cluster.timeout=60", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log") as run:
        worker = once_it_trains(run, tmp_path / "out")[1]
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.5)
        before = steps_logged(tmp_path / "out")
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: steps_logged(tmp_path / "out") > before + 2 or run.ended())
        assert not run.ended()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_workers_do_not_outlive_the_launcher(cluster: str, tmp_path: Path) -> None:
    words = (*LONG, *CLUSTERS[cluster], f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log") as run:
        workers = once_it_trains(run, tmp_path / "out")
        assert len(workers) == (1 if cluster == "simulated" else 3)
        os.kill(run.pid, signal.SIGKILL)
        wait_until(lambda: not run.members(), _ORPHANED / 2)
        assert not set(workers) & {pid for pid, fields in processes().items() if fields[2] != "Z"}
        assert run.stderr == ""
    newest = max(only_run(tmp_path / "out").glob("checkpoints/step-*"))
    assert newest.name == f"step-{steps_logged(tmp_path / 'out'):08d}"  # saved when the launcher died


@pytest.mark.parametrize("killed", [True, False])
def test_a_parent_that_ignores_the_ends_of_children(killed: bool, tmp_path: Path) -> None:
    """``trap '' CHLD``: the kernel then discards exit codes, unless a process restores the default."""

    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    words = (*LONG[1:], f"training.max_steps={100000 if killed else 4}", "cluster.workers=2")
    with background_run(*words, f"output_dir={tmp_path / 'out'}", folder=tmp_path / "log", before=ignore) as run:
        if killed:
            os.kill(once_it_trains(run, tmp_path / "out")[1], signal.SIGKILL)
            check_end(run, r"error: worker 1 was killed by SIGKILL at step (?P<step>\d+); .*")
        else:
            assert run.wait() == 0, run.stderr


def breaking(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Callable[[], None]:
    """Lets rank 1 fail by itself in the fourth step, while the others wait for it."""
    step = Learner.step

    def broken(learner: Learner, number: int) -> object:
        if number == 3 and learner._cluster.local_ranks[0] == 1:
            raise error
        return step(learner, number)

    return lambda: monkeypatch.setattr(Learner, "step", broken)


@pytest.mark.parametrize("text", ["on\nmany lines", ""])
def test_the_worker_that_failed_by_itself_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    breaking(monkeypatch, LookupError(text))()
    assert here(*LONG, *CLUSTERS["process_group"], f"output_dir={tmp_path}") == 1
    trace = only_run(tmp_path) / "errors" / "rank-1.txt"
    reason = text.partition("\n")[0] or "LookupError"
    expected = f"error: worker 1 failed at step 3: LookupError: {reason} (see {trace})\n"
    assert capfd.readouterr().err == expected
    assert "in broken" in trace.read_text()


def test_a_full_disk_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("trainer.checkpoint.write_atomically", full)
    monkeypatch.setattr("spardl.clusters.workers.processes.write_atomically", full)
    words = ("training.max_steps=2", *CLUSTERS["process_group"], f"output_dir={tmp_path}")
    assert here(*words) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"error: worker \d failed at step 2: cannot write \S+: No space left on device; free some space, then "
        r"continue with the same command and resume=auto",
        line,
    )


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    """``python train.py | head -1``"""

    def close_the_pipe() -> None:
        reading, writing = os.pipe()
        os.dup2(writing, 1)
        Experiment.perform = _then(Experiment.perform, reading)  # type: ignore[method-assign]

    words = ("training.max_steps=3", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log", before=close_the_pipe) as run:
        assert run.wait() == 0, run.stderr
        warnings = run.stderr.splitlines()
    assert warnings[0] == "warning: the display failed and is now disabled: [Errno 32] Broken pipe"
    assert all(line.startswith("warning: the report failed") for line in warnings[1:])
    assert summary(only_run(tmp_path / "out"))["status"] == "finished"


def _then(perform: Callable[..., None], reading: int) -> Callable[..., None]:
    def closed(*arguments: object) -> None:
        os.close(reading)
        perform(*arguments)

    return closed


SCHEDULES = {
    "wfbp": ("schedule=wfbp", "schedule.bucket_mb=0.1"),
    "mg_wfbp": ("schedule=mg_wfbp",),
    "layer_fusion": ("schedule=layer_fusion", "compressor=topka"),
    "dear": ("schedule=dear", "schedule.threshold_mb=0.1", "compressor=none", "training.clip_norm=1"),
    "dear, sparse": ("schedule=dear", "schedule.threshold_mb=0.1", "communicator.teams=3"),
    "dear, tuned": ("schedule=dear", "schedule.trials=90", "schedule.low_mb=0.05", "schedule.threshold_mb=0.1"),
}


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [("dear, sparse", 0)] + [pytest.param(name, seed, marks=pytest.mark.slow) for name in SCHEDULES for seed in (1, 2)],
)
def test_a_worker_that_dies_in_any_phase_ends_all(
    schedule: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or, with odd seeds, stopped at a random moment: while measuring, in a pass, in either half of a sum."""
    short_waits(monkeypatch, 4.0, 1.0)
    words = (*LONG, *CLUSTERS["process_group"], *SCHEDULES[schedule], "cluster.timeout=6")
    attempts = itertools.count()

    def ended() -> float:
        draw, outputs = random.Random(f"{schedule} {seed}"), tmp_path / str(next(attempts)) / "out"
        rank, stops = draw.randrange(3), seed % 2 == 1
        with background_run(*words, f"output_dir={outputs}", folder=outputs.parent / "log") as run:
            workers = once_it_trains(run, outputs, draw.randrange(1, 20))
            time.sleep(draw.uniform(0, 0.3))
            began = time.monotonic()
            os.kill(workers[rank], signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                check_end(run, rf"error: worker {rank} stopped answering at step (?P<step>\d+)")
            else:
                check_end(run, rf"error: worker {rank} was killed by SIGKILL at step (?P<step>\d+); .* were stopped")
            return time.monotonic() - began

    undisturbed(ended, lambda seconds: seconds < 20)


@pytest.mark.slow
def test_who_cannot_meet_the_others_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed, since torch reads once how much it shall say: of its own it would print the stack of its C++."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    port = free_port()
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = command("cluster.timeout=1", "logger=none", f"output_dir={tmp_path / 'out'}", env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: rank 1 cannot connect to the other workers at 127.0.0.1:{port}: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
