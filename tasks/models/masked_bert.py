"""BERT that computes logits for masked positions only. Imported lazily: transformers takes seconds to import."""

from __future__ import annotations

from torch import Tensor
from transformers import BertForPreTraining

__all__ = ["MaskedBert"]


class MaskedBert(BertForPreTraining):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """BERT of the library transformers with both pre-training heads; computes logits of masked positions only.

    Six of seven positions are not masked. Their logits over the whole vocabulary would take most of the time of a small
    network, and are never used. The original program also skips them.

    Source: Devlin, Chang, Lee, Toutanova: BERT, NAACL 2019.
    """

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the logits of masked words and of sentence pairs.

        Args:
            input_ids: Token ids: int64, shape (batch, time).
            token_type_ids: Segment numbers: int64, shape (batch, time), 1 in the second segment.
            attention_mask: Attention mask: int64, shape (batch, time), 0 in the padding.
            places: True for positions whose words are predicted: bool, shape (batch, time).

        Returns:
            Logits of words, shape (number of such positions, vocabulary), and logits of pairs, shape (batch, 2). Class
            1 of a pair means that the second segment is random.
        """
        read = self.bert(input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
        words: Tensor = self.cls.predictions(read.last_hidden_state[places])
        pairs: Tensor = self.cls.seq_relationship(read.pooler_output)
        return words, pairs
