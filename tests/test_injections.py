"""Faults at random moments: no hang, no corrupt result, no finished work lost; and the table of them in the docs.

To write the table anew, run all of them (as root, with iproute2):

    SPARDL_WRITE_RELIABILITY=1 python -m pytest tests/test_injections.py -m "slow or netlab"
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from spardl.files import checksum, write_atomically
from spardl.training.checkpoint import find_checkpoint, verify_checkpoint
from spardl.training.processes import _NOTICE, _OBEY
from tests.driver import ROOT, Beside, beside, only_run, results, summary, wait_until
from tests.injections import EVERY, FAULTS, LATEST, LONG, RUN, SETUPS, TIMEOUT, Fault, Scene

PAGE = ROOT / "docs" / "reliability.md"
WRITING = "SPARDL_WRITE_RELIABILITY"
# Seconds in which all must have ended: the longest wait for a silent peer, and for the launcher's patience, and room
# for a busy machine.
BOUND = TIMEOUT + _NOTICE + _OBEY + 15
HOW = {-9: "all its processes end", 0: "goes on to its end", 1: "one line, exit code 1"}


class Measured(NamedTuple):
    """What one injection cost.

    Attributes:
        seconds: from the fault until every process had ended; ``None`` if the run went on.
        redone: steps that were done a second time.
    """

    seconds: float | None
    redone: int


class _Finished(dict[int, Path]):
    """Folders of undisturbed runs, by number of workers; made when first asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, size: int) -> Path:
        folder = self._folders.mktemp(f"finished-{size}")
        words = (*RUN, *SETUPS[size], f"output_dir={folder / 'out'}")
        with beside(*words, folder=folder / "log") as run:
            assert run.wait() == 0, run.stderr
        self[size] = only_run(folder / "out")
        return self[size]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> _Finished:
    return _Finished(tmp_path_factory)


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, list[Measured]]]:
    """What all injections cost, by fault; written down at the end if that is asked for."""
    costs: dict[str, list[Measured]] = defaultdict(list)
    yield costs
    if os.environ.get(WRITING):
        assert {name: len(found) for name, found in costs.items()} == {fault.name: fault.injections for fault in FAULTS}
        write_page(costs)


@contextlib.contextmanager
def scene_of(fault: Fault, seed: int, finished: _Finished, folder: Path) -> Iterator[Scene]:
    draw = random.Random(f"{fault.name} {seed}")
    size = draw.choice(fault.sizes)
    outputs = folder / "out"
    with fault.outputs(outputs):
        other = outputs / finished[size].name
        shutil.copytree(finished[size], other)
        words = (*RUN, *SETUPS[size], f"output_dir={outputs}", "resume=auto")
        yield Scene(draw, outputs, other, folder / "logs", words, size)


def contents(folder: Path) -> dict[str, str]:
    """The checksum of every file."""
    return {str(path.relative_to(folder)): checksum(path) for path in folder.rglob("*") if path.is_file()}


def strike(fault: Fault, scene: Scene, runs: list[Beside]) -> tuple[float, list[Path]]:
    """Waits for the moment and causes the fault; returns when, and the checkpoints that were whole by then."""
    moment = scene.draw.randrange(fault.earliest, LATEST + 1)
    wait_until(lambda: scene.logged >= moment or any(run.ended() for run in runs))
    time.sleep(scene.draw.uniform(0, 0.1))
    whole, began = scene.checkpoints, time.monotonic()
    fault.strike(scene, runs)
    scene.gate.touch()
    return float(scene.struck.read_text()) if scene.struck.exists() else began, whole


def await_the_end(fault: Fault, scene: Scene, runs: list[Beside]) -> None:
    """All end in time, as expected, each with no more than the words that are expected."""
    for run in runs:
        assert run.wait(BOUND if fault.code else LONG) == fault.code, run.stderr
    for run in runs:
        wait_until(lambda: not run.members(), BOUND)  # noqa: B023
        # torch looks up the names of hosts, which have none in a lab.
        said = re.sub(r"^\[W.*hostname of the client socket.*\n", "", run.stderr, flags=re.MULTILINE)
        assert re.fullmatch(fault.says.replace("RANK", str(scene.named)), said), said


def check_what_is_left(scene: Scene, whole: list[Path]) -> None:
    """Each checkpoint is whole, and none that was is lost, unless newer ones have taken its place."""
    for path in scene.checkpoints:
        verify_checkpoint(path, scene.size)
    assert scene.checkpoints[-1:] >= whole[-1:]
    assert summary(scene.finished)["status"] == "finished"


def go_on(fault: Fault, scene: Scene) -> int:
    """Continues the run, which ends as if nothing had happened; returns the steps done a second time."""
    expected = fault.after(scene)
    folder = scene.folder
    assert folder
    done, (start, _) = scene.logged, find_checkpoint(folder / "checkpoints", scene.size)
    again = done - (int(start.name.removeprefix("step-")) if start else 0)
    assert 0 <= again <= fault.keeps * EVERY
    with beside(*scene.words, folder=scene.logs / "again") as run:
        assert run.wait() == 0, run.stderr
        assert re.fullmatch(expected, run.stderr), run.stderr
    return again


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        pytest.param(fault, seed, marks=getattr(pytest.mark, fault.mark), id=f"{fault.name} {seed}")
        for fault in FAULTS
        for seed in range(fault.injections)
    ],
)
def test_a_fault_at_a_random_moment(
    fault: Fault, seed: int, tmp_path: Path, finished: _Finished, record: dict[str, list[Measured]]
) -> None:
    with scene_of(fault, seed, finished, tmp_path) as scene:
        before = contents(scene.finished)
        with fault.start(scene, *fault.words) as runs:
            began, whole = strike(fault, scene, runs)
            await_the_end(fault, scene, runs)
            seconds = time.monotonic() - began
        check_what_is_left(scene, whole)
        redone = go_on(fault, scene) if fault.code else 0
        assert scene.folder
        assert results(scene.folder) == results(scene.finished)
        assert not [path for path in scene.folder.rglob(".*") if path.name != ".lock"]
        assert contents(scene.finished) == before
        record[fault.name].append(Measured(seconds if fault.code else None, redone))


def rules() -> str:
    """The table of what is done and what is expected."""
    rows = [f"| {fault.name} | {fault.injections} | {_how(fault)} | {_kept(fault)} |" for fault in FAULTS]
    total = sum(fault.injections for fault in FAULTS)
    head = ["| fault | injections | how the run ends | what is kept |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, f"| all | {total} | | |"])


def _how(fault: Fault) -> str:
    return HOW[fault.code] + (", with a warning" if fault.says and not fault.code else "")


def _kept(fault: Fault) -> str:
    if fault.code == 0:
        return "everything"
    return f"all but at most {fault.keeps * EVERY} steps ({_checkpoint(fault)})"


def _checkpoint(fault: Fault) -> str:
    return "the newest checkpoint" if fault.keeps == 1 else "the checkpoint before, with a warning"


def figures(costs: dict[str, list[Measured]]) -> str:
    """The table of what was measured."""
    head = ["| fault | worst seconds until all processes had ended | most steps done again |", "|---|---|---|"]
    return "\n".join(head + [f"| {fault.name} | {_worst(costs[fault.name])} |" for fault in FAULTS])


def _worst(found: list[Measured]) -> str:
    seconds = [cost.seconds for cost in found if cost.seconds is not None]
    return f"{max(seconds):.1f} | {max(cost.redone for cost in found)}" if seconds else "went on | 0"


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)


def write_page(costs: dict[str, list[Measured]], page: Path = PAGE) -> None:
    text = page.read_text()
    for name, table in {"rules": rules(), "figures": figures(costs)}.items():
        assert between(name).search(text), f"{page} has no place for the {name}"
        text = between(name).sub(lambda _, table=table: f"{table}\n", text)
    write_atomically(page, text.encode())


def test_the_docs_have_the_table_of_these_faults() -> None:
    found = between("rules").search(PAGE.read_text())
    assert found
    assert found[0].strip() == rules(), f"run the faults with {WRITING}=1, see above"
    assert sum(fault.injections for fault in FAULTS) >= 30


def test_the_tables_are_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    places = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("rules", "figures")]
    page.write_text("before\n" + "between\n".join(places) + "after\n")
    for seconds in (1.0, 2.0):
        write_page({fault.name: [Measured(seconds, 1), Measured(0.5, 2)] for fault in FAULTS}, page)
        text = page.read_text()
        assert text.startswith(f"before\n<!-- rules -->\n{rules()}\n<!-- end of rules -->\nbetween\n<!-- figures -->\n")
        assert text.count(f"| {seconds} | 2 |") == len(FAULTS)
        assert text.endswith("<!-- end of figures -->\nafter\n")
