"""Task: pre-training of BERT by masked language modeling and next-sentence prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from tasks.datasets.base import Dataset, require
from tasks.datasets.text import SpecialTokens, TextDataset
from tasks.placement import place
from tasks.scoring import score
from tasks.sentence_pairs import IGNORED, SentencePairs
from trainer.task import Batch, Task

__all__ = ["BertPretraining"]

INPUTS = ("input_ids", "token_type_ids", "attention_mask")
SHORTEST = 8


class BertPretraining(Task):
    """Prediction of masked tokens and of next sentences, evaluated by the loss of the masked tokens.

    Args:
        model: Function that builds the network from ``tokens`` and ``seq_len``, as
            :func:`tasks.models.bert.bert_for_pretraining` does.
        dataset: Data set of text with at least two documents in each split.
        seq_len: Number of tokens in a sequence, including three special tokens.
        mask_fraction: Share of the word pieces in a sequence to predict.

    Raises:
        ConfigError: If the data set is not a text with BERT's special tokens, contains too few documents, or an option
            is out of range.

    Source: Devlin, Chang, Lee, Toutanova: BERT, NAACL 2019, section 3.1.
    """

    metric: ClassVar[str] = "mlm_loss"
    higher_is_better: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = (
        "mlm_loss",
        "masked",
        "mlm_correct",
        "nsp_loss",
        "nsp_correct",
        "examples",
    )

    def __init__(
        self,
        model: Callable[..., nn.Module],
        dataset: Dataset,
        seq_len: int = 128,
        mask_fraction: float = 0.15,
    ) -> None:
        if seq_len < SHORTEST:
            raise ConfigError(f"task.seq_len must be at least {SHORTEST}, got {seq_len}")
        if not 0 < mask_fraction < 1:
            raise ConfigError(f"task.mask_fraction must be above 0 and below 1, got {mask_fraction}")
        text = require(dataset, TextDataset, "bert pre-training")
        if len(text.special.ids) < len(SpecialTokens.NAMES):
            raise ConfigError(
                f"bert pre-training needs text with BERT's special tokens, but dataset={text.name} has no "
                f"{SpecialTokens.NAMES[-1]}; use {TextDataset.examples}"
            )
        self.model = model
        self.seq_len = seq_len
        self.vocab_size = text.vocab_size
        self.train = SentencePairs(text.train, text.vocab_size, text.special, seq_len, mask_fraction)
        self.test = SentencePairs(text.test, text.vocab_size, text.special, seq_len, mask_fraction)

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's vocabulary and the sequence length.

        Raises:
            ConfigError: If the network's vocabulary or position table is too small.
        """
        return self.model(tokens=self.vocab_size, seq_len=self.seq_len)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss per masked token plus the mean loss per pair of segments, in nats: a scalar."""
        placed = place(batch, model)
        words, labels, pairs = _guess(model, placed)
        return F.cross_entropy(words, labels) + F.cross_entropy(pairs, placed["next_sentence_label"])

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the sums named by ``sums``, losses in nats and counts: float64, shape (len(sums),)."""
        placed = place(batch, model)
        words, labels, pairs = _guess(model, placed)
        loss, hits, count = score(words, labels)
        return torch.stack([loss, count, hits, *score(pairs, placed["next_sentence_label"])])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of a whole split.

        Returns:
            In nats: ``mlm_loss`` (masked tokens), ``nsp_loss`` (next sentences) and their sum, ``loss``. As fractions:
            ``mlm_accuracy`` and ``nsp_accuracy``.
        """
        mlm_loss = sums["mlm_loss"] / sums["masked"]
        nsp_loss = sums["nsp_loss"] / sums["examples"]
        return {
            "loss": mlm_loss + nsp_loss,
            "mlm_loss": mlm_loss,
            "nsp_loss": nsp_loss,
            "mlm_accuracy": sums["mlm_correct"] / sums["masked"],
            "nsp_accuracy": sums["nsp_correct"] / sums["examples"],
        }


def _guess(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits of masked words, the masked words, and the logits of pairs."""
    places = batch["labels"] != IGNORED
    words, pairs = model(*(batch[name] for name in INPUTS), places)
    return words, batch["labels"][places], pairs
