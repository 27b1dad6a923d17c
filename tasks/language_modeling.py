"""Predicting the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.errors import ConfigError, DataError
from spardl.training.task import Batch, Task
from tasks.datasets.base import Corpus, Dataset, TextDataset, require
from tasks.placement import place

__all__ = ["LanguageModeling", "TokenWindows"]

BEYOND = -100  # marks places after the text's end; never a target
LARGEST_EXPONENT = 700.0  # exp of more overflows


class TokenWindows:
    """A token stream cut into consecutive windows, each starting with the last token of the one before.

    Every token but the first is the target of exactly one window; the last window is filled up with -100.

    Args:
        stream: int64, shape (tokens,), two or more.
        seq_len: targets of a window.
    """

    def __init__(self, stream: Tensor, seq_len: int) -> None:
        count = math.ceil((len(stream) - 1) / seq_len)
        missing = count * seq_len + 1 - len(stream)
        self.windows = F.pad(stream, (0, missing), value=BEYOND).unfold(0, seq_len + 1, seq_len)

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.windows)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Collects windows.

        Args:
            indices: int64, shape (batch,).
            generator: unused, since nothing here is random.

        Returns:
            ``tokens``, int64, shape (batch, seq_len + 1), -100 after the end of the text.
        """
        return {"tokens": self.windows[indices]}


def _stream(corpus: Corpus, separator: int) -> Tensor:
    """All documents in a row, each closed by the separator."""
    lengths = corpus.sentences[corpus.documents].diff().tolist()
    end = corpus.tokens.new_tensor([separator])
    pieces = [piece for document in corpus.tokens.split(lengths) for piece in (document, end)]
    if not pieces:
        raise DataError("language modeling needs at least one document in each split; the data set lacks one")
    return torch.cat(pieces)


def _predict(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of shape (positions, vocabulary) and the targets they are for."""
    logits = model(tokens[:, :-1].clamp(min=0))
    return logits.flatten(0, 1), tokens[:, 1:].flatten()


class LanguageModeling(Task):
    """Next-token prediction from a zero state in every window, judged by perplexity per token.

    Args:
        model: builds the network from ``vocab_size``; it maps tokens (batch, time) to logits
            (batch, time, vocab_size), each from the tokens up to there.
        dataset: text.
        seq_len: tokens that a window predicts.

    Raises:
        ConfigError: the data set holds no text, or ``seq_len`` is under one.
    """

    metric: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = ("nll", "tokens")

    def __init__(self, model: Callable[..., nn.Module], dataset: Dataset, seq_len: int = 35) -> None:
        if seq_len < 1:
            raise ConfigError(f"task.seq_len={seq_len}: use 1 or more")
        text = require(dataset, TextDataset, "language modeling")
        self.model = model
        self.vocab_size = text.vocab_size
        self.train = TokenWindows(_stream(text.train, text.special.sep), seq_len)
        self.test = TokenWindows(_stream(text.test, text.special.sep), seq_len)

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's vocabulary."""
        return self.model(vocab_size=self.vocab_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean negative log likelihood of a batch's tokens, in nats."""
        logits, targets = _predict(model, place(batch, model)["tokens"])
        return F.cross_entropy(logits, targets, ignore_index=BEYOND)

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed negative log likelihood in nats and tokens: float64, shape (2,), on the model's device."""
        logits, targets = _predict(model, place(batch, model)["tokens"])
        nll = F.cross_entropy(logits, targets, ignore_index=BEYOND, reduction="none").double().sum()
        return torch.stack([nll, (targets != BEYOND).sum().double()])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """``loss``: nats per token over the whole split; ``perplexity``: its exponential, at most e^700."""
        loss = sums["nll"] / sums["tokens"]
        # The cap lets a diverged run be reported instead of ending in an OverflowError.
        return {"loss": loss, "perplexity": math.exp(min(loss, LARGEST_EXPONENT))}
