from __future__ import annotations

import gc
import hashlib
import io
import socket
import tarfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spardl.basics.errors import DataError
from tasks.datasets.download import Remote, fetch


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
    archive = pack(origin / "a.tar.gz", {"top/x": b"1", "top/sub/y": b"2", "beside": b"3"})
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


def test_a_file_that_is_not_there_is_told(origin, target):
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


def test_a_folder_that_cannot_be_made_is_told_in_one_line(origin, tmp_path):
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
