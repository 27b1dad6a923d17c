"""Table of the states of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from scripts.submission.standing import Standing
from scripts.submission.submissions import Submission
from trainer.display import table_console

__all__ = ["print_table"]

_COLOURS = {"finished": "green", "running": "cyan", "queued": "blue"}
_OTHERWISE = "red"
# Width for files and pipes, so that lines are not wrapped.
_WIDE = 10_000


def print_table(submission: Submission, found: Sequence[Standing]) -> None:
    """Prints one line per run and the number of runs in each state."""
    console = table_console(_WIDE)
    table = Table("", "id", "state", "", "job", "run", box=None, pad_edge=False)
    for number, (entry, one) in enumerate(zip(submission.entries, found, strict=True), 1):
        state = Text(one.state, style=_COLOURS.get(one.state, _OTHERWISE))
        table.add_row(str(number), entry.id, state, Text(one.note), entry.job or "", Text(submission.label(entry)))
    console.print(table)
    counts = Counter(one.state for one in found)
    console.print(f"{submission.name}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
