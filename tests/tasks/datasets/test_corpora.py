"""Corpora for language models."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import bert_text, wikitext
from tasks.datasets import ptb as module
from tasks.datasets.download import Remote
from tasks.datasets.plain_text import fetch_hint, put_hint, read_text, require_paths
from tasks.datasets.ptb import ptb
from tasks.datasets.text import SpecialTokens
from tasks.datasets.wikipedia import documents_of, wikipedia
from tasks.datasets.wikitext import articles_of, wikitext2, wikitext2_articles, wikitext2_chars, wikitext2_pieces
from tasks.language_modeling import LanguageModeling
from tasks.sentence_pairs import SentencePairs

PARTS = {
    "train": " a b <unk> \n b c N b \n",
    "valid": " c c \n",
    "test": " b other \n a \n",
}


@pytest.fixture
def small(tmp_path) -> Path:
    (tmp_path / "ptb").mkdir()
    for part, text in PARTS.items():
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text(text)
    return tmp_path


def test_reads_lines_and_closes_them(small):
    text = ptb(str(small))
    assert (text.name, text.vocab_size, text.caveat) == ("ptb", 6, None)
    task = LanguageModeling(None, text, seq_len=3)
    tokens = task.train.batch(torch.tensor([0, 1, 2]), None)["tokens"]
    # <eos>=0, <unk>=1, then b (3 times), a, c, N
    assert tokens.tolist() == [[3, 2, 1, 0], [0, 2, 4, 5], [5, 2, 0, -100]]
    assert task.test.batch(torch.tensor([0]), None)["tokens"].tolist() == [[2, 1, 0, 3]]


def test_the_validation_part_may_be_held_out(small):
    assert ptb(str(small), held_out="valid").test.tokens.tolist() == [4, 4]
    with pytest.raises(ConfigError, match=r"held_out must be .* got train"):
        ptb(str(small), held_out="train")


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("content", [None, b"", b"\xfe\xff", b"a\0b"])
def test_missing_or_damaged_files_are_reported_in_one_line(small, part, content):
    path = small / "ptb" / f"ptb.{part}.txt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        ptb(str(small))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "ptb is missing" in message if content is None else "ptb is damaged" in message
    assert "python train.py dataset=ptb dataset.download=true" in message
    assert "SPARDL_DATA" in message


def test_what_is_missing_is_fetched(small, tmp_path, monkeypatch):
    remotes = []
    for part in PARTS:
        path = small / "ptb" / f"ptb.{part}.txt"
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        remotes.append(Remote(path.as_uri(), f"sha256:{checksum}", f"ptb/ptb.{part}.txt"))
    monkeypatch.setattr(module, "FILES", remotes)
    fetched = ptb(str(tmp_path / "elsewhere"), download=True)
    assert torch.equal(fetched.train.tokens, ptb(str(small)).train.tokens)


def test_the_stand_in_reads_nothing_and_has_the_same_vocabulary():
    text = ptb("/nowhere", stand_in=True)
    assert (text.name, text.vocab_size) == ("ptb", 10_000)
    assert "Python's language reference replaces dataset=ptb" in text.caveat
    assert text.train.tokens.max() < 10_000
    assert len(text.train.tokens) > 50_000
    assert len(text.test.tokens) > 3_000
    assert (text.test.tokens == text.special.unk).float().mean() < 0.1


@pytest.mark.data
def test_the_real_penn_treebank():
    root = os.environ.get("SPARDL_DATA")
    if root is None:
        pytest.skip("set SPARDL_DATA to a folder that holds ptb")
    for held_out, tokens in (("test", 82_430), ("valid", 73_760)):
        text = ptb(root, held_out=held_out)
        assert text.vocab_size == 10_000
        assert len(text.train.tokens) + len(text.train.documents) - 1 == 929_589
        assert len(text.test.tokens) + len(text.test.documents) - 1 == tokens
    for remote in module.FILES:
        content = (Path(root) / remote.path).read_bytes()
        assert remote.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"


PIECES = ["[PAD]", "un", "[UNK]", "[CLS]", "##s", "[SEP]", "[MASK]", "=", "a", "b", "c", ".", "-", "1", ",", "<"]
TRAIN = """ \n = First = \n \n a <unk> b . A 1 @,@ 1 \n \n = = Part = = \n \n b @-@ c uns \n \n = Second = \n \n c \n"""
HELD_OUT = " = Third = \n \n c . B \n"


@pytest.fixture
def small_of_wikitext(tmp_path) -> Path:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "bert-base-uncased").mkdir()
    for part, text in (("train", TRAIN), ("valid", " = Fourth = \n \n b \n"), ("test", HELD_OUT)):
        (tmp_path / "wikitext-2" / f"{part}.txt").write_text(text)
    (tmp_path / "bert-base-uncased" / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return tmp_path


@pytest.fixture
def load(small_of_wikitext, tmp_path):
    def load(**options):
        return wikitext2_articles(
            **{"root": str(small_of_wikitext), "cache": str(tmp_path / "cache"), "vocab_size": len(PIECES), **options}
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


def test_tokens_come_from_the_cache_until_a_file_changes(load, small_of_wikitext, monkeypatch):
    before = load().train.tokens
    with monkeypatch.context() as broken:
        broken.setattr(bert_text, "encode", None)
        assert torch.equal(load().train.tokens, before)
    (small_of_wikitext / "wikitext-2" / "train.txt").write_text(TRAIN.replace("uns", "a"))
    assert len(load().train.tokens) == len(before) - 1


def test_wikitext_the_validation_part_may_be_held_out(load, small_of_wikitext):
    assert words(load(held_out="valid").test) == [["b"]]
    assert wikitext2(str(small_of_wikitext), held_out="valid").test.documents.tolist() == [0, 1, 2, 3]
    assert wikitext2_chars(str(small_of_wikitext), held_out="valid").test.documents.tolist() == [0, 1, 2, 3]
    loaders = (load, partial(wikitext2, str(small_of_wikitext)), partial(wikitext2_chars, str(small_of_wikitext)))
    for refused in (*loaders, partial(wikitext2_pieces, str(small_of_wikitext), str(small_of_wikitext / "cache"))):
        with pytest.raises(ConfigError, match=r"held_out must be .* got train"):
            refused(held_out="train")


def test_words_with_an_end_for_every_line(small_of_wikitext):
    text = wikitext2(str(small_of_wikitext))
    assert (text.name, text.caveat) == ("wikitext2", None)
    assert text.vocab_size == len({*TRAIN.split(), "<eos>"})
    assert len(text.train.documents) - 1 == 12
    assert len(text.train.tokens) == len(TRAIN.split())


def test_characters_with_an_end_for_every_line(small_of_wikitext):
    text = wikitext2_chars(str(small_of_wikitext), vocab_size=30)
    assert (text.name, text.vocab_size, text.caveat) == ("wikitext2_chars", 30, None)
    lines = [" ".join(line.split()) for line in TRAIN.removesuffix("\n").split("\n")]
    assert text.train.sentences.diff().tolist() == [len(line.replace("<unk>", "?")) for line in lines]
    assert text.train.tokens.tolist().count(text.special.unk) == 1
    assert text.train.tokens.max() < 30
    # Only spaces are known.
    rare = wikitext2_chars(str(small_of_wikitext), vocab_size=3)
    assert rare.train.tokens.tolist().count(2) == "".join(lines).count(" ")
    assert set(rare.train.tokens.tolist()) == {1, 2}


def test_articles_in_pieces_of_their_own(load, small_of_wikitext, tmp_path):
    text = wikitext2_pieces(str(small_of_wikitext), str(tmp_path / "cache"), vocab_size=60)
    assert (text.name, text.vocab_size, text.caveat) == ("wikitext2_pieces", 60, None)
    articles = load()
    assert torch.equal(text.train.documents, articles.train.documents)
    assert text.train.tokens.tolist().count(text.special.unk) == 1
    assert text.test.tokens.max() < 60


@pytest.mark.parametrize("name", ["wikitext2", "wikitext2_articles", "wikitext2_chars", "wikitext2_pieces"])
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("content", [None, b"", b"\xfe\xff", b"a\0b"])
def test_wikitext_missing_or_damaged_files_are_reported_in_one_line(load, small_of_wikitext, name, part, content):
    path = small_of_wikitext / "wikitext-2" / f"{part}.txt"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        {
            "wikitext2": lambda: wikitext2(str(small_of_wikitext)),
            "wikitext2_articles": load,
            "wikitext2_chars": lambda: wikitext2_chars(str(small_of_wikitext)),
            "wikitext2_pieces": lambda: wikitext2_pieces(str(small_of_wikitext), str(small_of_wikitext / "cache")),
        }[name]()
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert f"{name} is missing" in message if content is None else f"{name} is damaged" in message
    assert f"python train.py dataset={name} dataset.download=true" in message


def test_nothing_is_cached_of_a_damaged_file(load, small_of_wikitext, tmp_path):
    (small_of_wikitext / "wikitext-2" / "test.txt").write_bytes(b"\xff")
    with pytest.raises(DataError):
        load()
    assert not list((tmp_path / "cache").glob("*.safetensors"))


def test_wikitext_what_is_missing_is_fetched(small_of_wikitext, tmp_path, monkeypatch):
    def local(name: str) -> Remote:
        path = small_of_wikitext / name
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


WIKIPEDIA_PIECES = [*SpecialTokens.NAMES, *"abcd."]


@pytest.fixture
def small_of_wikipedia(tmp_path) -> Path:
    """Twenty short articles in two files of different folders, one letter each."""
    (tmp_path / "bert-base-uncased").mkdir()
    (tmp_path / "bert-base-uncased" / "vocab.txt").write_text("\n".join(WIKIPEDIA_PIECES))
    for folder, letter in (("AA", "a"), ("AB", "b")):
        (tmp_path / "wikipedia" / folder).mkdir(parents=True)
        article = f"{letter} {letter}. {letter.upper()}\nc\n"
        (tmp_path / "wikipedia" / folder / "text.txt").write_text("\n".join([article] * 10))
    return tmp_path


def load_of_wikipedia(root: Path, **options):
    return wikipedia(str(root), str(root / "cache"), **{"vocab_size": len(WIKIPEDIA_PIECES), **options})


def test_blank_lines_end_documents():
    lines = ["", "a  b ", "c", " \t", "", "d"]
    assert list(documents_of(lines)) == [["a b", "c"], ["d"]]
    assert list(documents_of([])) == []


def test_all_files_are_read_and_a_tenth_held_out(small_of_wikipedia):
    text = load_of_wikipedia(small_of_wikipedia)
    assert (text.name, text.vocab_size, text.caveat) == ("wikipedia", len(WIKIPEDIA_PIECES), None)
    assert (len(text.train.documents) - 1, len(text.test.documents) - 1) == (18, 2)
    a, b, c, stop = (WIKIPEDIA_PIECES.index(piece) for piece in "abc.")
    assert text.train.tokens[:5].tolist() == [a, a, stop, a, c]
    assert text.train.tokens[-5:].tolist() == [b, b, stop, b, c]
    assert text.train.sentences[:4].tolist() == [0, 3, 4, 5]


def test_a_changed_file_is_read_again(small_of_wikipedia):
    load_of_wikipedia(small_of_wikipedia)
    (small_of_wikipedia / "wikipedia" / "AB" / "more.txt").write_text("d\n")
    assert WIKIPEDIA_PIECES.index("d") in load_of_wikipedia(small_of_wikipedia).train.tokens


@pytest.mark.parametrize("download", [False, True])
def test_missing_text_is_reported_in_one_line(tmp_path, download):
    (tmp_path / "wikipedia").mkdir()
    (tmp_path / "wikipedia" / "dump.xml").write_text("no plain text")
    with pytest.raises(DataError) as caught:
        load_of_wikipedia(tmp_path, download=download)
    message = str(caught.value)
    assert "\n" not in message
    assert "wikipedia is missing" in message
    assert "https://dumps.wikimedia.org" in message
    assert str(tmp_path / "wikipedia") in message


@pytest.mark.parametrize("content", [b"", b"\xfe\xff", b"a\0b"])
def test_damaged_text_is_reported_in_one_line_and_not_cached(small_of_wikipedia, content):
    path = small_of_wikipedia / "wikipedia" / "AB" / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_of_wikipedia(small_of_wikipedia)
    assert "\n" not in str(caught.value)
    assert f"wikipedia is damaged: {path}" in str(caught.value)
    assert not list((small_of_wikipedia / "cache").glob("*.safetensors"))


def test_a_missing_vocabulary_is_reported(small_of_wikipedia):
    (small_of_wikipedia / "bert-base-uncased" / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"wikipedia is missing: \S+vocab.txt does not exist"):
        load_of_wikipedia(small_of_wikipedia)


def test_the_stand_in_reads_nothing():
    text = wikipedia("/nowhere", "/nowhere", stand_in=True)
    assert (text.name, text.vocab_size) == ("wikipedia", 30_522)
    assert "replaces dataset=wikipedia" in text.caveat


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


def test_a_missing_file_is_reported(tmp_path):
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
def test_other_content_than_text_is_reported_as_damage(tmp_path, content, fault):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    message = refusal(path)
    assert "thing is damaged" in message
    assert fault in message


def test_a_directory_instead_of_a_file_is_reported(tmp_path):
    assert "thing cannot be read" in refusal(tmp_path)


def test_the_first_missing_path_is_named(tmp_path):
    require_paths("thing", [tmp_path], "")
    with pytest.raises(DataError, match=r"thing is missing: \S+/one does not exist; do this"):
        require_paths("thing", [tmp_path, tmp_path / "one", tmp_path / "two"], "do this")


def test_hints_name_the_command_and_the_folder(tmp_path):
    assert "`python train.py dataset=thing dataset.download=true`" in fetch_hint("thing", "folder")
    assert "SPARDL_DATA" in fetch_hint("thing", "folder")
    assert f"put files into {tmp_path}," in put_hint("files", tmp_path)
