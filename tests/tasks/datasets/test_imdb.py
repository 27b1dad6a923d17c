from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import DataError
from tasks.datasets import imdb as module
from tasks.datasets.download import Remote
from tasks.datasets.imdb import imdb

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
def test_a_missing_folder_is_told(small, folder):
    target = small / "aclImdb" / folder
    target.rename(small / "away")
    assert f"imdb is missing: {target} does not exist" in refusal(small)


def test_missing_reviews_are_told(small):
    (small / "aclImdb" / "test" / "pos" / "1_5.txt").unlink()
    message = refusal(small)
    assert f"imdb is incomplete: {small / 'aclImdb' / 'test' / 'pos'} has 1 of 2 reviews; delete" in message


@pytest.mark.parametrize("content", [b"", b"\xfe\xff", b"a\0b"])
def test_a_damaged_review_is_told(small, content):
    path = small / "aclImdb" / "train" / "neg" / "1_5.txt"
    path.write_bytes(content)
    assert f"imdb is damaged: {path}" in refusal(small)


def test_a_failed_download_is_told(tmp_path, monkeypatch):
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
