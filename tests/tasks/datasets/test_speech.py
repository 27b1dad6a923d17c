"""Speech: AN4 and folders of recordings."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import DataError
from tasks.datasets.an4 import an4
from tasks.datasets.speech import (
    ALPHABET,
    BLANK,
    NUM_BINS,
    NUM_LABELS,
    SpeechSplit,
    collate,
    decode,
    encode,
    spectrogram,
)

FORMATS = {".flac": "FLAC", ".wav": "WAV", ".sph": "NIST"}
TRAIN = {"an4_clstk/fash/an1-fash-b": ".flac", "an4_clstk/fash/an2-fash-b": ".wav", "an4_clstk/mblb/an3-mblb-b": ".sph"}
TEST = {"an4test_clstk/fcaw/an4-fcaw-b": ".flac"}


def samples_of(name: str) -> torch.Tensor:
    """Noise of the kind that 16 bits hold exactly, longer by a frame for each next utterance."""
    number = int(name.rpartition("/an")[2][0])
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-9000, 9000, (16000 + 160 * number,), generator=generator).float() / 32768


def record(folder: Path, name: str, suffix: str, samples: torch.Tensor, rate: int = 16000) -> Path:
    path = folder / "wav" / f"{name}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples.numpy(), rate, format=FORMATS[suffix], subtype="PCM_16")
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small AN4 with all three formats."""
    home = tmp_path / "an4"
    (home / "etc").mkdir(parents=True)
    for part, names in (("train", TRAIN), ("test", TEST)):
        for name, suffix in names.items():
            record(home, name, suffix, samples_of(name))
        (home / "etc" / f"an4_{part}.fileids").write_text("\n".join(names) + "\n")
    (home / "etc" / "an4_train.transcription").write_text(
        "<s> YES </s> (an1-fash-b)\n<s> RUBOUT T  SIX </s> (an2-fash-b)\n<s> O'CLOCK </s> (an3-mblb-b)\n"
    )
    (home / "etc" / "an4_test.transcription").write_text("GO (an4-fcaw-b)\n")
    return home


def load(folder: Path):
    return an4(str(folder.parent), str(folder.parent / "cache"))


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "an4" in message
    assert not list(folder.parent.glob("cache/*.safetensors"))
    return message


def test_reads_all_three_formats(folder):
    dataset = load(folder)
    assert (len(dataset.train), len(dataset.test)) == (3, 1)
    for split, names in ((dataset.train, TRAIN), (dataset.test, TEST)):
        batch = split.batch(torch.arange(len(names)), None)
        for row, (length, name) in enumerate(zip(batch["lengths"].tolist(), names, strict=True)):
            expected = spectrogram(samples_of(name))
            assert length == len(expected)
            torch.testing.assert_close(batch["spectrograms"][row, :, :length].t(), expected, rtol=1e-3, atol=1e-3)


def test_texts_lose_their_marks(folder):
    dataset = load(folder)
    assert [decode(labels.tolist()) for labels in dataset.train.labels] == ["YES", "RUBOUT T SIX", "O'CLOCK"]
    assert [decode(labels.tolist()) for labels in dataset.test.labels] == ["GO"]
    assert dataset.caveat is None


def test_the_second_time_nothing_is_decoded(folder, monkeypatch):
    first = load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(soundfile, "SoundFile", None)
        assert torch.equal(load(folder).train.frames, first.train.frames)
    record(folder, "an4_clstk/fash/an2-fash-b", ".wav", torch.rand(32000))
    assert load(folder).train.starts[2] - load(folder).train.starts[1] == 201


def test_another_order_is_another_file_of_the_cache(folder):
    first = load(folder)
    (folder / "etc" / "an4_train.fileids").write_text("\n".join(reversed(TRAIN)))
    second = load(folder)
    assert torch.equal(
        first.train.batch(torch.tensor([0]), None)["spectrograms"],
        second.train.batch(torch.tensor([2]), None)["spectrograms"],
    )
    assert decode(second.train.labels[2].tolist()) == "YES"


def test_the_stand_in_reads_nothing(tmp_path):
    dataset = an4(str(tmp_path / "nowhere"), str(tmp_path / "cache"), stand_in=True)
    assert (dataset.name, len(dataset.train), len(dataset.test)) == ("an4", 948, 130)
    assert dataset.caveat
    assert not list(tmp_path.iterdir())


def test_missing_data_are_reported_in_one_line(tmp_path):
    message = refusal(tmp_path / "an4")
    assert f"an4 is missing: {tmp_path / 'an4'} does not exist; download an4_sphere.tar.gz from http" in message
    assert "SPARDL_DATA" in message
    with pytest.raises(DataError, match=r"download=true cannot fetch it \(no checksum is published\); download"):
        an4(str(tmp_path), str(tmp_path / "cache"), download=True)


def test_download_is_no_fault_if_nothing_is_missing(folder):
    assert len(an4(str(folder.parent), str(folder.parent / "cache"), download=True).test) == 1


def test_a_missing_recording(folder):
    (folder / "wav/an4_clstk/fash/an2-fash-b.wav").unlink()
    assert f"{folder}/wav/an4_clstk/fash/an2-fash-b.sph (or .wav, .flac) is missing" in refusal(folder)


@pytest.mark.parametrize(("name", "suffix"), TRAIN.items())
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_recording_cut_short(folder, name, suffix, kept):
    path = folder / "wav" / f"{name}{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    message = refusal(folder)
    assert message.startswith(f"an4 is damaged: {path} ")
    assert message.endswith("unpack the archive again")


@pytest.mark.parametrize(
    ("samples", "rate", "wrong"),
    [
        (torch.rand(16000), 8000, "has 1 channel(s) at 8000 Hz, expected 1 channel at 16000 Hz"),
        (torch.rand(16000, 2), 16000, "has 2 channel(s) at 16000 Hz"),
        (torch.rand(100), 16000, "has 100 samples, expected at least 320"),
    ],
)
def test_a_recording_of_another_form(folder, samples, rate, wrong):
    path = record(folder, "an4_clstk/fash/an1-fash-b", ".flac", samples, rate)
    assert f"{path} {wrong}" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        (
            "an4_test.transcription",
            b"GO \xc3\x96 (an4-fcaw-b)",
            "an4_test.transcription, line 1, contains 'Ö'",
        ),
        ("an4_test.transcription", b"\nGO", "an4_test.transcription, line 1, must end with the name"),
        ("an4_test.transcription", b"\xff\xfe", "an4_test.transcription cannot be read (not UTF-8)"),
        ("an4_test.transcription", b"", "{folder}/etc/an4_test.transcription has no line for an4-fcaw-b"),
        (
            "an4_test.transcription",
            b"A (an4-fcaw-b)\nB (an5)",
            "an4_test.transcription has a line for an5",
        ),
        ("an4_test.fileids", b"", "{folder}/etc/an4_test.transcription has a line for an4-fcaw-b"),
        ("an4_test.fileids", b"x/y", "has no line for y, but an4_test.fileids lists it"),
    ],
)
def test_lists_that_do_not_fit(folder, file, content, complaint):
    (folder / "etc" / file).write_bytes(content)
    assert complaint.format(folder=folder) in refusal(folder)


def test_an_empty_split(folder):
    for kind in ("fileids", "transcription"):
        (folder / "etc" / f"an4_test.{kind}").write_text("")
    assert f"{folder}/etc/an4_test.fileids is empty" in refusal(folder)


@pytest.mark.parametrize("file", ["an4_train.fileids", "an4_test.transcription"])
def test_a_missing_list(folder, file):
    (folder / "etc" / file).unlink()
    assert f"{folder / 'etc' / file} cannot be read (No such file or directory)" in refusal(folder)


@pytest.mark.data
def test_the_real_an4(tmp_path):
    root = os.environ.get("SPARDL_DATA")
    if root is None:
        pytest.skip("set SPARDL_DATA to a folder that holds an4")
    dataset = an4(root, str(tmp_path))
    assert len(dataset.test) == 130
    assert len(dataset.train) in {316, 948}  # a third of it is enough to test with
    assert decode(dataset.test.labels[0].tolist()) == "RUBOUT G M E F THREE NINE"
    seconds = dataset.test.starts.diff().float() / 100
    assert seconds.sum().item() == pytest.approx(357.0 + 1.3, abs=1.0)
    assert dataset.test.frames.isfinite().all()


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(text):
    labels = encode(text)
    assert labels.dtype == torch.int64
    assert BLANK not in labels
    assert decode(labels.tolist()) == text


def test_the_labels_are_blank_apostrophe_letters_space():
    assert NUM_LABELS == 29
    assert encode("'AZ ").tolist() == [1, 2, 27, 28]
    with pytest.raises(ValueError, match="substring"):
        encode("a")


def test_a_tone_is_loudest_in_its_bin():
    tone = 0.5 * torch.sin(2 * math.pi * 1000 * torch.arange(3200) / 16000)
    frames = spectrogram(tone)
    assert frames.shape == (1 + 3200 // 160, NUM_BINS)
    assert frames.dtype == torch.float32
    assert (frames[2:-2].argmax(dim=1) == 1000 // 50).all()


def test_a_frame_by_hand():
    samples = torch.randn(1600)
    # Frame 3 is centred on sample 480: a periodic Hamming window over samples 320 to 639.
    ramp = torch.arange(320).double()
    window = 0.54 - 0.46 * torch.cos(2 * math.pi * ramp / 320)
    angles = 2 * math.pi * torch.outer(torch.arange(NUM_BINS).double(), ramp) / 320
    parts = [wave(angles) @ (window * samples[320:640]) for wave in (torch.cos, torch.sin)]
    expected = torch.hypot(*parts).log1p()
    frame = spectrogram(samples)[3].double()
    # Normalised, so equal up to a scale and a shift.
    scale = frame.std() / expected.std()
    torch.testing.assert_close(frame - frame.mean(), scale * (expected - expected.mean()), rtol=0, atol=1e-4)


def test_an_utterance_has_mean_zero_and_deviation_one():
    frames = spectrogram(0.01 * torch.randn(8000))
    assert frames.mean().item() == pytest.approx(0, abs=1e-4)
    assert frames.std().item() == pytest.approx(1, rel=1e-4)


def test_silence_is_no_fault():
    assert (spectrogram(torch.zeros(1600)) == 0).all()


def test_utterances_are_padded_to_the_longest():
    batch = collate([torch.ones(3, 2), 2 * torch.ones(5, 2)], [torch.tensor([4, 5]), torch.tensor([6])])
    assert batch["spectrograms"].shape == (2, 2, 5)
    assert batch["spectrograms"].sum(dim=1).tolist() == [[2, 2, 2, 0, 0], [4, 4, 4, 4, 4]]
    assert batch["lengths"].tolist() == [3, 5]
    assert batch["targets"].tolist() == [[4, 5], [6, 0]]
    assert batch["target_lengths"].tolist() == [2, 1]


@pytest.fixture
def split() -> SpeechSplit:
    """Three utterances of 4, 2 and 7 frames."""
    starts = torch.tensor([0, 4, 6, 13])
    return SpeechSplit(torch.randn(13, NUM_BINS).half(), starts, [encode(text) for text in ("YES", "NO", "GO ON")])


def test_a_split_hands_out_what_was_asked_for(split):
    batch = split.batch(torch.tensor([2, 1]), None)
    assert len(split) == 3
    assert batch["spectrograms"].dtype == torch.float32
    assert torch.equal(batch["spectrograms"][0].t(), split.frames[6:13].float())
    assert torch.equal(batch["spectrograms"][1].t()[:2], split.frames[4:6].float())
    assert batch["lengths"].tolist() == [7, 2]
    assert [decode(row[:n].tolist()) for row, n in zip(batch["targets"], batch["target_lengths"], strict=True)] == [
        "GO ON",
        "NO",
    ]


def test_a_batch_is_a_function_of_its_indices(split):
    before = torch.get_rng_state()
    first = split.batch(torch.tensor([0, 2]), torch.Generator().manual_seed(1))
    second = split.batch(torch.tensor([0, 2]), None)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(before, torch.get_rng_state())
