from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import bert_text, wikitext
from tasks.datasets.download import Remote
from tasks.datasets.wikitext import articles_of, wikitext2, wikitext2_articles, wikitext2_chars, wikitext2_pieces
from tasks.sentence_pairs import SentencePairs

PIECES = ["[PAD]", "un", "[UNK]", "[CLS]", "##s", "[SEP]", "[MASK]", "=", "a", "b", "c", ".", "-", "1", ",", "<"]
TRAIN = """ \n = First = \n \n a <unk> b . A 1 @,@ 1 \n \n = = Part = = \n \n b @-@ c uns \n \n = Second = \n \n c \n"""
HELD_OUT = " = Third = \n \n c . B \n"


@pytest.fixture
def small(tmp_path) -> Path:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "bert-base-uncased").mkdir()
    for part, text in (("train", TRAIN), ("valid", " = Fourth = \n \n b \n"), ("test", HELD_OUT)):
        (tmp_path / "wikitext-2" / f"{part}.txt").write_text(text)
    (tmp_path / "bert-base-uncased" / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return tmp_path


@pytest.fixture
def load(small, tmp_path):
    def load(**options):
        return wikitext2_articles(
            **{"root": str(small), "cache": str(tmp_path / "cache"), "vocab_size": len(PIECES), **options}
        )

    return load


def words(corpus) -> list[list[str]]:
    return [[PIECES[token] for token in corpus.tokens[begin:end]] for begin, end in corpus.sentences.unfold(0, 2, 1)]


def test_articles_begin_at_titles_between_blank_lines():
    lines = [
        *("lost", "", " = One = ", " ", " x . ", " = a formula = ", "", " = another = ", " y ", ""),
        *(" = Empty = ", "", " = = Part = = ", "", " = Two = ", "", " z "),
    ]
    assert articles_of(lines) == [["x .", "= a formula =", "= another =", "y"], ["z"]]


def test_the_marks_of_the_tokenizer_are_undone():
    text = " a @-@ b 1 @.@ 5 <unk> @,@ x @ y "
    assert articles_of(["= T =", "", text]) == [["a-b 1.5 [UNK],x @ y"]]


def test_articles_in_word_pieces(load):
    text = load()
    assert (text.name, text.vocab_size, text.caveat) == ("wikitext2_articles", len(PIECES), None)
    assert words(text.train) == [
        ["a", "[UNK]", "b", "."],
        ["a", "1", ",", "1"],
        ["b", "-", "c", "un", "##s"],
        ["c"],
    ]
    assert text.train.documents.tolist() == [0, 3, 4]
    assert words(text.test) == [["c", "."], ["b"]]
    special = text.special
    assert [special.pad, special.unk, special.cls, special.sep, special.mask] == [0, 2, 3, 5, 6]
    assert text.train.tokens.dtype == torch.int64


def test_tokens_come_from_the_cache_until_a_file_changes(load, small, monkeypatch):
    before = load().train.tokens
    with monkeypatch.context() as broken:
        broken.setattr(bert_text, "encode", None)
        assert torch.equal(load().train.tokens, before)
    (small / "wikitext-2" / "train.txt").write_text(TRAIN.replace("uns", "a"))
    assert len(load().train.tokens) == len(before) - 1


def test_the_validation_part_may_be_held_out(load, small):
    assert words(load(held_out="valid").test) == [["b"]]
    assert wikitext2(str(small), held_out="valid").test.documents.tolist() == [0, 1, 2, 3]
    assert wikitext2_chars(str(small), held_out="valid").test.documents.tolist() == [0, 1, 2, 3]
    loaders = (load, partial(wikitext2, str(small)), partial(wikitext2_chars, str(small)))
    for refused in (*loaders, partial(wikitext2_pieces, str(small), str(small / "cache"))):
        with pytest.raises(ConfigError, match=r"held_out must be .* got train"):
            refused(held_out="train")


def test_words_with_an_end_for_every_line(small):
    text = wikitext2(str(small))
    assert (text.name, text.caveat) == ("wikitext2", None)
    assert text.vocab_size == len({*TRAIN.split(), "<eos>"})
    assert len(text.train.documents) - 1 == 12
    assert len(text.train.tokens) == len(TRAIN.split())


def test_characters_with_an_end_for_every_line(small):
    text = wikitext2_chars(str(small), vocab_size=30)
    assert (text.name, text.vocab_size, text.caveat) == ("wikitext2_chars", 30, None)
    lines = [" ".join(line.split()) for line in TRAIN.removesuffix("\n").split("\n")]
    assert text.train.sentences.diff().tolist() == [len(line.replace("<unk>", "?")) for line in lines]
    assert text.train.tokens.tolist().count(text.special.unk) == 1
    assert text.train.tokens.max() < 30
    # Only spaces are known.
    rare = wikitext2_chars(str(small), vocab_size=3)
    assert rare.train.tokens.tolist().count(2) == "".join(lines).count(" ")
    assert set(rare.train.tokens.tolist()) == {1, 2}


def test_articles_in_pieces_of_their_own(load, small, tmp_path):
    text = wikitext2_pieces(str(small), str(tmp_path / "cache"), vocab_size=60)
    assert (text.name, text.vocab_size, text.caveat) == ("wikitext2_pieces", 60, None)
    articles = load()
    assert torch.equal(text.train.documents, articles.train.documents)
    assert text.train.tokens.tolist().count(text.special.unk) == 1
    assert text.test.tokens.max() < 60


@pytest.mark.parametrize("name", ["wikitext2", "wikitext2_articles", "wikitext2_chars", "wikitext2_pieces"])
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("content", [None, b"", b"\xfe\xff", b"a\0b"])
def test_missing_or_damaged_files_are_told_in_one_line(load, small, name, part, content):
    path = small / "wikitext-2" / f"{part}.txt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        {
            "wikitext2": lambda: wikitext2(str(small)),
            "wikitext2_articles": load,
            "wikitext2_chars": lambda: wikitext2_chars(str(small)),
            "wikitext2_pieces": lambda: wikitext2_pieces(str(small), str(small / "cache")),
        }[name]()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert f"{name} is missing" in message if content is None else f"{name} is damaged" in message
    assert f"python train.py dataset={name} dataset.download=true" in message


def test_nothing_is_cached_of_a_damaged_file(load, small, tmp_path):
    (small / "wikitext-2" / "test.txt").write_bytes(b"\xff")
    with pytest.raises(DataError):
        load()
    assert not list((tmp_path / "cache").glob("*.safetensors"))


def test_what_is_missing_is_fetched(small, tmp_path, monkeypatch):
    def local(name: str) -> Remote:
        path = small / name
        return Remote(path.as_uri(), f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}", name)

    monkeypatch.setattr(wikitext, "FILES", [local(f"wikitext-2/{part}.txt") for part in ("train", "valid", "test")])
    monkeypatch.setattr(bert_text, "VOCABULARY", local("bert-base-uncased/vocab.txt"))
    target = str(tmp_path / "elsewhere")
    text = wikitext2_articles(target, str(tmp_path / "cache"), download=True, vocab_size=len(PIECES))
    assert len(text.train.documents) == 3
    pieces = wikitext2_pieces(str(tmp_path / "fourth"), str(tmp_path / "cache"), download=True)
    assert torch.equal(pieces.train.documents, text.train.documents)
    assert wikitext2_chars(str(tmp_path / "fifth"), download=True).vocab_size == 96
    assert wikitext2(str(tmp_path / "third"), download=True).vocab_size == wikitext2(target).vocab_size


@pytest.mark.parametrize(
    ("make", "vocab_size"),
    [
        (lambda: wikitext2("/nowhere", stand_in=True), 33_278),
        (lambda: wikitext2_articles("/nowhere", "/nowhere", stand_in=True), 30_522),
        (lambda: wikitext2_chars("/nowhere", stand_in=True), 96),
        (lambda: wikitext2_pieces("/nowhere", "/nowhere", stand_in=True), 4000),
    ],
)
def test_the_stand_ins_read_nothing_and_have_the_same_vocabulary(make, vocab_size):
    text = make()
    assert text.vocab_size == vocab_size
    assert f"replaces dataset={text.name}" in text.caveat
    assert text.train.tokens.max() < vocab_size


@pytest.fixture
def root() -> str:
    found = os.environ.get("SPARDL_DATA")
    if found is None:
        pytest.skip("set SPARDL_DATA to a folder that holds wikitext-2 and bert-base-uncased")
    return found


@pytest.mark.data
def test_the_real_words(root):
    for held_out, tokens in (("test", 245_569), ("valid", 217_646)):
        text = wikitext2(root, held_out=held_out)
        assert text.vocab_size == 33_278
        assert len(text.train.tokens) + len(text.train.documents) - 1 == 2_088_628
        assert len(text.test.tokens) + len(text.test.documents) - 1 == tokens
    for remote in (*wikitext.FILES, bert_text.VOCABULARY):
        content = (Path(root) / remote.path).read_bytes()
        assert remote.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.data
def test_the_real_characters(root):
    text = wikitext2_chars(root)
    assert len(text.train.tokens) + len(text.train.documents) - 1 == 10_501_452
    assert len(text.test.tokens) + len(text.test.documents) - 1 == 1_186_897
    assert text.train.tokens.bincount()[2:].min() > 90


@pytest.mark.data
def test_the_real_articles_in_pieces_of_their_own(root, tmp_path):
    text = wikitext2_pieces(root, str(tmp_path))
    assert (len(text.train.documents) - 1, len(text.test.documents) - 1) == (600, 60)
    assert (len(text.train.tokens), len(text.test.tokens), text.vocab_size) == (2_733_269, 306_649, 4000)
    with pytest.raises(ConfigError, match="vocab_size must be at least 363"):
        wikitext2_pieces(root, str(tmp_path), vocab_size=300)


@pytest.mark.data
def test_the_real_articles(root, tmp_path):
    text = wikitext2_articles(root, str(tmp_path))
    assert (len(text.train.documents) - 1, len(text.test.documents) - 1) == (600, 60)
    assert text.vocab_size == 30_522
    assert [text.special.pad, text.special.unk, text.special.cls, text.special.sep, text.special.mask] == [
        0,
        100,
        101,
        102,
        103,
    ]
    assert (text.train.tokens == text.special.unk).double().mean() < 0.03
    pairs = SentencePairs(text.train, text.vocab_size, text.special, seq_len=128)
    batch = pairs.batch(torch.arange(64), None)
    assert batch["input_ids"].max() < 30_522
    assert (batch["input_ids"][:, 0] == 101).all()
