from __future__ import annotations

import pytest
import torch

from tasks.models.lstm_classifier import LstmClassifier


def build(**options) -> LstmClassifier:
    return LstmClassifier(**{"vocab_size": 20, "num_classes": 3, "embedding_size": 4, "hidden_size": 5, **options})


def test_parameter_count_of_the_released_program():
    with torch.device("meta"):
        model = LstmClassifier(vocab_size=50_001, num_classes=2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_561_052


@pytest.mark.parametrize("mean_state", [True, False])
def test_padding_makes_no_difference(mean_state):
    model = build(mean_state=mean_state).eval()
    tokens, lengths = torch.randint(20, (4, 9)), torch.tensor([9, 1, 4, 6])
    logits = model(tokens, lengths)
    assert logits.shape == (4, 3)
    for row, length in enumerate(lengths.tolist()):
        assert torch.allclose(model(tokens[row : row + 1, :length], lengths[row : row + 1])[0], logits[row], atol=1e-6)
        changed = tokens.clone()
        changed[row, length:] = (changed[row, length:] + 1) % 20
        assert torch.equal(model(changed, lengths), logits)
        changed[row, length - 1] = (changed[row, length - 1] + 1) % 20
        assert not torch.equal(model(changed, lengths)[row], logits[row])


@pytest.mark.parametrize("mean_state", [True, False])
def test_the_state_that_counts(mean_state):
    model = build(mean_state=mean_state).eval()
    tokens = torch.randint(20, (1, 6))
    states, _ = model.lstm(model.embedding(tokens[:, :4]))
    state = states.mean(dim=1) if mean_state else states[:, -1]
    assert torch.allclose(model(tokens, torch.tensor([4])), model.classifier(state), atol=1e-6)


def test_dropout_only_in_training():
    model = build(dropout=0.5)
    tokens, lengths = torch.randint(20, (4, 9)), torch.full((4,), 9)
    assert not torch.equal(model(tokens, lengths), model(tokens, lengths))
    model.eval()
    assert torch.equal(model(tokens, lengths), model(tokens, lengths))


def test_every_parameter_gets_a_gradient():
    model = build()
    model(torch.randint(20, (2, 5)), torch.tensor([5, 3])).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
