from __future__ import annotations

import torch

from tasks.datasets.synthetic_tokens import synthetic_tokens
from tasks.sentence_pairs import SentencePairs


def test_tokens_are_uniform_and_no_special_ones():
    text = synthetic_tokens(vocab_size=50, tokens=100_000)
    assert (text.name, text.vocab_size) == ("synthetic_tokens", 50)
    counts = text.train.tokens.bincount(minlength=50).double()
    assert len(text.train.tokens) == 100_000
    assert counts[:5].sum() == 0
    assert (counts[5:] / counts.sum() - 1 / 45).abs().max() < 0.003
    assert len(text.test.tokens) == 10_000
    assert not torch.equal(text.train.tokens[:100], text.test.tokens[:100])


def test_seed_determines_tokens():
    before = torch.get_rng_state()
    one, same, other = (synthetic_tokens(tokens=20_000, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.train.tokens, same.train.tokens)
    assert not torch.equal(one.train.tokens, other.train.tokens)


def test_it_says_that_it_is_random():
    assert "loss means nothing" in synthetic_tokens(tokens=10).caveat


def test_short_sequences_are_almost_full():
    text = synthetic_tokens(tokens=10)
    pairs = SentencePairs(text.train, text.vocab_size, text.special, seq_len=64)
    batch = pairs.batch(torch.arange(len(pairs)), None)
    assert batch["attention_mask"].double().mean() > 0.95
    assert 0.4 < batch["next_sentence_label"].double().mean() < 0.6
