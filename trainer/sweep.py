"""Output of a sweep (``-m``): a line before each of its runs, and a table after the last one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from spardl.basics.files import read_json, write_atomically
from trainer.display import table_console
from trainer.runs import Run, final_metric

__all__ = ["Outcome", "SweepFolder", "part_of_sweep", "print_table", "sweep_words"]

_WIDTH = 10_000  # of a pipe, so that no line is wrapped
# Names the folder of outcomes to the runs, which a Hydra launcher may start in other processes or on other machines.
_VARIABLE = "SPARDL_SWEEP_FOLDER"


@dataclass
class Outcome:
    """Outcome of one run of a sweep.

    Attributes:
        words: Settings that distinguish the run from the other runs of the sweep, as ``KEY=VALUE``.
        state: State of the run: ``finished``, ``skipped`` because it was finished before, ``stopped`` or ``failed``.
        seconds: Time that the run took in this command, in seconds.
        folder: Folder of the run; ``None`` if it has none.
    """

    words: str
    state: str = "failed"
    seconds: float = 0.0
    folder: str | None = None


class SweepFolder(Callback):
    """Hydra callback that chooses, when a sweep starts, the folder in which its runs record their outcomes."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes the path of the folder into an environment variable, which the runs of the sweep inherit."""
        folder = Path(config.hydra.sweep.dir).absolute() / f"outcomes-{secrets.token_hex(4)}"
        os.environ[_VARIABLE] = str(folder)


@contextmanager
def part_of_sweep() -> Iterator[Outcome]:
    """Prints which run of the sweep begins, and records its outcome when the body of the ``with`` statement ends.

    Yields:
        The outcome, initially ``failed``, which the body must update.
    """
    used, began = HydraConfig.get(), perf_counter()
    total = _count(sys.argv[1:])
    of = f" of {total}" if total else ""
    outcome = Outcome(" ".join(sweep_words(sys.argv[1:], used.overrides.task)) or "all settings as given")
    print(f"run {used.job.num + 1}{of}: {outcome.words}", flush=True)
    _write(used.job.num, outcome)  # as failed, in case that its process dies
    try:
        yield outcome
    finally:
        outcome.seconds = perf_counter() - began
        _write(used.job.num, outcome)


def _write(number: int, outcome: Outcome) -> None:
    if folder := os.environ.get(_VARIABLE):
        with suppress(OSError):  # the run itself reports a full disk
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_atomically(Path(folder, f"{number}.json"), json.dumps(asdict(outcome)).encode())


def print_table() -> None:
    """Prints metric, seconds, bytes and path of every run of a sweep, including failed ones.

    Prints nothing if no sweep was started.
    """
    if not (named := os.environ.pop(_VARIABLE, None)):
        return
    files = sorted(Path(named).glob("*.json"), key=lambda path: int(path.stem))
    outcomes = [Outcome(**read_json(path)) for path in files]
    shutil.rmtree(named, ignore_errors=True)
    if not outcomes:
        return
    table = Table("", "run", "state", "metric", "seconds", "MB per worker", "path", box=None, pad_edge=False)
    for number, outcome in enumerate(outcomes, 1):
        table.add_row(str(number), outcome.words, outcome.state, *_figures(outcome))
    table_console(_WIDTH).print(table)


def _figures(outcome: Outcome) -> list[str]:
    seconds = f"{outcome.seconds:.1f}"
    if outcome.folder is None:
        return ["-", seconds, "-", "-"]
    summary = Run("", Path(outcome.folder)).read_summary()
    value = final_metric(summary)
    if value is None:
        return ["-", seconds, "-", outcome.folder]
    # The time of a skipped run is that of the command that trained it.
    seconds = f"{summary['wall_seconds']:.1f}" if outcome.state == "skipped" else seconds
    sent = summary["step_bytes"] * summary["steps"] / 1e6
    return [f"{summary['metric']} {value:.4g}", seconds, f"{sent:.4g}", outcome.folder]


def sweep_words(typed: Sequence[str], words: Sequence[str]) -> list[str]:
    """Returns the settings of one run that differ between the runs of its sweep.

    Args:
        typed: Words of the command line that started the sweep.
        words: All overrides (``KEY=VALUE``) of the run.
    """
    return [word for word in words if word not in typed]


def _count(typed: Sequence[str]) -> int | None:
    """Returns the number of runs; ``None`` if another sweeper decides it."""
    used = HydraConfig.get()
    if used.runtime.choices["hydra/sweeper"] != "basic":
        trials = used.sweeper.get("n_trials")
        return int(trials) if trials else None
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    values = [f"{key}={value}" for key, value in (used.sweeper.params or {}).items()]
    with suppress(HydraException, ValueError):
        # Not the value of an option, such as the folder of --config-dir.
        settings = [word for word in typed if "=" in word and not word.startswith("-")]
        found = parser.parse_overrides([*values, *settings])
        return prod(len(list(each.sweep_string_iterator())) for each in found if each.is_sweep_override())
    return None
