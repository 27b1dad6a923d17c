"""LSTM, GPT and BERT."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spardl.basics.errors import ConfigError
from tasks.language_modeling import LanguageModeling
from tasks.models.bert import bert_for_pretraining
from tasks.models.gpt import GptLanguageModel
from tasks.models.lstm import LstmLanguageModel
from tasks.models.lstm_classifier import LstmClassifier


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


def build_of_lstm_classifier(**options) -> LstmClassifier:
    return LstmClassifier(**{"vocab_size": 20, "num_classes": 3, "embedding_size": 4, "hidden_size": 5, **options})


def test_parameter_count_of_the_released_program():
    with torch.device("meta"):
        model = LstmClassifier(vocab_size=50_001, num_classes=2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_561_052


@pytest.mark.parametrize("mean_state", [True, False])
def test_padding_makes_no_difference(mean_state):
    model = build_of_lstm_classifier(mean_state=mean_state).eval()
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
    model = build_of_lstm_classifier(mean_state=mean_state).eval()
    tokens = torch.randint(20, (1, 6))
    states, _ = model.lstm(model.embedding(tokens[:, :4]))
    state = states.mean(dim=1) if mean_state else states[:, -1]
    assert torch.allclose(model(tokens, torch.tensor([4])), model.classifier(state), atol=1e-6)


def test_dropout_only_in_training():
    model = build_of_lstm_classifier(dropout=0.5)
    tokens, lengths = torch.randint(20, (4, 9)), torch.full((4,), 9)
    assert not torch.equal(model(tokens, lengths), model(tokens, lengths))
    model.eval()
    assert torch.equal(model(tokens, lengths), model(tokens, lengths))


def test_every_parameter_gets_a_gradient():
    model = build_of_lstm_classifier()
    model(torch.randint(20, (2, 5)), torch.tensor([5, 3])).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


SMALL = {"vocab_size": 50, "context": 12, "hidden_size": 16, "num_layers": 2, "num_heads": 2}


def build_of_gpt(**options) -> GptLanguageModel:
    return GptLanguageModel(**{**SMALL, **options})


def test_the_published_parameter_count():
    with torch.device("meta"):
        model = build_of_gpt(vocab_size=50_257, context=1024, hidden_size=768, num_layers=12, num_heads=12)
    assert count(model) == 124_439_808


def test_an_untied_decoder_has_a_matrix_of_its_own():
    assert count(build_of_gpt(tied=False)) - count(build_of_gpt()) == 50 * 16


def test_gpt_a_logit_sees_only_the_past():
    model = build_of_gpt().eval()
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

    model = build_of_gpt().eval()
    config = type(model.network.config).from_dict({**model.network.config.to_dict(), "activation_function": "gelu_new"})
    own = GPT2LMHeadModel(config).eval()
    own.load_state_dict(model.network.state_dict())
    tokens = torch.randint(50, (3, 12))
    torch.testing.assert_close(model(tokens), own(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_every_parameter_gets_a_gradient(tied):
    model = build_of_gpt(tied=tied)
    model(torch.randint(50, (2, 12))).logsumexp(2).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_dropout_is_everywhere_or_nowhere():
    for dropout in (0.0, 0.25):
        found = [module.p for module in build_of_gpt(dropout=dropout).modules() if isinstance(module, torch.nn.Dropout)]
        assert found == [dropout] * (1 + 3 * 2)


def test_the_same_seed_gives_the_same_weights():
    torch.manual_seed(3)
    first = build_of_gpt()
    torch.manual_seed(3)
    second = build_of_gpt()
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
        build_of_gpt(**options)


def test_a_window_longer_than_the_context_is_refused(tiny_text):
    task = LanguageModeling(None, tiny_text, seq_len=12, eval_context=5)
    model = build_of_gpt(vocab_size=70)
    assert task.loss(model, task.train.batch(torch.tensor([0, 1]), None)).isfinite()
    with pytest.raises(ConfigError, match=r"context must be at least the 17 tokens .* got 12; use .*eval_context=0"):
        task.measure(model, task.test.batch(torch.tensor([0, 1]), None))


def test_learns_a_sentence_by_heart():
    model = build_of_gpt()
    tokens = torch.randint(50, (1, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss < 0.1


BERT_SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 12}


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
    assert bert_for_pretraining(tokens=60, seq_len=12, **BERT_SMALL).config.vocab_size == 60
    assert bert_for_pretraining(tokens=60, seq_len=12, vocab_size=64, **BERT_SMALL).config.vocab_size == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 59}, "vocab_size must be .* got 59"),
        ({"max_positions": 11}, "max_positions must be .* got 11"),
        ({"num_heads": 3}, "num_heads=3"),
    ],
)
def test_bert_misfits_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        bert_for_pretraining(tokens=60, seq_len=12, **{**BERT_SMALL, **options})


@pytest.mark.parametrize("tied", [True, False])
def test_bert_every_parameter_gets_a_gradient(tied):
    model = bert_for_pretraining(tokens=60, seq_len=12, tied=tied, **BERT_SMALL)
    ids = torch.randint(5, 60, (2, 12))
    words, pairs = model(ids, torch.zeros_like(ids), torch.ones_like(ids), torch.rand(2, 12) < 0.5)
    (words.logsumexp(1).sum() + pairs.logsumexp(1).sum()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_equals_transformers_own_scores_at_the_places_asked_for():
    from transformers import BertForPreTraining

    model = bert_for_pretraining(tokens=60, seq_len=12, **BERT_SMALL).eval()
    own = BertForPreTraining(model.config).eval()
    own.load_state_dict(model.state_dict())
    ids, types = torch.randint(5, 60, (3, 12)), torch.randint(2, (3, 12))
    attention = (torch.arange(12) < torch.tensor([[12], [7], [5]])).long()
    places = torch.rand(3, 12) < 0.3
    words, pairs = model(ids, types, attention, places)
    expected = own(ids, token_type_ids=types, attention_mask=attention)
    torch.testing.assert_close(words, expected.prediction_logits[places])
    torch.testing.assert_close(pairs, expected.seq_relationship_logits)
