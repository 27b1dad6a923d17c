"""Loggers other than W&B: CSV files, TensorBoard, and several loggers at once."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spardl.basics.errors import ConfigError
from spardl.basics.files import TEXT_BYTES, read_regular, write_atomically
from trainer.observers import Forwarder, Guarded, Logger, Observer
from trainer.runs import Run

__all__ = ["Csv", "Several", "TensorBoard"]


@dataclass(frozen=True)
class Csv(Logger):
    """Writes one CSV file per kind of metrics into the run's folder: ``train.csv`` and ``eval.csv``.

    The files have one row per line of ``metrics.jsonl`` and one column per metric. They are rewritten after each
    evaluation and at the end of the run, so that a resumed run has neither gaps nor duplicate rows.
    """

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Returns an observer that writes the CSV files of a run; ``config`` is not used."""
        return _CsvObserver(run.metrics_file)


class _CsvObserver(Observer):
    def __init__(self, metrics_file: Path) -> None:
        self._metrics_file = metrics_file

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind == "eval":
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        if not self._metrics_file.exists():
            return
        rows: dict[str, list[dict[str, Any]]] = {}
        for line in read_regular(self._metrics_file, TEXT_BYTES).splitlines():
            event = json.loads(line)
            rows.setdefault(event.pop("kind"), []).append(event)
        for kind, found in rows.items():
            text = io.StringIO()
            # Figures can appear in the middle of a run, for example the count of skipped gradients.
            writer = csv.DictWriter(text, list(dict.fromkeys(name for row in found for name in row)))
            writer.writeheader()
            writer.writerows(found)
            write_atomically(self._metrics_file.with_name(f"{kind}.csv"), text.getvalue().encode())


@dataclass(frozen=True)
class TensorBoard(Logger):
    """Writes event files for TensorBoard into ``tensorboard`` in the run's folder."""

    def check(self) -> None:
        """Raises a ``ConfigError`` if the package ``tensorboard`` is not installed."""
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "logger=tensorboard needs the package tensorboard; run pip install tensorboard, or use logger=csv"
            )

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Returns an observer that writes the event files of a run; ``config`` is not used."""
        return _TensorBoardObserver(run.folder / "tensorboard")


class _TensorBoardObserver(Observer):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self, step: int, total: int) -> None:
        # Only rank 0 of a run that logs to TensorBoard pays for this import.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        # Hides what an interrupted run logged after the checkpoint from which this one resumes.
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name != "time":
                self._writer.add_scalar(f"{kind}/{name}", value, step, walltime=values.get("time"))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@dataclass(frozen=True)
class Several(Logger):
    """Several loggers at once: ``logger=several logger.of=[wandb,csv]``.

    A logger that fails is switched off with a warning; the others continue.

    Args:
        of: Names of the loggers to use.
        wandb: Logger for W&B, with its settings.
        tensorboard: Logger that writes event files for TensorBoard.
        csv: Logger that writes CSV files.

    Raises:
        ConfigError: If ``of`` is empty or names an unknown logger.
    """

    of: Sequence[str]
    wandb: Logger | None = None
    tensorboard: Logger | None = None
    csv: Logger | None = None

    def __post_init__(self) -> None:
        known = [each.name for each in fields(self) if each.name != "of" and getattr(self, each.name) is not None]
        wrong = [name for name in self.of if name not in known]
        if isinstance(self.of, str) or wrong or not self.of:
            raise ConfigError(f"logger.of must list some of {', '.join(known)}, got {self.of!r}")

    def parts(self) -> list[Logger]:
        """Returns the chosen loggers."""
        return [getattr(self, name) for name in dict.fromkeys(self.of)]

    def check(self) -> None:
        """Checks that the packages that the chosen loggers need are installed."""
        for part in self.parts():
            part.check()

    def place(self) -> str | None:
        """Returns the destinations of the chosen loggers as text; ``None`` if they only write to the run folder."""
        return "; ".join(filter(None, (part.place() for part in self.parts()))) or None

    def open(self, run: Run, config: Mapping[str, Any]) -> Observer:
        """Opens all chosen loggers, and returns an observer that passes each event to all of them."""
        parts = self.parts()
        return _Group([Guarded(partial(part.open, run, config), type(part).__name__) for part in parts])


class _Group(Forwarder):
    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def _forward(self, event: str, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(*arguments)
