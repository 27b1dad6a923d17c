"""Records of finished work: everything that tables, figures and claims need from it, one JSON line per job.

A file holds the records of one size preset or page, sorted by id, so that a new record is one added line. The id of a
record is the id of its job: one configuration has one record, whichever exhibit asks for it. Work done with uncommitted
changes is not recorded, because others could not repeat it.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.jobs import Job, Outcome
from spardl.basics.errors import ConfigError, DataError
from spardl.basics.files import read_text, write_atomically

# Relative to the root of the repository. Holds one JSONL file per size preset or page.
SHIPPED = Path("docs", "results")
SUFFIX = ".jsonl"
# Seconds to wait for another process that writes a record into the same folder.
LOCK_TIMEOUT = 60.0
_COMMON: dict[str, type] = {"id": str, "command": str, "environment": dict}
_TRAINING: dict[str, type] = {"metric": str, "final": dict, "steps": int, "workers": int, "evaluations": list}
_COMPUTATION: dict[str, type] = {"name": str, "arguments": dict, "recipe": int, "result": object}


class Record(NamedTuple):
    """The result of a training: the command that repeats it; its summary, evaluations and environment."""

    command: str
    figures: Mapping[str, Any]

    def final(self, metric: str) -> float:
        """Returns the value of a metric after the last step; infinity if it was not finite."""
        value = self.figures["final"].get(metric)
        return math.inf if value is None else float(value)

    @property
    def id(self) -> str:
        """Run id."""
        return str(self.figures["id"])

    @property
    def share(self) -> float:
        """Bytes sent per worker, as a share of the bytes of a dense all-reduce."""
        dense = self.figures["step_bytes_dense"]
        return float(self.figures["step_bytes"] / dense) if dense else 0.0


# By command.
Records: TypeAlias = Mapping[str, Record]


def unshippable(made: Mapping[str, Any]) -> str | None:
    """Returns the reason why results of this environment cannot be recorded, or ``None``."""
    commit = made.get("commit")
    if commit is None:
        return "done with code of no known commit"
    return f"done with uncommitted changes ({commit})" if str(commit).endswith("-dirty") else None


def is_training(content: Mapping[str, Any]) -> bool:
    """Whether a record is of a training, not of a computation."""
    return "result" not in content


def record(job: Job, outcome: Outcome, path: Path) -> dict[str, Any]:
    """Adds the record of a finished job to a JSONL file, in place of an older one, and returns it as it is read back.

    Raises ConfigError if the work is :func:`unshippable`, and DataError if the file is damaged or locked.
    """
    if reason := unshippable(outcome.made):
        raise ConfigError(f"{outcome.where} was {reason}; commit, delete this result, and run it again")
    line = json.dumps({"id": job.id, "command": job.command, **job.recorded(outcome)})
    content: dict[str, Any] = json.loads(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Reading and writing under one lock keeps the records of two concurrent writers.
    with _locked(path.parent):
        contents = {**(read_records(path) if path.exists() else {}), job.id: content}
        lines = (json.dumps(contents[key]) + "\n" for key in sorted(contents))
        write_atomically(path, "".join(lines).encode())
    return content


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an advisory lock on a folder; raises DataError after ``LOCK_TIMEOUT``."""
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_TIMEOUT
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    words = f"{folder} has been locked by another process for {LOCK_TIMEOUT:.0f} s"
                    raise DataError(f"{words}; stop that process or try again later") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def on_record(path: Path) -> Records:
    """Returns the records of the trainings in a JSONL file, by command; empty if there is no such file."""
    contents = read_records(path).values() if path.exists() else ()
    return {content["command"]: Record(content["command"], content) for content in contents if is_training(content)}


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Reads a JSONL file of records: by id, in the order of the file.

    Raises:
        DataError: If a line is not a valid record, or an id occurs twice; the message names file and line.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as records ({error}); name a .jsonl file of records") from error
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            content: dict[str, Any] = json.loads(line)
            _validate(content, found)
        except (ValueError, TypeError) as error:
            way_out = "delete the line and record its job again"
            raise DataError(f"{path}, line {number}: not a valid record ({error}); {way_out}") from error
        found[content["id"]] = content
    return found


def _validate(content: Any, before: Collection[str]) -> None:
    """Raises TypeError if a field of a record is missing or has another type, ValueError if its id came before."""
    if not isinstance(content, dict):
        raise TypeError(f"expected a JSON object, got {type(content).__name__}")
    for name, kind in (_COMMON | (_TRAINING if is_training(content) else _COMPUTATION)).items():
        if name not in content:
            raise TypeError(f"field {name!r} is missing")
        if not isinstance(content[name], kind):
            raise TypeError(f"field {name!r} must be {kind.__name__}, got {type(content[name]).__name__}")
    if content["id"] in before:
        raise ValueError(f"id {content['id']} occurs twice")


class RecordStore:
    """The records in the JSONL files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _found(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        """File and content of each record, by id."""
        found: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            for key, content in read_records(path).items():
                if key in found:
                    raise DataError(f"{found[key][0]} and {path} both have a record {key}; delete one of the lines")
                found[key] = (path, content)
        return found

    def find(self, job: Job) -> Outcome | None:
        """Returns the recorded result of a job, or ``None``."""
        if job.id not in self._found:
            return None
        path, content = self._found[job.id]
        return job.recalled(content, path.with_name(f"{path.name}#{job.id}"))

    def keep(self, job: Job, outcome: Outcome, name: str) -> Path:
        """Records a job in the file of this name or of its older record, and returns the file; see :func:`record`."""
        path = self._found[job.id][0] if job.id in self._found else self.folder / f"{name}{SUFFIX}"
        self._found[job.id] = (path, record(job, outcome, path))
        return path
