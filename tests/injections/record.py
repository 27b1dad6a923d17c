"""What the injections cost: a file with a line for each, and the two tables of the docs that follow from it."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from spardl.basics.files import write_atomically
from tests.injections.faults import FAULTS, Fault
from tests.injections.scene import EVERY
from tests.support.driver import ROOT

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "docs" / "results" / "injections.json"
HOW = {
    -9: "all its processes end",
    0: "goes on to its end",
    **{code: f"one line, exit code {code}" for code in (1, 2, 75, 130)},
}


@dataclass(frozen=True)
class Injection:
    """One that ended as expected, with everything checked.

    Attributes:
        fault: its name.
        seed: of its random numbers.
        setup: what was trained.
        ended: how.
        seconds: from the fault until every process had ended; ``None`` if the run went on.
        redone: steps that were done a second time.
    """

    fault: str
    seed: int
    setup: str
    ended: str
    seconds: float | None
    redone: int


def read_results() -> list[Injection]:
    return [Injection(**content) for content in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def write_results(found: Sequence[Injection]) -> None:
    """In the order of the table, without what is no longer in it."""
    order = {name: place for place, name in enumerate(planned())}
    kept = sorted((one for one in found if (one.fault, one.seed) in order), key=lambda one: order[one.fault, one.seed])
    lines = ",\n".join(json.dumps(asdict(one)) for one in kept)
    write_atomically(RESULTS, f"[\n{lines}\n]\n".encode())


def planned() -> list[tuple[str, int]]:
    """All injections: the fault and the seed of each."""
    return [(fault.name, seed) for fault in FAULTS for seed in range(fault.injections)]


def forget(fault: Fault, seed: int) -> None:
    """Takes an injection out of the file: it is tried anew, and may fail."""
    _change(lambda found: [one for one in found if (one.fault, one.seed) != (fault.name, seed)])


def remember(injection: Injection) -> None:
    """Enters one that ended as expected."""
    _change(lambda found: [*found, injection])


def _change(change: Callable[[list[Injection]], list[Injection]]) -> None:
    """Changes the file, and with it both tables."""
    with _alone():
        write_results(change(read_results()))
        write_page(read_results())


@contextmanager
def _alone() -> Iterator[None]:
    """Several may run at the same time, each with a part of the faults."""
    descriptor = os.open(RESULTS.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def rules() -> str:
    """The table of what is done and what is expected."""
    rows = [f"| {fault.name} | {fault.injections} | {_how(fault)} | {_kept(fault)} |" for fault in FAULTS]
    head = ["| fault | injections | how the run ends | kept |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, f"| all | {len(planned())} | | |"])


def _how(fault: Fault) -> str:
    ends = HOW[fault.codes[0]] + "".join(f" or {code}" for code in fault.codes[1:] if code)
    ends += f", or {HOW[0]}" if 0 in fault.codes[1:] else ""
    return ends + (", with a warning" if fault.says and fault.survived else "")


def _kept(fault: Fault) -> str:
    if fault.survived:
        return "everything"
    return f"all but at most {fault.keeps * EVERY} steps ({_checkpoint(fault)})"


def _checkpoint(fault: Fault) -> str:
    return "the newest checkpoint" if fault.keeps == 1 else "the checkpoint before, with a warning"


def figures(found: Sequence[Injection]) -> str:
    """The table of what was measured."""
    head = [
        "| fault | ended as expected | worst seconds until all processes had ended | most steps done again |",
        "|---|---|---|---|",
    ]
    rows = [_row(fault.name, [one for one in found if one.fault == fault.name]) for fault in FAULTS]
    failed = "0 hangs | 0 results that differ" if len(found) == len(planned()) else "|"
    return "\n".join([*head, *rows, f"| all | {len(found)} of {len(planned())} | {failed} |"])


def _row(name: str, found: Sequence[Injection]) -> str:
    seconds = [one.seconds for one in found if one.seconds is not None]
    cost = f"{max(seconds):.1f} | {max(one.redone for one in found)}" if seconds else "went on | 0"
    return f"| {name} | {len(found)} | {cost} |"


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)


def page(text: str, found: Sequence[Injection]) -> str:
    """The page with its two tables replaced."""
    for name, table in {"rules": rules(), "figures": figures(found)}.items():
        assert between(name).search(text), f"{PAGE} has no place for the {name}"
        text = between(name).sub(lambda _, table=table: f"{table}\n", text)
    return text


def write_page(found: Sequence[Injection]) -> None:
    write_atomically(PAGE, page(PAGE.read_text(), found).encode())
