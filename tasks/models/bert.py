"""BERT with both pre-training heads, built from a configuration; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import nn

from spardl.basics.errors import ConfigError

__all__ = ["bert_for_pretraining"]


def bert_for_pretraining(
    tokens: int,
    seq_len: int,
    vocab_size: int | None = None,
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    intermediate_size: int = 3072,
    max_positions: int = 512,
    dropout: float = 0.1,
    tied: bool = True,
) -> nn.Module:
    """Builds a :class:`tasks.models.masked_bert.MaskedBert` with new random weights.

    The defaults are BERT-base: 110,106,428 parameters with ``vocab_size=30522``, and 133,547,324 with
    ``tied=False``, the count that several papers on sparse communication quote.

    Args:
        tokens: Number of token ids in the data, passed by the task.
        seq_len: Number of tokens in a training sequence, passed by the task.
        vocab_size: Number of rows of the embedding, at least ``tokens``; ``None`` uses ``tokens``.
        hidden_size: Number of entries in the vector of a token.
        num_layers: Number of encoder layers.
        num_heads: Number of attention heads of a layer.
        intermediate_size: Number of units in the feed-forward part of a layer.
        max_positions: Number of rows of the position embedding, at least ``seq_len``.
        dropout: Probability of dropping an activation or an attention weight.
        tied: Whether the masked-token head shares the embedding matrix, as in the paper.

    Returns:
        The network, with the arguments of :meth:`MaskedBert.forward`.

    Raises:
        ConfigError: If the embedding or the position table is too small for the data.

    Source: Devlin, Chang, Lee, Toutanova: BERT, NAACL 2019.
    """
    rows = tokens if vocab_size is None else vocab_size
    _demand(rows >= tokens, f"vocab_size must be at least the {tokens} token ids of the data set, got {rows}")
    _demand(max_positions >= seq_len, f"max_positions must be at least task.seq_len={seq_len}, got {max_positions}")
    _demand(hidden_size % num_heads == 0, f"hidden_size must be a multiple of num_heads={num_heads}, got {hidden_size}")
    # Imported late: it takes seconds, and only this model needs it.
    from transformers import BertConfig  # noqa: PLC0415

    from tasks.models.masked_bert import MaskedBert  # noqa: PLC0415

    config = BertConfig(
        vocab_size=rows,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        tie_word_embeddings=tied,
    )
    return _with_one_bias(MaskedBert(config))


def _with_one_bias(model: Any) -> nn.Module:
    """Ties the two biases of the masked-token head; in transformers 5, one of them has no gradient otherwise."""
    head = model.cls.predictions
    head.decoder.bias = head.bias
    tied: nn.Module = model
    return tied


def _demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise ConfigError(f"model.{complaint}")
