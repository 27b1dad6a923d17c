from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.words import characters_of, check_held_out, number_words, read_lines, word_dataset, words_of

TRAIN = [["b", "a"], [], ["a", "c", "a", "<unk>"]]


def test_words_are_numbered_by_frequency_then_by_appearance():
    assert number_words(TRAIN, ("<eos>", "<unk>")) == {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 4}
    assert number_words(TRAIN, ("<eos>", "<unk>"), size=4) == {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}


@given(st.lists(st.lists(st.sampled_from("abcdef"))), st.integers(1, 8))
def test_a_limited_vocabulary_is_the_beginning_of_the_whole_one(texts, size):
    whole = number_words(texts, ("<unk>",))
    limited = number_words(texts, ("<unk>",), size)
    assert list(limited.items()) == list(whole.items())[:size]


def test_lines_are_documents_and_blank_ones_too():
    text = word_dataset("thing", TRAIN, [["a", "new"], []])
    assert (text.name, text.vocab_size, text.caveat) == ("thing", 5, None)
    assert text.train.tokens.tolist() == [3, 2, 2, 4, 2, 1]
    assert text.train.sentences.tolist() == [0, 2, 2, 6]
    assert text.train.documents.tolist() == [0, 1, 2, 3]
    assert text.test.tokens.tolist() == [2, 1]
    assert text.test.sentences.tolist() == [0, 2, 2]
    assert (text.special.sep, text.special.unk) == (0, 1)


def test_a_declared_vocabulary_may_be_larger_or_smaller():
    assert word_dataset("thing", TRAIN, [], vocab_size=9).vocab_size == 9
    smaller = word_dataset("thing", TRAIN, [], vocab_size=3)
    assert smaller.vocab_size == 3
    assert smaller.train.tokens.tolist() == [1, 2, 2, 1, 2, 1]


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("a b\u2028c\n\n d\n".encode())
    assert read_lines("thing", path, "") == [["a", "b", "c"], [], ["d"]]
    path.write_bytes(b"a\nb")
    assert read_lines("thing", path, "") == [["a"], ["b"]]


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match="thing is damaged"):
        read_lines("thing", tmp_path / "a.txt", "hint")


def test_words_of_running_text():
    assert words_of("Don't -- it's 'Good', 10/10!") == ["don't", "it's", "good", "10", "10"]


def test_characters_keep_unknown_mark_whole():
    assert characters_of("A <b> <unk>.") == ["A", " ", "<", "b", ">", " ", "<unk>", "."]
    assert characters_of("") == []


def test_an_unknown_part_is_refused():
    check_held_out("valid")
    with pytest.raises(ConfigError, match="held_out must be one of test, valid, got train"):
        check_held_out("train")
