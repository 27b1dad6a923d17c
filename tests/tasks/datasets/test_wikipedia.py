from __future__ import annotations

from pathlib import Path

import pytest

from spardl.basics.errors import DataError
from tasks.datasets.text import SpecialTokens
from tasks.datasets.wikipedia import documents_of, wikipedia

PIECES = [*SpecialTokens.NAMES, *"abcd."]


@pytest.fixture
def small(tmp_path) -> Path:
    """Twenty short articles in two files of different folders, one letter each."""
    (tmp_path / "bert-base-uncased").mkdir()
    (tmp_path / "bert-base-uncased" / "vocab.txt").write_text("\n".join(PIECES))
    for folder, letter in (("AA", "a"), ("AB", "b")):
        (tmp_path / "wikipedia" / folder).mkdir(parents=True)
        article = f"{letter} {letter}. {letter.upper()}\nc\n"
        (tmp_path / "wikipedia" / folder / "text.txt").write_text("\n".join([article] * 10))
    return tmp_path


def load(root: Path, **options):
    return wikipedia(str(root), str(root / "cache"), **{"vocab_size": len(PIECES), **options})


def test_blank_lines_end_documents():
    lines = ["", "a  b ", "c", " \t", "", "d"]
    assert list(documents_of(lines)) == [["a b", "c"], ["d"]]
    assert list(documents_of([])) == []


def test_all_files_are_read_and_a_tenth_held_out(small):
    text = load(small)
    assert (text.name, text.vocab_size, text.caveat) == ("wikipedia", len(PIECES), None)
    assert (len(text.train.documents) - 1, len(text.test.documents) - 1) == (18, 2)
    a, b, c, stop = (PIECES.index(piece) for piece in "abc.")
    assert text.train.tokens[:5].tolist() == [a, a, stop, a, c]
    assert text.train.tokens[-5:].tolist() == [b, b, stop, b, c]
    assert text.train.sentences[:4].tolist() == [0, 3, 4, 5]


def test_a_changed_file_is_read_again(small):
    load(small)
    (small / "wikipedia" / "AB" / "more.txt").write_text("d\n")
    assert PIECES.index("d") in load(small).train.tokens


@pytest.mark.parametrize("download", [False, True])
def test_missing_text_is_told_in_one_line(tmp_path, download):
    (tmp_path / "wikipedia").mkdir()
    (tmp_path / "wikipedia" / "dump.xml").write_text("no plain text")
    with pytest.raises(DataError) as caught:
        load(tmp_path, download=download)
    message = str(caught.value)
    assert "\n" not in message
    assert "wikipedia is missing" in message
    assert "https://dumps.wikimedia.org" in message
    assert str(tmp_path / "wikipedia") in message


@pytest.mark.parametrize("content", [b"", b"\xfe\xff", b"a\0b"])
def test_damaged_text_is_told_in_one_line_and_not_cached(small, content):
    path = small / "wikipedia" / "AB" / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(small)
    assert "\n" not in str(caught.value)
    assert f"wikipedia is damaged: {path}" in str(caught.value)
    assert not list((small / "cache").glob("*.safetensors"))


def test_a_missing_vocabulary_is_told(small):
    (small / "bert-base-uncased" / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"wikipedia is missing: \S+vocab.txt does not exist"):
        load(small)


def test_the_stand_in_reads_nothing():
    text = wikipedia("/nowhere", "/nowhere", stand_in=True)
    assert (text.name, text.vocab_size) == ("wikipedia", 30_522)
    assert "replaces dataset=wikipedia" in text.caveat
