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
    """Builds :class:`tasks.models.masked_bert.MaskedBert` with fresh weights.

    The defaults are BERT-base: 110,106,428 parameters with ``vocab_size=30522``, and 133,547,324 with
    ``tied=False``, the count that several papers on sparse communication quote.

    Args:
        tokens: number of token ids that the data use, given by the task.
        seq_len: tokens of a training sequence, given by the task.
        vocab_size: rows of the embedding, ``tokens`` or more; ``None`` takes ``tokens``.
        hidden_size: length of a token's vector.
        num_layers: encoder layers.
        num_heads: attention heads of a layer.
        intermediate_size: width of a layer's feed-forward part.
        max_positions: rows of the position embedding, ``seq_len`` or more.
        dropout: probability of dropping an activation or an attention weight.
        tied: let the masked-token head share the embedding's matrix, as the paper does.

    Returns:
        The network; see there for how it is called.

    Raises:
        ConfigError: an embedding or position table that is too small for the data.

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
    """Ties the two biases of the masked-token head: transformers 5 leaves one of them without a gradient."""
    head = model.cls.predictions
    head.decoder.bias = head.bias
    tied: nn.Module = model
    return tied


def _demand(holds: bool, complaint: str) -> None:
    if not holds:
        raise ConfigError(f"model.{complaint}")
