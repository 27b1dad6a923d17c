from __future__ import annotations

import contextlib
import json
import pickle
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import CheckpointError
from spardl.basics.files import checksum
from spardl.clusters import Cluster
from tests.support.driver import here, only_run
from tests.support.harness import run_workers, spardl
from tests.trainer.toy import plan, simulated, trainer
from trainer.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    load_part,
    save_checkpoint,
    saved_workers,
    verify_checkpoint,
)

CPU = torch.device("cpu")


def part(rank: int, step: int) -> dict[str, object]:
    return {"rank": rank, "step": step, "values": torch.full((3,), float(rank))}


def save(folder: Path, step: int, cluster: Cluster | None = None, keep: int = 2) -> Path:
    cluster = cluster or simulated(3)
    parts = [partial(part, rank, step) for rank in cluster.local_ranks]
    return save_checkpoint(folder, step, cluster, parts, lambda: {"progress": step}, keep)


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 7)
    assert {path.name for path in checkpoint.iterdir()} == {
        "shared.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt", "manifest.json"
    }  # fmt: skip
    verify_checkpoint(checkpoint, 3)
    assert load_part(checkpoint, None, CPU) == {"progress": 7}
    for rank in range(3):
        found = load_part(checkpoint, rank, CPU)
        assert (found["rank"], found["step"], found["values"].tolist()) == (rank, 7, [float(rank)] * 3)


def test_real_workers_save_together(tmp_path: Path) -> None:
    def work(cluster: Cluster) -> str:
        return str(save(tmp_path, 2, cluster))

    assert run_workers(3, work) == [str(tmp_path / "step-00000002")] * 3
    assert find_checkpoint(tmp_path, 3) == (tmp_path / "step-00000002", [])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000015", "step-00000100"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crash_while_saving_leaves_the_one_before(tmp_path: Path) -> None:
    first = save(tmp_path, 5)

    def crash() -> dict[str, object]:
        raise MemoryError

    cluster = simulated(3)
    parts = [partial(part, 0, 10), partial(part, 1, 10), crash]
    with pytest.raises(MemoryError):
        save_checkpoint(tmp_path, 10, cluster, parts, lambda: {}, 2)
    assert find_checkpoint(tmp_path, 3) == (first, [])
    # A killed writer leaves a part of a file, too; the next attempt at this step clears it away.
    (tmp_path / ".step-00000010" / ".rank-2.pt.123.tmp").write_bytes(b"half")
    again = save(tmp_path, 10)
    assert find_checkpoint(tmp_path, 3) == (again, [])
    assert not list(again.glob(".*"))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crash_while_an_old_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it is no checkpoint, and goes with the next one."""

    def crash(path: Path, **options: object) -> None:
        if path.exists():
            (path / "manifest.json").unlink()
            raise MemoryError

    first, second = save(tmp_path, 5, keep=2), save(tmp_path, 10, keep=2)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("trainer.checkpoint.shutil.rmtree", crash)
        save(tmp_path, 15, keep=2)
    third = tmp_path / "step-00000015"
    assert list_checkpoints(tmp_path) == [second, third]
    for whole in (second, third):
        verify_checkpoint(whole, 3)
    fourth = save(tmp_path, 20, keep=2)
    assert list_checkpoints(tmp_path) == [third, fourth]
    assert len(list(tmp_path.iterdir())) == 2
    assert not first.exists()


def test_files_of_a_larger_world_size_are_removed(tmp_path: Path) -> None:
    whole = save(tmp_path, 5)
    (tmp_path / ".step-00000010").mkdir()
    for name in ("rank-3.pt", "rank-4.pt"):
        (tmp_path / ".step-00000010" / name).write_bytes((whole / "rank-0.pt").read_bytes())
    found = save(tmp_path, 10)
    assert saved_workers(found) == 3
    assert not (found / "rank-3.pt").exists()


def test_later_checkpoints_are_removed_after_a_resume(tmp_path: Path) -> None:
    """The newest was broken, and the run went on from an older one."""
    for step in (5, 10):
        save(tmp_path, step, keep=2)
    (tmp_path / "step-00000010" / "shared.pt").unlink()
    for step, left in ((7, ["step-00000005", "step-00000007"]), (9, ["step-00000007", "step-00000009"])):
        save(tmp_path, step, keep=2)
        assert [path.name for path in list_checkpoints(tmp_path)] == left


def test_a_bad_one_is_replaced_when_its_step_is_reached_again(tmp_path: Path) -> None:
    (save(tmp_path, 5) / "shared.pt").unlink()
    assert find_checkpoint(tmp_path.parent / "other", 3) == (None, [])
    verify_checkpoint(save(tmp_path, 5), 3)


def harm_missing(path: Path) -> None:
    path.unlink()


def harm_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 0x10
    path.write_bytes(content)


def harm_length(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("harm", [harm_missing, harm_byte, harm_length])
@pytest.mark.parametrize("name", ["shared.pt", "rank-0.pt", "rank-2.pt", "manifest.json"])
def test_damage_is_detected(harm, name: str, tmp_path: Path) -> None:
    old, new = save(tmp_path, 5), save(tmp_path, 10)
    harm(new / name)
    found, faults = find_checkpoint(tmp_path, 3)
    assert found == old
    assert len(faults) == 1
    assert str(faults[0]).startswith(f"checkpoint {new} cannot be used: ")
    harm(old / name)
    with pytest.raises(CheckpointError, match="no older checkpoint can be used; start again without resume"):
        find_checkpoint(tmp_path, 3)


def test_too_few_parts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no rank-3\.pt, which a run of 4 workers needs"):
        verify_checkpoint(save(tmp_path, 1), 4)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"7", b"[" * 10**5, b"{", b"\xff\xfe", b'{"shared.pt": 1}'])
def test_a_manifest_of_nonsense(content: bytes, tmp_path: Path) -> None:
    old, new = save(tmp_path, 5), save(tmp_path, 10)
    (new / "manifest.json").write_bytes(content)
    found, (fault,) = find_checkpoint(tmp_path, 3)
    assert found == old
    assert str(fault).startswith(f"checkpoint {new} cannot be used: ")


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._mark,))


def evil_archive(path: Path, mark: Path) -> None:
    torch.save({"x": Evil(mark)}, path)


def evil_old_archive(path: Path, mark: Path) -> None:
    torch.save({"x": Evil(mark)}, path, _use_new_zipfile_serialization=False)


def evil_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(mark)))


def evil_script(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(_Evaluated(f"__import__('pathlib').Path({str(mark)!r}).touch()")))


class _Evaluated:
    def __init__(self, source: str) -> None:
        self._source = source

    def __reduce__(self) -> tuple[object, ...]:
        return (eval, (self._source,))


def harmless_but_foreign(path: Path, mark: Path) -> None:
    """A class that no checkpoint needs; its constructor is code, too."""
    torch.save({"x": Fraction(1, 2)}, path)


EVILS = [evil_archive, evil_old_archive, evil_pickle, evil_script, harmless_but_foreign]


def plant(evil: Callable[[Path, Path], None], checkpoint: Path, name: str, mark: Path) -> None:
    """Puts a file in the place of another, with its checksum in the manifest."""
    evil(checkpoint / name, mark)
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), name: checksum(checkpoint / name)}))


@pytest.mark.parametrize("evil", EVILS)
def test_the_malicious_files_execute_code(evil: Callable[[Path, Path], None], tmp_path: Path) -> None:
    evil(tmp_path / "file", tmp_path / "mark")
    with contextlib.suppress(Exception):
        torch.load(tmp_path / "file", weights_only=False)
    with contextlib.suppress(Exception):
        pickle.loads((tmp_path / "file").read_bytes())
    assert (tmp_path / "mark").exists() == (evil is not harmless_but_foreign)


@pytest.mark.parametrize("name", ["shared.pt", "rank-0.pt"])
@pytest.mark.parametrize("evil", EVILS)
def test_loading_runs_no_code(evil: Callable[[Path, Path], None], name: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 1)
    plant(evil, checkpoint, name, tmp_path / "mark")
    verify_checkpoint(checkpoint, 3)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load_part(checkpoint, None if name == "shared.pt" else 0, CPU)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_raw_pickle_is_one_line_that_recommends_nothing(protocol: int, tmp_path: Path) -> None:
    """torch would warn of the protocol, in two lines a file, and say how to run what is in it."""
    checkpoint = save(tmp_path / "run", 1)
    (checkpoint / "rank-0.pt").write_bytes(pickle.dumps({"x": Path("y")}, protocol=protocol))
    with warnings.catch_warnings(record=True) as caught, pytest.raises(CheckpointError) as error:
        warnings.simplefilter("always")
        load_part(checkpoint, 0, CPU)
    assert caught == []
    assert str(error.value) == (
        f"checkpoint {checkpoint} cannot be used: rank-0.pt cannot be read (it contains objects other than "
        "tensors and plain data; no code in it was executed)"
    )


@pytest.mark.parametrize("name", ["rank-0.pt", pytest.param("shared.pt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("evil", [evil_archive, *(pytest.param(evil, marks=pytest.mark.slow) for evil in EVILS[1:])])
def test_a_run_that_goes_on_from_an_evil_checkpoint(
    evil: Callable[[Path, Path], None], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("cluster=simulated", "cluster.workers=2", "training.max_steps=1", "training.eval_examples=8")
    assert here(*words, f"output_dir={tmp_path / 'out'}") == 0
    folder = only_run(tmp_path / "out")
    plant(evil, folder / "checkpoints" / "step-00000001", name, tmp_path / "mark")
    capfd.readouterr()
    assert here(*words, f"output_dir={tmp_path / 'out'}", f"resume={folder}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: checkpoint {folder / 'checkpoints' / 'step-00000001'} cannot be used: {name}")
    assert not (tmp_path / "mark").exists()


def stripped(path: Path) -> None:
    """Rewrites a checkpoint as the versions did that stored no identity."""
    for file in path.glob("*.pt"):
        content = torch.load(file, weights_only=True)
        del content["checkpoint"]
        torch.save(content, file)
    sums = {file.name: checksum(file) for file in path.glob("*.pt")}
    (path / "manifest.json").write_text(json.dumps(sums))


def edited(path: Path, name: str, **changes: object) -> None:
    """Changes the top-level keys of a file (``None`` removes one), with a matching checksum."""
    content = {**torch.load(path / name, weights_only=True), **changes}
    torch.save({key: value for key, value in content.items() if value is not None}, path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, name: checksum(path / name)}))


def save_as(run: str, folder: Path, step: int, workers: int = 2) -> Path:
    return save_checkpoint(folder, step, simulated(workers), [dict] * workers, dict, 9, run)


def test_every_file_stores_its_identity(tmp_path: Path) -> None:
    checkpoint = save_as("a", tmp_path, 7)
    identity = {"format": 1, "run": "a", "step": 7, "workers": 2}
    assert json.loads((checkpoint / "manifest.json").read_text())["checkpoint"] == identity
    for name, rank in {"shared.pt": None, "rank-0.pt": 0, "rank-1.pt": 1}.items():
        assert torch.load(checkpoint / name, weights_only=True) == {"checkpoint": {**identity, "rank": rank}}
    assert find_checkpoint(tmp_path, 2, "a") == (checkpoint, [])


@pytest.mark.parametrize(
    ("run", "step", "workers", "reason"),
    [
        ("b", 9, 2, r"it was saved by run b, but this is run a; move it back to its folder"),
        ("a", 8, 2, r"it was saved at step 8; rename it back"),
        ("a", 9, 3, r"it was saved by 3 workers, but this run has 2; move it elsewhere"),
        ("a", 9, 1, r"it was saved by 1 workers, but this run has 2; move it elsewhere"),
    ],
)
def test_a_foreign_checkpoint_is_refused(run: str, step: int, workers: int, reason: str, tmp_path: Path) -> None:
    """The whole one of step 5 is no substitute: continuing from it would delete the newer one."""
    save_as("a", tmp_path / "run", 5)
    save_as(run, tmp_path / "other", step, workers).rename(tmp_path / "run" / "step-00000009")
    with pytest.raises(CheckpointError, match=rf"step-00000009 cannot be used: {reason}$"):
        find_checkpoint(tmp_path / "run", 2, "a")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    save_as("a", tmp_path, 5)
    newer = save_as("a", tmp_path, 9) / "manifest.json"
    content = json.loads(newer.read_text())
    newer.write_text(json.dumps({**content, "checkpoint": {**content["checkpoint"], "format": 2}}))
    with pytest.raises(CheckpointError, match="has format 2, but this version of spardl reads 1; use the version"):
        find_checkpoint(tmp_path, 2, "a")


def test_a_checkpoint_of_more_workers_without_identity(tmp_path: Path) -> None:
    stripped(save_as("a", tmp_path, 5, workers=3))
    assert find_checkpoint(tmp_path, 3, "a")[0] == find_checkpoint(tmp_path, None, "a")[0] == tmp_path / "step-00000005"
    with pytest.raises(CheckpointError, match="it was saved by 3 workers, but this run has 2"):
        find_checkpoint(tmp_path, 2, "a")


@pytest.mark.parametrize("source", ["rank-1.pt", "../other/step-00000005/rank-0.pt", "../old/step-00000005/rank-0.pt"])
def test_a_file_of_another_checkpoint_is_refused(source: str, tmp_path: Path) -> None:
    checkpoint = save_as("a", tmp_path / "run", 5)
    save_as("b", tmp_path / "other", 5)
    stripped(save_as("a", tmp_path / "old", 5))
    content = torch.load(tmp_path / "run" / source if source[0] == "." else checkpoint / source, weights_only=True)
    edited(checkpoint, "rank-0.pt", checkpoint=content.get("checkpoint"))
    verify_checkpoint(checkpoint, 2)
    with pytest.raises(CheckpointError, match=r"rank-0\.pt is .*, but manifest\.json is of run a, step 5, 2 workers$"):
        load_part(checkpoint, 0, CPU)


def test_a_checkpoint_without_identity_is_continued(tmp_path: Path) -> None:
    made = plan(spardl(0.1), max_steps=6, checkpoint_every=3)
    undisturbed = trainer(made, tmp_path, 2).fit()
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    stripped(checkpoint)
    assert find_checkpoint(tmp_path / "checkpoints", 2, "0")[1] == []
    resumed = trainer(made, tmp_path / "again", 2, checkpoint).fit()
    assert resumed["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("shared.pt", {"progress": None}, "has no 'progress'; use an older checkpoint"),
        ("shared.pt", {"progress": {"pace": 1}}, "does not fit this run .*unexpected keyword argument 'pace'"),
        ("shared.pt", {"optimizer": None}, "has no 'optimizer'; use"),
        ("shared.pt", {"optimizer": {}}, "has no '(param_groups|state)'; use"),
        ("shared.pt", {"model": {}}, "does not fit this run .*Sequential"),
        ("rank-1.pt", {"window": None}, "has no 'window'; use"),
        ("rank-1.pt", {"synchronizer": {}}, "has no '.*'; use"),
        ("rank-1.pt", {"worker": [1]}, "does not fit this run"),
    ],
)
def test_missing_keys_are_named(name: str, changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    made = plan(spardl(0.1), max_steps=2)
    trainer(made, tmp_path, 2).fit()
    (checkpoint,) = list_checkpoints(tmp_path / "checkpoints")
    edited(checkpoint, name, **changes)
    with pytest.raises(CheckpointError, match=rf"^checkpoint {checkpoint} cannot be used: {name} {reason}"):
        trainer(made, tmp_path / "again", 2, checkpoint)


def test_missing_keys_are_named_for_other_workers(tmp_path: Path) -> None:
    made = plan(spardl(0.1), max_steps=2, elastic=True)
    trainer(made, tmp_path, 3).fit()
    (checkpoint,) = list_checkpoints(tmp_path / "checkpoints")
    edited(checkpoint, "rank-1.pt", worker=None)
    with pytest.raises(CheckpointError, match=r"rank-1\.pt has no 'worker'"):
        trainer(made, tmp_path / "again", 2, checkpoint)
