"""Language model with LSTM layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError

__all__ = ["LstmLanguageModel"]

INITIAL_RANGE = 0.1
NOWHERE = -2  # no window comes after this one


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM layers and a linear decoder, with dropout between them.

    With ``lanes``, a row of a training batch starts from the final state of the same row in the previous batch if that
    row had the preceding window of text. All other rows, and rows in evaluations, start from a zero state. The states
    are buffers: every worker has its own, and checkpoints contain them.

    Args:
        vocab_size: Number of token ids.
        embedding_size: Number of entries in the vector of a token.
        hidden_size: Number of units of each LSTM layer.
        num_layers: Number of LSTM layers.
        dropout: Probability of dropping an activation, before, between and after the layers.
        tied: Whether the decoder shares the embedding matrix; requires ``embedding_size == hidden_size``.
        lanes: Number of rows of a training batch, whose states are kept; ``None`` keeps no states.

    Raises:
        ConfigError: If ``tied`` is set with unequal sizes.

    Source: Zaremba, Sutskever, Vinyals: Recurrent Neural Network Regularization, 2014; tied weights:
    Press, Wolf: Using the Output Embedding to Improve Language Models, EACL 2017.
    """

    hidden: Tensor
    cell: Tensor
    window: Tensor

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int = 256,
        hidden_size: int = 256,
        num_layers: int = 2,
        dropout: float = 0.2,
        tied: bool = False,
        lanes: int | None = None,
    ) -> None:
        super().__init__()
        if tied and embedding_size != hidden_size:
            raise ConfigError(
                f"model.tied=true needs model.embedding_size={embedding_size} to equal "
                f"model.hidden_size={hidden_size}; change one of them, or use model.tied=false"
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
        self.lanes = lanes
        rows = lanes or 0
        for name in ("hidden", "cell"):
            self.register_buffer(name, torch.zeros(num_layers, rows, hidden_size), persistent=False)
        self.register_buffer("window", torch.full((rows,), NOWHERE), persistent=False)

    def forward(self, tokens: Tensor, windows: Tensor | None = None) -> Tensor:
        """Computes the logits of each next token.

        Args:
            tokens: Token ids: int64, shape (batch, time).
            windows: Index of each row's window in the text: int64, shape (batch,). A row continues its text if the
                index is one higher than in the previous batch. ``None`` starts every row from a zero state.

        Returns:
            Logits, shape (batch, time, vocab_size); entry ``t`` depends on tokens up to and including ``t``.

        Raises:
            ConfigError: If a training batch has another size than ``lanes``.
        """
        embedded = self.dropout(self.embedding(tokens))
        if windows is None or self.lanes is None or not self.training:
            hidden, _ = self.lstm(embedded)
        else:
            hidden, (last, cell) = self.lstm(embedded, self._state_before(windows))
            self._keep(windows, last, cell)
        logits: Tensor = self.decoder(self.dropout(hidden))
        return logits

    def _state_before(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        if len(windows) != self.lanes:
            raise ConfigError(
                f"the model carries the states of task.lanes={self.lanes} rows, but a batch has {len(windows)} rows; "
                "use task.lanes=${training.batch_size}, or task.lanes=null"
            )
        goes_on = (self.window + 1 == windows).view(1, -1, 1)
        return self.hidden * goes_on, self.cell * goes_on

    @torch.no_grad()
    def _keep(self, windows: Tensor, hidden: Tensor, cell: Tensor) -> None:
        self.window.copy_(windows)
        self.hidden.copy_(hidden)
        self.cell.copy_(cell)
