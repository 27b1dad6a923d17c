from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from spardl.basics.errors import DataError
from tasks.datasets import pydocs as module
from tasks.datasets.pydocs import paragraphs_of, sentences_of, split_documents
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


def test_a_python_without_the_text_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="standard library"):
        module.load_pydocs()


def test_loading_draws_no_random_numbers():
    before = torch.get_rng_state()
    module.load_pydocs(vocab_size=500)
    assert torch.equal(before, torch.get_rng_state())
