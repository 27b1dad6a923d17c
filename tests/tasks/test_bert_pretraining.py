from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from spardl.basics.errors import ConfigError
from tasks.bert_pretraining import BertPretraining
from tasks.datasets.words import word_dataset
from tasks.models.bert import bert_for_pretraining
from tasks.sentence_pairs import IGNORED

SMALL = partial(bert_for_pretraining, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, max_positions=24)


class Fixed(torch.nn.Module):
    """The same word scores at every place, and the same pair scores for every example."""

    def __init__(self, words, pairs):
        super().__init__()
        self.words = torch.nn.Parameter(words)
        self.pairs = torch.nn.Parameter(pairs)

    def forward(self, input_ids, token_type_ids, attention_mask, places):
        return self.words.expand(int(places.sum()), -1), self.pairs.expand(len(input_ids), -1)


def total(task, model, split, size):
    parts = [task.measure(model, split.batch(i, None)) for i in torch.arange(len(split)).split(size)]
    return dict(zip(task.sums, sum(parts).tolist(), strict=True))


@pytest.fixture(scope="module")
def task(pydocs) -> BertPretraining:
    return BertPretraining(SMALL, pydocs, seq_len=24)


def test_sums_by_hand_count_masked_tokens_only(task):
    model = Fixed(torch.randn(2000), torch.tensor([0.3, -0.4]))
    batch = task.test.batch(torch.arange(30), None)
    sums = dict(zip(task.sums, task.measure(model, batch).tolist(), strict=True))
    wanted = [label for label in batch["labels"].flatten().tolist() if label != IGNORED]
    word_loss, pair_loss = -model.words.log_softmax(0), -model.pairs.log_softmax(0)
    favourite = int(model.words.argmax())
    pairs = batch["next_sentence_label"].tolist()
    assert sums["masked"] == len(wanted)
    assert sums["mlm_loss"] == pytest.approx(sum(word_loss[label].item() for label in wanted), rel=1e-5)
    assert sums["mlm_correct"] == wanted.count(favourite)
    assert sums["examples"] == 30
    assert sums["nsp_loss"] == pytest.approx(sum(pair_loss[label].item() for label in pairs), rel=1e-5)
    assert sums["nsp_correct"] == pairs.count(0)


class Free(torch.nn.Module):
    """Any scores for every place of a batch, and any for each pair."""

    def __init__(self, words, pairs):
        super().__init__()
        self.words = torch.nn.Parameter(words)
        self.pairs = torch.nn.Parameter(pairs)

    def forward(self, input_ids, token_type_ids, attention_mask, places):
        return self.words[places], self.pairs


def test_unmasked_scores_have_no_effect(task):
    batch = task.test.batch(torch.arange(6), None)
    words, pairs = torch.randn(6, 24, 2000), torch.randn(6, 2)
    before = task.measure(Free(words, pairs), batch)
    masked = (batch["labels"] != IGNORED).unsqueeze(2)
    assert torch.equal(task.measure(Free(torch.where(masked, words, words + torch.randn(2000)), pairs), batch), before)
    after = task.measure(Free(torch.where(masked, words + torch.randn(2000), words), pairs), batch)
    changed = dict(zip(task.sums, (after != before).tolist(), strict=True))
    assert changed["mlm_loss"]
    assert not changed["nsp_loss"]
    assert not changed["masked"]


def test_the_training_loss_is_of_masked_tokens_and_pairs_only(task):
    model = task.build_model().eval()
    batch = dict(task.train.batch(torch.arange(4), torch.Generator().manual_seed(0)))
    every = torch.ones_like(batch["labels"], dtype=torch.bool)
    scores, pair_scores = model(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], every)
    scores = scores.view(4, 24, -1)
    rows = [
        (example, place) for example in range(4) for place in range(24) if batch["labels"][example, place] != IGNORED
    ]
    words = [-scores[row].log_softmax(0)[batch["labels"][row]].item() for row in rows]
    pairs = [
        -pair.log_softmax(0)[label].item()
        for pair, label in zip(pair_scores, batch["next_sentence_label"], strict=True)
    ]
    expected = sum(words) / len(words) + sum(pairs) / 4
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_hits_are_counted(task):
    batch = task.test.batch(torch.arange(30), None)
    wanted = batch["labels"][batch["labels"] != IGNORED]
    scores = F.one_hot(wanted.mode().values, 2000).double()
    sums = dict(zip(task.sums, task.measure(Fixed(scores, torch.zeros(2)), batch).tolist(), strict=True))
    assert sums["mlm_correct"] == (wanted == wanted.mode().values).sum().item() > 0


def test_summary_by_hand(task):
    sums = {"mlm_loss": 12.0, "masked": 4.0, "mlm_correct": 1.0, "nsp_loss": 1.0, "nsp_correct": 3.0, "examples": 5.0}
    figures = task.summarize(sums)
    assert figures == {"loss": 3.2, "mlm_loss": 3.0, "nsp_loss": 0.2, "mlm_accuracy": 0.25, "nsp_accuracy": 0.6}
    assert task.metric in figures
    assert not task.higher_is_better


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_loss_is_what_evaluation_measures(task, dtype):
    model = task.build_model().eval().to(dtype)
    batch = task.train.batch(torch.arange(8), torch.Generator().manual_seed(0))
    figures = task.summarize(dict(zip(task.sums, task.measure(model, batch).tolist(), strict=True)))
    assert task.loss(model, batch).item() == pytest.approx(figures["loss"], rel=1e-5)


def test_batch_sizes_do_not_change_the_sums(task):
    model = task.build_model().eval()
    assert total(task, model, task.test, 50) == pytest.approx(total(task, model, task.test, 1000), rel=1e-5)


def test_loss_falls(task):
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    before = task.summarize(total(task, model.eval(), task.test, 200))
    model.train()
    for _ in range(30):
        indices = torch.randint(len(task.train), (16,), generator=generator)
        optimizer.zero_grad()
        task.loss(model, task.train.batch(indices, generator)).backward()
        optimizer.step()
    after = task.summarize(total(task, model.eval(), task.test, 200))
    assert after["mlm_loss"] < before["mlm_loss"] - 1


def test_a_larger_vocabulary_is_kept_and_a_smaller_one_refused(pydocs):
    larger = BertPretraining(partial(SMALL, vocab_size=2100), pydocs, seq_len=24).build_model()
    assert larger.config.vocab_size == 2100
    with pytest.raises(ConfigError, match=r"vocab_size must be at least the 2000 .* got 1999"):
        BertPretraining(partial(SMALL, vocab_size=1999), pydocs, seq_len=24).build_model()


def test_images_are_refused_in_one_line(digits):
    with pytest.raises(ConfigError) as caught:
        BertPretraining(SMALL, digits)
    assert str(caught.value) == (
        "bert pre-training needs a data set of text, but dataset=digits contains images; use dataset=pydocs"
    )


def test_text_in_whole_words_is_refused_in_one_line():
    words = word_dataset("plain", [["a", "b"]] * 4, [["a"]])
    with pytest.raises(ConfigError) as caught:
        BertPretraining(SMALL, words)
    assert str(caught.value) == (
        "bert pre-training needs text with BERT's special tokens, but dataset=plain has no [MASK]; use dataset=pydocs"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [({"seq_len": 7}, "seq_len must be at least 8"), ({"mask_fraction": 0.0}, "mask_fraction")],
)
def test_options_out_of_range_are_refused(pydocs, options, words):
    with pytest.raises(ConfigError, match=words):
        BertPretraining(SMALL, pydocs, **options)
