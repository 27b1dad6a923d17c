"""What was submitted: one folder for each submission, with a record that is written as a whole."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically

__all__ = ["ADDED", "Entry", "Submission", "find_submission", "near", "new_submission"]

# What every job's words have besides those that were typed. A job is one run, even of a configuration that is a sweep.
ADDED = ("resume=auto", "hydra.mode=RUN")
_FOLDER, _RECORD = ".submissions", "submission.json"


@dataclass(frozen=True)
class Entry:
    """One run of a submission.

    Attributes:
        words: for train.py.
        id: the run's id.
        tasks: processes to start; see :class:`~scripts.submission.sweeps.Planned`.
        job: who runs it: Slurm's job id, or a number; ``None`` while nobody does.
        log: what it prints; relative to the submission's folder.
    """

    words: tuple[str, ...]
    id: str
    tasks: int
    job: str | None = None
    log: str | None = None


@dataclass(frozen=True)
class Submission:
    """Runs that were submitted together.

    Attributes:
        folder: its own, with the logs.
        place: who runs them: a key of ``PLACES``.
        outputs: where the runs' folders are.
        since: seconds since 1970 when it was made.
        force: whether runs that had been finished before run again.
        site: the settings, as plain data.
        entries: the runs.
    """

    folder: Path
    place: str
    outputs: Path
    since: float
    force: bool
    site: dict[str, Any]
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The folder's name, by which commands find the submission."""
        return self.folder.name

    @property
    def headline(self) -> str:
        """What a user is told of it first."""
        return f"submission {self.name}: logs in {near(self.folder)}"

    def log(self, entry: Entry) -> Path | None:
        """The file that a run's output goes to."""
        return self.folder / entry.log if entry.log else None

    def label(self, entry: Entry) -> str:
        """The words in which a run differs from the others; all that were typed, if it is the only one."""
        alike = set.intersection(*(set(other.words) for other in self.entries))
        kept = alike & set(ADDED) if len(self.entries) == 1 else alike
        return " ".join(word for word in entry.words if word not in kept)

    def with_entries(self, entries: Sequence[Entry]) -> Submission:
        """The same with other entries, written down."""
        changed = replace(self, entries=tuple(entries))
        changed.write()
        return changed

    def discard(self) -> None:
        """Forgets it: nobody took it over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        """Writes the record."""
        content = {**asdict(self), "folder": None, "outputs": str(self.outputs)}
        write_atomically(self.folder / _RECORD, (json.dumps(content, indent=2) + "\n").encode())


def new_submission(
    outputs: Path, place: str, force: bool, site: dict[str, Any], entries: Sequence[Entry]
) -> Submission:
    """Makes a folder that no other submission has, and writes the record.

    Raises:
        ConfigError: if the folder cannot be made.
    """
    since = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(since))
    number = 1
    while True:
        folder = outputs / _FOLDER / (stamp + (f"-{number}" if number > 1 else ""))
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            if not folder.is_dir():
                raise ConfigError(f"output_dir={outputs} is not a folder; name another") from None
        except OSError as error:
            raise ConfigError(f"cannot write to output_dir={outputs} ({error.strerror}); name another") from error
    made = Submission(folder, place, outputs, since, force, site, tuple(entries))
    made.write()
    return made


def near(path: Path) -> Path:
    """A path as short as it can be typed here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_submission(outputs: Path, name: str | None) -> Submission:
    """Reads a submission's record.

    Args:
        outputs: where the runs are.
        name: of its folder; ``None`` for the newest.

    Raises:
        ConfigError: if there is none, or its record is broken.
    """
    root = outputs / _FOLDER
    names = sorted((path.parent for path in root.glob(f"*/{_RECORD}")), key=lambda folder: folder.stat().st_mtime_ns)
    if not names:
        raise ConfigError(f"nothing was submitted to {outputs}; name another folder with --outputs")
    folder = root / name if name else max(names, key=_since)
    if folder not in names:
        raise ConfigError(f"there is no submission {name} in {root}; the newest is {max(names, key=_since).name}")
    content = _read(folder)
    entries = tuple(Entry(**{**entry, "words": tuple(entry["words"])}) for entry in content.pop("entries"))
    return Submission(**{**content, "folder": folder, "outputs": Path(content["outputs"]), "entries": entries})


def _since(folder: Path) -> float:
    return float(_read(folder)["since"])


def _read(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / _RECORD).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the record {folder / _RECORD} cannot be read: {error}") from error
    return content
