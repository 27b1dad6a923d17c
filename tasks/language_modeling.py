"""Task: language modeling, the prediction of the next token."""

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
    """A token stream cut into consecutive windows.

    A window starts with the last token of the previous window, so that every token except the very first is predicted
    in exactly one window. The last window is padded with -100.

    Args:
        stream: At least two tokens: int64, shape (tokens,).
        seq_len: Number of tokens that a window predicts.
        context: Number of additional tokens at the beginning of a window, which the model reads but does not predict.
        before: Token that fills the context of the first windows, before the start of the text.
    """

    def __init__(self, stream: Tensor, seq_len: int, context: int = 0, before: int = 0) -> None:
        count = math.ceil((len(stream) - 1) / seq_len)
        missing = count * seq_len + 1 - len(stream)
        whole = torch.cat([stream.new_full((context,), before), F.pad(stream, (0, missing), value=BEYOND)])
        self.windows = whole.unfold(0, context + seq_len + 1, seq_len)

    def __len__(self) -> int:
        """Returns the number of windows."""
        return len(self.windows)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns a batch of windows.

        Args:
            indices: Positions of the examples: int64, shape (batch,).
            generator: Not used, because nothing here is random.

        Returns:
            int64 tensors: ``tokens``, shape (batch, context + seq_len + 1), with -100 after the end of the text, and
            ``windows``, shape (batch,), which are ``indices``.
        """
        return {"tokens": self.windows[indices], "windows": indices}


def _stream(corpus: Corpus, separator: int) -> Tensor:
    """Returns all documents one after the other, each followed by the separator."""
    lengths = corpus.sentences[corpus.documents].diff().tolist()
    end = corpus.tokens.new_tensor([separator])
    pieces = [piece for document in corpus.tokens.split(lengths) for piece in (document, end)]
    if not pieces:
        raise DataError(
            "language modeling needs at least one document in each split, but a split is empty; use another dataset"
        )
    return torch.cat(pieces)


def _targets(logits: Tensor, tokens: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Returns logits, shape (positions, vocabulary), and targets of the last ``seq_len`` positions of each window."""
    return logits[:, -seq_len:].flatten(0, 1), tokens[:, -seq_len:].flatten()


class LanguageModeling(Task):
    """Next-token prediction, evaluated by perplexity per token.

    The text is cut into windows. Without ``lanes``, training shuffles the windows, and a recurrent network starts each
    from a zero state. With ``lanes``, each row of a batch continues the text of the same row in the previous batch, and
    starts from the final state of that row (truncated back-propagation through time). A test window always starts from
    a zero state and reads ``eval_context`` tokens before it predicts, so that the metric depends neither on the batch
    size nor on the number of workers.

    Args:
        model: Function that builds the network from ``vocab_size`` and, if set, ``lanes``. The network maps tokens
            (batch, time) to logits of each next token (batch, time, vocab_size). With ``lanes``, the network also
            receives the indices of the windows.
        dataset: Data set of text.
        seq_len: Number of tokens that a window predicts.
        eval_context: Number of tokens before a test window that the model reads first.
        lanes: Number of rows of a batch, ``training.batch_size``, if states are kept from batch to batch; ``None``
            keeps no states.

    Raises:
        ConfigError: If the data set contains no text, ``seq_len`` is below 1 or ``eval_context`` below 0.
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
        """Returns the mean negative log likelihood of the predicted tokens of a batch, in nats: a scalar."""
        placed = place(batch, model)
        known = placed["tokens"][:, :-1].clamp(min=0)
        logits = model(known, placed["windows"]) if self.consecutive else model(known)
        return F.cross_entropy(*_targets(logits, placed["tokens"], self.seq_len), ignore_index=BEYOND)

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns summed negative log likelihood in nats, and number of predicted tokens: float64, shape (2,)."""
        tokens = place(batch, model)["tokens"]
        logits, targets = _targets(model(tokens[:, :-1].clamp(min=0)), tokens, self.seq_len)
        nll = F.cross_entropy(logits, targets, ignore_index=BEYOND, reduction="none").double().sum()
        return torch.stack([nll, (targets != BEYOND).sum().double()])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns ``loss`` in nats per token of the whole split, and ``perplexity``, its exponential (up to e^700)."""
        loss = sums["nll"] / sums["tokens"]
        # The cap lets a diverged run be reported instead of ending in an OverflowError.
        return {"loss": loss, "perplexity": math.exp(min(loss, LARGEST_EXPONENT))}
