from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spardl.basics.errors import DataError
from tasks.datasets import cache as module
from tasks.datasets.cache import cached, fingerprint

TENSORS = {
    "numbers": torch.arange(6, dtype=torch.int32).view(2, 3),
    "none": torch.empty(0, dtype=torch.int64),
    "fractions": torch.tensor([0.1, float("nan")]),
}


def make():
    return {name: tensor.clone() for name, tensor in TENSORS.items()}


def never():
    raise AssertionError("made again")


def is_whole(found) -> bool:
    return found.keys() == TENSORS.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name].nan_to_num(7), tensor.nan_to_num(7))
        for name, tensor in TENSORS.items()
    )


def kept(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def test_what_is_made_once_is_read_from_then_on(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert is_whole(cached(folder, "thing", {"a": 1}, make))
    assert is_whole(cached(folder, "thing", {"a": 1}, never))
    assert kept(folder).name.startswith("thing-")


@pytest.mark.parametrize(("name", "key"), [("thing", {"a": 2}), ("other", {"a": 1}), ("thing", {"a": 1, "b": None})])
def test_another_key_is_another_thing(tmp_path, name, key):
    cached(tmp_path, "thing", {"a": 1}, lambda: {"x": torch.zeros(1)})
    assert is_whole(cached(tmp_path, name, key, make))


def test_the_order_of_a_key_does_not_matter(tmp_path):
    cached(tmp_path, "thing", {"a": 1, "b": 2}, make)
    assert is_whole(cached(tmp_path, "thing", {"b": 2, "a": 1}, never))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_noticed_and_made_again(tmp_path, data):
    cached(tmp_path, "thing", {}, make)
    path = kept(tmp_path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    assert is_whole(cached(tmp_path, "thing", {}, make))
    assert is_whole(cached(tmp_path, "thing", {}, never))


def test_changed_values_are_noticed_by_their_checksum(tmp_path):
    cached(tmp_path, "thing", {}, make)
    path = kept(tmp_path)
    content = path.read_bytes()
    wanted = TENSORS["numbers"].numpy().tobytes()
    assert wanted in content
    path.write_bytes(content.replace(wanted, bytes(len(wanted))))
    assert is_whole(cached(tmp_path, "thing", {}, make))


def test_a_failure_leaves_nothing_behind(tmp_path):
    def fail():
        raise DataError("the source is broken")

    with pytest.raises(DataError, match="the source is broken"):
        cached(tmp_path, "thing", {}, fail)
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])
    assert is_whole(cached(tmp_path, "thing", {}, make))


@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace")])
def test_a_crash_while_writing_leaves_nothing_half_written(tmp_path, monkeypatch, owner, call):
    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(owner, call, crash)
        cached(tmp_path, "thing", {}, make)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def _work(folder, barrier, log):
    def slow():
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        return {"x": torch.randperm(2_000_000, generator=torch.Generator().manual_seed(0))}

    barrier.wait(timeout=240)
    assert len(cached(folder, "thing", {}, slow)["x"].unique()) == 2_000_000


def test_of_two_processes_at_once_one_makes_it(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    workers = [
        context.Process(target=_work, args=(str(tmp_path / "cache"), barrier, str(tmp_path / "log"))) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=240)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_lock_that_nobody_releases_is_told_in_one_line(tmp_path, monkeypatch):
    cached(tmp_path, "thing", {}, make)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with FileLock(kept(tmp_path).with_suffix(".lock")), pytest.raises(DataError) as caught:
        cached(tmp_path, "thing", {}, never)
    assert "another process" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError) as caught:
        cached(tmp_path / "file" / "cache", "thing", {}, never)
    assert "thing cannot be cached" in str(caught.value)
    assert "SPARDL_CACHE" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fingerprint_tells_files_that_changed(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_text("one")
    two.write_text("two")
    before = fingerprint([two, one])
    assert before == fingerprint([one, two])
    os.utime(one, ns=(5, 5))
    touched = fingerprint([one, two])
    assert touched != before
    one.write_text("more")
    os.utime(one, ns=(5, 5))
    assert fingerprint([one, two]) != touched


def test_a_fingerprint_of_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        fingerprint([tmp_path / "none"])
