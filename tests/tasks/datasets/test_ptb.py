from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets import ptb as module
from tasks.datasets.download import Remote
from tasks.datasets.ptb import ptb
from tasks.language_modeling import LanguageModeling

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
def test_missing_or_damaged_files_are_told_in_one_line(small, part, content):
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
