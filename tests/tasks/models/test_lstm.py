from __future__ import annotations

import pytest
import torch

from spardl.errors import ConfigError
from tasks.models.lstm import LstmLanguageModel


def build(**options) -> LstmLanguageModel:
    sizes = {"vocab_size": 50, "embedding_size": 8, "hidden_size": 8, "num_layers": 2}
    return LstmLanguageModel(**{**sizes, **options})


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_count():
    layer = 4 * 8 * (8 + 8 + 2)
    assert count(build()) == 50 * 8 + 2 * layer + 8 * 50 + 50


def test_tied_weights_are_stored_and_counted_once():
    model = build(tied=True)
    assert model.decoder.weight is model.embedding.weight
    assert count(build()) - count(model) == 50 * 8


def test_tied_weights_need_equal_sizes():
    with pytest.raises(ConfigError, match="hidden_size=16"):
        build(tied=True, hidden_size=16)


def test_a_logit_sees_only_the_past():
    model = build().eval()
    tokens = torch.randint(50, (3, 7))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 50
    first, second = model(tokens), model(changed)
    assert first.shape == (3, 7, 50)
    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.equal(first[:, 4], second[:, 4])


def test_every_call_starts_from_zero_state():
    model = build().eval()
    tokens = torch.randint(50, (2, 5))
    assert torch.equal(model(tokens), model(tokens))


def test_one_layer_builds_without_a_warning():
    assert build(num_layers=1, dropout=0.5)(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 50)
