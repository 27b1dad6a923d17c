"""BERT pretraining and sentence pairs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from spardl.basics.errors import ConfigError, DataError
from tasks.bert_pretraining import BertPretraining
from tasks.datasets.text import Corpus, SpecialTokens
from tasks.datasets.words import word_dataset
from tasks.models.bert import bert_for_pretraining
from tasks.sentence_pairs import IGNORED, SentencePairs

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


SPECIAL = SpecialTokens()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def original(batch):
    """The ids before masking."""
    return torch.where(batch["labels"] == IGNORED, batch["input_ids"], batch["labels"])


def segments(row) -> tuple[list[int], list[int]]:
    """Splits ``[CLS] A [SEP] B [SEP] [PAD]...``; fails on any other form."""
    row = row.tolist()
    first = row.index(SPECIAL.sep)
    second = row.index(SPECIAL.sep, first + 1)
    assert row[0] == SPECIAL.cls
    assert set(row[second + 1 :]) <= {SPECIAL.pad}
    return row[1:first], row[first + 1 : second]


def numbered(*lengths_by_document) -> Corpus:
    """Documents of sentences of the given lengths; token ids count up from 10, and on."""
    start, documents = 10, []
    for lengths in lengths_by_document:
        document = []
        for length in lengths:
            document.append(list(range(start, start + length)))
            start += length
        documents.append(document)
        start += 100  # a gap, so that consecutive ids never span two documents
    return Corpus.from_documents(documents)


@pytest.fixture(scope="module")
def counting() -> SentencePairs:
    corpus = numbered([5, 3, 8, 2, 6, 4] * 4, [7, 2, 9, 1] * 5, [4] * 20, [3, 6])
    return SentencePairs(corpus, 1000, SPECIAL, seq_len=24)


@pytest.fixture(scope="module")
def english(pydocs) -> SentencePairs:
    return SentencePairs(pydocs.train, pydocs.vocab_size, pydocs.special, seq_len=64)


def document_of(pairs: SentencePairs, token: int) -> int:
    position = (pairs.tokens == token).nonzero().item()
    sentence = torch.searchsorted(pairs.starts, position, right=True) - 1
    return int(torch.searchsorted(pairs.documents, sentence, right=True)) - 1


def test_form_of_an_example(counting):
    batch = counting.batch(torch.arange(len(counting)), seeded(0))
    ids = original(batch)
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "input_ids": (len(counting), 24),
        "token_type_ids": (len(counting), 24),
        "attention_mask": (len(counting), 24),
        "labels": (len(counting), 24),
        "next_sentence_label": (len(counting),),
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    for row, types, attention in zip(ids, batch["token_type_ids"], batch["attention_mask"], strict=True):
        a, b = segments(row)
        assert a
        assert b
        used = len(a) + len(b) + 3
        assert types.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (24 - used)
        assert attention.tolist() == [1] * used + [0] * (24 - used)


def test_true_pairs_go_on_and_random_pairs_come_from_elsewhere(counting):
    batch = counting.batch(torch.arange(len(counting)).repeat(20), seeded(0))
    for row, is_random in zip(original(batch), batch["next_sentence_label"].tolist(), strict=True):
        a, b = segments(row)
        assert a == list(range(a[0], a[0] + len(a)))
        assert b == list(range(b[0], b[0] + len(b)))
        assert (b[0] == a[-1] + 1) == (not is_random)
        assert (document_of(counting, a[0]) == document_of(counting, b[0])) == (not is_random)


def test_segments_start_at_sentences_and_fill_up(counting):
    heads = set(counting.tokens[counting.starts[:-1]].tolist())
    tails = set(counting.tokens[counting.starts[counting.documents[1:]] - 1].tolist())
    batch = counting.batch(torch.arange(len(counting)).repeat(5), seeded(1))
    for row in original(batch):
        a, b = segments(row)
        assert {a[0], b[0]} <= heads
        assert len(a) + len(b) == 21 or b[-1] in tails


def test_every_token_of_the_text_is_in_some_example(counting):
    chunks = counting.chunks
    covered = set()
    for first, count in zip(chunks.first.tolist(), chunks.count.tolist(), strict=True):
        assert count >= 2
        begin, end = counting.starts[first].item(), counting.starts[first + count].item()
        assert end - begin <= 21
        covered |= set(range(begin, end))
    assert covered == set(range(len(counting.tokens)))


def test_a_segment_border_falls_on_every_sentence(counting):
    chunk = int(counting.chunks.count.argmax())
    count = int(counting.chunks.count[chunk])
    batch = counting.batch(torch.full((300,), chunk), seeded(2))
    assert len({len(segments(row)[0]) for row in original(batch)}) == count - 1


def test_long_sentences_are_cut():
    pairs = SentencePairs(numbered([100], [50, 3]), 1000, SPECIAL, seq_len=23)
    assert pairs.starts.diff().max() == 10
    assert pairs.documents.tolist() == [0, 10, 16]
    assert len(pairs) == 5 + 3


def test_same_generator_state_same_batch(english):
    indices = torch.tensor([5, 0, 99, 5])
    batch = english.batch(indices, seeded(1))
    assert same(batch, english.batch(indices, seeded(1)))
    assert not same(batch, english.batch(indices, seeded(2)))
    assert not torch.equal(batch["labels"][0], batch["labels"][3])


def test_examples_depend_only_on_index(english):
    batch = english.batch(torch.tensor([5, 0, 99, 5]), None)
    alone = english.batch(torch.tensor([5]), None)
    for name, tensor in batch.items():
        assert torch.equal(tensor[0], tensor[3])
        assert torch.equal(tensor[0], alone[name][0])
    assert len(batch["input_ids"].unique(dim=0)) == 3


def test_the_global_generator_is_left_alone(english):
    before = torch.get_rng_state()
    english.batch(torch.arange(3), None)
    english.batch(torch.arange(3), seeded(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("generator", [seeded(0), None])
def test_half_the_pairs_are_random(english, generator):
    labels = english.batch(torch.arange(len(english)), generator)["next_sentence_label"].double()
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / len(english) ** 0.5


def test_fifteen_percent_of_each_example_are_to_be_guessed(english):
    batch = english.batch(torch.arange(len(english)), seeded(0))
    words = original(batch) >= len(SPECIAL.NAMES)
    guessed = batch["labels"] != IGNORED
    assert not (guessed & ~words).any()
    assert (guessed.sum(1) >= 1).all()
    assert ((guessed.sum(1) - 0.15 * words.sum(1)).abs() <= 0.5 + 1e-9).all()
    # Every place is as likely as any other, not only the first ones.
    full = words.sum(1) == 61
    share = guessed[full].double().mean(dim=0)[1:63]
    assert share.max() < 0.22
    assert share.median() > 0.12


def test_eighty_ten_ten(english):
    batch = english.batch(torch.arange(len(english)).repeat(4), seeded(0))
    guessed = batch["labels"] != IGNORED
    seen, wanted = batch["input_ids"][guessed], batch["labels"][guessed]
    count = len(seen)
    assert count > 20_000
    tolerance = 4 * 0.4 / count**0.5
    assert abs((seen == SPECIAL.mask).double().mean() - 0.8) < tolerance
    assert abs((seen == wanted).double().mean() - 0.1) < tolerance
    replaced = seen[(seen != SPECIAL.mask) & (seen != wanted)]
    assert abs(len(replaced) / count - 0.1) < tolerance
    assert replaced.min() >= len(SPECIAL.NAMES)
    assert replaced.max() < english.vocab_size
    assert abs(replaced.double().mean() / english.vocab_size - 0.5) < 0.03


def test_random_word_is_never_special():
    scattered = SpecialTokens(pad=0, unk=7, cls=8, sep=3, mask=999)
    pairs = SentencePairs(numbered([5, 3, 8], [7, 2, 9]), 1000, scattered, seq_len=24)
    chances = (torch.arange(995, dtype=torch.float64) + 0.5) / 995
    assert pairs._ordinary(chances).tolist() == sorted(set(range(1000)) - {0, 7, 8, 3, 999})
    batch = pairs.batch(torch.zeros(2000, dtype=torch.int64), seeded(0))
    guessed = batch["labels"] != IGNORED
    seen = batch["input_ids"][guessed & (batch["input_ids"] != batch["labels"])]
    assert (seen == 999).double().mean() > 0.8
    assert not set(seen.tolist()) & {0, 7, 8, 3}
    assert len(set(seen.tolist())) > 100


def test_where_nothing_is_to_be_guessed_the_text_stands(english):
    indices = torch.arange(50)
    batch = english.batch(indices, seeded(0))
    quiet = SentencePairs.__new__(SentencePairs)
    quiet.__dict__.update(english.__dict__, mask_fraction=1e-9)
    other = quiet.batch(indices, seeded(0))
    assert (other["labels"] != IGNORED).sum(1).eq(1).all()
    assert torch.equal(original(batch), original(other))


def test_an_empty_batch_has_the_same_form(english):
    empty = torch.empty(0, dtype=torch.long)
    for generator in (seeded(0), None):
        assert english.batch(empty, generator)["input_ids"].shape == (0, 64)


@pytest.mark.parametrize("documents", [[], [[4, 4]], [[4], [4]]])
def test_too_little_text_is_refused(documents):
    with pytest.raises(DataError, match="at least two documents"):
        SentencePairs(numbered(*documents), 1000, SPECIAL, seq_len=24)
