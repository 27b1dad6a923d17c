"""A small GPT, built from a configuration; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spardl.basics.errors import ConfigError

__all__ = ["GptLanguageModel"]


class GptLanguageModel(nn.Module):
    """transformers' GPT-2 with fresh weights, as a network from tokens to logits.

    Positions have learned vectors, so a window may hold ``context`` tokens at most, and ``task.eval_context``, which
    would put test tokens at places that training never fills, has to be 0.

    Args:
        vocab_size: number of token ids.
        context: rows of the position embedding: ``task.seq_len``.
        hidden_size: length of a token's vector; the feed-forward parts are four times as wide.
        num_layers: decoder layers.
        num_heads: attention heads of a layer.
        dropout: probability of dropping an embedding, an activation or an attention weight.
        tied: let the decoder share the embedding's matrix.
        lanes: only ``None``: nothing is carried from one window to the next.

    Raises:
        ConfigError: ``lanes``, or a hidden size that the heads cannot share out.

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
        """Predicts each next token.

        Args:
            tokens: int64, shape (batch, time).

        Returns:
            Logits, shape (batch, time, vocab_size); entry ``t`` sees tokens up to and including ``t``.

        Raises:
            ConfigError: more tokens than positions.
        """
        if tokens.shape[1] > self.context:
            raise ConfigError(
                f"model.context must be at least the {tokens.shape[1]} tokens of a window, got {self.context}; "
                "use model.context=${task.seq_len} and task.eval_context=0"
            )
        logits: Tensor = self.network(tokens).logits
        return logits
