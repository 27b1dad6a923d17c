from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from spardl.basics.errors import ConfigError, PeerError, ProgramError, TrainingError, WorkerError
from spardl.clusters.workers import processes
from spardl.clusters.workers.processes import _watch, run_each, run_processes
from tests.support.measuring import undisturbed

Heartbeat = Callable[[int], None]

ROOT = Path(__file__).resolve().parents[3]


def test_each_rank_has_a_separate_process(tmp_path: Path) -> None:
    def target(rank: int, heartbeat: Heartbeat) -> None:
        (tmp_path / str(rank)).write_text(f"{os.getpid()} {os.getppid()}")

    run_processes(5, target, tmp_path)
    written = [path.read_text().split() for path in tmp_path.iterdir()]
    assert len({own for own, _ in written}) == 5
    assert {parent for _, parent in written} == {str(os.getpid())}


def test_nothing_stays_open(tmp_path: Path) -> None:
    def opened() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    before = opened()
    run_processes(3, lambda rank, heartbeat: None, tmp_path)
    with pytest.raises(WorkerError):
        run_processes(3, lambda rank, heartbeat: os._exit(7), tmp_path)
    assert opened() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


POOL = """
import os
import sys
from pathlib import Path

import torch

from spardl.clusters.workers.processes import run_processes

torch.set_num_threads(3)
# From now on torch's own way to make its pool anew after a fork takes it for made.
torch.get_num_threads()
run_processes(1, lambda rank, heartbeat: print(len(os.listdir("/proc/self/task"))), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_torch_thread_pool_exists_before_other_threads(tmp_path: Path) -> None:
    """Else the first two that compute at once race to make it, and torch aborts. A pool keeps its first size."""
    done = subprocess.run(
        [sys.executable, "-c", POOL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    itself, watching, pool = 1, 1, 2
    assert int(done.stdout) == itself + watching + pool


def test_more_workers_than_the_machine_allows(tmp_path: Path) -> None:
    """Those that were started end, and one line says which limit to raise."""
    open_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (there + 20, most))
    try:
        with pytest.raises(ConfigError, match=r"worker \d+ of 100 cannot be started: .*Too many open files; use fewer"):
            run_processes(100, lambda rank, heartbeat: time.sleep(60), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, most))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def failing(rank: int, error: BaseException, others: Callable[[], None]) -> Callable[[int, Heartbeat], None]:
    def target(mine: int, heartbeat: Heartbeat) -> None:
        heartbeat(3 + mine)
        if mine == rank:
            raise error
        others()

    return target


def loses_peer() -> None:
    raise PeerError("lost contact")


def fails_late() -> None:
    time.sleep(0.3)
    raise PeerError("lost contact")


@pytest.mark.parametrize("others", [loses_peer, fails_late, lambda: None])
def test_original_failure_is_reported(others: Callable[[], None], tmp_path: Path) -> None:
    target = failing(2, ZeroDivisionError("by zero"), others)
    with pytest.raises(WorkerError) as error:
        run_processes(4, target, tmp_path)
    trace = tmp_path / "errors" / "rank-2.txt"
    assert str(error.value) == f"worker 2 failed at step 5: ZeroDivisionError: by zero (see {trace})"
    assert trace.read_text().endswith("ZeroDivisionError: by zero\n")


def test_first_failure_is_reported_before_its_consequences(tmp_path: Path) -> None:
    def target(rank: int, heartbeat: Heartbeat) -> None:
        if rank == 1:
            os._exit(7)
        raise ValueError("a victim that takes it for its own fault")

    with pytest.raises(WorkerError, match="worker 1 ended with exit code 7 at step 0"):
        run_processes(3, target, tmp_path)


def test_an_abort_is_a_consequence(tmp_path: Path) -> None:
    """NCCL's watchdog aborts a process that has lost its peer."""

    def target(rank: int, heartbeat: Heartbeat) -> None:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGKILL if rank == 2 else signal.SIGABRT)

    with pytest.raises(WorkerError, match="worker 2 was killed by SIGKILL"):
        run_processes(3, target, tmp_path)


@pytest.mark.parametrize("kind", [ConfigError, TrainingError])
def test_common_errors_name_no_worker(kind: type[Exception], tmp_path: Path) -> None:
    def target(rank: int, heartbeat: Heartbeat) -> None:
        raise kind("too large")

    with pytest.raises(kind) as error:
        run_processes(3, target, tmp_path)
    assert str(error.value) == "too large"


def test_contact_lost_for_no_known_reason(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="worker 0 failed at step 3: lost contact"):
        run_processes(1, failing(0, PeerError("lost contact"), loses_peer), tmp_path)


def test_the_others_are_ended_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 0.2)
    monkeypatch.setattr("spardl.clusters.workers.processes._OBEY", 0.2)

    def hang() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    def ended() -> float:
        began = time.monotonic()
        with pytest.raises(WorkerError, match="worker 0 failed at step 3: no"):
            run_processes(3, failing(0, ProgramError("no"), hang), tmp_path)
        return time.monotonic() - began

    undisturbed(ended, lambda seconds: seconds < 3)


class Dying:
    """A worker whose sentinel fires a moment before the kernel reports its end."""

    def __init__(self, looks: int, sentinel: int) -> None:
        self.rank, self.report, self.fault = 0, None, ProgramError("no")
        self.process = SimpleNamespace(sentinel=sentinel, exitcode=1)
        self._looks = looks

    @property
    def ended(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def read_fault(self) -> None:
        pass


@pytest.mark.parametrize("looks", range(6))
def test_end_of_a_worker_is_noticed_at_any_time(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 0.01)
    dead, writing = os.pipe()
    os.close(writing)
    living, held = os.pipe()
    other = SimpleNamespace(rank=1, ended=False, fault=None, process=SimpleNamespace(sentinel=living, exitcode=None))
    other.read_fault = lambda: None
    try:
        with pytest.raises(WorkerError, match="worker 0 failed at step 4: no"):
            _watch([Dying(looks, dead), other], [4, 4])  # type: ignore[list-item]
    finally:
        for descriptor in (dead, living, held):
            os.close(descriptor)


def test_ended_workers_get_to_tidy_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 0.2)

    def hang() -> None:
        try:
            time.sleep(60)
        finally:
            (tmp_path / "tidy").touch()

    with pytest.raises(WorkerError):
        run_processes(2, failing(1, ProgramError("no"), hang), tmp_path)
    assert (tmp_path / "tidy").exists()


@pytest.mark.parametrize("text", ["", "\n", "x" * 1_000_000])
def test_odd_messages(text: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as error:
        run_processes(2, failing(0, RuntimeError(text), lambda: None), tmp_path)
    assert str(error.value).startswith(
        "worker 0 failed at step 3: RuntimeError: " + (text.strip() or "RuntimeError")[:99]
    )
    assert len(str(error.value)) < 5000


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "errors").touch()
    with pytest.raises(WorkerError) as error:
        run_processes(1, failing(0, RuntimeError("no"), lambda: None), tmp_path)
    assert str(error.value) == "worker 0 failed at step 3: RuntimeError: no"


def test_output_is_not_lost_or_doubled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    print("before", end="")

    def target(rank: int, heartbeat: Heartbeat) -> None:
        sys.stdout.write(f" worker {rank}")

    run_processes(2, target, tmp_path)
    assert sorted(capfd.readouterr().out.replace("worker ", "worker-").split()) == ["before", "worker-0", "worker-1"]


def test_each_process_runs_once_within_the_limit(tmp_path: Path) -> None:
    def target(number: int, heartbeat: Heartbeat) -> None:
        (tmp_path / f"{number}.begun").touch()
        time.sleep(0.02)
        begun, ended = (len(list(tmp_path.glob(f"*.{what}"))) for what in ("begun", "ended"))
        (tmp_path / f"{number}.ended").write_text(str(begun - ended))

    ended: list[tuple[int, object]] = []
    run_each(7, target, tmp_path, at_once=2, ended=lambda number, fault: ended.append((number, fault)))
    assert sorted(ended) == [(number, None) for number in range(7)]
    assert {int(path.read_text()) for path in tmp_path.glob("*.ended")} <= {1, 2}


def test_failures_do_not_affect_other_processes(tmp_path: Path) -> None:
    def target(number: int, heartbeat: Heartbeat) -> None:
        if number == 1:
            raise ConfigError("nonsense")
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 3:
            raise ValueError("broken")

    ended: dict[int, object] = {}
    run_each(5, target, tmp_path, at_once=3, ended=ended.__setitem__)
    assert (ended[0], ended[4]) == (None, None)
    assert isinstance(ended[1], ConfigError)
    assert str(ended[2]) == "the process was killed by SIGKILL"
    assert str(ended[3]).startswith("ValueError: broken (see ")


def test_an_interruption_ends_those_that_run(tmp_path: Path) -> None:
    def target(number: int, heartbeat: Heartbeat) -> None:
        (tmp_path / f"{number}").write_text(str(os.getpid()))
        if number:
            time.sleep(60)

    def interrupt(number: int, fault: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_each(2, target, tmp_path, at_once=2, ended=interrupt)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_repetitions_during_a_slow_request_are_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter handles signals that arrive together one after the other."""
    monkeypatch.setattr(processes, "_ECHO", 0.2)
    asked: list[bool] = []
    again: list[bool] = []

    def ask() -> bool:
        asked.append(bool(asked))
        time.sleep(0.0 if asked[-1] else 0.5)
        return asked[-1]

    both = {signal.SIGUSR1, signal.SIGTERM}
    with processes.handling_signals(ask, lambda: again.append(True), both):
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for signum in both:
            signal.pthread_kill(threading.get_ident(), signum)  # os.kill() may choose a thread that does not block it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        assert (asked, again) == ([False, True], [])
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert (asked, again) == ([False, True, True], [True])
