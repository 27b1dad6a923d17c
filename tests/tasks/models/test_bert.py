from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.models.bert import bert_for_pretraining

SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 12}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"vocab_size": 30522}, 110_106_428),
        ({"vocab_size": 30522, "tied": False}, 133_547_324),
        ({"vocab_size": 30528}, 110_111_042),
        (
            {
                "vocab_size": 30528,
                "hidden_size": 1024,
                "num_layers": 24,
                "num_heads": 16,
                "intermediate_size": 4096,
            },
            336_232_258,
        ),
    ],
)
def test_published_parameter_counts(options, parameters):
    with torch.device("meta"):
        model = bert_for_pretraining(tokens=4000, seq_len=128, **options)
    assert count(model) == parameters


def test_vocabulary_follows_the_data_unless_it_is_set():
    assert bert_for_pretraining(tokens=60, seq_len=12, **SMALL).config.vocab_size == 60
    assert bert_for_pretraining(tokens=60, seq_len=12, vocab_size=64, **SMALL).config.vocab_size == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 59}, "vocab_size must be .* got 59"),
        ({"max_positions": 11}, "max_positions must be .* got 11"),
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
    words, pairs = model(ids, torch.zeros_like(ids), torch.ones_like(ids), torch.rand(2, 12) < 0.5)
    (words.logsumexp(1).sum() + pairs.logsumexp(1).sum()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_equals_transformers_own_scores_at_the_places_asked_for():
    from transformers import BertForPreTraining

    model = bert_for_pretraining(tokens=60, seq_len=12, **SMALL).eval()
    own = BertForPreTraining(model.config).eval()
    own.load_state_dict(model.state_dict())
    ids, types = torch.randint(5, 60, (3, 12)), torch.randint(2, (3, 12))
    attention = (torch.arange(12) < torch.tensor([[12], [7], [5]])).long()
    places = torch.rand(3, 12) < 0.3
    words, pairs = model(ids, types, attention, places)
    expected = own(ids, token_type_ids=types, attention_mask=attention)
    torch.testing.assert_close(words, expected.prediction_logits[places])
    torch.testing.assert_close(pairs, expected.seq_relationship_logits)
