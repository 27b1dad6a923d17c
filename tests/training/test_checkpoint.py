from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import pytest
import torch

from spardl.clusters import Cluster
from spardl.errors import CheckpointError
from spardl.training.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    load_part,
    save_checkpoint,
    verify_checkpoint,
)
from tests.harness import run_workers
from tests.training.toy import simulated

CPU = torch.device("cpu")


def part(rank: int, step: int) -> dict[str, object]:
    return {"rank": rank, "step": step, "values": torch.full((3,), float(rank))}


def save(folder: Path, step: int, cluster: Cluster | None = None, keep: int = 2) -> Path:
    cluster = cluster or simulated(3)
    parts = [partial(part, rank, step) for rank in cluster.local_ranks]
    return save_checkpoint(folder, step, cluster, parts, lambda: {"progress": step}, keep)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 7)
    assert {path.name for path in checkpoint.iterdir()} == {
        "shared.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt", "manifest.json"
    }  # fmt: skip
    verify_checkpoint(checkpoint, 3)
    assert load_part(checkpoint, None, CPU) == {"progress": 7}
    for rank in range(3):
        found = load_part(checkpoint, rank, CPU)
        assert (found["rank"], found["step"], found["values"].tolist()) == (rank, 7, [float(rank)] * 3)


@pytest.mark.timeout(60)
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
def test_harm_is_found(harm, name: str, tmp_path: Path) -> None:
    old, new = save(tmp_path, 5), save(tmp_path, 10)
    harm(new / name)
    found, faults = find_checkpoint(tmp_path, 3)
    assert found == old
    assert len(faults) == 1
    assert str(faults[0]).startswith(f"checkpoint {new} cannot be used: ")
    harm(old / name)
    with pytest.raises(CheckpointError, match="no older one can be used either: start again without resume"):
        find_checkpoint(tmp_path, 3)


def test_too_few_parts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no rank-3\.pt, which a run of 4 workers needs"):
        verify_checkpoint(save(tmp_path, 1), 4)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("evil"),))


def test_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = save(tmp_path, 1)
    torch.save({"x": Evil()}, checkpoint / "rank-0.pt")
    (checkpoint / "rank-1.pt").write_bytes(pickle.dumps(Evil()))
    for rank in (0, 1):
        with pytest.raises(CheckpointError, match=f"rank-{rank}.pt cannot be read"):
            load_part(checkpoint, rank, CPU)
    assert not Path("evil").exists()
