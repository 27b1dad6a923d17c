from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from tasks.datasets.labelled_text import LabelledTexts, number_texts, texts_from

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
