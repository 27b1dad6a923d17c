"""Finished work in small files: what they keep, and that any clone finds its results in them."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from scripts import choices
from scripts.exhibits import base, jobs, measures, records
from spardl.basics.errors import ConfigError, DataError, WorkerError
from tests.support.driver import ROOT, here
from trainer import report, targets

MADE = {"commit": "0123456789ab", "cpu": "a processor", "torch": "2"}
WORDS = (
    "cluster.workers=2",
    "seed=7",
    "model.depth=8",
    "compressor=spardl",
    "training.batch_size=1",
    "training.max_steps=70",
    "training.eval_every=0.03",
    "training.eval_examples=4",
)
# All of it together, for whoever clones the repository.
MOST_BYTES = 5e6


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no uncommitted changes while these tests are written."""
    monkeypatch.setattr(report, "_commit", lambda: MADE["commit"])


def double(number: int) -> dict[str, int]:
    return {"twice": 2 * number}


def computation(number: int = 4, recipe: int = 1) -> Any:
    return jobs.Computation("double", double, (("number", number),), "echo", recipe)


def result(folder: Path, value: int = 8, **made: Any) -> Any:
    return jobs.Outcome(folder, {"twice": value}, made={**MADE, **made})


def test_a_computation_and_its_record(committed: None, tmp_path: Path) -> None:
    job, outputs, store = computation(), tmp_path / "runs", records.RecordStore(tmp_path / "kept")
    job.perform(outputs)
    path = store.keep(job, job.find(outputs), "laptop")
    assert path == tmp_path / "kept" / "laptop.jsonl"
    (content,) = map(json.loads, path.read_text().splitlines())
    wanted = {"id": job.id, "command": "echo", "name": "double", "arguments": {"number": 4}, "recipe": 1}
    assert {key: content[key] for key in wanted} == wanted
    found = records.RecordStore(tmp_path / "kept").find(computation())
    assert found is not None
    where = tmp_path / "kept" / f"laptop.jsonl#{job.id}"
    assert (found.where, found.data, found.reason) == (where, {"twice": 8}, None)
    assert found.made["commit"] == MADE["commit"]
    assert found.origin == f"{where}, commit {MADE['commit']}, on {report.environment()['cpu']}"
    assert records.RecordStore(tmp_path / "kept").find(computation(recipe=2)) is None


def test_a_training_and_its_record(committed: None, tmp_path: Path) -> None:
    assert here("cluster=simulated", *WORDS, f"output_dir={tmp_path / 'runs'}") == 0
    store = records.RecordStore(tmp_path / "kept")
    with choices.composing():
        job = jobs.Training(WORDS)
        own = job.find(tmp_path / "runs")
        assert own is not None
        path = store.keep(job, own, "laptop")
        found = store.find(job)
    assert path.stat().st_size < 8000
    assert found is not None
    for key in ("final", "cluster_seconds", "step_bytes", "step_bytes_dense", "weights_sha256", "environment"):
        assert found.data[key] == own.data[key]
    assert found.data["seed"] == 7
    assert found.data["environment"]["cpu"]
    # Of 70 lines, every third until the last; of few evaluations, all.
    assert [event["step"] for event in found.events("train")] == [*range(1, 71, 3)]
    whole = measures.metric_curve(own.data, own.events("eval"))
    assert measures.metric_curve(found.data, found.events("eval")) == whole
    assert len(whole.steps) > 2
    assert found.data["train_loss"] == pytest.approx(measures.last_epoch_loss(list(own.events("train"))))


def test_work_of_another_edition_is_not_found(composing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a run nor its record; and what does not have the part is."""
    words = ("cluster.workers=2", "model.depth=8")
    plain, other = (jobs.Training((*words, f"compressor={name}")) for name in ("none", "oktopk"))
    store = records.RecordStore(tmp_path / "kept")
    final = {"status": "finished", "metric": "accuracy", "final": {"accuracy": 0.5}, "environment": MADE}
    final |= {"steps": 1, "workers": 2}
    for job in (plain, other):
        folder = tmp_path / "runs" / f"label-{job.id}"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps({**final, "editions": targets.editions(job.config)}))
        (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 1, "accuracy": 0.5}\n')
        store.keep(job, job.find(tmp_path / "runs"), "laptop")
        assert store.find(job)
    monkeypatch.setattr(targets, "_RAISED", {"spardl.OkTopk": 2})
    assert plain.find(tmp_path / "runs")
    assert store.find(plain)
    assert other.find(tmp_path / "runs") is None
    assert store.find(other) is None
    (tmp_path / "runs" / f"label-{other.id}" / "summary.json").write_text(
        json.dumps({**final, "editions": {"spardl.OkTopk": 2}})
    )
    assert other.find(tmp_path / "runs")


@pytest.mark.parametrize("count", [0, 1, 29, 30, 31, 60, 61, 1000])
def test_thinning_keeps_the_last_line_and_equal_distances(count: int) -> None:
    found = [event["step"] for event in jobs.thinned([{"step": step} for step in range(count)])]
    assert len(found) == min(count, len(found))
    assert len(found) <= jobs.MOST
    assert len({later - before for before, later in itertools.pairwise(found)}) <= 1
    assert len(found) >= min(count, jobs.MOST / 2)
    if count:
        assert found[-1] == count - 1


def test_a_loss_that_is_not_finite() -> None:
    summary_ = {"final": {}}
    content = jobs.contents(summary_, [{"kind": "train", "step": 1, "epoch": 1.0, "loss": None}])
    assert content["train_loss"] is None
    assert json.dumps(content, allow_nan=False)
    assert math.isnan(measures.last_epoch_loss(jobs.events_in(content)) or 0)


@pytest.mark.parametrize(
    ("commit", "words"),
    [
        ("0a-dirty", r"done with uncommitted changes \(0a-dirty\); commit, delete"),
        (None, "code of no known commit"),
    ],
)
def test_results_that_others_cannot_repeat_have_no_record(commit: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        records.record(computation(), result(tmp_path, commit=commit), tmp_path / "kept" / "laptop.jsonl")
    assert not (tmp_path / "kept").exists()


def test_a_job_has_one_record(tmp_path: Path) -> None:
    first = records.RecordStore(tmp_path).keep(computation(), result(tmp_path), "laptop")
    store = records.RecordStore(tmp_path)
    assert store.keep(computation(), result(tmp_path, 9), "evening") == first
    found = store.find(computation())
    assert found is not None
    assert found.data == {"twice": 9}
    records.record(computation(), result(tmp_path), tmp_path / "evening.jsonl")
    with pytest.raises(DataError, match=r"evening.jsonl and .*laptop.jsonl both have a record .*; delete one"):
        records.RecordStore(tmp_path).find(computation())


GOOD = {"id": "a", "command": "b", "environment": {}, "name": "c", "arguments": {}, "recipe": 1, "result": 2}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object, got list"),
        (json.dumps({**GOOD, "id": 1}), "field 'id' must be str, got int"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "recipe"}), "field 'recipe' is missing"),
        (json.dumps({key: value for key, value in GOOD.items() if key != "result"}), "field 'metric' is missing"),
        (json.dumps({**GOOD, "id": "0"}), "id 0 occurs twice"),
    ],
)
def test_a_damaged_record_is_named_by_its_line(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "laptop.jsonl"
    path.write_text(f"{json.dumps({**GOOD, 'id': '0'})}\n{line}\n")
    with pytest.raises(DataError, match=rf"laptop.jsonl, line 2: not a valid record \({reason}.*\); delete the line"):
        records.RecordStore(tmp_path).find(computation())
    before = path.read_bytes()
    with pytest.raises(DataError, match="line 2"):
        records.record(computation(), result(tmp_path), path)
    assert path.read_bytes() == before


def write_records(folder: Path, numbers: range) -> None:
    for number in numbers:
        records.record(computation(number), result(folder), folder / "laptop.jsonl")


def test_concurrent_writers_lose_no_record_and_sort_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_records, args=(tmp_path, range(n, n + 20))) for n in (0, 20, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    found = list(records.read_records(tmp_path / "laptop.jsonl"))
    assert found == sorted(computation(number).id for number in range(60))


def test_a_lock_held_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LOCK_TIMEOUT", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(DataError, match="has been locked by another process"):
            records.record(computation(), result(tmp_path), tmp_path / "laptop.jsonl")
    finally:
        os.close(descriptor)
    records.record(computation(), result(tmp_path), tmp_path / "laptop.jsonl")


def test_own_results_precede_records_and_failures(tmp_path: Path) -> None:
    job, outputs, store = computation(), tmp_path / "runs", records.RecordStore(tmp_path / "kept")
    job.note(outputs, WorkerError("lost"))
    assert base.Results.on_disk(outputs, [job], store).of(job).reason == "lost"
    store.keep(job, result(tmp_path, 7), "laptop")
    assert base.Results.on_disk(outputs, [job]).of(job).reason == "lost"
    assert base.Results.on_disk(outputs, [job], store).of(job).data == {"twice": 7}
    job.perform(outputs)
    assert base.Results.on_disk(outputs, [job], store).of(job).data == {"twice": 8}


def test_records_of_learning_are_found_as_well(composing: None) -> None:
    kept_ = records.on_record(ROOT / records.SHIPPED / "learning.jsonl")
    content = next(iter(kept_.values()))
    words = content.command.removeprefix("python train.py cluster=simulated ").split()
    found = records.RecordStore(ROOT / records.SHIPPED).find(jobs.Training(tuple(words)))
    assert found is not None
    assert found.data["final"] == content.figures["final"]
    assert [event["step"] for event in found.events("eval")] == [
        each["step"] for each in content.figures["evaluations"]
    ]


def test_what_is_shipped_is_small_and_clean() -> None:
    paths = sorted((ROOT / records.SHIPPED).glob("*.jsonl"))
    assert [path.stem for path in paths] == ["evening", "laptop", "learning"]
    assert sum(path.stat().st_size for path in paths) < MOST_BYTES
    for path in paths:
        found = records.read_records(path)
        assert list(found) == sorted(found)
        for key, content in found.items():
            assert records.unshippable(content["environment"]) is None, f"{path}#{key}"
