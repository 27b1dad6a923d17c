"""Speech recognition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.datasets.base import Dataset, require
from tasks.datasets.speech import BLANK, SpeechDataset, decode
from tasks.placement import place
from trainer.task import Batch, Task

__all__ = ["SpeechRecognition", "greedy_texts"]


def greedy_texts(logits: Tensor, lengths: Tensor) -> list[str]:
    """Reads off the best label of every frame, repetitions merged, blanks left out.

    Args:
        logits: shape (batch, frames, labels).
        lengths: int64, shape (batch,): frames that count.

    Returns:
        One text per utterance.
    """
    best = logits.argmax(dim=2).cpu()
    paths = [path[:length].unique_consecutive() for path, length in zip(best, lengths.tolist(), strict=True)]
    return [decode(path[path != BLANK].tolist()) for path in paths]


class SpeechRecognition(Task):
    """Connectionist temporal classification of characters, judged by the word error rate of greedy decoding.

    Args:
        model: builds the network from ``num_labels`` and ``num_bins``; it maps spectrograms (batch, num_bins, time)
            and their lengths to logits (batch, frames, num_labels) and their lengths.
        dataset: speech.

    Raises:
        ConfigError: the data set holds no speech.

    Source: Graves et al.: Connectionist Temporal Classification, ICML 2006.
    """

    metric: ClassVar[str] = "wer"
    higher_is_better: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = (
        "loss",
        "utterances",
        "word_edits",
        "words",
        "character_edits",
        "characters",
    )

    def __init__(self, model: Callable[..., nn.Module], dataset: Dataset) -> None:
        self.dataset = require(dataset, SpeechDataset, "speech recognition")
        self.model = model
        self.train = self.dataset.train
        self.test = self.dataset.test

    def build_model(self) -> nn.Module:
        """Builds the network for the data set's spectrograms and alphabet."""
        return self.model(num_labels=self.dataset.num_labels, num_bins=self.dataset.num_bins)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean over utterances of the negative log likelihood of the whole text, in nats.

        An utterance with too few frames for its text would have an infinite loss; it counts as 0 instead, and so
        does its gradient.
        """
        placed = place(batch, model)
        logits, lengths = model(placed["spectrograms"], placed["lengths"])
        return _summed_loss(logits, lengths, placed) / len(lengths)

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed loss, utterances, edited and all words, edited and all characters: float64, shape (6,)."""
        placed = place(batch, model)
        logits, lengths = model(placed["spectrograms"], placed["lengths"])
        texts = greedy_texts(logits, lengths)
        wanted = [
            decode(labels[:length])
            for labels, length in zip(batch["targets"].tolist(), batch["target_lengths"].tolist(), strict=True)
        ]
        words = _edits([text.split() for text in texts], [text.split() for text in wanted])
        loss = _summed_loss(logits.double(), lengths, placed)
        return torch.stack([loss, *loss.new_tensor([len(texts), *words, *_edits(texts, wanted)])])

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The figures of a whole split.

        Returns:
            ``loss``: nats per utterance; ``wer``: substituted, missing and added words per word that was said;
            ``cer``: the same of characters, spaces included. Nothing written at all gives 1; both can be more.
        """
        return {
            "loss": sums["loss"] / sums["utterances"],
            "wer": sums["word_edits"] / sums["words"],
            "cer": sums["character_edits"] / sums["characters"],
        }


def _summed_loss(logits: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
    # Sums over hundreds of frames: half precision would not do.
    precise = torch.promote_types(logits.dtype, torch.float32)
    scores = F.log_softmax(logits, dim=2, dtype=precise).transpose(0, 1)
    return F.ctc_loss(
        scores, batch["targets"], lengths, batch["target_lengths"], BLANK, reduction="sum", zero_infinity=True
    )


def _edits(written: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Edit distance between the hypothesis and the transcript, and the length of the transcript."""
    from rapidfuzz.distance import Levenshtein  # noqa: PLC0415

    edits = sum(Levenshtein.distance(one, other) for one, other in zip(written, said, strict=True))
    return edits, sum(len(other) for other in said)
