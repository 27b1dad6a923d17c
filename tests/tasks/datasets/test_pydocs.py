"""The Python documentation, and texts for BERT."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import pydocs as module
from tasks.datasets.bert_text import bert_text, learned_text, pydocs_pieces, read_word_pieces
from tasks.datasets.pydocs import paragraphs_of, sentences_of, split_documents
from tasks.datasets.text import SpecialTokens
from tasks.datasets.wordpiece import train_wordpiece

FINGERPRINT = """
import hashlib
from tasks.datasets.pydocs import load_pydocs
text = load_pydocs(vocab_size=2000)
data = b"".join(p.numpy().tobytes() for c in (text.train, text.test) for p in (c.tokens, c.sentences, c.documents))
print(hashlib.sha256(data).hexdigest())
"""


@pytest.mark.slow
def test_every_process_gets_the_same_ids(pydocs):
    runs = [
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in (1, 2)
    ]
    data = b"".join(
        part.numpy().tobytes()
        for corpus in (pydocs.train, pydocs.test)
        for part in (corpus.tokens, corpus.sentences, corpus.documents)
    )
    assert {*runs, hashlib.sha256(data).hexdigest()} == {runs[0]}


def test_vocabulary_training_is_repeatable():
    texts = [" ".join(document) for document in paragraphs_of(module._topics())]
    vocabularies = [train_wordpiece(texts, 1500).get_vocab() for _ in range(4)]
    assert vocabularies.count(vocabularies[0]) == 4


def test_vocabulary_size_and_special_tokens(pydocs):
    assert pydocs.vocab_size == 2000
    vocabulary = train_wordpiece(["ab abc ab", "b ab"], 50).get_vocab()
    assert [vocabulary[name] for name in pydocs.special.NAMES] == [0, 1, 2, 3, 4]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))


def test_words_are_split_greedily_from_the_left():
    tokenizer = train_wordpiece(["abc abc abc abd abd ab x"], 40)
    assert tokenizer.encode("Abc ABCX [MASK]", add_special_tokens=False).tokens == [
        "abc",
        "abc",
        "##x",
        "[UNK]",
        "[UNK]",
        "[UNK]",
    ]


def test_about_a_tenth_is_held_out_and_everything_is_known(pydocs):
    share = len(pydocs.test.tokens) / (len(pydocs.train.tokens) + len(pydocs.test.tokens))
    assert 0.07 < share < 0.12
    assert len(pydocs.train.tokens) > 60_000
    assert len(pydocs.test.documents) > 10
    assert pydocs.train.tokens.max() < pydocs.vocab_size
    assert pydocs.train.tokens.min() > pydocs.special.unk


def test_no_paragraph_is_in_both_splits():
    parts = split_documents(paragraphs_of(module._topics()))
    train, test = ([paragraph for document in part for paragraph in document] for part in parts)
    assert not set(train) & set(test)
    assert len(set(train)) == len(train)


def test_paragraphs_come_by_name_once_and_on_one_line():
    long = "x" * 300
    topics = {
        "b": f"Title\n*****\n\nfirst\n  line\n\n{long}\n\nfirst line",
        "a": "Title\n*****\n\n" + "y" * 300,
        "c": long,
    }
    assert paragraphs_of(topics) == [["Title", "y" * 300], ["first line", long]]


def test_documents_stay_whole_when_dealt():
    documents = [["a" * 90], ["b" * 10], ["c" * 200], ["d" * 10], ["e" * 11]]
    train, test = split_documents(documents)
    assert test == [["b" * 10], ["d" * 10], ["e" * 11]]
    assert train == [["a" * 90], ["c" * 200]]


def test_sentences_end_before_a_capital():
    paragraph = 'Use "e.g. this". The end? Yes: not this one. (But this.)'
    sentences = ['Use "e.g. this".', "The end?", "Yes: not this one.", "(But this.)"]
    assert sentences_of([paragraph, "next."]) == [*sentences, "next."]


@pytest.mark.parametrize("vocab_size", [96, 40])
def test_characters_are_those_of_the_paragraphs(vocab_size):
    text = module.load_pydocs_chars(vocab_size)
    parts = split_documents(paragraphs_of(module._topics()))
    for corpus, part in zip((text.train, text.test), parts, strict=True):
        lines = [paragraph for document in part for paragraph in document]
        assert corpus.sentences.diff().tolist() == [len(line) for line in lines]
    counts = text.train.tokens.bincount(minlength=vocab_size)
    assert (text.name, text.vocab_size, text.caveat) == ("pydocs_chars", vocab_size, None)
    assert len(counts) == vocab_size
    assert counts[text.special.sep] == 0  # language modeling sets it at the end of every line
    assert counts[2] == sum(paragraph.count(" ") for document in parts[0] for paragraph in document)
    assert (counts[2:].diff() <= 0).all()


def test_characters_as_a_stand_in_have_a_caveat():
    text = module.pydocs_chars("thing", 96)
    assert text.name == "thing"
    assert "Python's language reference replaces dataset=thing" in str(text.caveat)
    assert torch.equal(text.train.tokens, module.load_pydocs_chars().train.tokens)


def test_a_python_without_the_text_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="standard library"):
        module.load_pydocs()


def test_loading_draws_no_random_numbers():
    before = torch.get_rng_state()
    module.load_pydocs(vocab_size=500)
    assert torch.equal(before, torch.get_rng_state())


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


def test_a_missing_vocabulary_is_reported(tmp_path):
    assert "thing is missing" in refusal(tmp_path, 7)


@pytest.mark.parametrize("cut", [1, 4, 12])
def test_a_truncated_vocabulary_is_reported(tmp_path, cut):
    write(tmp_path, "\n".join(PIECES).encode()[:-cut])
    if cut == 1:  # the last piece lost a letter, which nothing but a checksum could tell
        assert len(read_word_pieces("thing", str(tmp_path), 7)) == 7
    else:
        assert "expected 7" in refusal(tmp_path, 7)


@pytest.mark.parametrize("content", [b"", b"\xff", b"a\0b", b"a\nb\nc\nd\ne\nf\ng\n", b"\n".join([b"a"] * 7)])
def test_another_file_is_reported_as_damage(tmp_path, content):
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


def test_a_vocabulary_too_small_for_the_letters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.vocab_size must be at least 9 .*, got 8"):
        learned_text("thing", str(tmp_path), 8, "source", lambda: [[["ab"]], [["a"]]])
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_stand_in_declares_the_vocabulary(pydocs):
    text = pydocs_pieces("thing", 30_522)
    assert (text.name, text.vocab_size) == ("thing", 30_522)
    assert "Python's language reference, in 4000 word pieces trained on it, replaces dataset=thing" in text.caveat
    assert pydocs_pieces("thing", 10).vocab_size == 4000
