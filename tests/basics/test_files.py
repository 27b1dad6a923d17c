"""Files, and messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from spardl.basics.errors import ConfigError, DataError, first_line
from spardl.basics.files import open_regular, read_json, read_regular, read_tail, read_text, read_yaml
from spardl.clusters.network import parse_network
from spardl.clusters.profile import Profile
from spardl.schedules.measured import Groups
from tasks.datasets import plain_text
from trainer.runs import Run

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 30)
)


@pytest.mark.parametrize("read", [open_regular, read_regular, read_text, read_tail, read_json, read_yaml])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_only_regular_files_are_read(kind: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "it"
    if kind != "device":
        (os.mkfifo if kind == "fifo" else os.mkdir)(path)
    with pytest.raises(OSError, match=f"not a regular file: '{path}'"):
        read(path)


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"12345")
    assert (read_regular(path, 5), read_text(path, 5), read_json(path, 5)) == (b"12345", "12345", 12345)
    assert read_tail(path, 2) == b"45"
    for read in (read_regular, read_text, read_json):
        with pytest.raises(OSError, match="larger than 4 bytes"):
            read(path, 4)
    assert b"processor" in read_regular(Path("/proc/cpuinfo"))  # its size is 0
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_regular(Path("/proc/cpuinfo"), 10)


def test_line_ends_are_those_of_read_text(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(path) == path.read_text(encoding="utf-8") == "ä\nb\nc\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "more than 100,000 nodes"),
        ("a: &a [*a, *a]\n", "more than 100,000 nodes"),
        ("[" * 10_000, "nested too deeply"),
        ("x: " + "y" * (1 << 18), "larger than"),
    ],
)
def test_yaml_that_grows_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_text(text)
    with pytest.raises((OSError, ValueError), match=reason):
        read_yaml(path)


def test_aliases_of_moderate_size_are_yaml(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("base: &b {x: 1}\nall: [*b, *b]\nother: {<<: *b, y: 2}\n")
    assert yaml.safe_load(read_yaml(tmp_path / "it"))["other"] == {"x": 1, "y": 2}
    (tmp_path / "it").write_text("")
    assert read_yaml(tmp_path / "it") == ""


@pytest.mark.parametrize("kind", ["fifo", "zero", "deep"])
def test_readers_of_named_files_refuse_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_text("[" * 100_000)
    else:
        path.symlink_to("/dev/zero")
    assert Run("a", tmp_path).read_summary() == {}
    readers: list[Callable[[], object]] = [
        lambda: Groups.read(path),
        lambda: Profile.read(path),
        lambda: parse_network(str(path), "network"),
    ]
    if kind != "deep":
        readers.append(lambda: plain_text.read_text("imdb", path, "fetch it"))
    for read in readers:
        with pytest.raises((ConfigError, DataError)) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_one_line_of_any_error() -> None:
    assert first_line(ValueError("what\nwhere")) == "what"
    assert first_line(ValueError("\n  what  \nwhere")) == "what"
    assert first_line(ValueError()) == first_line(ValueError(" \n")) == "ValueError"
