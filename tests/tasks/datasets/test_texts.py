"""Labelled texts and words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import imdb as module
from tasks.datasets.download import Remote
from tasks.datasets.imdb import imdb
from tasks.datasets.labelled_text import LabelledTexts, number_texts, texts_from
from tasks.datasets.words import characters_of, check_held_out, number_words, read_lines, word_dataset, words_of

REVIEWS = {
    "train/neg": ["Bad, bad film.<br /><br />Don't!", "boring"],
    "train/pos": ["good film", "A GOOD one"],
    "test/neg": ["bad actors", "not a film"],
    "test/pos": ["good", "unheard words"],
}


@pytest.fixture
def small(tmp_path) -> Path:
    for folder, texts in REVIEWS.items():
        target = tmp_path / "aclImdb" / folder
        target.mkdir(parents=True)
        for number, text in enumerate(texts):
            (target / f"{number}_5.txt").write_text(text)
    (tmp_path / "aclImdb" / "train" / "unsup").mkdir()
    (tmp_path / "aclImdb" / "train" / "labeledBow.feat").write_text("not a review")
    return tmp_path


def load(root: Path, **options):
    return imdb(str(root), str(root / "cache"), **{"reviews_per_folder": 2, **options})


def refusal(root: Path, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(root, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "python train.py dataset=imdb dataset.download=true" in message
    assert "SPARDL_DATA" in message
    assert not list((root / "cache").glob("*.safetensors"))
    return message


def test_reviews_become_numbered_words(small):
    texts = load(small)
    assert (texts.name, texts.vocab_size, texts.num_classes, texts.caveat) == ("imdb", 50_001, 2, None)
    batch = texts.train.batch(torch.arange(4), None)
    # By frequency, then by first occurrence: bad, film, good, don't, boring, a, one
    assert batch["tokens"].tolist() == [[1, 1, 2, 4], [5, 0, 0, 0], [3, 2, 0, 0], [6, 3, 7, 0]]
    assert batch["labels"].tolist() == [0, 0, 1, 1]
    assert texts.test.batch(torch.arange(4), None)["tokens"].tolist() == [[1, 0, 0], [0, 6, 2], [3, 0, 0], [0, 0, 0]]
    assert texts.test.labels.tolist() == [0, 0, 1, 1]


def test_only_so_many_words_and_so_long(small):
    texts = load(small, max_tokens=3, vocab_size=3)
    assert texts.vocab_size == 3
    assert texts.train.batch(torch.tensor([0, 2]), None)["tokens"].tolist() == [[1, 1, 2], [0, 2, 0]]


def test_tokens_come_from_the_cache_until_a_file_changes(small, monkeypatch):
    load(small)
    with monkeypatch.context() as broken:
        broken.setattr(module, "words_of", None)
        assert len(load(small, max_tokens=1).train) == 4
    (small / "aclImdb" / "train" / "pos" / "0_5.txt").write_text("good good good film")
    assert load(small).train.batch(torch.tensor([2]), None)["tokens"].tolist() == [[1, 1, 1, 3]]


@pytest.mark.parametrize("folder", REVIEWS)
def test_a_missing_folder_is_reported(small, folder):
    target = small / "aclImdb" / folder
    target.rename(small / "away")
    assert f"imdb is missing: {target} does not exist" in refusal(small)


def test_missing_reviews_are_reported(small):
    (small / "aclImdb" / "test" / "pos" / "1_5.txt").unlink()
    message = refusal(small)
    assert f"imdb is incomplete: {small / 'aclImdb' / 'test' / 'pos'} has 1 of 2 reviews; delete" in message


@pytest.mark.parametrize("content", [b"", b"\xfe\xff", b"a\0b"])
def test_a_damaged_review_is_reported(small, content):
    path = small / "aclImdb" / "train" / "neg" / "1_5.txt"
    path.write_bytes(content)
    assert f"imdb is damaged: {path}" in refusal(small)


def test_a_failed_download_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ARCHIVE", Remote((tmp_path / "none.tar.gz").as_uri(), "md5:0", "aclImdb"))
    with pytest.raises(DataError, match="imdb cannot be downloaded"):
        load(tmp_path, download=True)


def test_the_stand_in_has_the_same_shapes_and_reads_no_reviews(tmp_path):
    texts = imdb("/nowhere", str(tmp_path), stand_in=True)
    assert (texts.name, texts.vocab_size, texts.num_classes) == ("imdb", 50_001, 2)
    assert "placeholder data: docstrings of Python's standard library" in texts.caveat
    assert set(texts.train.labels.tolist()) == set(texts.test.labels.tolist()) == {0, 1}
    assert texts.train.tokens.max() < 50_001


@pytest.mark.data
def test_the_real_reviews(tmp_path):
    root = os.environ.get("SPARDL_DATA")
    if root is None:
        pytest.skip("set SPARDL_DATA to a folder that holds aclImdb")
    texts = imdb(root, str(tmp_path))
    for split in (texts.train, texts.test):
        assert split.labels.bincount().tolist() == [12_500, 12_500]
        assert split.offsets.diff().min() >= 4
    assert texts.train.tokens.max() == 50_000
    assert (texts.train.tokens == 0).double().mean() < 0.02
    assert (texts.test.tokens == 0).double().mean() < 0.04


PARTS = {
    "train": [(["b", "a", "a"], 1), ([], 0), (["a", "c"], 2)],
    "test": [(["c", "new", "b"], 0)],
}


def some(max_tokens: int = 10) -> LabelledTexts:
    return texts_from(number_texts(PARTS, 10), "train", max_tokens)


def test_words_are_numbered_by_the_training_part():
    tensors = number_texts(PARTS, 10)
    assert tensors["train.tokens"].tolist() == [2, 1, 1, 0, 1, 3]
    assert tensors["train.offsets"].tolist() == [0, 3, 4, 6]
    assert tensors["train.labels"].tolist() == [1, 0, 2]
    assert tensors["test.tokens"].tolist() == [3, 0, 2]
    assert tensors["train.tokens"].dtype == torch.int32


def test_rare_words_share_the_first_id():
    assert number_texts(PARTS, 3)["train.tokens"].tolist() == [2, 1, 1, 0, 1, 0]


def test_a_batch_is_padded_to_its_longest_text():
    batch = some().batch(torch.tensor([2, 0, 1]), None)
    assert batch["tokens"].tolist() == [[1, 3, 0], [2, 1, 1], [0, 0, 0]]
    assert batch["lengths"].tolist() == [2, 3, 1]
    assert batch["labels"].tolist() == [2, 1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert some().batch(torch.tensor([2]), None)["tokens"].tolist() == [[1, 3]]


def test_long_texts_are_cut():
    batch = some(2).batch(torch.tensor([0, 1]), None)
    assert batch["tokens"].tolist() == [[2, 1], [0, 0]]
    assert batch["lengths"].tolist() == [2, 1]
    with pytest.raises(ConfigError, match="max_tokens must be at least 1, got 0"):
        some(0)


@given(
    st.lists(st.tuples(st.lists(st.sampled_from("abc")), st.integers(0, 3)), min_size=1),
    st.integers(1, 6),
    st.data(),
)
def test_every_text_comes_back_whatever_its_company(texts, max_tokens, data):
    tensors = number_texts({"train": texts}, 10)
    split = texts_from(tensors, "train", max_tokens)
    indices = torch.tensor(data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=5)))
    batch = split.batch(indices, None)
    for row, index in enumerate(indices.tolist()):
        alone = split.batch(torch.tensor([index]), None)
        length = int(batch["lengths"][row])
        assert length == min(max_tokens, max(1, len(texts[index][0])))
        assert batch["tokens"][row, :length].tolist() == alone["tokens"][0].tolist()
        assert not batch["tokens"][row, length:].any()
        assert batch["labels"][row] == texts[index][1]


def test_a_batch_depends_on_its_arguments_alone():
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    for given_generator in (None, generator):
        one, other = (some().batch(torch.tensor([2, 0]), given_generator) for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(before, torch.get_rng_state())


def test_an_empty_batch_has_the_same_form():
    batch = some().batch(torch.empty(0, dtype=torch.int64), None)
    assert [tuple(batch[name].shape) for name in ("tokens", "lengths", "labels")] == [(0, 1), (0,), (0,)]


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
