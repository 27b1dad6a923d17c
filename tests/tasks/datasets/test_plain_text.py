from __future__ import annotations

import pytest

from spardl.basics.errors import DataError
from tasks.datasets.plain_text import fetch_hint, put_hint, read_text, require_paths


def refusal(path) -> str:
    with pytest.raises(DataError) as caught:
        read_text("thing", path, "do this")
    message = str(caught.value)
    assert "\n" not in message
    assert str(path.absolute()) in message
    assert message.endswith("; do this") or message.endswith("then do this")
    return message


def test_text_is_read_as_it_stands(tmp_path):
    (tmp_path / "a.txt").write_text("ä\n b \n\n", encoding="utf-8")
    assert read_text("thing", tmp_path / "a.txt", "") == "ä\n b \n\n"


def test_a_missing_file_is_told(tmp_path):
    assert "thing is missing" in refusal(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        ("gr\u00fcn".encode("latin-1"), "is not UTF-8 (byte 2)"),
        ("cut \u00fc".encode()[:-1], "is not UTF-8 (byte 4)"),
        (b"text\0\0\0", "contains binary data"),
    ],
)
def test_what_is_no_text_is_told_as_damage(tmp_path, content, fault):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    message = refusal(path)
    assert "thing is damaged" in message
    assert fault in message


def test_what_is_no_file_is_told(tmp_path):
    assert "thing cannot be read" in refusal(tmp_path)


def test_the_first_missing_path_is_named(tmp_path):
    require_paths("thing", [tmp_path], "")
    with pytest.raises(DataError, match=r"thing is missing: \S+/one does not exist; do this"):
        require_paths("thing", [tmp_path, tmp_path / "one", tmp_path / "two"], "do this")


def test_hints_name_the_command_and_the_folder(tmp_path):
    assert "`python train.py dataset=thing dataset.download=true`" in fetch_hint("thing", "folder")
    assert "SPARDL_DATA" in fetch_hint("thing", "folder")
    assert f"put files into {tmp_path}," in put_hint("files", tmp_path)
