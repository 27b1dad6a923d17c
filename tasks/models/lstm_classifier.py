"""An LSTM text classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LstmClassifier"]


class LstmClassifier(nn.Module):
    """Embedding, one LSTM layer, and a linear layer on its mean or last state.

    With 50,001 words, 2 classes and the default sizes it has 2,561,052 parameters, as the program released with
    SparDL; which state that one classifies by is not known. The embedding keeps torch's deviation of one: with the
    small values that are usual for language models, the averaged states of two texts hardly differ at first, and plain
    SGD finds nothing for an epoch.

    Args:
        vocab_size: number of token ids.
        num_classes: length of the output.
        embedding_size: length of a token's vector.
        hidden_size: units of the LSTM.
        mean_state: classify by the mean of all states instead of the last one; it learns much faster, since
            the gradient reaches every word directly.
        dropout: probability of dropping an entry of the state before the linear layer.

    Source: Zhao et al.: SparDL, ICDE 2024 (released program, by its sizes).
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embedding_size: int = 50,
        hidden_size: int = 100,
        mean_state: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden_size, batch_first=True)
        self.classifier = nn.Linear(hidden_size, num_classes)
        self.dropout = nn.Dropout(dropout)
        self.mean_state = mean_state

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Scores the classes; what stands after a text's end makes no difference.

        Args:
            tokens: int64, shape (batch, time).
            lengths: int64, shape (batch,), from 1 to ``time``: tokens of each text.

        Returns:
            Logits, shape (batch, num_classes).
        """
        # The state runs from left to right, so that the states up to a text's end know nothing of the padding.
        states, _ = self.lstm(self.embedding(tokens))
        place = torch.arange(tokens.shape[1], device=tokens.device)
        end = lengths.unsqueeze(1)
        wanted = (place < end if self.mean_state else place == end - 1).unsqueeze(2)
        state = torch.where(wanted, states, 0.0).sum(dim=1) / wanted.sum(dim=1)
        logits: Tensor = self.classifier(self.dropout(state))
        return logits
