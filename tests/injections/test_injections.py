"""Faults at random moments: no hang, no corrupt result, no finished work lost; and the table of them in the docs.

The slow tests try some of each kind. All of them, as root, with iproute2, which writes the table anew:

    SPARDL_WRITE_RELIABILITY=1 python -m pytest tests/injections/test_injections.py -m "slow or netlab"

With ``rest`` only those that are not in docs/results/injections.json yet; with ``-k "W&B"`` those of some faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spardl.basics.files import checksum
from spardl.clusters.workers.processes import _NOTICE, _OBEY
from tests.injections import record
from tests.injections.faults import FAULTS, Fault
from tests.injections.record import HOW, Injection, between, figures, planned, read_results, rules
from tests.injections.scene import EVERY, LATEST, LONG, RUN, TIMEOUT, Scene, Setup
from tests.support.driver import BackgroundRun, background_run, only_run, results, summary, wait_until
from trainer.checkpoint import find_checkpoint, verify_checkpoint

WRITING = os.environ.get("SPARDL_WRITE_RELIABILITY", "")
# Seconds in which all must have ended: the longest wait for a silent peer, and for the launcher's patience, and room
# for a busy machine. Less than LONG, so that no run ends in time that waits for a lost peer in vain.
BOUND = TIMEOUT + _NOTICE + _OBEY + 40
assert BOUND < LONG


def chosen(fault: Fault) -> list[int]:
    """The seeds that are tried now."""
    if not WRITING:
        first = FAULTS.index(fault)  # so that they strike all setups, which take turns
        return [(first + number) % fault.injections for number in range(fault.tried)]
    assert WRITING in ("1", "rest"), "SPARDL_WRITE_RELIABILITY is 1 for all, or rest for what is missing"
    done = {(one.fault, one.seed) for one in read_results()} if WRITING == "rest" else set()
    return [seed for seed in range(fault.injections) if (fault.name, seed) not in done]


class _Finished(dict[Setup, Path]):
    """Folders of undisturbed runs; made when first asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, setup: Setup) -> Path:
        folder = self._folders.mktemp("finished")
        words = (*words_of(setup), f"output_dir={folder / 'out'}")
        with background_run(*words, folder=folder / "log") as run:
            assert run.wait() == 0, run.stderr
        self[setup] = only_run(folder / "out")
        return self[setup]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> _Finished:
    return _Finished(tmp_path_factory)


def words_of(setup: Setup) -> tuple[str, ...]:
    return (*RUN, f"cluster.workers={setup.workers}", *setup.words)


@contextlib.contextmanager
def scene_of(fault: Fault, setup: Setup, seed: int, finished: _Finished, folder: Path) -> Iterator[Scene]:
    outputs = folder / "out"
    with fault.outputs(outputs):
        other = outputs / finished[setup].name
        shutil.copytree(finished[setup], other)
        # With force=true, the finished run next to it does not keep this one from starting.
        words = (*words_of(setup), f"output_dir={outputs}", "resume=auto", "force=true")
        draw = random.Random(f"{fault.name} {seed}")
        yield Scene(draw, outputs, other, folder / "logs", words, setup.workers, fault.phase)


def contents(folder: Path) -> dict[str, str]:
    """The checksum of every file."""
    return {str(path.relative_to(folder)): checksum(path) for path in folder.rglob("*") if path.is_file()}


def strike(fault: Fault, scene: Scene, runs: list[BackgroundRun]) -> tuple[float, list[Path]]:
    """Waits for the moment and causes the fault; returns when, and the checkpoints that were whole by then."""
    moment = scene.draw.randrange(fault.earliest, LATEST + 1)
    wait_until(lambda: arrived(scene, moment) or any(run.ended() for run in runs))
    time.sleep(scene.draw.uniform(0, 0.1))
    whole, began = scene.checkpoints, time.monotonic()
    fault.strike(scene, runs)
    scene.gate.touch()
    return float(scene.struck.read_text()) if scene.struck.exists() else began, whole


def arrived(scene: Scene, moment: int) -> bool:
    return scene.reached.exists() if scene.phase else scene.logged >= moment


def await_the_end(fault: Fault, scene: Scene, runs: list[BackgroundRun]) -> list[int]:
    """All end in time, as expected, each with no more than the words that are expected; returns their exit codes."""
    codes = [run.wait(LONG if fault.survived else BOUND) for run in runs]
    assert {*codes} <= {*fault.codes}, [run.stderr for run in runs]
    for run in runs:
        wait_until(lambda: not run.members(), BOUND)  # noqa: B023
        # torch looks up the names of hosts, which have none in a lab.
        said = re.sub(r"^\[W.*hostname of the client socket.*\n", "", run.stderr, flags=re.MULTILINE)
        assert re.fullmatch(fault.says.replace("RANK", str(scene.named)), said), said
    return codes


def check_what_is_left(scene: Scene, whole: list[Path]) -> None:
    """Each checkpoint is whole, and none that was is lost, unless newer ones have taken its place."""
    for path in scene.checkpoints:
        verify_checkpoint(path, scene.size)
    assert scene.checkpoints[-1:] >= whole[-1:]
    assert summary(scene.finished)["status"] == "finished"


def ended(scene: Scene) -> bool:
    return scene.folder is not None and summary(scene.folder).get("status") == "finished"


def go_on(fault: Fault, scene: Scene) -> int:
    """Continues the run, which ends as if nothing had happened; returns the steps done a second time."""
    expected, done = fault.after(scene), scene.logged
    folder = scene.folder  # there is none if the workers did not even meet
    start = find_checkpoint(folder / "checkpoints", scene.size)[0] if folder else None
    again = done - (int(start.name.removeprefix("step-")) if start else 0)
    assert 0 <= again <= fault.keeps * EVERY
    with background_run(*scene.words, folder=scene.logs / "again") as run:
        assert run.wait() == 0, run.stderr
        assert re.fullmatch(expected, run.stderr), run.stderr
    return again


def outcome(folder: Path, setup: Setup) -> dict[str, Any]:
    """What must be the same. Measured times may put layers into other groups: other messages, but the same average."""
    found = results(folder)
    return {name: value for name, value in found.items() if not (setup.measures and name.startswith("step_"))}


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        pytest.param(fault, seed, marks=getattr(pytest.mark, fault.mark), id=f"{fault.name} {seed}")
        for fault in FAULTS
        for seed in chosen(fault)
    ],
)
def test_a_fault_at_a_random_moment(fault: Fault, seed: int, tmp_path: Path, finished: _Finished) -> None:
    if WRITING:
        record.forget(fault, seed)
    setup = fault.setups[seed % len(fault.setups)]
    with scene_of(fault, setup, seed, finished, tmp_path) as scene:
        before = contents(scene.finished)
        with fault.start(scene, *fault.words) as runs:
            began, whole = strike(fault, scene, runs)
            codes = await_the_end(fault, scene, runs)
            seconds = time.monotonic() - began
        check_what_is_left(scene, whole)
        # A run may finish that is asked to stop in its last step.
        redone = 0 if fault.survived or ended(scene) else go_on(fault, scene)
        assert scene.folder
        assert outcome(scene.folder, setup) == outcome(scene.finished, setup)
        assert not [path for path in scene.folder.rglob(".*") if path.name != ".lock"]
        assert contents(scene.finished) == before
    if WRITING:
        cost = None if fault.survived else round(seconds, 1)
        record.remember(Injection(fault.name, seed, setup.name, HOW[codes[0]], cost, redone))


def test_the_docs_have_the_tables_of_these_faults() -> None:
    """If not, the injections have to be tried anew, see above."""
    done = read_results()
    assert [(one.fault, one.seed) for one in done] == planned()
    assert len(done) >= 500
    text = record.PAGE.read_text()
    for name, table in {"rules": rules(), "figures": figures(done)}.items():
        found = between(name).search(text)
        assert found
        assert found[0].strip() == table


def test_every_setup_suffers_every_kill() -> None:
    for fault in FAULTS[:3]:  # the kills
        names = [one.setup for one in read_results() if one.fault == fault.name]
        assert {*names} == {setup.name for setup in fault.setups}, fault.name


def made_up(seconds: float | None) -> list[Injection]:
    return [Injection(name, seed, "dense", HOW[1], seconds, seed) for name, seed in planned()]


def test_the_tables_are_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(record, "PAGE", page)
    places = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("rules", "figures")]
    page.write_text("before\n" + "between\n".join(places) + "after\n")
    for seconds in (1.0, 2.0):
        record.write_page(made_up(seconds))
        text = page.read_text()
        assert text.startswith(f"before\n<!-- rules -->\n{rules()}\n<!-- end of rules -->\nbetween\n<!-- figures -->\n")
        for fault in FAULTS:
            assert f"| {fault.name} | {fault.injections} | {seconds} | {fault.injections - 1} |\n" in text
        assert f"| all | {len(planned())} of {len(planned())} | 0 hangs | 0 results that differ |\n" in text
        assert text.endswith("<!-- end of figures -->\nafter\n")


def test_results_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "injections.json")
    monkeypatch.setattr(record, "PAGE", tmp_path / "page.md")
    record.PAGE.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("rules", "figures")))
    whole = made_up(None)
    for one in reversed([*whole[:3], Injection("no longer there", 0, "dense", HOW[1], None, 0)]):
        record.remember(one)
    assert read_results() == whole[:3]
    record.forget(FAULTS[0], 1)
    assert read_results() == [whole[0], whole[2]]
    assert f"| all | 2 of {len(whole)} | | |" in record.PAGE.read_text()
