"""Sweeps and runs on a real Slurm: arrays, failures, cancelling, requeues, several nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.driver import here, only_run, results, steps_logged, summary
from tests.support.labs import processes_with
from tests.support.slurms import LONG, SMALL, Slurm, lab, missing, running, table

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def started() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="spardl-") as folder:
        Path(folder).chmod(0o755)
        with running(Path(folder) / "slurm", nodes=2) as found:
            yield found


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    found: Slurm = request.getfixturevalue("started")
    yield found
    if jobs := found.queue():
        found.ask("scancel", "--full", *jobs)
        found.empty()


def status(slurm: Slurm, outputs: Path) -> dict[int, tuple[str, str, str]]:
    return table(slurm.submit("status", "--outputs", str(outputs)))


def statuses(outputs: Path) -> Counter[str]:
    return Counter(summary(path.parent)["status"] for path in outputs.glob("*/summary.json"))


def test_a_sweep_is_one_array_with_a_throttle(slurm: Slurm, tmp_path: Path) -> None:
    words = ("compressor=none,topka", "seed=1,2,3", "training.max_steps=6", "cluster.workers=1", "site.at_once=2")
    job = slurm.sweep(tmp_path, "-m", *words)
    seen: set[int] = set()

    def ended() -> bool:
        seen.add(len(slurm.queue("RUNNING", "COMPLETING")))
        return not slurm.queue()

    assert slurm.queue() and {name.partition("_")[0] for name in slurm.queue()} == {job}
    assert slurm.job(f"{job}_5")["ArrayTaskThrottle"] == "2"
    slurm.until(ended)
    assert max(seen) == 2
    rows = status(slurm, tmp_path)
    assert [row[0] for row in rows.values()] == ["finished"] * 6
    assert {row[2] for row in rows.values()} == {
        f"compressor={c} seed={s}" for c in ("none", "topka") for s in (1, 2, 3)
    }
    assert slurm.submit("resubmit", "--outputs", str(tmp_path)).startswith("skipped: 6 of 6")
    assert not slurm.queue()


def test_a_failure_is_reported_and_stops_no_other(slurm: Slurm, tmp_path: Path) -> None:
    words = ("optimizer.lr=0.01,1e30", "compressor=none", "training.max_steps=6", "cluster.workers=1")
    job = slurm.sweep(tmp_path, "-m", *words, "site.at_once=1")
    slurm.empty()
    rows = status(slurm, tmp_path)
    assert rows[1][::2] == ("finished", "optimizer.lr=0.01")
    assert rows[2][::2] == ("failed", "optimizer.lr=1e+30")
    assert rows[2][1].startswith("the loss is nan at step ")
    assert [slurm.job(f"{job}_{number}")["JobState"] for number in (0, 1)] == ["COMPLETED", "FAILED"]
    assert "error: the loss is nan" in slurm.submit("logs", "--outputs", str(tmp_path))


def test_what_was_cancelled_is_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    # A run must outlast the start of the command that cancels it, on a busy machine too.
    slurm.sweep(tmp_path, "-m", "seed=1,2,3", "training.max_steps=500", "cluster.workers=1", "site.at_once=1")
    slurm.until(lambda: statuses(tmp_path)["finished"] == 1 and statuses(tmp_path)["running"] == 1)
    # As if the submitting process had been killed between sbatch and the record of its jobs.
    (record,) = tmp_path.glob(".submissions/*/submission.json")
    content = json.loads(record.read_text())
    entries = [{**entry, "job": None, "log": None} for entry in content["entries"]]
    record.write_text(json.dumps({**content, "entries": entries}))
    assert slurm.submit("cancel", "--outputs", str(tmp_path)).startswith("cancelled: 2 of 3")
    assert json.loads(record.read_text()) == content
    slurm.empty()
    states = [row[0] for row in status(slurm, tmp_path).values()]
    assert states[0] == "finished"
    assert set(states[1:]) <= {"stopped", "died", "not begun"}
    finished = [path for path in tmp_path.glob("*/summary.json") if summary(path.parent)["status"] == "finished"]
    before = finished[0].stat().st_mtime_ns
    assert slurm.submit("resubmit", "--outputs", str(tmp_path)).startswith("skipped: 1 of 3")
    assert len(slurm.queue()) == 2
    slurm.empty()
    assert [row[0] for row in status(slurm, tmp_path).values()] == ["finished"] * 2
    assert statuses(tmp_path) == {"finished": 3}
    assert finished[0].stat().st_mtime_ns == before


def test_a_requeue_in_the_middle_changes_no_bit(slurm: Slurm, tmp_path: Path) -> None:
    words = ("compressor=spardl", "training.max_steps=300", "training.checkpoint_every=7", "cluster.workers=2")
    job = slurm.sweep(tmp_path / "slurm", *words)
    slurm.until(lambda: steps_logged(tmp_path / "slurm") >= 12)
    slurm.ask("scontrol", "requeue", job)
    slurm.until(lambda: slurm.job(job)["JobState"] == "PENDING")
    assert steps_logged(tmp_path / "slurm") < 300
    slurm.until(lambda: slurm.job(job)["JobState"] == "COMPLETED")
    assert slurm.job(job)["Restarts"] == "1"
    assert here(*SMALL, *words, f"output_dir={tmp_path / 'here'}") == 0
    assert results(only_run(tmp_path / "slurm")) == results(only_run(tmp_path / "here"))


def test_time_limit_requeues_and_scancel_ends(slurm: Slurm, tmp_path: Path) -> None:
    words = (*LONG, "cluster.workers=2", "logger=wandb", "site.time=2", "site.signal_seconds=25")
    job = slurm.sweep(tmp_path, *words)
    slurm.until(lambda: list((tmp_path / ".submissions").glob("*/*_0_log.out")))
    (log,) = (tmp_path / ".submissions").glob("*/*_0_log.out")
    # Slurm may be early; a run that has not begun to train goes back into the queue, too.
    slurm.until(lambda: re.search(r"^stopped at step", log.read_text(), flags=re.MULTILINE))
    (stopped,) = re.findall(r"^stopped at step (\d+) of 100000", log.read_text(), flags=re.MULTILINE)
    slurm.until(lambda: f"\ntraining: step {stopped} of 100000" in log.read_text())
    run = only_run(tmp_path)
    assert "is in the queue again (requeue 1 of 10)" in log.read_text()
    # Before and after it went back. W&B may not have written a word of a third one yet, when it is cancelled.
    slurm.until(lambda: continued(run) >= 2)
    slurm.submit("cancel", "--outputs", str(tmp_path))
    slurm.empty()
    assert slurm.job(job)["JobState"] == "CANCELLED"
    # On a busy machine, it may have reached its time limit more than once; each requeue was its own, and was reported.
    restarts = slurm.job(job)["Restarts"]
    assert f"is in the queue again (requeue {restarts} of 10)" in log.read_text()
    time.sleep(8)  # longer than a requeued job waits
    assert not slurm.queue()
    assert slurm.job(job)["Restarts"] == restarts


def continued(run: Path) -> int:
    """How many of W&B's files of a run belong to its one W&B run."""
    identity = (run / "wandb-id.txt").read_bytes().strip()
    return sum(identity in path.read_bytes() for path in run.glob("wandb/offline-run-*/*.wandb"))


def test_one_run_of_an_array_goes_back_into_the_queue_alone(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sweep(tmp_path, "-m", "seed=1,2", *LONG, "cluster.workers=1", "site.at_once=2")
    slurm.until(lambda: sum(step > 3 for step in steps_of(tmp_path)) == 2)
    # This one has the number of the whole array.
    (last,) = (number for number in (0, 1) if slurm.job(f"{job}_{number}")["JobId"] == job)
    slurm.ask("scancel", "--signal=USR1", f"{job}_{last}")
    slurm.until(lambda: slurm.job(f"{job}_{last}").get("Restarts") == "1")
    slurm.until(lambda: statuses(tmp_path)["running"] == 2)
    other = slurm.job(f"{job}_{1 - last}")
    assert (other["JobState"], other["Restarts"]) == ("RUNNING", "0")


def steps_of(outputs: Path) -> list[int]:
    return [path.read_text().count('"train"') for path in outputs.glob("*/metrics.jsonl")]


def test_a_killed_job_differs_from_a_running_one(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sweep(tmp_path, *LONG, "cluster.workers=1")
    slurm.until(lambda: steps_logged(tmp_path) > 3)
    assert status(slurm, tmp_path)[1][0] == "running"
    tasks = [pid for pid in processes_with(str(tmp_path)) if "python" in Path(f"/proc/{pid}/comm").read_text()]
    assert len(tasks) == 2  # the launcher and its worker
    for pid in tasks:
        os.kill(pid, signal.SIGKILL)
    slurm.empty()
    assert summary(only_run(tmp_path))["status"] == "running"
    state, note, _ = status(slurm, tmp_path)[1]
    assert state == "died"
    assert re.match(r"step \d+; .*", note), note
    assert slurm.job(job)["JobState"] == "FAILED"


def test_one_run_on_two_nodes_is_the_run_of_a_simulation(slurm: Slurm, tmp_path: Path) -> None:
    words = ("compressor=spardl", "communicator.teams=2", "training.max_steps=6", "cluster.workers=4")
    job = slurm.sweep(tmp_path / "slurm", *words, "site.workers_per_node=2")
    slurm.empty()
    assert slurm.job(job)["NumNodes"] == "2"
    logs = [path.read_text() for path in (tmp_path / "slurm").glob(".submissions/*/*_log.out")]
    places = [re.search(r"node=(\d)\(2\), global_rank=(\d)\(4\)", log) for log in logs]
    assert sorted(place.groups() for place in places if place) == [("0", "0"), ("0", "1"), ("1", "2"), ("1", "3")]
    assert here(*SMALL, *words, "cluster=simulated", f"output_dir={tmp_path / 'here'}") == 0
    assert results(only_run(tmp_path / "slurm")) == results(only_run(tmp_path / "here"))


def test_manual_batch_file_stages_data_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("content")
    staged = {"STAGE_FROM": str(tmp_path / "data"), "STAGE_TO": str(tmp_path / "disk" / "data")}
    words = (*SMALL, "training.max_steps=4", "compressor=spardl", f"output_dir={tmp_path / 'out'}")
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/log.txt", "--parsable"]
    job = slurm.ask("sbatch", *options, "slurm/run.sh", *words, env=staged).strip()
    slurm.empty()
    assert slurm.job(job)["JobState"] == "COMPLETED", (tmp_path / "log.txt").read_text()
    found = summary(only_run(tmp_path / "out"))
    assert (found["status"], found["workers"]) == ("finished", 2)
    assert (tmp_path / "disk" / "data" / "file").read_text() == "content"
    assert f"data_dir: {tmp_path}/disk/data" in (only_run(tmp_path / "out") / "config.yaml").read_text()


def test_what_slurm_refuses_is_one_line(slurm: Slurm, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^error: sbatch refused the jobs: invalid partition .*\n"):
        slurm.sweep(tmp_path, "site.partition=none_such")
    assert [path.name for path in (tmp_path / ".submissions").iterdir()] == [".lock"]
    assert not slurm.queue()


def test_a_lab_is_gone_after_down(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="spardl-") as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent) / "slurm"
        with running(folder, nodes=1) as found:
            again = lab("up", "--folder", str(folder))
            assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
            assert found.ask("srun", "--ntasks=1", sys.executable, "-c", "print('here')") == "here\n"
            found.ask(
                "sbatch", "--output=/dev/null", "--wrap", f"exec {sys.executable} -c 'import time; time.sleep(99)'"
            )
            found.until(lambda: found.queue("RUNNING"))
        assert not folder.exists()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert str(folder) not in path.read_text(errors="replace")
