"""BERT that computes logits for masked positions only. Imported lazily: transformers takes seconds to import."""

from __future__ import annotations

from torch import Tensor
from transformers import BertForPreTraining

__all__ = ["MaskedBert"]


class MaskedBert(BertForPreTraining):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """transformers' BERT with both pre-training heads, called for scores at chosen places.

    Six of seven places have nothing to guess, and scoring them against the whole vocabulary would take most of the
    time of a small network; the original program also skips them.

    Source: Devlin, Chang, Lee, Toutanova: BERT, NAACL 2019.
    """

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores words and pairs.

        Args:
            input_ids: int64, shape (batch, time).
            token_type_ids: int64, shape (batch, time): 1 in the second segment.
            attention_mask: int64, shape (batch, time): 0 in the padding.
            places: bool, shape (batch, time): where words are to be scored.

        Returns:
            Logits of words, shape (chosen places, vocabulary), and of pairs, shape (batch, 2): the second one for a
            second segment that is random.
        """
        read = self.bert(input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
        words: Tensor = self.cls.predictions(read.last_hidden_state[places])
        pairs: Tensor = self.cls.seq_relationship(read.pooler_output)
        return words, pairs
