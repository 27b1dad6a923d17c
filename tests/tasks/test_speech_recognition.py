from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from tasks.datasets.speech import NUM_BINS, NUM_LABELS, SpeechDataset, SpeechSplit, encode
from tasks.datasets.synthetic_speech import tone_speech
from tasks.models.deepspeech import DeepSpeech
from tasks.speech_recognition import SpeechRecognition, greedy_texts

TEXTS = ("GO", "YES NO", "I'M A B C")


class Fixed(torch.nn.Module):
    """Gives the same logits, whatever it hears, as long as the spectrograms' real frames."""

    def __init__(self, logits, dtype=torch.float32):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.to(dtype))

    def forward(self, spectrograms, lengths):
        assert spectrograms.dtype == self.logits.dtype
        return self.logits[:, : spectrograms.shape[2]], lengths


def one_hot(paths) -> torch.Tensor:
    """Logits whose best labels are the given ones; ``_`` is blank; shorter paths go on with blanks."""
    labels = [[0 if character == "_" else encode(character).item() for character in path] for path in paths]
    longest = max(map(len, labels))
    rows = torch.tensor([row + [0] * (longest - len(row)) for row in labels])
    return 5 * torch.nn.functional.one_hot(rows, NUM_LABELS).float()


def dataset_of(texts, frames=20) -> SpeechDataset:
    starts = frames * torch.arange(len(texts) + 1)
    split = SpeechSplit(torch.randn(frames * len(texts), NUM_BINS), starts, [encode(text) for text in texts])
    return SpeechDataset("tiny", split, split)


def measured(said, written) -> dict[str, float]:
    """The sums over a batch in which ``written`` was heard for ``said``."""
    task = SpeechRecognition(None, dataset_of(said))
    # A blank after every character keeps double ones apart.
    model = Fixed(one_hot(["".join(f"{character}_" for character in text).ljust(20, "_") for text in written]))
    sums = task.measure(model, task.test.batch(torch.arange(len(said)), None))
    assert sums.dtype == torch.float64
    return dict(zip(task.sums, sums.tolist(), strict=True))


@pytest.fixture(scope="module")
def tones() -> SpeechDataset:
    return tone_speech("an4", 200, 40)


SMALL = partial(DeepSpeech, hidden_size=16, num_layers=2, channels=2, context=2)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("____", ""),
        ("GGOO", "GO"),
        ("_G_O", "GO"),
        ("SEE_E", "SEE"),
        ("SEEE", "SE"),
        ("A  B", "A B"),
        ("A _ ", "A  "),
    ],
)
def test_repetitions_merge_and_blanks_vanish(path, text):
    assert greedy_texts(one_hot([path]), torch.tensor([len(path)])) == [text]


def test_frames_after_the_end_do_not_count():
    assert greedy_texts(one_hot(["GOGO", "YYES"]), torch.tensor([2, 4])) == ["GO", "YES"]


@pytest.mark.parametrize(
    ("said", "written", "word_edits", "character_edits"),
    [
        ("YES NO", "YES NO", 0, 0),
        ("YES NO", "YES GO", 1, 1),  # substitution
        ("YES NO", "YES", 1, 3),  # deletion
        ("YES NO", "YES A NO", 1, 2),  # insertion
        ("YES NO", "", 2, 6),  # nothing
        ("YES NO", "NO YES", 2, 6),
        ("YES NO", "YESNO", 2, 1),  # one word for two: a substitution and a deletion
        ("GO", "G O", 2, 1),  # more words than were said
    ],
)
def test_edits_by_hand(said, written, word_edits, character_edits):
    sums = measured([said], [written])
    assert (sums["word_edits"], sums["words"]) == (word_edits, len(said.split()))
    assert (sums["character_edits"], sums["characters"]) == (character_edits, len(said))
    assert sums["utterances"] == 1


def test_rates_are_of_the_whole_split_not_means_of_utterances():
    task = SpeechRecognition(None, dataset_of(TEXTS))
    sums = measured(TEXTS, ("NO", "YES NO", "A B C"))
    figures = task.summarize(sums)
    assert figures["wer"] == 2 / 7  # not (1/1 + 0/2 + 1/4) / 3
    assert figures["cer"] == (1 + 4) / (2 + 6 + 9)
    assert figures["loss"] == sums["loss"] / 3
    assert task.metric in figures
    assert not task.higher_is_better


def test_an_empty_hypothesis_has_a_rate_of_one():
    figures = SpeechRecognition(None, dataset_of(TEXTS)).summarize(measured(TEXTS, ("", "", "")))
    assert (figures["wer"], figures["cer"]) == (1.0, 1.0)


@settings(max_examples=25)
@given(st.lists(st.text("AB ", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_batches_add_up(said, data):
    written = [data.draw(st.text("AB ", max_size=6)) for _ in said]
    whole = measured(said, written)
    parts = [measured([one], [other]) for one, other in zip(said, written, strict=True)]
    assert whole == pytest.approx({name: sum(part[name] for part in parts) for name in whole})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_is_that_of_all_paths_to_the_text(dtype):
    """By enumeration: labels blank, A and B at four frames, the text AB, and alone for the second utterance A."""
    texts = ("AB", "A")
    labels = (0, 2, 3)  # blank, A, B
    logits = torch.full((2, 4, NUM_LABELS), -math.inf)
    logits[:, :, labels] = torch.randn(2, 4, 3)
    scores = logits.double().log_softmax(2)
    likelihoods = []
    for row, text in enumerate(texts):
        paths = torch.tensor(list(itertools.product(labels, repeat=4)))
        hits = [path for path in paths if greedy_texts(torch.eye(NUM_LABELS)[path][None], torch.tensor([4])) == [text]]
        likelihoods.append(sum(scores[row, range(4), path].sum().exp() for path in hits))
    task = SpeechRecognition(None, dataset_of(texts, frames=4))
    batch = task.train.batch(torch.arange(2), None)
    expected = -sum(likelihood.log().item() for likelihood in likelihoods)
    logits = logits.clamp(min=-1e4)  # no infinities in a parameter
    assert task.loss(Fixed(logits, dtype), batch).item() == pytest.approx(expected / 2, rel=1e-5)
    assert task.measure(Fixed(logits, dtype), batch)[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_text_that_cannot_fit_counts_nothing():
    task = SpeechRecognition(None, dataset_of(("AB", "YES NO"), frames=4))
    model = Fixed(torch.randn(2, 4, NUM_LABELS))
    loss = task.loss(model, task.train.batch(torch.arange(2), None))
    loss.backward()
    assert loss.isfinite()
    assert (model.logits.grad[1] == 0).all()
    assert (model.logits.grad[0] != 0).any()


def test_half_precision_and_double_precision_give_the_same_loss(tones):
    task = SpeechRecognition(SMALL, tones)
    model = task.build_model().eval()
    batch = task.train.batch(torch.arange(6), None)
    expected = task.loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = task.loss(model, batch)
        rough.backward()
        assert task.measure(model, batch)[0].item() == pytest.approx(6 * expected.item(), rel=0.05)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(expected.item(), rel=0.05)
    exact = task.loss(model.double(), batch)
    exact.backward()
    assert exact.dtype == torch.float64
    assert exact.item() == pytest.approx(expected.item(), rel=1e-4)


def test_half_precision_model_has_float32_loss():
    task = SpeechRecognition(None, dataset_of(TEXTS))
    logits = torch.randn(3, 20, NUM_LABELS).bfloat16()
    batch = task.train.batch(torch.arange(3), None)
    loss = task.loss(Fixed(logits, torch.bfloat16), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(task.loss(Fixed(logits), batch).item(), rel=1e-6)


def test_measure_needs_no_gradients(tones):
    task = SpeechRecognition(SMALL, tones)
    assert not task.measure(task.build_model(), task.test.batch(torch.arange(2), None)).requires_grad


def test_the_model_is_built_for_the_data(tones):
    asked = {}
    SpeechRecognition(lambda **data: asked.update(data), tones).build_model()
    assert asked == {"num_labels": 29, "num_bins": 161}


def test_pictures_are_refused(tiny_images):
    with pytest.raises(ConfigError, match="dataset=tiny contains images; use dataset=an4"):
        SpeechRecognition(None, tiny_images)


@pytest.mark.slow
def test_it_learns_to_read_tones(tones):
    model_of = partial(DeepSpeech, hidden_size=48, num_layers=1, channels=4, context=4)
    task = SpeechRecognition(model_of, tones)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for indices in torch.randint(len(task.train), (120, 16)):
        optimizer.zero_grad()
        task.loss(model, task.train.batch(indices, None)).backward()
        optimizer.step()
    sums = task.measure(model.eval(), task.test.batch(torch.arange(len(task.test)), None))
    assert task.summarize(dict(zip(task.sums, sums.tolist(), strict=True)))["wer"] < 0.5
