"""A run that was killed and continued is a run that was never disturbed, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from itertools import product
from pathlib import Path

import pytest

from tests.support.driver import background_run, here, only_run, results, steps_logged, summary, wait_until
from trainer.build import CONFIGURATIONS
from trainer.learner import Learner
from trainer.runs import Run

STEPS = 14
RUN = (
    f"training.max_steps={STEPS}",
    "training.checkpoint_every=3",
    "training.log_every=1",
    "training.eval_every=0.1",
    "training.eval_examples=64",
)
KEEP = ("training.keep_checkpoints=5",)
CLUSTERS = {"process_group": ("cluster.workers=2",), "simulated": ("cluster=simulated", "cluster.workers=4")}
METHODS = {
    "none": ("compressor=none",),
    "topka": ("compressor=topka",),
    "spardl": ("compressor=spardl", "communicator.teams=2"),
}


def interrupt(run: Path, outputs: Path, step: int) -> None:
    """Copies a finished run into a folder as a kill between this checkpoint and the next one leaves it."""
    copy = outputs / run.name
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name > f"step-{step:08d}":
            shutil.rmtree(checkpoint)
    assert (copy / "checkpoints" / f"step-{step:08d}").is_dir()
    (copy / "summary.json").write_text(json.dumps({"id": summary(run)["id"], "status": "running"}))


def kill_at(step: int, *words: str, folder: Path, outputs: Path) -> None:
    with background_run(*words, folder=folder) as run:
        wait_until(lambda: list(outputs.glob("*/summary.json")) or run.ended())
        wait_until(lambda: steps_logged(outputs) >= step or run.ended())
        run.kill()
        assert run.wait() == -9
        wait_until(lambda: not run.members())


@pytest.mark.parametrize(
    ("cluster", "method"),
    [
        ("process_group", "spardl"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [
                ("process_group", "topka"),
                ("simulated", "none"),
                ("simulated", "spardl"),
            ]
        ),
    ],
)
def test_killed_twice_and_continued(
    cluster: str, method: str, tmp_path: Path, undisturbed: dict[tuple[str, ...], Path]
) -> None:
    words = (*RUN, *CLUSTERS[cluster], *METHODS[method])
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    first, second = sorted(random.Random(f"{cluster}-{method}").sample(range(1, STEPS - 1), 2))
    kill_at(first, *again, folder=tmp_path / "first", outputs=tmp_path / "out")
    kill_at(second, *again, folder=tmp_path / "second", outputs=tmp_path / "out")
    assert here(*again) == 0
    assert results(only_run(tmp_path / "out")) == results(undisturbed[words])


def test_a_second_run_next_to_one_that_is_in_use(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever types the same command again by mistake hears of it."""
    words = ("cluster=simulated", "cluster.workers=2", "training.eval_examples=8", f"output_dir={tmp_path / 'out'}")
    with background_run(
        *words, "training.max_steps=3", folder=tmp_path / "log", before=wait_in_the_first_step
    ) as first:
        wait_until(lambda: list((tmp_path / "out").glob("*/summary.json")) or first.ended())
        (folder,) = (tmp_path / "out").glob("[!.]*")
        assert here(*words, "training.max_steps=3", "resume=auto") == 0
        expected = f"warning: {folder} is in use by another process; this is a second run of the same configuration\n"
        assert capfd.readouterr().err == expected
        assert not first.ended()
    assert here(*words, "training.max_steps=3", "resume=auto") == 0
    assert capfd.readouterr().err == ""


def wait_in_the_first_step() -> None:
    Learner.step = lambda *arguments: time.sleep(600)  # type: ignore[method-assign, assignment, return-value]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(path.stem for path in (CONFIGURATIONS / "compressor").glob("*.yaml")))
def test_every_method_continues(
    method: str, tmp_path: Path, undisturbed: dict[tuple[str, ...], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """With what it carries: thresholds, regions, factors, velocities, the step of its random numbers."""
    parts = ("model.depth=8", "cluster=simulated", "cluster.workers=3", f"compressor={method}", "warmup.steps=2")
    words = (*RUN, *KEEP, *parts)
    interrupt(undisturbed[words], tmp_path, 6)
    assert here(*words, f"output_dir={tmp_path}", "resume=auto") == 0
    assert f"training: step 6 of {STEPS}" in capfd.readouterr().out
    assert results(only_run(tmp_path)) == results(undisturbed[words])


SCHEDULES = {
    "wfbp": ("schedule=wfbp", "schedule.bucket_mb=0.1", "compressor=spardl"),
    "dear": ("schedule=dear", "schedule.threshold_mb=0.1", "compressor=spardl"),
    "outer": ("schedule=outer", "schedule.every=4", "compressor=spardl"),
    "muon": ("model=gpt_chars", "optimizer=muon", "schedule=dear", "compressor=spardl", "training.eval_examples=20"),
    "dear_dense": ("schedule=dear", "schedule.layers=3", "compressor=none", "training.clip_norm=1"),
    # What these measure differs from run to run, and with it the groups; dense training does not depend on them.
    "dear_tuned": ("schedule=dear", "schedule.trials=3", "schedule.low_mb=0.05", "compressor=none"),
    "mg_wfbp": ("schedule=mg_wfbp", "compressor=none"),
    "layer_fusion": ("schedule=layer_fusion", "compressor=none"),
}
# A simulated run saves for these what it saves for the others.
REAL_WORKERS_ONLY = ("muon", "dear_dense", "mg_wfbp")


@pytest.mark.parametrize(
    ("schedule", "cluster"),
    [
        pytest.param(name, cluster, marks=[] if (name, cluster) == ("dear", "process_group") else pytest.mark.slow)
        for name, cluster in product(SCHEDULES, CLUSTERS)
        if cluster == "process_group" or name not in REAL_WORKERS_ONLY
    ],
)
def test_every_schedule_continues(
    schedule: str, cluster: str, tmp_path: Path, undisturbed: dict[tuple[str, ...], Path]
) -> None:
    """After a kill of real workers; from a copy of a simulated run, which has all state in one process."""
    words = (*RUN, *KEEP, *CLUSTERS[cluster], *SCHEDULES[schedule])
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    step = random.Random(f"{schedule} {cluster}").randrange(2, STEPS - 1)
    if cluster == "simulated":
        interrupt(undisturbed[words], tmp_path / "out", max(3, step - step % 3))
    else:
        kill_at(step, *again, folder=tmp_path, outputs=tmp_path / "out")
    assert here(*again) == 0
    found, expected = results(only_run(tmp_path / "out")), results(undisturbed[words])
    names = (
        found if schedule in ("wfbp", "dear", "dear_dense", "outer", "muon") else ("weights_sha256", "losses", "final")
    )
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}


def test_killed_before_the_first_checkpoint(tmp_path: Path, undisturbed: dict[tuple[str, ...], Path]) -> None:
    words = (*RUN, *CLUSTERS["process_group"], *METHODS["spardl"])
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    kill_at(0, *again, folder=tmp_path / "first", outputs=tmp_path / "out")
    assert here(*again) == 0
    assert results(only_run(tmp_path / "out")) == results(undisturbed[words])


@pytest.mark.slow
def test_log_lines_that_span_an_interruption(tmp_path: Path, undisturbed: dict[tuple[str, ...], Path]) -> None:
    """A mean over 5 steps of which 3 were before the crash."""
    words = (*RUN, *CLUSTERS["simulated"], *METHODS["spardl"], "training.log_every=5", "training.eval_every=0.3")
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    kill_at(1, *again, folder=tmp_path / "first", outputs=tmp_path / "out")
    assert here(*again) == 0
    assert results(only_run(tmp_path / "out")) == results(undisturbed[words])


def test_a_finished_run_is_not_trained_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("training.max_steps=1", "cluster=simulated", f"output_dir={tmp_path}", "resume=auto")
    assert here(*words) == 0
    folder = only_run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capfd.readouterr()
    assert here(*words) == 0
    assert capfd.readouterr().out.splitlines()[1:] == [f"already finished: {folder} (force=true trains it again)"]
    assert {path: path.stat().st_mtime_ns for path in only_run(tmp_path).rglob("*")} == before
    assert here(*words, "force=true") == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_finished_run_of_an_earlier_edition_is_trained_again(tmp_path: Path) -> None:
    words = ("training.max_steps=1", "cluster=simulated", f"output_dir={tmp_path}", "resume=auto")
    assert here(*words) == 0
    run = Run("", only_run(tmp_path))
    run.write_summary({**run.read_summary(), "editions": {"spardl.TopK": 99}})
    assert here(*words) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("training.max_steps=500", "cluster=simulated", "cluster.workers=2", f"output_dir={tmp_path / 'out'}")
    with background_run(*words, folder=tmp_path / "first") as run:
        wait_until(lambda: steps_logged(tmp_path / "out") or run.ended())
        busy = only_run(tmp_path / "out")
        assert here(*words, f"resume={busy}") == 2
        with background_run(*words, "resume=auto", folder=tmp_path / "second") as other:
            wait_until(lambda: len(list((tmp_path / "out").iterdir())) == 2 or other.ended())
            wait_until(lambda: len(list((tmp_path / "out").glob("*/metrics.jsonl"))) == 2 or other.ended())
            assert not other.ended()
        assert not run.ended()
    assert "is in use by another process" in capfd.readouterr().err


def test_ctrl_c_saves_a_checkpoint(tmp_path: Path) -> None:
    words = ("training.max_steps=400", "training.checkpoint_every=500", "cluster.workers=2")
    with background_run(*words, f"output_dir={tmp_path / 'out'}", "resume=auto", folder=tmp_path / "log") as run:
        wait_until(lambda: steps_logged(tmp_path / "out") > 1 or run.ended())
        run.kill(signal.SIGINT)
        assert run.wait(10) == 130
        step = steps_logged(tmp_path / "out")
        saved = f"stopped at step {step} of 400 on request; all state is saved"
        assert run.stderr == f"{saved}; the same command with resume=auto continues\n"
        assert not run.members()
    folder = only_run(tmp_path / "out")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert summary(folder)["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_500_outer_steps_with_20_kills(tmp_path: Path, undisturbed: dict[tuple[str, ...], Path]) -> None:
    """Most of them in the middle of local steps, and of what is not saved."""
    steps = 1000
    words = (
        *(
            "model.depth=8",
            "cluster.workers=2",
            "training.batch_size=2",
            "training.eval_examples=8",
            "training.eval_every=1000",
        ),
        *(f"training.max_steps={steps}", "training.epochs=1000", "training.checkpoint_every=23"),
        *("compressor=spardl", "schedule=outer", "schedule.every=2", "schedule.lr=1"),
    )
    again = (*words, f"output_dir={tmp_path / 'out'}", "resume=auto")
    for number, step in enumerate(sorted(random.Random(20).sample(range(1, steps), 20))):
        kill_at(step, *again, folder=tmp_path / str(number), outputs=tmp_path / "out")
    assert here(*again) == 0
    assert results(only_run(tmp_path / "out")) == results(undisturbed[words])
