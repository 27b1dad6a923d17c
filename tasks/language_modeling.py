"""Language modeling: prediction of the next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.base import Dataset, require
from tasks.datasets.text import Corpus, TextDataset
from tasks.placement import place
from trainer.task import Batch, Task

__all__ = ["LanguageModeling", "TokenWindows"]

BEYOND = -100  # marks places after the text's end; never a target
LARGEST_EXPONENT = 700.0  # exp of more overflows


class TokenWindows:
    """A token stream cut into consecutive windows, each starting with the last token of the one before.

    Every token but the first is the target of exactly one window; the last window is filled up with -100.

    Args:
        stream: int64, shape (tokens,), two or more.
        seq_len: targets of a window.
        context: tokens before a window that come with it to be read, not to be predicted.
        before: what stands for tokens before the text's first one.
    """

    def __init__(self, stream: Tensor, seq_len: int, context: int = 0, before: int = 0) -> None:
        count = math.ceil((len(stream) - 1) / seq_len)
        missing = count * seq_len + 1 - len(stream)
        whole = torch.cat([stream.new_full((context,), before), F.pad(stream, (0, missing), value=BEYOND)])
        self.windows = whole.unfold(0, context + seq_len + 1, seq_len)

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.windows)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Collects windows.

        Args:
            indices: int64, shape (batch,).
            generator: unused, since nothing here is random.

        Returns:
            int64: ``tokens``, shape (batch, context + seq_len + 1), -100 after the end of the text, and
            ``windows``, shape (batch,): the indices.
        """
        return {"tokens": self.windows[indices], "windows": indices}


def _stream(corpus: Corpus, separator: int) -> Tensor:
    """All documents in a row, each closed by the separator."""
    lengths = corpus.sentences[corpus.documents].diff().tolist()
    end = corpus.tokens.new_tensor([separator])
    pieces = [piece for document in corpus.tokens.split(lengths) for piece in (document, end)]
    if not pieces:
        raise DataError(
            "language modeling needs at least one document in each split, but a split is empty; use another dataset"
        )
    return torch.cat(pieces)


def _targets(logits: Tensor, tokens: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Of each window's last ``seq_len`` places: logits of shape (places, vocabulary) and the targets they are for."""
    return logits[:, -seq_len:].flatten(0, 1), tokens[:, -seq_len:].flatten()


class LanguageModeling(Task):
    """Next-token prediction, judged by perplexity per token.

    Without ``lanes``, training draws windows at random, and each starts from a zero state. With ``lanes``, a
    worker's rows follow the text, and each goes on from the state in which its last window ended (truncated
    back-propagation through time). A test window always starts from a zero state and reads ``eval_context``
    tokens before it predicts: so the figure does not depend on batch size and number of workers.

    Args:
        model: builds the network from ``vocab_size``; it maps tokens (batch, time) to logits
            (batch, time, vocab_size), each from the tokens up to there. With ``lanes``, it is also built
            from these, and called with the windows' numbers.
        dataset: text.
        seq_len: tokens that a window predicts.
        eval_context: tokens before a test window that the model reads first.
        lanes: rows of a batch (``training.batch_size``), to carry their states on; ``None`` carries none.

    Raises:
        ConfigError: the data set holds no text, ``seq_len`` is under one or ``eval_context`` under zero.
    """

    metric: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = ("nll", "tokens")

    def __init__(
        self,
        model: Callable[..., nn.Module],
        dataset: Dataset,
        seq_len: int = 35,
        eval_context: int = 0,
        lanes: int | None = None,
    ) -> None:
        if seq_len < 1:
            raise ConfigError(f"task.seq_len must be at least 1, got {seq_len}")
        if eval_context < 0:
            raise ConfigError(f"task.eval_context must be at least 0, got {eval_context}")
        text = require(dataset, TextDataset, "language modeling")
        self.model = model
        self.vocab_size = text.vocab_size
        self.seq_len, self.lanes = seq_len, lanes
        self.consecutive = lanes is not None
        end = text.special.sep
        self.train = TokenWindows(_stream(text.train, end), seq_len)
        self.test = TokenWindows(_stream(text.test, end), seq_len, eval_context, before=end)

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's vocabulary."""
        carried = {"lanes": self.lanes} if self.consecutive else {}
        return self.model(vocab_size=self.vocab_size, **carried)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean negative log likelihood of a batch's tokens, in nats."""
        placed = place(batch, model)
        known = placed["tokens"][:, :-1].clamp(min=0)
        logits = model(known, placed["windows"]) if self.consecutive else model(known)
        return F.cross_entropy(*_targets(logits, placed["tokens"], self.seq_len), ignore_index=BEYOND)

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed negative log likelihood in nats and tokens: float64, shape (2,), on the model's device."""
        tokens = place(batch, model)["tokens"]
        logits, targets = _targets(model(tokens[:, :-1].clamp(min=0)), tokens, self.seq_len)
        nll = F.cross_entropy(logits, targets, ignore_index=BEYOND, reduction="none").double().sum()
        return torch.stack([nll, (targets != BEYOND).sum().double()])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """``loss``: nats per token over the whole split; ``perplexity``: its exponential, at most e^700."""
        loss = sums["nll"] / sums["tokens"]
        # The cap lets a diverged run be reported instead of ending in an OverflowError.
        return {"loss": loss, "perplexity": math.exp(min(loss, LARGEST_EXPONENT))}
