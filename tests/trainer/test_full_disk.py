"""A full disk: one line with the path and the way out, no folder of a run that never began, and a true summary."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from spardl.basics.files import write_atomically
from tests.injections.starts import a_small_disk
from tests.support.driver import background_run, here, only_run, steps_logged, summary, wait_until
from trainer import checkpoint
from trainer.observers import MetricsFile
from trainer.runs import Run, new_run

RUN = ("cluster=simulated", "cluster.workers=2", "training.eval_examples=16", "training.batch_size=4")


def full(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        MetricsFile(Path("/dev/full")).metrics("train", 1, {"loss": 1.0})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'x'}'"):
        write_atomically(tmp_path / "x", b"content")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["trainer.job", "trainer.runs"])
def test_a_run_that_never_began_leaves_no_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(f"{place}.write_atomically", write)
    assert here(*RUN, f"output_dir={tmp_path / 'out'}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"error: cannot write {tmp_path}/out/\S+: No space left on device; free some space, or name another folder "
        r"with output_dir=FOLDER",
        line,
    )
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_a_lock_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "claim", full)
    with pytest.raises(ValueError, match=r"No space left on device"):
        new_run(tmp_path, "label", "abc")
    assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (*RUN, "training.max_steps=1", f"output_dir={tmp_path}")
    assert here(*words) == 0
    folder = only_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("trainer.job.write_atomically", full)
        assert here(*words, f"resume={folder}") == 2
    assert summary(folder)["status"] == "finished"


def test_a_checkpoint_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = checkpoint.write_atomically

    def fits(path: Path, data: bytes) -> None:
        if path.parent.name == ".step-00000004":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_atomically", fits)
    assert here(*RUN, "training.max_steps=5", "training.checkpoint_every=2", f"output_dir={tmp_path}") == 1
    folder = only_run(tmp_path)
    (line,) = capfd.readouterr().err.splitlines()
    reason = (
        f"worker 0 failed at step 4: cannot write {folder}/checkpoints/.step-00000004/rank-0.pt: No space left on "
        "device; free some space, then continue with the same command and resume=auto"
    )
    assert line == f"error: {reason}"
    assert (summary(folder)["status"], summary(folder)["reason"]) == ("failed", reason)


@pytest.mark.slow
def test_not_one_block_is_free(tmp_path: Path) -> None:
    """The summary still fits: its space was reserved at the start."""
    with a_small_disk(tmp_path / "disk"):
        outputs = tmp_path / "disk" / "out"
        words = (*RUN, "training.max_steps=100000", "training.checkpoint_every=50", f"output_dir={outputs}")
        with background_run(*words, folder=tmp_path / "log") as run:
            wait_until(lambda: steps_logged(outputs) or run.ended())
            filler = tmp_path / "disk" / "filler"
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(4096))
            assert run.wait() == 1
            assert re.fullmatch(r"error: worker 0 failed at step \d+: cannot write \S+: No space left.*\n", run.stderr)
        folder = only_run(outputs)
        assert summary(folder)["status"] == "failed"
        assert (folder / ".lock").stat().st_size == 0
