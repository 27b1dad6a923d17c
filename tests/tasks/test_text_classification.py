from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.datasets.labelled_text import LabelledTextDataset, number_texts, texts_from
from tasks.models.lstm_classifier import LstmClassifier
from tasks.text_classification import TextClassification

TEXTS = {"train": [(["a"] * n, n % 3) for n in range(1, 8)]}


class Fixed(torch.nn.Module):
    """Classifies by the length alone."""

    def __init__(self, table, dtype):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table, dtype=dtype))

    def forward(self, tokens, lengths):
        assert tokens.shape == (len(lengths), lengths.max())
        return self.table[lengths]


@pytest.fixture(scope="module")
def tiny() -> LabelledTextDataset:
    split = texts_from(number_texts(TEXTS, 10), "train", 5)
    return LabelledTextDataset("tiny", split, split, vocab_size=10, num_classes=3)


def made_up(count: int, seed: int) -> list[tuple[list[str], int]]:
    """Texts of random words, of which each class likes some."""
    dice = random.Random(seed)
    return [
        ([dice.choice(("abcdef", "defghi")[label]) for _ in range(dice.randint(1, 20))], label)
        for label in (dice.randrange(2) for _ in range(count))
    ]


@pytest.fixture(scope="module")
def learnable() -> LabelledTextDataset:
    tensors = number_texts({"train": made_up(200, 0), "test": made_up(100, 1)}, 20)
    train, test = (texts_from(tensors, part, 15) for part in ("train", "test"))
    return LabelledTextDataset("made_up", train, test, vocab_size=20, num_classes=2)


def evaluate(task, model, size):
    total = sum(task.measure(model, task.test.batch(i, None)) for i in torch.arange(len(task.test)).split(size))
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_sums_by_hand(tiny, dtype):
    task = TextClassification(None, tiny)
    model = Fixed([[0.0] * 3, [math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(6)], [0.0] * 3], dtype)
    batch = task.test.batch(torch.tensor([0, 1]), None)  # of lengths 1 and 2, labels 1 and 2
    losses = [-math.log(1 / 4), -math.log(6 / 8)]
    assert task.loss(model, batch).item() == pytest.approx(sum(losses) / 2, rel=1e-6)
    sums = task.measure(model, batch)
    assert sums.dtype == torch.float64
    assert not sums.requires_grad
    assert sums.tolist() == pytest.approx([sum(losses), 1.0, 2.0], rel=1e-6)


def test_summary_divides_by_the_count(tiny):
    task = TextClassification(None, tiny)
    figures = task.summarize({"loss": 6.0, "correct": 3.0, "count": 4.0})
    assert figures == {"loss": 1.5, "accuracy": 0.75}
    assert task.metric in figures
    assert task.higher_is_better


def test_the_model_is_built_for_the_data(tiny):
    asked = {}
    TextClassification(lambda **data: asked.update(data), tiny).build_model()
    assert asked == {"vocab_size": 10, "num_classes": 3}


def test_batch_sizes_do_not_change_the_summary(learnable):
    task = TextClassification(partial(LstmClassifier, hidden_size=8), learnable)
    model = task.build_model().eval()
    assert evaluate(task, model, 7) == pytest.approx(evaluate(task, model, 1000), rel=1e-5)


def test_other_data_are_refused(tiny_text):
    with pytest.raises(ConfigError, match="dataset=tiny contains text; use dataset=docstrings or imdb"):
        TextClassification(None, tiny_text)


def test_an_lstm_learns(learnable):
    task = TextClassification(partial(LstmClassifier, hidden_size=16), learnable)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for indices in torch.arange(200).repeat(3).split(20):
        optimizer.zero_grad()
        task.loss(model, task.train.batch(indices, None)).backward()
        optimizer.step()
    assert evaluate(task, model.eval(), 100)["accuracy"] > 0.8
