from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spardl.basics.errors import ConfigError
from tasks.language_modeling import LanguageModeling
from tasks.models.gpt import GptLanguageModel

SMALL = {"vocab_size": 50, "context": 12, "hidden_size": 16, "num_layers": 2, "num_heads": 2}


def build(**options) -> GptLanguageModel:
    return GptLanguageModel(**{**SMALL, **options})


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_published_parameter_count():
    with torch.device("meta"):
        model = build(vocab_size=50_257, context=1024, hidden_size=768, num_layers=12, num_heads=12)
    assert count(model) == 124_439_808


def test_an_untied_decoder_has_a_matrix_of_its_own():
    assert count(build(tied=False)) - count(build()) == 50 * 16


def test_a_logit_sees_only_the_past():
    model = build().eval()
    tokens = torch.randint(50, (3, 7))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 50
    first, second = model(tokens), model(changed)
    assert first.shape == (3, 7, 50)
    torch.testing.assert_close(first[:, :4], second[:, :4])
    assert not torch.allclose(first[:, 4], second[:, 4])


def test_equals_the_published_network():
    """Which has GELU in another form."""
    from transformers import GPT2LMHeadModel

    model = build().eval()
    config = type(model.network.config).from_dict({**model.network.config.to_dict(), "activation_function": "gelu_new"})
    own = GPT2LMHeadModel(config).eval()
    own.load_state_dict(model.network.state_dict())
    tokens = torch.randint(50, (3, 12))
    torch.testing.assert_close(model(tokens), own(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_gets_a_gradient(tied):
    model = build(tied=tied)
    model(torch.randint(50, (2, 12))).logsumexp(2).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_dropout_is_everywhere_or_nowhere():
    for dropout in (0.0, 0.25):
        found = [module.p for module in build(dropout=dropout).modules() if isinstance(module, torch.nn.Dropout)]
        assert found == [dropout] * (1 + 3 * 2)


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(3)
    first = build()
    torch.manual_seed(3)
    second = build()
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 3}, "model.hidden_size must be a multiple of num_heads=3, got 16"),
        ({"lanes": 4}, "task.lanes=4 has no effect.* use task.lanes=null"),
    ],
)
def test_misfits_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build(**options)


def test_a_window_longer_than_the_context_is_refused(tiny_text):
    task = LanguageModeling(None, tiny_text, seq_len=12, eval_context=5)
    model = build(vocab_size=70)
    assert task.loss(model, task.train.batch(torch.tensor([0, 1]), None)).isfinite()
    with pytest.raises(ConfigError, match=r"context must be at least the 17 tokens .* got 12; use .*eval_context=0"):
        task.measure(model, task.test.batch(torch.tensor([0, 1]), None))


def test_learns_a_sentence_by_heart():
    model = build()
    tokens = torch.randint(50, (1, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss < 0.1
