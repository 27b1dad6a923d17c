from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from tasks.models.deepspeech import DeepSpeech

BINS = 21


def build(**options) -> DeepSpeech:
    sizes = {"hidden_size": 8, "num_layers": 2, "channels": 2, "context": 4}
    return DeepSpeech(num_labels=5, num_bins=BINS, **{**sizes, **options})


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def padded(utterances, time: int, filling: float = 0.0) -> torch.Tensor:
    """Puts utterances (bins, frames) into a batch of so many frames."""
    return torch.stack([torch.nn.functional.pad(item, (0, time - item.shape[1]), value=filling) for item in utterances])


def test_the_default_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = DeepSpeech(num_labels=29, num_bins=161)
    assert count(model.lstms) == 27_270_400
    assert count(model.convolutions) == 251_168
    assert count(model.lookahead) == 16_800
    assert count(model) == 27_569_568


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), more=st.integers(0, 20))
def test_padding_cannot_be_seen(lengths, more):
    model = build(channels=1).double().eval()
    utterances = [torch.randn(BINS, length).double() for length in lengths]
    far = padded(utterances, max(lengths) + more, filling=9.0)
    with torch.no_grad():
        together, counts = model(far, torch.tensor(lengths))
        for row, utterance in enumerate(utterances):
            alone, length = model(utterance.unsqueeze(0), torch.tensor(lengths[row : row + 1]))
            assert counts[row] == length == alone.shape[1]
            torch.testing.assert_close(together[row, :length], alone[0])


def test_padding_cannot_be_seen_in_training_either():
    """Batch statistics, too, are of real frames only."""
    model = build().double()
    utterances = [torch.randn(BINS, length).double() for length in (30, 17)]
    lengths = torch.tensor([30, 17])
    results = []
    for time, filling in ((30, 0.0), (47, 9.0)):
        model.zero_grad()
        for norm in model.modules():
            if isinstance(norm, torch.nn.BatchNorm1d):
                norm.reset_running_stats()
        logits, counts = model(padded(utterances, time, filling), lengths)
        sum(logits[row, : counts[row]].pow(2).sum() for row in range(2)).backward()
        results.append([*(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_logit_sees_so_far_ahead_and_no_further():
    model = build().double().eval()
    sound = torch.randn(1, BINS, 200).double()
    changed = sound.clone()
    changed[:, :, 180:] += 1
    with torch.no_grad():
        first, second = (model(frames, torch.tensor([200]))[0] for frames in (sound, changed))
    # A frame of the second convolution sees 5 of the first to each side, these see 2t - 5 to 2t + 5.
    earliest = (180 - 5 + 1) // 2 - 5 - model.context
    torch.testing.assert_close(first[:, :earliest], second[:, :earliest], rtol=0, atol=1e-12)
    assert (first[:, earliest] - second[:, earliest]).abs().max() > 1e-9


def test_lookahead_by_hand():
    """With one layer, the convolution's weights are those of the present and the next frames."""
    model = build(num_layers=1).eval()
    model.lookahead.weight.data = torch.arange(5.0).expand(8, 1, 5).contiguous()
    frames = torch.nn.functional.pad(torch.rand(1, 6, 8), (0, 0, 0, 4))
    found = model.lookahead(frames.transpose(1, 2)).transpose(1, 2)
    expected = [sum(j * frames[0, t + j] for j in range(5)) for t in range(6)]
    torch.testing.assert_close(found[0], torch.stack(expected))


@pytest.mark.parametrize(("strides", "frames"), [((2, 1), 10), ((2, 2), 5), ((1, 1), 19)])
def test_strides_shorten_time(strides, frames):
    logits, lengths = build(time_strides=strides)(torch.randn(2, BINS, 19), torch.tensor([19, 1]))
    assert logits.shape == (2, frames, 5)
    assert lengths.tolist() == [frames, 1]


def test_activations_are_clipped():
    """What follows the convolutions and the lookahead is between 0 and 20, and both ends are reached."""
    model = build(num_layers=1).eval()
    for module in (model.convolutions[1].convolution, model.lookahead):
        module.weight.data *= 1000  # their inputs are small
    heard = []
    model.lstms[0].register_forward_pre_hook(lambda module, args: heard.append(args[0]))
    model.norms[-1].register_forward_pre_hook(lambda module, args: heard.append(args[0]))
    model(torch.randn(1, BINS, 30), torch.tensor([30]))
    assert len(heard) == 2
    for activations in heard:
        assert (activations.min(), activations.max()) == (0, 20)


def test_it_takes_a_layer():
    with pytest.raises(ConfigError, match="num_layers must be at least 1, got 0"):
        build(num_layers=0)
