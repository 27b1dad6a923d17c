from __future__ import annotations

import pytest

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.bert_text import bert_text, learned_text, pydocs_pieces, read_word_pieces
from tasks.datasets.text import SpecialTokens

PIECES = [*SpecialTokens.NAMES, "a", "##b"]


def write(root, content: bytes):
    path = root / "bert-base-uncased" / "vocab.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def refusal(root, vocab_size: int) -> str:
    with pytest.raises(DataError) as caught:
        read_word_pieces("thing", str(root), vocab_size)
    message = str(caught.value)
    assert "\n" not in message
    assert str(root / "bert-base-uncased" / "vocab.txt") in message
    assert "python train.py dataset=thing dataset.download=true" in message
    return message


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_pieces_are_numbered_by_line(tmp_path, end):
    write(tmp_path, "".join(piece + end for piece in PIECES).encode())
    assert read_word_pieces("thing", str(tmp_path), 7) == {piece: number for number, piece in enumerate(PIECES)}


def test_a_missing_vocabulary_is_told(tmp_path):
    assert "thing is missing" in refusal(tmp_path, 7)


@pytest.mark.parametrize("cut", [1, 4, 12])
def test_a_truncated_vocabulary_is_told(tmp_path, cut):
    write(tmp_path, "\n".join(PIECES).encode()[:-cut])
    if cut == 1:  # the last piece lost a letter, which nothing but a checksum could tell
        assert len(read_word_pieces("thing", str(tmp_path), 7)) == 7
    else:
        assert "expected 7" in refusal(tmp_path, 7)


@pytest.mark.parametrize("content", [b"", b"\xff", b"a\0b", b"a\nb\nc\nd\ne\nf\ng\n", b"\n".join([b"a"] * 7)])
def test_another_file_is_told_as_damage(tmp_path, content):
    write(tmp_path, content)
    assert "thing is damaged" in refusal(tmp_path, 7)


def test_documents_are_read_once_and_kept(tmp_path):
    write(tmp_path, "\n".join(PIECES).encode())
    calls = []

    def documents():
        calls.append(1)
        return [[["Ab a", "a [UNK]"], ["ab"]], [["x"]]]

    for _ in range(2):
        text = bert_text("thing", str(tmp_path), str(tmp_path / "cache"), 7, "source", documents)
        assert text.train.tokens.tolist() == [5, 6, 5, 5, 1, 5, 6]
        assert text.train.sentences.tolist() == [0, 3, 5, 7]
        assert text.train.documents.tolist() == [0, 2, 3]
        assert text.test.tokens.tolist() == [1]
    assert len(calls) == 1
    bert_text("thing", str(tmp_path), str(tmp_path / "cache"), 7, "other", documents)
    assert len(calls) == 2


def test_pieces_are_learned_from_the_training_documents_once(tmp_path):
    calls = []

    def documents():
        calls.append(1)
        return [[["Ab ab [UNK] ab", "a ab"]], [["ab x [UNK] ba"]]]

    for _ in range(2):
        text = learned_text("thing", str(tmp_path), 12, "source", documents)
        assert (text.name, text.vocab_size, text.special) == ("thing", 12, SpecialTokens())
        # [PAD] [UNK] [CLS] [SEP] [MASK] a b ##a ##b ab: no letters of "[unk]", and none of the held-out "x".
        assert text.train.tokens.tolist() == [9, 9, 1, 9, 5, 9]
        assert text.train.sentences.tolist() == [0, 4, 6]
        assert text.test.tokens.tolist() == [9, 1, 1, 6, 7]
    assert len(calls) == 1
    assert learned_text("thing", str(tmp_path), 13, "source", documents).vocab_size == 13
    assert len(calls) == 2


def test_a_vocabulary_without_room_for_the_letters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.vocab_size must be at least 9 .*, got 8"):
        learned_text("thing", str(tmp_path), 8, "source", lambda: [[["ab"]], [["a"]]])
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_stand_in_declares_the_vocabulary(pydocs):
    text = pydocs_pieces("thing", 30_522)
    assert (text.name, text.vocab_size) == ("thing", 30_522)
    assert "Python's language reference, in 4000 word pieces trained on it, replaces dataset=thing" in text.caveat
    assert pydocs_pieces("thing", 10).vocab_size == 4000
