"""Twenty runs that start at the same instant in one output folder: each has a folder of its own, and finishes."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.support.driver import BackgroundRun, background_run, events, results, summary
from trainer.checkpoint import list_checkpoints, verify_checkpoint

RUNS, STEPS, WORKERS = 20, 2, 2
TINY = (
    "cluster=simulated",
    f"cluster.workers={WORKERS}",
    f"training.max_steps={STEPS}",
    "training.checkpoint_every=1",
    "training.eval_examples=32",
    "model.depth=8",
)
WAYS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "twenty seeds": lambda number: (f"seed={100 + number}",),
    "the same command": lambda number: ("seed=100",),
    "the same command, to go on": lambda number: ("seed=100", "resume=auto"),
}

# What a run says that finds others of the same under way.
SECOND = r"(warning: \S+( \(and \d+ more\))? is in use by another process; this is a second run of the same "
SECOND += r"configuration\n)?"


def check_whole(folder: Path, seed: int) -> None:
    """Everything is there, once, and belongs to this seed."""
    found = summary(folder)
    assert (found["status"], found["steps"], found["workers"]) == ("finished", STEPS, WORKERS)
    assert found["id"] in folder.name
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed"] == seed
    assert f" seed={seed}" in (folder / "command.txt").read_text()
    steps = [event["step"] for event in events(folder) if event["kind"] == "train"]
    assert steps == [1, 2]
    checkpoints = list_checkpoints(folder / "checkpoints")
    assert [path.name for path in checkpoints] == ["step-00000001", "step-00000002"]
    for path in checkpoints:
        verify_checkpoint(path, WORKERS)
    assert {path.name for path in folder.rglob(".*")} == {".lock"}


def folder_of(run: BackgroundRun) -> Path:
    """Where a run says that it writes."""
    found = re.search(r"^run \w+: (.*)$", run.stdout, flags=re.MULTILINE)
    assert found, run.stdout
    return Path(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_twenty_at_once(way: str, tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    start = multiprocessing.get_context("fork").Barrier(RUNS)
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                background_run(
                    *TINY,
                    *WAYS[way](number),
                    f"output_dir={outputs}",
                    folder=tmp_path / str(number),
                    before=partial(start.wait, 60),
                )
            )
            for number in range(RUNS)
        ]
        assert [run.wait(200) for run in runs] == [0] * RUNS, [run.stderr for run in runs]
        for run in runs:
            assert re.fullmatch(SECOND if "to go on" in way else "", run.stderr), run.stderr
    folders = [folder_of(run) for run in runs]
    assert set(folders) == {path for path in outputs.iterdir() if not path.name.startswith(".")}
    assert len(set(folders)) == RUNS
    seeds = [yaml.safe_load((folder / "config.yaml").read_text())["seed"] for folder in folders]
    for number, folder in enumerate(folders):
        check_whole(folder, int(WAYS[way](number)[0].removeprefix("seed=")))
    distinct = {str(sorted(results(folder).items())) for folder in folders}
    assert len(distinct) == len(set(seeds))
