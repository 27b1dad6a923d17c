"""Data set AN4: recordings of spelled names, numbers, dates and commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spardl.basics.errors import DataError
from spardl.basics.files import read_text
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.speech import ALPHABET, SAMPLE_RATE, SHORTEST, SpeechDataset, SpeechSplit, encode, spectrogram
from tasks.datasets.synthetic_speech import tone_speech

__all__ = ["an4"]

HOME = "http://www.speech.cs.cmu.edu/databases/an4/"
SUFFIXES = (".sph", ".wav", ".flac")
TRAIN, TEST = 948, 130  # utterances of the whole data set
RECIPE = 1  # of the cached spectrograms; a change of the recipe needs another number
TRANSCRIPT = re.compile(r"(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()]+)\)")


@dataclass(frozen=True)
class _Utterance:
    name: str
    path: Path
    labels: Tensor


def an4(root: str, cache: str, download: bool = False, stand_in: bool = False) -> SpeechDataset:
    """Loads AN4: 948 training and 130 test utterances of one to six seconds, or the part of them that the folder lists.

    Args:
        root: Folder that contains the folder ``an4`` with ``etc/an4_{train,test}.{fileids,transcription}``, and with
            recordings in ``wav``: SPHERE, WAV or FLAC files with one channel of 16 kHz.
        cache: Folder in which the spectrograms are cached in float16: 32 kB per second of speech.
        download: Not supported, because no checksum of the files is published; an error if ``an4`` is missing.
        stand_in: Whether to generate tones instead, as placeholder data with the same number of utterances.

    Returns:
        Data set of spectrograms and transcripts.

    Raises:
        DataError: If a file is missing, damaged, or in another format.

    Source: Acero: Acoustical and Environmental Robustness in Automatic Speech Recognition, PhD thesis, CMU, 1990.
    """
    if stand_in:
        return tone_speech("an4", TRAIN, TEST)
    folder = Path(root).expanduser() / "an4"
    if not folder.is_dir():
        raise DataError(_how_to_get(folder, download))
    parts = {part: _utterances(folder, part) for part in ("train", "test")}
    everything = [utterance for part in parts.values() for utterance in part]
    key = {
        "recipe": RECIPE,
        "utterances": [(part, utterance.name) for part, found in parts.items() for utterance in found],
        "files": fingerprint(utterance.path for utterance in everything),
    }
    frames = cached(cache, "an4", key, lambda: _all_frames(parts))
    train, test = (_split(frames, part, found) for part, found in parts.items())
    return SpeechDataset("an4", train, test)


def _how_to_get(folder: Path, download: bool) -> str:
    refused = ", and dataset.download=true cannot fetch it (no checksum is published)" if download else ""
    return (
        f"an4 is missing: {folder.absolute()} does not exist{refused}; download an4_sphere.tar.gz from {HOME} and "
        f"unpack it in {folder.parent.absolute()}, or set SPARDL_DATA (data_dir) to the folder that contains an4"
    )


def _utterances(folder: Path, part: str) -> list[_Utterance]:
    """Returns the utterances that the lists of a split name."""
    texts = _transcripts(folder / "etc" / f"an4_{part}.transcription")
    names = [line.strip() for line in _lines(folder / "etc" / f"an4_{part}.fileids")]
    found = [_utterance(folder, name, texts.pop(name.rpartition("/")[2], None), part) for name in names]
    if texts:
        raise DataError(
            f"an4 is damaged: {folder}/etc/an4_{part}.transcription has a line for {next(iter(texts))}, but "
            f"an4_{part}.fileids does not list it; unpack the archive again"
        )
    if not found:
        raise DataError(f"an4 is damaged: {folder}/etc/an4_{part}.fileids is empty; unpack the archive again")
    return found


def _utterance(folder: Path, name: str, text: str | None, part: str) -> _Utterance:
    if text is None:
        raise DataError(
            f"an4 is damaged: {folder}/etc/an4_{part}.transcription has no line for {name.rpartition('/')[2]}, but "
            f"an4_{part}.fileids lists it; unpack the archive again"
        )
    for suffix in SUFFIXES:
        path = folder / "wav" / f"{name}{suffix}"
        if path.exists():
            return _Utterance(name, path, encode(text))
    raise DataError(
        f"an4 is damaged: {folder}/wav/{name}{SUFFIXES[0]} (or {', '.join(SUFFIXES[1:])}) is missing, but "
        f"etc/an4_{part}.fileids lists it; unpack the archive again"
    )


def _transcripts(path: Path) -> dict[str, str]:
    """Returns the transcripts by the last part of the utterance's name, without marks of begin and end."""
    texts = {}
    for number, line in enumerate(_lines(path), 1):
        match = TRANSCRIPT.fullmatch(line.strip())
        if match is None:
            raise DataError(
                f"an4 is damaged: {path}, line {number}, must end with the name of an utterance in parentheses; "
                "unpack the archive again"
            )
        text = " ".join(match["text"].upper().split())
        strange = sorted(set(text) - set(ALPHABET))
        if strange:
            raise DataError(
                f"an4 cannot be used: {path}, line {number}, contains {strange[0]!r}, but transcripts may contain only "
                "A to Z, apostrophes and spaces; replace this character"
            )
        texts[match["id"]] = text
    return texts


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file that are not empty."""
    try:
        return [line for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "not UTF-8"
        raise DataError(f"an4 is damaged: {path} cannot be read ({reason}); unpack the archive again") from fault


def _all_frames(parts: dict[str, list[_Utterance]]) -> dict[str, Tensor]:
    """Returns the spectrograms of each split, one after the other, and the start of each."""
    result = {}
    for part, utterances in parts.items():
        # Normalised values of a few units: float16 keeps them to three digits.
        spectrograms = [spectrogram(_samples(utterance.path)).half() for utterance in utterances]
        result[f"{part}_frames"] = torch.cat(spectrograms)
        result[f"{part}_starts"] = torch.tensor([0, *(len(item) for item in spectrograms)]).cumsum(0)
    return result


def _split(frames: dict[str, Tensor], part: str, utterances: Sequence[_Utterance]) -> SpeechSplit:
    labels = [utterance.labels for utterance in utterances]
    return SpeechSplit(frames[f"{part}_frames"], frames[f"{part}_starts"], labels)


def _samples(path: Path) -> Tensor:
    """Returns the samples of a recording: float32, between -1 and 1."""
    import soundfile  # noqa: PLC0415

    try:
        with soundfile.SoundFile(path) as file:
            rate, channels, promised = file.samplerate, file.channels, _promised(path, file.extra_info, file.frames)
            samples = torch.from_numpy(file.read(dtype="float32"))
    except (OSError, soundfile.SoundFileError) as fault:
        reason = " ".join(str(fault).split())
        raise DataError(f"an4 is damaged: {path} cannot be read ({reason}); unpack the archive again") from fault
    if (rate, channels) != (SAMPLE_RATE, 1):
        raise DataError(
            f"an4 cannot be used: {path} has {channels} channel(s) at {rate} Hz, expected 1 channel at {SAMPLE_RATE} "
            "Hz; convert the file"
        )
    if len(samples) != promised or len(samples) < SHORTEST:
        raise DataError(
            f"an4 is damaged: {path} has {len(samples)} samples, expected at least {max(promised, SHORTEST)}; "
            "unpack the archive again"
        )
    return samples


def _promised(path: Path, remarks: str, frames: int) -> int:
    """Returns the number of samples in the header; the audio library does not detect truncated files."""
    with path.open("rb") as file:
        sphere = re.search(rb"\nsample_count -i (\d+)\n", file.read(1024))
    riff = re.search(r"^data : (\d+) \(should be", remarks, re.MULTILINE)
    if riff:
        return int(riff[1]) // 2
    return int(sphere[1]) if sphere else frames
