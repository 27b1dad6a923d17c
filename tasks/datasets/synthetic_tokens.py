"""Data set of random tokens of any vocabulary, to measure speed."""

from __future__ import annotations

import torch

from tasks.datasets.text import Corpus, SpecialTokens, TextDataset

__all__ = ["synthetic_tokens"]

SENTENCE = 10
SENTENCES_PER_DOCUMENT = 500


def synthetic_tokens(vocab_size: int = 30_528, tokens: int = 400_000, seed: int = 0) -> TextDataset:
    """Generates documents of 500 sentences of 10 random tokens.

    DeAR (see the source) measures BERT on random sentences of 64 tokens and a vocabulary of 30,528. Masks and random
    segments are drawn as for real text, so a step takes the same time, but there is nothing to learn.

    Args:
        vocab_size: Number of token ids; the first five are the special tokens.
        tokens: Number of tokens in the training text; the test text has a tenth of it.
        seed: Seed of the random tokens.

    Returns:
        Data set of uniformly distributed tokens; each split has at least two documents.

    Source: Zhang, Shi, Chu et al.: Decoupling the All-Reduce Primitive for Accelerating Distributed Deep Learning
    (DeAR), ICDCS 2023.
    """
    special = SpecialTokens()
    generator = torch.Generator().manual_seed(seed)
    train, test = (_random_corpus(size, len(special.ids), vocab_size, generator) for size in (tokens, tokens // 10))
    note = "dataset=synthetic_tokens is random: use the run to measure speed, as its loss means nothing"
    return TextDataset("synthetic_tokens", train, test, vocab_size, special, note)


def _random_corpus(tokens: int, low: int, high: int, generator: torch.Generator) -> Corpus:
    documents = max(2, tokens // (SENTENCE * SENTENCES_PER_DOCUMENT))
    sentences = documents * SENTENCES_PER_DOCUMENT
    return Corpus(
        tokens=torch.randint(low, high, (sentences * SENTENCE,), generator=generator),
        sentences=torch.arange(sentences + 1) * SENTENCE,
        documents=torch.arange(documents + 1) * SENTENCES_PER_DOCUMENT,
    )
