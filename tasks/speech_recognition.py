"""Task: speech recognition."""

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
    """Converts logits to texts: takes the most likely label of every frame, merges repetitions, and omits blanks.

    Args:
        logits: Logits of shape (batch, frames, labels).
        lengths: Number of frames of each utterance: int64, shape (batch,).

    Returns:
        Text of each utterance.
    """
    best = logits.argmax(dim=2).cpu()
    paths = [path[:length].unique_consecutive() for path, length in zip(best, lengths.tolist(), strict=True)]
    return [decode(path[path != BLANK].tolist()) for path in paths]


class SpeechRecognition(Task):
    """Connectionist temporal classification of characters, evaluated by the word error rate of greedy decoding.

    Args:
        model: Function that builds the network from ``num_labels`` and ``num_bins``; it maps spectrograms (batch,
            num_bins, time) and their lengths to logits (batch, frames, num_labels) and their lengths.
        dataset: Data set of speech.

    Raises:
        ConfigError: If the data set contains no speech.

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
        """Returns the negative log likelihood of a text in nats, averaged over utterances: a scalar.

        An utterance with too few frames for its text would have an infinite loss. Its loss and its gradient count as 0
        instead.
        """
        placed = place(batch, model)
        logits, lengths = model(placed["spectrograms"], placed["lengths"])
        return _summed_loss(logits, lengths, placed) / len(lengths)

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the sums named by ``sums``, a loss in nats and counts: float64, shape (len(sums),).

        Edits are the substitutions, omissions and insertions that separate an output from its transcript.
        """
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
        """Returns the metrics of a whole split.

        Returns:
            ``loss``, in nats per utterance; ``wer``, the number of substituted, missing and added words per word of the
            transcripts; and ``cer``, the same for characters, including spaces. Empty outputs give a ``wer`` and a
            ``cer`` of 1, and both can exceed 1.
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
    """Returns the edit distance between hypothesis and transcript, and the length of the transcript."""
    from rapidfuzz.distance import Levenshtein  # noqa: PLC0415

    edits = sum(Levenshtein.distance(one, other) for one, other in zip(written, said, strict=True))
    return edits, sum(len(other) for other in said)
