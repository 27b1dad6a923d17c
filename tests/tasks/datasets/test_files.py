"""What all data sets share: the base class, the cache and downloads."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import io
import multiprocessing
import os
import socket
import tarfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import cache as module
from tasks.datasets.base import require
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.download import Remote, fetch
from tasks.datasets.images import ImageDataset
from tasks.datasets.text import Corpus, TextDataset


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels_of(split, batch):
    """Undoes the normalisation: whole pixel values again."""
    scaled = batch["images"] * split.std.view(1, -1, 1, 1) + split.mean.view(1, -1, 1, 1)
    return (scaled * split.scale).round().to(torch.uint8)


def test_without_a_generator_images_are_only_normalised(tiny_images):
    indices = torch.tensor([4, 0, 4])
    batch = tiny_images.train.batch(indices, None)
    assert batch["images"].dtype == torch.float32
    assert batch["labels"].tolist() == [1, 0, 1]
    assert torch.equal(pixels_of(tiny_images.train, batch), tiny_images.train.images[indices])
    value = tiny_images.train.images[4, 2, 1, 3].item()
    assert batch["images"][0, 2, 1, 3].item() == pytest.approx((value / 255 - 0.3) / 1.0)


def test_same_generator_state_same_batch(tiny_images):
    indices = torch.arange(6)
    first = tiny_images.train.batch(indices, seeded(1))["images"]
    assert torch.equal(first, tiny_images.train.batch(indices, seeded(1))["images"])
    assert not torch.equal(first, tiny_images.train.batch(indices, seeded(2))["images"])


def test_augmentation_leaves_the_global_generator_alone(tiny_images):
    before = torch.get_rng_state()
    tiny_images.train.batch(torch.arange(6), seeded(1))
    assert torch.equal(before, torch.get_rng_state())


def test_augmentation_only_shifts_and_mirrors(tiny_images):
    split = tiny_images.train
    indices = torch.zeros(1000, dtype=torch.long)
    drawn = {bytes(p.flatten().tolist()) for p in pixels_of(split, split.batch(indices, seeded(0)))}
    padded = torch.nn.functional.pad(split.images[0], (1, 1, 1, 1))
    crops = [padded[:, top : top + 4, left : left + 4] for top in range(3) for left in range(3)]
    crops += [crop.flip(2) for crop in crops]
    assert drawn == {bytes(crop.flatten().tolist()) for crop in crops}


def test_flip_off_only_shifts(tiny_images):
    split = dataclasses.replace(tiny_images.train, flip=False, padding=0)
    batch = split.batch(torch.arange(6), seeded(0))
    assert torch.equal(pixels_of(split, batch), split.images)


def test_no_shift_only_mirrors(tiny_images):
    split = dataclasses.replace(tiny_images.train, padding=0)
    drawn = pixels_of(split, split.batch(torch.zeros(50, dtype=torch.long), seeded(0)))
    assert {bytes(p.flatten().tolist()) for p in drawn} == {
        bytes(p.flatten().tolist()) for p in (split.images[0], split.images[0].flip(2))
    }


def test_images_of_a_batch_are_augmented_independently(tiny_images):
    images = tiny_images.train.batch(torch.zeros(50, dtype=torch.long), seeded(3))["images"]
    assert len(images.unique(dim=0)) > 5


def test_corpus_leaves_out_what_is_empty():
    corpus = Corpus.from_documents([[[7, 8], [], [9]], [], [[]], [[5]]])
    assert corpus.tokens.tolist() == [7, 8, 9, 5]
    assert corpus.sentences.tolist() == [0, 2, 3, 4]
    assert corpus.documents.tolist() == [0, 2, 3]


def test_require_returns_what_fits(tiny_images, tiny_text):
    assert require(tiny_images, ImageDataset, "x") is tiny_images
    assert require(tiny_text, TextDataset, "x") is tiny_text


def test_require_names_what_fits_in_one_line(digits):
    with pytest.raises(ConfigError) as caught:
        require(digits, TextDataset, "bert pre-training")
    assert str(caught.value) == (
        "bert pre-training needs a data set of text, but dataset=digits contains images; use dataset=pydocs"
    )


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


def test_a_lock_that_is_never_released_is_reported_in_one_line(tmp_path, monkeypatch):
    cached(tmp_path, "thing", {}, make)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    with FileLock(kept(tmp_path).with_suffix(".lock")), pytest.raises(DataError) as caught:
        cached(tmp_path, "thing", {}, never)
    assert "another process" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_reported_in_one_line(tmp_path):
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


def served(path: Path, name: str, algorithm: str = "sha256") -> Remote:
    """A file on this machine, offered under a URL with its right checksum."""
    return Remote(path.as_uri(), f"{algorithm}:{hashlib.new(algorithm, path.read_bytes()).hexdigest()}", name)


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def origin(tmp_path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "data"


def left(target: Path) -> list[str]:
    return sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.suffix != ".lock")


def refusal(remote: Remote, target: Path) -> str:
    """The message; there must be nothing left of the attempt."""
    with pytest.raises(DataError) as caught:
        fetch("thing", [remote], target)
    assert left(target) == []
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"thing cannot be downloaded into {target}: ")
    assert message.endswith("download it on another machine and set data_dir to its parent folder")
    return message


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_file_is_put_where_it_belongs(origin, target, algorithm):
    (origin / "a").write_bytes(b"content")
    fetch("thing", [served(origin / "a", "sub/folder/b.txt", algorithm)], target)
    assert (target / "sub/folder/b.txt").read_bytes() == b"content"
    assert left(target) == ["sub", "sub/folder", "sub/folder/b.txt"]


def test_an_archive_is_unpacked(origin, target):
    archive = pack(origin / "a.tar.gz", {"top/x": b"1", "top/sub/y": b"2", "outside": b"3"})
    fetch("thing", [served(archive, "top")], target)
    assert left(target) == ["top", "top/sub", "top/sub/y", "top/x"]
    assert (target / "top/sub/y").read_bytes() == b"2"


def test_only_what_is_missing_is_fetched(origin, target):
    (origin / "a").write_bytes(b"new")
    (origin / "b").write_bytes(b"new")
    target.mkdir()
    (target / "a").write_bytes(b"old")
    fetch("thing", [served(origin / "a", "a"), served(origin / "b", "b")], target)
    assert (target / "a").read_bytes() == b"old"
    assert (target / "b").read_bytes() == b"new"


def test_other_bytes_than_expected_are_refused(origin, target):
    remote = served(pack(origin / "a.tar.gz", {"top/x": b"1"}), "top")
    pack(origin / "a.tar.gz", {"top/x": b"2"})
    message = refusal(remote, target)
    assert remote.checksum.split(":")[1] in message
    assert "sha256" in message


def test_a_file_that_is_not_there_is_reported(origin, target):
    refusal(Remote((origin / "none").as_uri(), "md5:0", "none"), target)


@pytest.mark.parametrize("cut", [0, 5, 60, -40])
def test_a_broken_archive_is_refused(origin, target, cut):
    archive = pack(origin / "a.tgz", {"top/x": bytes(range(256)) * 40})
    archive.write_bytes(archive.read_bytes()[:cut])
    refusal(served(archive, "top"), target)


def test_an_archive_with_damaged_contents_is_refused(origin, target):
    archive = pack(origin / "a.tgz", {"top/x": bytes(range(256)) * 40})
    content = bytearray(archive.read_bytes())
    content[30:60] = bytes(30)
    archive.write_bytes(content)
    refusal(served(archive, "top"), target)


def test_an_archive_of_something_else_is_refused(origin, target):
    refusal(served(pack(origin / "a.tar.gz", {"other/x": b"1"}), "top"), target)


def test_an_archive_that_reaches_outside_is_refused(origin, target):
    refusal(served(pack(origin / "a.tar.gz", {"top/x": b"1", "../../evil": b"2"}), "top"), target)
    assert not list(target.parent.rglob("evil"))


def test_download_a_folder_that_cannot_be_made_is_reported_in_one_line(origin, tmp_path):
    (origin / "a").write_bytes(b"content")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"thing cannot be downloaded into \S+file"):
        fetch("thing", [served(origin / "a", "a")], tmp_path / "file")


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """Gives one answer, whatever is asked, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/file"
        thread.join()


HEADER = b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\n"


def test_over_http(target):
    with server(HEADER + b"content") as url:
        fetch("thing", [Remote(url, f"sha256:{hashlib.sha256(b'content').hexdigest()}", "a")], target)
    assert (target / "a").read_bytes() == b"content"
    assert threading.active_count() == 1  # workers are forked from this process


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "HTTP Error 404"),
        (b"this is no web server\r\n", "this is no web server"),
        (b"", "closed connection"),
        (HEADER + b"cont", "has sha256"),
    ],
)
def test_servers_that_do_not_deliver(target, answer, reason):
    with server(answer) as url:
        assert reason in refusal(Remote(url, f"sha256:{hashlib.sha256(b'content').hexdigest()}", "a"), target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # urllib forgets the socket of a broken answer
        gc.collect()
