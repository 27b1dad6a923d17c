from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import docstrings as module
from tasks.datasets.docstrings import SUBJECTS, docstrings, docstrings_of

SOURCE = '''"""Module   text."""
import nothing_that_exists

class A:
    """Class
    text."""

    async def f(self):
        "Method text."
        return "no docstring"

def bare():
    return 1
'''


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return docstrings(str(tmp_path_factory.mktemp("cache")))


def test_docstrings_are_found_without_importing():
    found = [" ".join(text.split()) for text in docstrings_of(SOURCE)]
    assert sorted(found) == ["Class text.", "Method text.", "Module text."]


@pytest.mark.parametrize("source", ["def (", "a\0b"])
def test_what_is_no_python_has_none(source):
    assert list(docstrings_of(source)) == []


def test_every_subject_has_enough_texts_in_both_splits(texts):
    assert (texts.name, texts.num_classes, texts.vocab_size) == ("docstrings", 6, 5_001)
    for split, fewest in ((texts.train, 200), (texts.test, 50)):
        counts = split.labels.bincount(minlength=6)
        assert counts.min() >= fewest
        assert counts.max() < 0.4 * counts.sum()
        assert split.tokens.max() < 5_001
    assert 0.1 < len(texts.test) / (len(texts.train) + len(texts.test)) < 0.3
    assert (texts.test.tokens == 0).double().mean() < 0.1


def test_no_text_occurs_twice_and_short_ones_never(tmp_path):
    texts = [f"Text number {word} of many others." for word in "abcdefghijklmnopqrstuvwxyz"]
    for number, (first, then) in enumerate(((0, 20), (10, 26))):
        definitions = [f'def f():\n    """{text}"""\n' for text in texts[first:then]]
        spaced = [definition.replace(" of ", "\n      OF --  ") for definition in definitions[:5]]
        source = "".join([*definitions, *spaced, 'def f():\n    "Too short."\n'])
        (tmp_path / f"{number}.py").write_text(source)
    tensors = module._tokenize([[tmp_path / "0.py"], [tmp_path / "1.py"]], 1000)
    labels = torch.cat([tensors["train.labels"], tensors["test.labels"]])
    assert labels.bincount().tolist() == [20, 6]
    assert 0 < len(tensors["test.labels"]) < 13
    assert tensors["train.offsets"].diff().tolist() == [6] * len(tensors["train.labels"])


def test_fewer_classes_are_the_first_ones_and_the_same_each_time(texts, tmp_path):
    before = torch.get_rng_state()
    two = docstrings(str(tmp_path), classes=2)
    assert torch.equal(before, torch.get_rng_state())
    assert two.num_classes == 2
    assert two.test.labels.tolist() == texts.test.labels[texts.test.labels < 2].tolist()
    assert torch.equal(two.train.offsets, texts.train.offsets[: len(two.train) + 1])


@pytest.mark.parametrize("classes", [1, len(SUBJECTS) + 1])
def test_a_number_of_classes_that_cannot_be_is_refused(classes):
    with pytest.raises(ConfigError, match=f"classes must be from 2 to .*, got {classes}"):
        docstrings("/nowhere", classes=classes)


def test_a_python_without_sources_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError) as caught:
        docstrings(str(tmp_path))
    assert "dataset=docstrings needs the source files" in str(caught.value)
    assert "\n" not in str(caught.value)
