from __future__ import annotations

import pytest
import torch

from spardl.errors import ConfigError
from tasks.models.bert import bert_for_pretraining

SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 12}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("tied", "parameters"), [(True, 110_106_428), (False, 133_547_324)])
def test_bert_base_parameter_counts(tied, parameters):
    with torch.device("meta"):
        model = bert_for_pretraining(tokens=4000, seq_len=128, vocab_size=30522, tied=tied)
    assert count(model) == parameters


def test_vocabulary_follows_the_data_unless_it_is_set():
    assert bert_for_pretraining(tokens=60, seq_len=12, **SMALL).config.vocab_size == 60
    assert bert_for_pretraining(tokens=60, seq_len=12, vocab_size=64, **SMALL).config.vocab_size == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 59}, "vocab_size=59"),
        ({"max_positions": 11}, "max_positions=11"),
        ({"num_heads": 3}, "num_heads=3"),
    ],
)
def test_misfits_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        bert_for_pretraining(tokens=60, seq_len=12, **{**SMALL, **options})


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient(tied):
    model = bert_for_pretraining(tokens=60, seq_len=12, tied=tied, **SMALL)
    ids = torch.randint(5, 60, (2, 12))
    output = model(
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        attention_mask=torch.ones_like(ids),
        labels=ids,
        next_sentence_label=torch.tensor([0, 1]),
    )
    output.loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
