"""A sweep (``-m``): the line before each of its runs, and the table after the last one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.table import Table

from trainer.display import table_console
from trainer.runs import Run, final_metric

__all__ = ["Outcome", "Sweep", "sweep_words"]

_WIDTH = 10_000  # of a pipe, so that no line is wrapped


@dataclass
class Outcome:
    """What one run of a sweep came to.

    Attributes:
        words: settings that distinguish it from the other runs.
        state: ``finished``, ``skipped`` because it was finished before, or ``failed``.
        seconds: time in this command.
        run: its folder; ``None`` if it has none.
    """

    words: str
    state: str = "failed"
    seconds: float = 0.0
    run: Run | None = None


@dataclass
class Sweep:
    """The runs of one command, in the order in which they start in this process."""

    outcomes: list[Outcome] = field(default_factory=list)

    def begin(self) -> Outcome:
        """Prints which run of the sweep begins; call it in a job of a sweep."""
        used = HydraConfig.get()
        total = _count(sys.argv[1:])
        of = f" of {total}" if total else ""
        outcome = Outcome(" ".join(sweep_words(sys.argv[1:], used.overrides.task)) or "all settings as given")
        print(f"run {used.job.num + 1}{of}: {outcome.words}", flush=True)
        self.outcomes.append(outcome)
        return outcome

    def print_table(self) -> None:
        """Prints metric, seconds, bytes and path of every run, including failed ones."""
        if not self.outcomes:  # a launcher ran them in other processes
            return
        table = Table("", "run", "state", "metric", "seconds", "MB per worker", "path", box=None, pad_edge=False)
        for number, outcome in enumerate(self.outcomes, 1):
            table.add_row(str(number), outcome.words, outcome.state, *_figures(outcome))
        table_console(_WIDTH).print(table)


def _figures(outcome: Outcome) -> list[str]:
    seconds, run = f"{outcome.seconds:.1f}", outcome.run
    if run is None:
        return ["-", seconds, "-", "-"]
    summary = run.read_summary()
    value = final_metric(summary)
    if value is None:
        return ["-", seconds, "-", str(run.folder)]
    # The time of a skipped run is that of the command that trained it.
    seconds = f"{summary['wall_seconds']:.1f}" if outcome.state == "skipped" else seconds
    sent = summary["step_bytes"] * summary["steps"] / 1e6
    return [f"{summary['metric']} {value:.4g}", seconds, f"{sent:.4g}", str(run.folder)]


def sweep_words(typed: Sequence[str], words: Sequence[str]) -> list[str]:
    """The settings of one run that differ between the runs of its sweep.

    Args:
        typed: the command line of the sweep.
        words: the settings of the run.
    """
    fixed = {word for word in typed if not word.startswith("-")}
    return [word for word in words if word not in fixed]


def _count(typed: Sequence[str]) -> int | None:
    """Number of runs; ``None`` where another sweeper decides it."""
    used = HydraConfig.get()
    if used.runtime.choices["hydra/sweeper"] != "basic":
        trials = used.sweeper.get("n_trials")
        return int(trials) if trials else None
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    values = [f"{key}={value}" for key, value in (used.sweeper.params or {}).items()]
    with suppress(HydraException, ValueError):
        found = parser.parse_overrides([*values, *(word for word in typed if not word.startswith("-"))])
        return prod(len(list(each.sweep_string_iterator())) for each in found if each.is_sweep_override())
    return None
