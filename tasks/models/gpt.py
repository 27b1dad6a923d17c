"""A small GPT, built from a configuration; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spardl.basics.errors import ConfigError

__all__ = ["GptLanguageModel"]


class GptLanguageModel(nn.Module):
    """GPT-2 of the library transformers with new random weights, as a network from tokens to logits.

    Positions have learned vectors, so a window has at most ``context`` tokens. ``task.eval_context`` must be 0, because
    tokens to predict would otherwise be at positions whose vectors are never trained.

    Args:
        vocab_size: Number of token ids.
        context: Maximum number of tokens in a window, normally ``task.seq_len``.
        hidden_size: Number of entries in the vector of a token; the feed-forward layers have four times as many.
        num_layers: Number of decoder layers.
        num_heads: Number of attention heads of a layer.
        dropout: Probability of dropping an embedding, an activation or an attention weight.
        tied: Whether the decoder shares the embedding matrix.
        lanes: Must be ``None``, because no state is kept from one window to the next.

    Raises:
        ConfigError: If ``lanes`` is set, or the number of heads does not divide the hidden size.

    Source: Radford, Wu, Child et al.: Language Models are Unsupervised Multitask Learners (GPT-2), 2019.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 64,
        hidden_size: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
        lanes: int | None = None,
    ) -> None:
        super().__init__()
        if lanes is not None:
            raise ConfigError(
                f"task.lanes={lanes} has no effect, because GPT carries no state between windows; use task.lanes=null"
            )
        if hidden_size % num_heads:
            raise ConfigError(f"model.hidden_size must be a multiple of num_heads={num_heads}, got {hidden_size}")
        # Imported late: it takes seconds, and only this model needs it.
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

        config = GPT2Config(
            vocab_size=vocab_size,
            n_positions=context,
            n_embd=hidden_size,
            n_layer=num_layers,
            n_head=num_heads,
            # The same function as GPT-2's "gelu_new", in one kernel: a fifth less time for a small network on a CPU.
            activation_function="gelu_pytorch_tanh",
            embd_pdrop=dropout,
            resid_pdrop=dropout,
            attn_pdrop=dropout,
            tie_word_embeddings=tied,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.context = context
        self.network: Any = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits of each next token.

        Args:
            tokens: Token ids: int64, shape (batch, time).

        Returns:
            Logits, shape (batch, time, vocab_size); entry ``t`` depends on tokens up to and including ``t``.

        Raises:
            ConfigError: If there are more tokens than positions.
        """
        if tokens.shape[1] > self.context:
            raise ConfigError(
                f"model.context must be at least the {tokens.shape[1]} tokens of a window, got {self.context}; "
                "use model.context=${task.seq_len} and task.eval_context=0"
            )
        logits: Tensor = self.network(tokens).logits
        return logits
