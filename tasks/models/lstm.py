"""A recurrent language model."""

from __future__ import annotations

from torch import Tensor, nn

from spardl.errors import ConfigError

__all__ = ["LstmLanguageModel"]

INITIAL_RANGE = 0.1


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM layers and a linear decoder, with dropout between them.

    Args:
        vocab_size: number of token ids.
        embedding_size: length of a token's vector.
        hidden_size: units of each LSTM layer.
        num_layers: LSTM layers.
        dropout: probability of dropping an activation, before, between and after the layers.
        tied: let the decoder share the embedding's matrix; needs ``embedding_size == hidden_size``.

    Raises:
        ConfigError: ``tied`` with unequal sizes.

    Source: Zaremba, Sutskever, Vinyals: Recurrent Neural Network Regularization, 2014; tied weights:
    Press, Wolf: Using the Output Embedding to Improve Language Models, EACL 2017.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int = 256,
        hidden_size: int = 256,
        num_layers: int = 2,
        dropout: float = 0.2,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if tied and embedding_size != hidden_size:
            raise ConfigError(
                f"model.tied=true needs equal sizes; embedding_size={embedding_size}, hidden_size={hidden_size}"
            )
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        # torch warns about dropout in a single layer, which has no layer after it to drop for.
        between = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(embedding_size, hidden_size, num_layers, dropout=between, batch_first=True)
        self.decoder = nn.Linear(hidden_size, vocab_size)
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.uniform_(self.decoder.weight, -INITIAL_RANGE, INITIAL_RANGE)
        nn.init.zeros_(self.decoder.bias)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts each next token; every sequence starts from a zero state.

        Args:
            tokens: int64, shape (batch, time).

        Returns:
            Logits, shape (batch, time, vocab_size); entry ``t`` sees tokens up to and including ``t``.
        """
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.decoder(self.dropout(hidden))
        return logits
