from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from spardl.basics.errors import CheckpointError, ConfigError
from tests.trainer.toy import simulated
from trainer.checkpoint import save_checkpoint
from trainer.runs import Run, continue_from, finished_run, new_run, run_id


def make(root: Path, identity: str = "abc", **summary: object) -> Run:
    run, lock = new_run(root, "label", identity)
    os.close(lock)
    if summary:
        run.write_summary({"id": identity, **summary})
    os.utime(run.folder, ns=(0, 1000 * len(list(root.iterdir()))))
    return run


def save(run: Run, step: int) -> Path:
    return save_checkpoint(run.checkpoints, step, simulated(2), [dict, dict], dict, 5)


def test_the_id_follows_from_the_configuration_alone() -> None:
    one = {"a": 1, "b": {"c": [1, 2], "d": None}}
    assert run_id(one) == run_id({"b": {"d": None, "c": [1, 2]}, "a": 1})
    assert run_id(one) != run_id({"a": 1, "b": {"c": [2, 1], "d": None}})
    assert len(run_id(one)) == 10


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    names = [make(tmp_path / "out").folder.name for _ in range(3)]
    assert names == ["label-abc", "label-abc-2", "label-abc-3"]


def test_a_new_folder_that_another_process_claims_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Run.claim
    monkeypatch.setattr(Run, "claim", lambda run: claim(run) if run.folder.name == "label-abc-2" else None)
    assert make(tmp_path).folder.name == "label-abc-2"


def test_claims_are_exclusive_and_end_when_closed(tmp_path: Path) -> None:
    run = make(tmp_path)
    first = run.claim()
    assert first is not None
    assert run.claim() is None
    os.close(first)
    second = run.claim()
    assert second is not None
    os.close(second)


def test_summaries(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.read_summary() == {}
    run.write_summary({"status": "running"})
    assert run.read_summary() == {"status": "running"}
    run.summary_file.write_text("{")
    assert run.read_summary() == {}


def test_the_finished_run(tmp_path: Path) -> None:
    assert finished_run(tmp_path / "nothing", "abc") is None
    make(tmp_path, status="running")
    make(tmp_path, "other", status="finished")
    assert finished_run(tmp_path, "abc") is None
    done = make(tmp_path, status="finished")
    assert finished_run(tmp_path, "abc") == done


def test_auto_resumes_the_newest_unfinished_idle_run(tmp_path: Path) -> None:
    assert continue_from(tmp_path, "abc", "auto", 2) is None
    old = make(tmp_path, status="running")
    wanted = make(tmp_path, status="failed")
    make(tmp_path, status="finished")
    busy = make(tmp_path, status="running")
    make(tmp_path, "other", status="running")
    save(old, 9)
    checkpoint = save(wanted, 4)
    os.utime(old.folder, ns=(0, 10))
    os.utime(wanted.folder, ns=(0, 5000))
    os.utime(busy.folder, ns=(0, 9000))
    going_on = busy.claim()
    assert going_on is not None
    found = continue_from(tmp_path, "abc", "auto", 2)
    assert found is not None
    assert found.run == Run("abc", wanted.folder, checkpoint)
    assert found.run.claim() is None
    os.close(found.lock)
    os.close(going_on)


def test_auto_begins_again_in_a_folder_without_checkpoints(tmp_path: Path) -> None:
    run = make(tmp_path, status="running")
    found = continue_from(tmp_path, "abc", "auto", 2)
    assert found is not None
    assert found.run == run
    os.close(found.lock)


def test_a_folder_by_name(tmp_path: Path) -> None:
    run = make(tmp_path, status="finished")
    named = partial(continue_from, tmp_path, "abc", str(run.folder), 2)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        named()
    checkpoint = save(run, 4)
    found = named()
    assert found is not None
    assert found.run.checkpoint == checkpoint
    with pytest.raises(ConfigError, match="is in use by another process"):
        named()
    os.close(found.lock)
    with pytest.raises(CheckpointError, match=r"is run abc, but this configuration is that of run xyz"):
        continue_from(tmp_path, "xyz", str(run.folder), 2)
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        continue_from(tmp_path, "abc", str(tmp_path), 2)


def test_a_bad_checkpoint_is_noticed_and_the_claim_is_given_back(tmp_path: Path) -> None:
    run = make(tmp_path, status="running")
    good, bad = save(run, 4), save(run, 8)
    (bad / "rank-1.pt").unlink()
    found = continue_from(tmp_path, "abc", "auto", 2)
    assert found is not None
    assert found.run.checkpoint == good
    (notice,) = found.run.notices
    assert notice.startswith(f"checkpoint {bad} cannot be used: rank-1.pt is missing")
    assert notice.endswith(f"continuing from {good}")
    os.close(found.lock)

    (good / "manifest.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="start again without resume"):
        continue_from(tmp_path, "abc", "auto", 2)
    lock = run.claim()
    assert lock is not None
    os.close(lock)


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder; name another with output_dir=FOLDER"):
        make(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot write to output_dir=.* \(Not a directory\)"):
        make(tmp_path / "file" / "below")
