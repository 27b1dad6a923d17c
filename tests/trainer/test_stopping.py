"""Runs that a signal asks to stop: they save, end together, and continue to the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spardl.basics.errors import PeerError
from spardl.clusters.workers.processes import _ORPHANED
from tests.support.driver import (
    QUICK,
    ROOT,
    BackgroundRun,
    background_run,
    free_port,
    here,
    only_run,
    pending,
    processes,
    results,
    stand_still,
    steps_logged,
    summary,
    wait_until,
)
from trainer.command_line import STOPPED
from trainer.launch import Simulated
from trainer.rendezvous import Stopping

RUN = (
    "training.max_steps=14",
    "training.checkpoint_every=100",
    "training.eval_every=0.1",
    "training.eval_examples=64",
)
CLUSTERS = {
    "process_group": ("cluster.workers=3",),
    "simulated": ("cluster=simulated", "cluster.workers=3"),
    "dear": ("cluster.workers=2", "schedule=dear", "schedule.threshold_mb=0.1"),
}


def everybody(signum: int) -> Callable[[BackgroundRun], None]:
    """As Slurm does it: the signal goes to the launcher and to all workers."""
    return lambda run: run.kill(signum)


def the_launcher(signum: int) -> Callable[[BackgroundRun], None]:
    return lambda run: os.kill(run.pid, signum)


def the_last_worker(signum: int) -> Callable[[BackgroundRun], None]:
    return lambda run: os.kill(run.workers()[-1], signum)


WAYS = {
    "SIGTERM, launcher": the_launcher(signal.SIGTERM),
    "SIGUSR1, launcher": the_launcher(signal.SIGUSR1),
    "SIGUSR1, a worker": the_last_worker(signal.SIGUSR1),
    "SIGTERM, all": everybody(signal.SIGTERM),
    "SIGUSR1, all": everybody(signal.SIGUSR1),
    "SIGHUP, launcher": the_launcher(signal.SIGHUP),
    "SIGHUP, all": everybody(signal.SIGHUP),
}


def in_the_middle(run: BackgroundRun, outputs: Path, steps: int = 3) -> None:
    wait_until(lambda: steps_logged(outputs) >= steps or run.ended())
    assert not run.ended(), run.stderr


# Every way with real workers; with each kind every signal, and with all but the first every process that gets one.
WITH_DEAR = ("SIGHUP, launcher", "SIGUSR1, a worker", "SIGTERM, all")
CASES = [
    *(("process_group", way) for way in WAYS if way not in WITH_DEAR),
    *(("simulated", way) for way in ("SIGTERM, launcher", "SIGUSR1, a worker", "SIGHUP, all")),
    *(("dear", way) for way in WITH_DEAR),
]
QUICK_CASES = [("process_group", "SIGTERM, launcher"), ("simulated", "SIGHUP, all")]


@pytest.mark.parametrize(
    ("cluster", "way"),
    [pytest.param(*case, marks=[] if case in QUICK_CASES else pytest.mark.slow) for case in CASES],
)
def test_stopped_and_continued(
    cluster: str, way: str, tmp_path: Path, undisturbed: dict[tuple[str, ...], Path]
) -> None:
    words = (*RUN, *CLUSTERS[cluster])
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    with background_run(*again, folder=tmp_path / "log") as run:
        in_the_middle(run, tmp_path / "out", random.Random(f"{cluster} {way}").randrange(1, 6))
        WAYS[way](run)
        WAYS[way](run)  # those who end a job may tell some of its processes twice
        assert run.wait() == STOPPED, run.stderr
        assert not run.members()
        (line,) = run.stderr.splitlines()
    folder = only_run(tmp_path / "out")
    (checkpoint,) = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    reason = f"stopped at step {step} of 14 on request; all state is saved"
    assert line == f"{reason}; the same command with resume=auto continues"
    assert (summary(folder)["status"], summary(folder)["reason"]) == ("stopped", reason)
    assert steps_logged(tmp_path / "out") == step
    assert here(*again) == 0
    assert results(folder) == results(undisturbed[words])


@pytest.mark.parametrize(
    ("signum", "every", "said"),
    [
        (signal.SIGTERM, 1, r"error: interrupted; the same command with resume=auto continues after step \d+\n"),
        (signal.SIGINT, 20000, r"error: interrupted before the first checkpoint; the same command starts a new run\n"),
    ],
)
def test_a_second_signal_ends_at_once(signum: int, every: int, said: str, tmp_path: Path) -> None:
    """The first signal finds no end of a step, because a worker stands still."""
    words = ("training.max_steps=10000", f"training.checkpoint_every={every}", "cluster.workers=2")
    with background_run(*words, f"output_dir={tmp_path / 'out'}", folder=tmp_path / "log") as run:
        in_the_middle(run, tmp_path / "out")
        stopped = run.workers()[1]
        stand_still(stopped)
        # Echoes of the first are not meant as a second one. The launcher sees both at once, also on a busy machine.
        stand_still(run.pid)
        os.kill(run.pid, signum)
        os.kill(run.pid, signal.SIGUSR1)
        os.kill(run.pid, signal.SIGCONT)
        wait_until(lambda: pending(stopped, signal.SIGUSR1))  # the launcher has passed the first one on
        time.sleep(2.5)  # more than a second after the launcher has handled the first one
        assert not run.ended()
        os.kill(run.pid, signum)
        assert run.wait() == 130
        assert not run.members()
        assert re.fullmatch(said, run.stderr), run.stderr
    assert summary(only_run(tmp_path / "out"))["status"] == "interrupted"
    assert (only_run(tmp_path / "out") / "output.log").read_text().endswith(f"\n{run.stderr}")


@pytest.mark.parametrize(
    ("signum", "code"), [pytest.param(signal.SIGTERM, STOPPED, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_sweep_is_stopped_as_a_whole(signum: int, code: int, tmp_path: Path) -> None:
    words = ("-m", "seed=1,2", "training.max_steps=10000", "cluster=simulated", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log") as run:
        in_the_middle(run, tmp_path / "out")
        run.kill(signum)
        assert run.wait() == code, run.stderr
    (ended,) = (tmp_path / "out").glob("*/summary.json")
    assert summary(ended.parent)["status"] == "stopped"
    assert len(list(ended.parent.glob("checkpoints/step-*"))) == 1


def test_nohup_keeps_a_run_alive(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ("training.max_steps=40", "cluster.workers=2", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "log", before=ignore) as run:
        in_the_middle(run, tmp_path / "out")
        run.kill(signal.SIGHUP)
        assert run.wait() == 0, run.stderr


def test_workers_save_when_their_agent_dies(tmp_path: Path) -> None:
    """Two workers, started as torchrun does, whose parent is killed."""
    port = free_port()
    words = ("training.max_steps=100000", "training.checkpoint_every=100000", f"output_dir={tmp_path / 'out'}")
    agent = os.fork()
    if agent == 0:
        for rank in range(2):
            named = {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
            started = BackgroundRun(*words, folder=tmp_path / f"rank-{rank}", before=partial(os.environ.update, named))
            (tmp_path / f"{rank}").write_text(f"{started.pid}")
        signal.pause()
    try:
        wait_until(lambda: steps_logged(tmp_path / "out") > 2)
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
    workers = {int((tmp_path / f"{rank}").read_text()) for rank in range(2)}
    wait_until(lambda: not workers & {pid for pid, fields in processes().items() if fields[2] != "Z"}, _ORPHANED / 2)
    folder = only_run(tmp_path / "out")
    assert summary(folder)["status"] == "stopped"
    assert [path.name for path in folder.glob("checkpoints/*")] == [f"step-{steps_logged(tmp_path / 'out'):08d}"]


@pytest.mark.parametrize("moment", ["trainer.job.build", "trainer.experiment.prepare"])
def test_asked_before_training_began(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        monkeypatch.setattr(moment, lambda *arguments, **more: signal.raise_signal(signal.SIGTERM))

    with background_run(f"output_dir={tmp_path / 'out'}", folder=tmp_path / "log", before=ask) as run:
        assert run.wait() == STOPPED
        assert run.stderr == "stopped on request before training began\n"
    assert {summary(path.parent)["status"] for path in tmp_path.glob("out/*/summary.json")} <= {"stopped"}


@pytest.mark.slow
def test_asked_while_it_is_imported(tmp_path: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "train.py", *QUICK, "training.max_steps=100000", f"output_dir={tmp_path}"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    blocked = signal.SIGTERM - 1
    wait_until(lambda: int(re.findall(r"SigBlk:\s(\w+)", status_of(started.pid))[0], 16) >> blocked & 1)
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=240)
    assert (started.returncode, said) == (STOPPED, "stopped on request before training began\n")


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def test_a_finished_run_stays_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted when all is written, while loggers are closed."""

    def interrupt(*arguments: object, **options: object) -> None:
        launch(*arguments, **options)
        raise KeyboardInterrupt

    launch = Simulated.launch
    monkeypatch.setattr(Simulated, "launch", interrupt)
    assert here("training.max_steps=1", "cluster=simulated", f"output_dir={tmp_path}") == 130
    assert summary(only_run(tmp_path))["status"] == "finished"


class MemoryStore:
    """A store for threads, in which what is awaited comes."""

    def __init__(self) -> None:
        self._content: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._content[key] = value
            self._changed.notify_all()

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= set(self._content)

    def get(self, key: str) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._content, 60):
                raise RuntimeError("timeout")
            return self._content[key]


@pytest.mark.parametrize("seed", range(5))
def test_all_leave_after_the_same_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are up to two steps apart, as with DeAR, of whom one is asked at a random moment."""
    monkeypatch.setattr("trainer.rendezvous._POLL_SECONDS", 0.001)
    draw, store, size = random.Random(seed), MemoryStore(), 4
    group = [Stopping(lambda: store, rank, size, 60) for rank in range(size)]
    done, left = [0] * size, [0] * size
    moved = threading.Condition()
    asked, when = draw.randrange(size), draw.randrange(1, 40)

    def work(rank: int) -> None:
        with group[rank].watching():
            while True:
                with moved:
                    moved.wait_for(lambda: done[rank] - min(done) < 2, 60)
                    done[rank] += 1
                    moved.notify_all()
                if rank == asked and done[rank] == when:
                    group[rank].ask()
                if group[rank].after(done[rank]):
                    left[rank] = done[rank]
                    return

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(set(left)) == 1
    assert left[0] > when


def test_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    alone = Stopping(lambda: store, 0, 2, 0.1)
    with alone.watching():
        alone.ask()
        wait_until(lambda: alone._bound is not None)
        with pytest.raises(PeerError, match="rank 0 was asked to stop, but not all workers responded"):
            alone.after(1)
