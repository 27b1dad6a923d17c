"""Text classifier with an LSTM layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LstmClassifier"]


class LstmClassifier(nn.Module):
    """Embedding, one LSTM layer, and a linear layer on its mean or last state.

    With 50,001 words, 2 classes and the default sizes it has 2,561,052 parameters, like the program released with
    SparDL; it is not known whether that program uses the mean or the last state. The embedding keeps torch's initial
    standard deviation of 1. With the smaller values that are usual for language models, the mean states of two texts
    hardly differ at first, and plain SGD makes no progress for an epoch.

    Args:
        vocab_size: Number of token ids.
        num_classes: Number of classes: length of the output.
        embedding_size: Number of entries in the vector of a token.
        hidden_size: Number of units of the LSTM.
        mean_state: Whether to classify by the mean of all states instead of the last one, which learns much faster,
            because the gradient reaches every word directly.
        dropout: Probability of dropping an entry of the state before the linear layer.

    Source: Zhao et al.: SparDL, ICDE 2024 (sizes of the released program).
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
        """Computes the logits of the classes; tokens after the end of a text have no effect.

        Args:
            tokens: Token ids: int64, shape (batch, time).
            lengths: Number of tokens of each text, from 1 to ``time``: int64, shape (batch,).

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
