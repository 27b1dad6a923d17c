"""Finished work in small files, kept in the repository: all that tables, figures and claims need of it.

A file is named after the id of its job, so there is one record of a configuration, whoever asks for it. Work done with
uncommitted changes has no record: nobody else could do the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.jobs import Job, Outcome
from spardl.basics.errors import ConfigError, DataError
from spardl.basics.files import write_atomically

__all__ = ["SHIPPED", "Record", "Records", "Shelf", "on_record", "read_record", "record", "unshippable"]

# From the root of the repository; each folder in it holds records, those of a scale or of a page.
SHIPPED = Path("docs", "results")


class Record(NamedTuple):
    """What a training came to.

    Attributes:
        command: that makes it again.
        figures: its summary, as far as it matters, its evaluations, and where it ran.
    """

    command: str
    figures: Mapping[str, Any]

    def final(self, metric: str) -> float:
        """A metric after the last step; infinite if it was not finite."""
        value = self.figures["final"].get(metric)
        return math.inf if value is None else float(value)

    @property
    def id(self) -> str:
        """The run's."""
        return str(self.figures["id"])

    @property
    def share(self) -> float:
        """Bytes sent by a worker, as a share of those that a dense all-reduce sends."""
        dense = self.figures["step_bytes_dense"]
        return float(self.figures["step_bytes"] / dense) if dense else 0.0


# By command.
Records: TypeAlias = Mapping[str, Record]


def unshippable(made: Mapping[str, Any]) -> str | None:
    """Why results of an environment are not for the repository, if they are not."""
    commit = made.get("commit")
    if commit is None:
        return "done with code of no known commit"
    return f"done with uncommitted changes ({commit})" if str(commit).endswith("-dirty") else None


def record(job: Job, outcome: Outcome, folder: Path) -> Path:
    """Writes the small file of a finished job.

    Args:
        job: what was done.
        outcome: of it.
        folder: of the file.

    Returns:
        The file.

    Raises:
        ConfigError: if nobody else could do the same; see :func:`unshippable`.
    """
    if reason := unshippable(outcome.made):
        raise ConfigError(f"{outcome.where} was {reason}; commit, delete it, and do it again")
    content = {"id": job.id, "command": job.command, **job.recorded(outcome)}
    path = folder / f"{job.id}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _text(content).encode())
    return path


def _text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each key: small, and easy to compare."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def on_record(folder: Path) -> Records:
    """All that is on record, by command; ``folder``: of the small files."""
    contents = map(read_record, sorted(folder.glob("*.json")))
    return {content["command"]: Record(content["command"], content) for content in contents}


def read_record(path: Path) -> dict[str, Any]:
    """What a small file holds.

    Raises:
        DataError: if it is none.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        content["id"], content["command"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no record ({error}); delete it, and record its job again") from error
    return content


class Shelf:
    """The records in the folders of a folder.

    Args:
        folder: of folders with records.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _files(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in sorted(self._folder.glob("*/*.json")):
            if path.stem in found:
                raise DataError(f"{found[path.stem]} and {path} are records of the same; delete one")
            found[path.stem] = path
        return found

    def find(self, job: Job) -> Outcome | None:
        """A job's result, if it is on record."""
        path = self._files.get(job.id)
        return job.recalled(read_record(path), path) if path else None

    def keep(self, job: Job, outcome: Outcome, name: str) -> Path:
        """Records a job in the folder of this name; in place of its older record, wherever that is.

        Raises:
            ConfigError: see :func:`record`.
        """
        before = self._files.get(job.id)
        path = record(job, outcome, before.parent if before else self._folder / name)
        self._files[job.id] = path
        return path
