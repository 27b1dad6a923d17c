"""Messages of runs that diverge; and the remedies that they name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.driver import composed, events, here, only_run, results, summary
from trainer.experiment import experiment_id

SMALL = ("cluster=simulated", "cluster.workers=2", "training.eval_examples=16", "training.log_every=100")
RUN = (*SMALL, "training.max_steps=8", "training.checkpoint_every=2", "training.batch_size=4")
# Of the run's 176 steps an epoch, this explodes in the fifth.
EXPLODING = ("lr_schedule=multistep", "lr_schedule.warmup_epochs=0", "lr_schedule.milestones=[0.02]")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def strict(path: Path) -> list[Any]:
    """The JSON texts of a file, one of them or one a line, as readers other than Python's have it."""
    text = path.read_text()
    return [json.loads(part, parse_constant=refuse) for part in (text.splitlines() if "jsonl" in path.name else [text])]


@pytest.mark.parametrize("rate", ["1e30", "1e38"])
def test_a_rate_that_is_far_too_high(rate: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (*RUN, f"optimizer.lr={rate}", f"output_dir={tmp_path}", "resume=auto")
    for _ in range(2):  # the same command again says the same
        assert here(*words) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert re.fullmatch(
            r"error: the .* at step \d; lower optimizer\.lr or set training\.clip_norm, and start again: .*", line
        )
    folder = only_run(tmp_path)
    assert summary(folder)["status"] == "failed"
    assert not (folder / "checkpoints").exists()
    for name in ("summary.json", "metrics.jsonl"):
        if (folder / name).exists():
            strict(folder / name)


@pytest.mark.slow
def test_what_a_diverged_run_advises_works(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (*RUN, *EXPLODING, f"output_dir={tmp_path}")
    assert here(*words, "lr_schedule.gamma=1e30") == 1
    (line,) = capfd.readouterr().err.splitlines()
    advice = line.rpartition(" ")[2]
    diverged = only_run(tmp_path)
    assert advice == f"start_from={diverged}/checkpoints/step-00000004"
    before = sorted(path.name for path in diverged.rglob("*"))
    calm = (*words, "lr_schedule.gamma=0.5", "resume=auto", advice)
    assert here(*calm) == 0
    assert "training: step 4 of 8" in capfd.readouterr().out
    assert sorted(path.name for path in diverged.rglob("*")) == before
    (branch,) = (path for path in tmp_path.iterdir() if path != diverged and not path.name.startswith("."))
    assert (summary(branch)["status"], summary(branch)["steps"]) == ("finished", 8)
    # From here on it is a separate run: it continues without the run that it started from.
    shutil.rmtree(diverged)
    whole = results(branch)
    shutil.rmtree(branch / "checkpoints" / "step-00000008")
    (branch / "summary.json").write_text(json.dumps({"id": summary(branch)["id"], "status": "running"}))
    assert here(*calm) == 0
    assert "training: step 6 of 8" in capfd.readouterr().out
    assert results(branch) == whole


def rates(folder: Path) -> list[float]:
    return [event["lr"] for event in events(folder) if event["kind"] == "train"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("finished")
    assert here(*RUN, f"output_dir={outputs}", "compressor.density=0.02", "training.keep_checkpoints=9") == 0
    return only_run(outputs)


def test_a_branch_with_nothing_else_is_the_run_itself(finished: Path, tmp_path: Path) -> None:
    start = finished / "checkpoints" / "step-00000002"
    words = (*RUN, "compressor.density=0.02", f"output_dir={tmp_path}", f"start_from={start}")
    assert here(*words) == 0
    assert results(only_run(tmp_path)) == {**results(finished), "losses": results(only_run(tmp_path))["losses"]}
    assert events(only_run(tmp_path))[-1]["loss"] == pytest.approx(events(finished)[-1]["loss"])
    assert only_run(tmp_path).name != finished.name


def test_a_branch_follows_its_own_schedule(finished: Path, tmp_path: Path) -> None:
    """With more steps than the run it starts from, the learning rate falls over the steps of the branch."""
    schedule = ("lr_schedule=cosine", "lr_schedule.warmup_epochs=0", "training.max_steps=12", "training.log_every=1")
    words = (*RUN, "compressor.density=0.02", *schedule)
    start = finished / "checkpoints" / "step-00000004"
    assert here(*words, f"output_dir={tmp_path / 'branch'}", f"start_from={start}") == 0
    assert here(*words, f"output_dir={tmp_path / 'whole'}") == 0
    branch, whole = (rates(only_run(tmp_path / name)) for name in ("branch", "whole"))
    assert branch == whole[4:]
    assert len(branch) == 8 and min(branch) > 0


REFUSED = {
    "compressor.density=0.03": r"with compressor\.density=0\.02, but this run has 0\.03; change only optimizer\.lr, ",
    "optimizer.momentum=0.5 optimizer.lr=0.01": r"was saved with optimizer\.momentum=0\.9, but this run has 0\.5; ",
    "cluster.workers=4": r"it has no rank-2\.pt, which a run of 4 workers needs",
    "cluster.workers=1": r"was saved by 2 workers, but this run has 1; use cluster\.workers=2",
    "training.max_steps=4": r"is at or after the last step, training\.max_steps=4; increase it",
    "start_from={run}": r"is not a checkpoint; name one: RUN/checkpoints/step-NUMBER",
    "start_from={tmp}": r"is not a checkpoint; name one: RUN/checkpoints/step-NUMBER",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_a_run_cannot_begin_with(
    typed: str, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*RUN, "compressor.density=0.02", f"start_from={finished}/checkpoints/step-00000004"]
    words += typed.replace("{run}", str(finished)).replace("{tmp}", str(tmp_path)).split()
    assert here(*words, f"output_dir={tmp_path / 'out'}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(REFUSED[typed], line), line
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_whose_run_is_unknown(finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")) / "step-00000004"
    for content in (None, "a: [", "5"):
        if content:
            (tmp_path / "config.yaml").write_text(content)
        assert here(*RUN, f"start_from={copy}", f"output_dir={tmp_path / 'out'}") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("error: start_from")
    assert not (tmp_path / "out").exists()


def test_ids_are_those_of_the_time_before_it() -> None:
    known = {(): "f27acb955d", ("training.elastic=true",): "b2114fa5d1", ("schedule=layer_fusion",): "63c0e42d5f"}
    for words, identity in known.items():
        assert experiment_id(composed("recipe=published", *words), 4) == identity
        assert experiment_id(composed("recipe=published", *words, "start_from=a"), 4) != identity
