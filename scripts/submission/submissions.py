"""Records of submissions: one folder per submission, with a record that is written atomically."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spardl.basics.errors import ConfigError, first_line
from spardl.basics.files import read_json, write_atomically

# Words added to every command line. A job is a single run even if the configuration defines a sweep.
ADDED = ("resume=auto", "hydra.mode=RUN")
_FOLDER, _RECORD = ".submissions", "submission.json"
# Places that execute runs: this machine, and Slurm.
HERE, SLURM = "here", "slurm"
PLACES = (HERE, SLURM)
_WAY_OUT = "delete its folder, or name another submission"
_FIELDS = {"place": str, "outputs": str, "since": int | float, "force": bool, "site": dict, "entries": list}


@dataclass(frozen=True)
class Entry:
    """One run of a submission.

    Attributes:
        words: Arguments of train.py.
        id: Run id.
        tasks: Number of processes to start; see :class:`~scripts.submission.sweeps.Planned`.
        job: Job id of Slurm, or a number for local runs; ``None`` before the submission.
        log: Log file, relative to the folder of the submission.
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
        folder: Folder of the record and the logs.
        place: Place that executes the runs, one of ``PLACES``.
        outputs: Folder of the run folders.
        since: Time of the submission in seconds since 1970.
        force: Whether to repeat runs that were already finished.
        site: Settings of the site as plain data.
        entries: Entries of the runs.
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
        """Name of the folder, which identifies the submission."""
        return self.folder.name

    @property
    def headline(self) -> str:
        """Headline for users."""
        return f"submission {self.name}: logs in {near(self.folder)}"

    def log(self, entry: Entry) -> Path | None:
        """Returns the log file of a run."""
        return self.folder / entry.log if entry.log else None

    def run_lock(self, entry: Entry) -> Path:
        """Returns the lock file of a run, common to all submissions."""
        return self.folder.parent / f".run-{entry.id}.lock"

    def label(self, entry: Entry) -> str:
        """Returns the words that distinguish a run from the others; all typed words if it is the only one."""
        alike = set.intersection(*(set(other.words) for other in self.entries))
        kept = alike & set(ADDED) if len(self.entries) == 1 else alike
        return " ".join(word for word in entry.words if word not in kept)

    def with_entries(self, entries: Sequence[Entry]) -> Submission:
        """Replaces the entries and writes the record."""
        changed = replace(self, entries=tuple(entries))
        changed.write()
        return changed

    def discard(self) -> None:
        """Deletes a submission that no place accepted."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self) -> None:
        """Writes the record."""
        content = {**asdict(self), "folder": None, "outputs": str(self.outputs)}
        write_atomically(self.folder / _RECORD, (json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def submitting(outputs: Path, patience: float = 120.0) -> Iterator[None]:
    """Prevents other processes from submitting runs to the same folder at the same time.

    Raises:
        ConfigError: If the folder cannot be created, or another process holds the lock for ``patience`` seconds.
    """
    folder, until = outputs / _FOLDER, time.monotonic() + patience
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(outputs, error) from error
    try:
        while not lock_free(descriptor):
            if time.monotonic() > until:
                raise ConfigError(
                    f"another process has been submitting runs to {outputs} for {patience:g} s; end it or wait"
                )
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def lock_free(descriptor: int) -> bool:
    """Tries to lock an open file; the lock ends when all copies of the descriptor are closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unusable(outputs: Path, error: OSError) -> ConfigError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError(f"output_dir={outputs} is not a folder; choose another")
    return ConfigError(f"cannot write to output_dir={outputs} ({error.strerror}); choose another")


def new_submission(
    outputs: Path, place: str, force: bool, site: dict[str, Any], entries: Sequence[Entry]
) -> Submission:
    """Creates a submission with a new folder and writes its record.

    Raises:
        ConfigError: If the folder cannot be created.
    """
    since = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(since))
    names = (f"{stamp}-{number:03}" if number > 1 else stamp for number in itertools.count(1))
    folder = next(path for path in map((outputs / _FOLDER).joinpath, names) if not path.exists())
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unusable(outputs, error) from error
    made = Submission(folder, place, outputs, since, force, site, tuple(entries))
    made.write()
    return made


def near(path: Path) -> Path:
    """Returns the path relative to the working directory if it is inside, otherwise unchanged."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_submission(outputs: Path, name: str | None) -> Submission:
    """Reads the record of a submission, without a name of the newest.

    Raises:
        ConfigError: If the submission does not exist, or its record is invalid.
    """
    root = outputs / _FOLDER
    if name and (root / name / _RECORD).exists():
        return _read(root / name)
    found, faults = all_submissions(outputs)
    if not found and not faults:
        raise ConfigError(f"no submissions in {outputs}; pass another folder with --outputs")
    if name:
        newest = f"; the newest is {found[-1].name}" if found else ""
        raise ConfigError(f"submission {name} does not exist in {root}{newest}")
    # Without a name, a command must not fall back to an older submission than the newest.
    for broken, fault in faults.items():
        if not found or broken > found[-1].name:
            raise fault
    return found[-1]


def all_submissions(outputs: Path) -> tuple[list[Submission], dict[str, ConfigError]]:
    """Submissions with valid records, oldest first, and the errors of the others by name."""
    found, faults = list[Submission](), dict[str, ConfigError]()
    for record in sorted((outputs / _FOLDER).glob(f"*/{_RECORD}")):
        try:
            found.append(_read(record.parent))
        except ConfigError as fault:
            faults[record.parent.name] = fault
    return found, faults


def _read(folder: Path) -> Submission:
    """Reads one record.

    Raises:
        ConfigError: If the record cannot be read, or a field is missing or has an invalid value.
    """
    path = folder / _RECORD
    try:
        return _parsed(read_json(path), folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read record {path}: {error}; {_WAY_OUT}") from error
    except (LookupError, TypeError) as error:
        reason = f"missing field {error}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(f"record {path} is not a submission ({reason}); {_WAY_OUT}") from error


def _parsed(content: Any, folder: Path) -> Submission:
    for name, kind in _FIELDS.items():
        if not isinstance(content[name], kind):
            raise TypeError(f"field {name} has the invalid value {content[name]!r}")
    entries = tuple(map(_entry, content["entries"]))
    if not entries or content["place"] not in PLACES:
        raise TypeError(f"no runs, or an unknown place {content['place']!r}")
    return Submission(**{**content, "folder": folder, "outputs": Path(content["outputs"]), "entries": entries})


def _entry(content: Any) -> Entry:
    words, name, texts = content["words"], content["id"], (content.get("job"), content.get("log"))
    valid = isinstance(words, list) and all(isinstance(word, str) for word in words)
    valid &= isinstance(name, str) and name.isalnum() and isinstance(content["tasks"], int)
    if not valid or not all(isinstance(text, str | None) for text in texts):
        raise TypeError(f"invalid entry {content!r}")
    return Entry(**{**content, "words": tuple(words)})
