"""Language modeling, text classification, scores, and the placement of batches."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from tasks.datasets.labelled_text import LabelledTextDataset, number_texts, texts_from
from tasks.datasets.text import Corpus, SpecialTokens, TextDataset
from tasks.language_modeling import LanguageModeling, TokenWindows
from tasks.models.lstm import LstmLanguageModel
from tasks.models.lstm_classifier import LstmClassifier
from tasks.placement import place
from tasks.scoring import score
from tasks.text_classification import TextClassification


class Bigram(torch.nn.Module):
    """Logits that depend on the current token only."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, tokens):
        return self.table[tokens]


def evaluate(task, model, size):
    total = sum(task.measure(model, task.test.batch(i, None)) for i in torch.arange(len(task.test)).split(size))
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


@given(st.integers(2, 40), st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_once(length, seq_len):
    windows = TokenWindows(torch.arange(length), seq_len)
    tokens = windows.batch(torch.arange(len(windows)), None)["tokens"]
    inputs, targets = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    real = targets >= 0
    assert targets[real].tolist() == list(range(1, length))
    assert torch.equal(inputs[real] + 1, targets[real])
    assert (tokens[:, 1] >= 0).all()


def test_a_batch_is_a_function_of_the_indices(tiny_text):
    task = LanguageModeling(None, tiny_text, seq_len=4)
    indices = torch.tensor([3, 0, 3])
    with_generator = task.train.batch(indices, torch.Generator().manual_seed(1))["tokens"]
    assert torch.equal(with_generator, task.train.batch(indices, None)["tokens"])
    assert torch.equal(with_generator[0], with_generator[2])


def test_documents_are_closed_by_the_separator(tiny_text):
    task = LanguageModeling(None, tiny_text, seq_len=35)
    stream = task.test.windows.flatten()
    expected = [*range(10, 21), 3, *range(30, 41), 3, *range(50, 61), 3]
    assert stream[stream >= 0].tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 100])
def test_perplexity_over_a_whole_split_by_hand(tiny_text, size):
    table = torch.randn(70, 70, dtype=torch.float64)
    task = LanguageModeling(None, tiny_text, seq_len=4)
    stream = [*range(10, 21), 3, *range(30, 41), 3, *range(50, 61), 3]
    log_p = table.log_softmax(dim=1)
    nll = -sum(log_p[now, after].item() for now, after in itertools.pairwise(stream))
    figures = evaluate(task, Bigram(table), size)
    assert figures["loss"] == pytest.approx(nll / 35)
    assert figures["perplexity"] == pytest.approx(math.exp(nll / 35))


def test_loss_is_the_mean_over_real_targets(tiny_text):
    table = torch.randn(70, 70)
    task = LanguageModeling(None, tiny_text, seq_len=20)  # 36 tokens: windows of 20 and 15 targets
    loss = task.loss(Bigram(table), task.train.batch(torch.tensor([1]), None)).item()
    last = torch.tensor([*range(38, 41), 3, *range(50, 61), 3])
    expected = torch.nn.functional.cross_entropy(table[last[:-1]], last[1:]).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_uniform_model_has_the_vocabularys_perplexity(tiny_text):
    task = LanguageModeling(None, tiny_text, seq_len=5)
    assert evaluate(task, Bigram(torch.zeros(70, 70)), 4)["perplexity"] == pytest.approx(70, rel=1e-5)


@pytest.mark.parametrize(("nll", "perplexity"), [(1e6, math.exp(700)), (math.inf, math.exp(700))])
def test_a_diverged_run_is_still_reported(tiny_text, nll, perplexity):
    figures = LanguageModeling(None, tiny_text).summarize({"nll": nll, "tokens": 10.0})
    assert figures["perplexity"] == perplexity
    assert math.isnan(LanguageModeling(None, tiny_text).summarize({"nll": math.nan, "tokens": 1.0})["perplexity"])


def test_lstm_learns_in_either_precision(tiny_text):
    task = LanguageModeling(partial(LstmLanguageModel, embedding_size=16, hidden_size=16, dropout=0.0), tiny_text, 6)
    for dtype in (torch.float32, torch.float64):
        model = task.build_model().to(dtype)
        before = evaluate(task, model, 6)["perplexity"]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            task.loss(model, task.train.batch(torch.arange(len(task.train)), None)).backward()
            optimizer.step()
        assert before > 60
        assert evaluate(task, model, 6)["perplexity"] < 20


def test_images_are_refused(digits):
    with pytest.raises(ConfigError, match="needs a data set of text, but dataset=digits contains images"):
        LanguageModeling(None, digits)


def test_misfits_are_refused(tiny_text):
    with pytest.raises(ConfigError, match="seq_len must be at least 1, got 0"):
        LanguageModeling(None, tiny_text, seq_len=0)
    empty = TextDataset("empty", tiny_text.train, Corpus.from_documents([]), 70, SpecialTokens())
    with pytest.raises(ConfigError, match="at least one document"):
        LanguageModeling(None, empty)


class Memory(torch.nn.Module):
    """Logits that tell the sum of all tokens read so far."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, tokens):
        return self.scale * torch.nn.functional.one_hot(tokens.cumsum(1) % 70, 70)


@pytest.mark.parametrize("context", [0, 3, 40])
def test_perplexity_with_context_by_hand(tiny_text, context):
    task = LanguageModeling(None, tiny_text, seq_len=4, eval_context=context)
    stream = [*[3] * context, *range(10, 21), 3, *range(30, 41), 3, *range(50, 61), 3]
    nll = 0.0
    for position in range(context + 1, len(stream)):
        window = (position - context - 1) // 4
        predicted = sum(stream[4 * window : position]) % 70
        nll += math.log(69 + math.e) - (1 if predicted == stream[position] else 0)
    assert evaluate(task, Memory(), 5)["loss"] == pytest.approx(nll / 35)


def test_training_windows_come_without_context(tiny_text):
    task = LanguageModeling(None, tiny_text, seq_len=4, eval_context=8)
    assert task.train.batch(torch.tensor([0]), None)["tokens"].shape == (1, 5)
    assert task.test.batch(torch.tensor([0]), None)["tokens"].shape == (1, 13)
    with pytest.raises(ConfigError, match="eval_context must be at least 0, got -1"):
        LanguageModeling(None, tiny_text, eval_context=-1)


def test_states_are_carried_from_window_to_window(tiny_text):
    make = partial(LstmLanguageModel, embedding_size=8, hidden_size=8, dropout=0.0)
    task = LanguageModeling(make, tiny_text, seq_len=4, lanes=2)
    assert task.consecutive
    assert not LanguageModeling(make, tiny_text, seq_len=4).consecutive
    model = task.build_model()
    losses = [task.loss(model, task.train.batch(torch.tensor(indices), None)) for indices in ([0, 4], [1, 5])]
    fresh = LanguageModeling(make, tiny_text, seq_len=8)
    tokens = torch.stack([task.train.windows[[0, 1]], task.train.windows[[4, 5]]])
    whole = torch.cat([tokens[:, 0], tokens[:, 1, 1:]], dim=1)
    expected = fresh.loss(model.eval(), {"tokens": whole, "windows": torch.zeros(2)})
    assert sum(losses).item() / 2 == pytest.approx(expected.item(), rel=1e-5)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_hand(dtype):
    logits = torch.tensor([[math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(6)], [1.0, 1.0, 1.0]], dtype=dtype)
    loss = -math.log(2 / 4) - math.log(1 / 8) - math.log(1 / 3)
    sums = score(logits, torch.tensor([0, 1, 2]))
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([loss, 1.0, 3.0], rel=1e-6)


def test_of_nothing():
    assert score(torch.empty(0, 3), torch.empty(0, dtype=torch.int64)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_follow_the_model_and_integers_stay(dtype):
    model = torch.nn.Linear(2, 2).to(dtype)
    placed = place({"x": torch.ones(1, 2), "n": torch.ones(1, dtype=torch.int64)}, model)
    assert placed["x"].dtype == dtype
    assert placed["n"].dtype == torch.int64


def test_tensors_follow_the_models_device():
    model = torch.nn.Linear(2, 2, device="meta")
    placed = place({"x": torch.ones(1, 2), "n": torch.ones(1, dtype=torch.int64)}, model)
    assert {tensor.device.type for tensor in placed.values()} == {"meta"}
