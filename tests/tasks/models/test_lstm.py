from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
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


def carrying(**options) -> LstmLanguageModel:
    return build(lanes=2, dropout=0.0, **options)


def test_a_row_goes_on_from_its_state():
    """Two halves of a text, one after the other, give the logits of the whole."""
    model = carrying()
    tokens = torch.randint(50, (2, 8))
    whole = build_like(model)(tokens)
    first = model(tokens[:, :4], torch.tensor([3, 7]))
    second = model(tokens[:, 4:], torch.tensor([4, 8]))
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


def build_like(model: LstmLanguageModel) -> LstmLanguageModel:
    twin = build(dropout=0.0)
    twin.load_state_dict(model.state_dict())
    return twin


def test_a_row_that_jumps_starts_from_zero():
    model = carrying()
    tokens = torch.randint(50, (2, 4))
    model(tokens, torch.tensor([0, 5]))
    logits = model(tokens, torch.tensor([1, 5]))
    fresh = build_like(model)(tokens)
    assert not torch.equal(logits[0], fresh[0])
    torch.testing.assert_close(logits[1], fresh[1])


def test_no_gradient_reaches_the_window_before():
    model = carrying()
    tokens = torch.randint(50, (2, 4))
    model(tokens, torch.tensor([0, 5]))
    model(tokens, torch.tensor([1, 6])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.hidden.requires_grad


def test_evaluation_neither_uses_nor_changes_the_states():
    model = carrying()
    tokens = torch.randint(50, (2, 4))
    model(tokens, torch.tensor([0, 5]))
    before = [buffer.clone() for buffer in model.buffers()]
    model.eval()
    assert torch.equal(model(tokens, torch.tensor([1, 6])), build_like(model).eval()(tokens))
    assert all(torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))


def test_states_are_the_workers_own_and_no_weights():
    assert "hidden" not in carrying().state_dict()
    assert {name for name, _ in carrying().named_buffers()} == {"hidden", "cell", "window"}


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(ConfigError, match="lanes=2 rows, but a batch has 3 rows"):
        carrying()(torch.randint(50, (3, 4)), torch.tensor([0, 1, 2]))
