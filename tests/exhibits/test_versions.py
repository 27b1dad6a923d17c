"""Small work of exhibits of all kinds: it survives being killed, and no stale result is reused where code changes it.

Small work of every kind is done anew and held against ``tests/golden/versions.json``. Where it differs on purpose,
raise the ``recipe`` of the computation, or in ``trainer/targets.py`` the edition of a training's part; then

    SPARDL_WRITE_GOLDEN=1 python -m pytest -m slow -k anew tests/exhibits/test_versions.py
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from scripts import choices
from scripts.exhibits import jobs
from scripts.exhibits.catalogue import catalogue
from tests.golden.test_golden import Book, bits_depend_on
from tests.support.labs import ROOT, missing, processes_with, until
from trainer.targets import editions

# Together they have every method of the papers, and most axes of the study.
TRAINED = ("spardl.convergence", "spardl.residuals", "spardl.teams", "study.grid", "sketch_fusion.accuracy")
# Their jobs are of the same kind, and often have the same methods, as those of other exhibits.
ALIKE = {
    *(f"spardl.{name}" for name in ("real_data", "residuals_real", "residuals_why", "density", "workers")),
    *("spardl.many_teams", "spardl.fast_network"),
    *(f"settings.{name}" for name in ("warm_up", "wire", "fewer_bits", "bucket_mb", "groups", "streams_small")),
}
RAISE = "results changed: raise the recipe of the computation, or the edition of the training's part; see above"


def small_work() -> dict[str, Any]:
    """By id: of each function the first job that measures no seconds, and of each method the first seed's training."""
    known, found = catalogue(), dict[Any, Any]()
    for name, exhibit in known.items():
        for job in exhibit.jobs("smoke"):
            if isinstance(job, jobs.Computation) and not job.alone:
                found.setdefault(job.function, job)
            elif isinstance(job, jobs.Training) and name in TRAINED and "seed=1" in job.words:
                found.setdefault(job, job)
    return {job.id: job for job in found.values()}


def figures(job: Any, outcome: Any) -> Any:
    return [outcome.data["final"]["loss"]] if isinstance(job, jobs.Training) else outcome.data


def entry(job: Any, outcome: Any) -> dict[str, Any]:
    training = isinstance(job, jobs.Training)
    text = outcome.data["weights_sha256"] if training else json.dumps(outcome.data)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {
        "command": job.command,
        "editions": editions(job.config) if training else {},
        "figures": figures(job, outcome),
        "digests": {bits_depend_on(): digest},
    }


def numbers(node: Any) -> Iterator[float]:
    if isinstance(node, dict | list):
        for value in node.values() if isinstance(node, dict) else node:
            yield from numbers(value)
    elif isinstance(node, float | int):
        yield float(node)


def same(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """To the last bit where the bits are known, else about."""
    ((machine, digest),) = new["digests"].items()
    if machine in old["digests"]:
        return bool(old["digests"][machine] == digest)
    return list(numbers(new["figures"])) == pytest.approx(list(numbers(old["figures"])), rel=0.05)


def compare(found: dict[str, Any], book: Book) -> None:
    """Holds new entries against the book; into which goes only what is new, or of another edition."""
    for ident, new in found.items():
        old = book.figures.get(ident)
        known = old is not None and old["editions"] == new["editions"]
        assert not known or same(old, new), f"{new['command']}: {RAISE}"
        assert known or book.writing, f"{new['command']}: not in the book; write it anew"
        if book.writing:
            digests = {**(old["digests"] if old and known else {}), **new["digests"]}
            book.figures[ident] = {**new, "digests": digests}
    if book.writing:
        book.figures = {ident: each for ident, each in sorted(book.figures.items()) if ident in found}
    assert found.keys() == book.figures.keys()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
@pytest.mark.timeout(3300)
def test_exhibits_survive_being_killed(runs: Path, tmp_path: Path) -> None:
    """The runs of this test are those that the next one compares."""
    known = catalogue()
    assert known.keys() > ALIKE
    names = [name for name in known if name not in ALIKE]
    assert {type(known[name]) for name in names} == {type(each) for each in known.values()}
    words = (*names, "--scale=smoke", "--own", "--jobs=2", f"--outputs={runs}", f"--report={tmp_path / 'report'}")
    command = [sys.executable, "scripts/reproduce.py", *words]
    # As many threads as tests have, because bits depend on their number.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout
        finished = list(islice((line for line in first.stdout if ": done" in line), 20))
        first.send_signal(signal.SIGKILL)
    until(lambda: not processes_with(str(runs)))  # those that it started end by themselves
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    # Five exhibits need a network lab; one has four jobs there, and one has two.
    assert done.returncode == (1 if missing() else 0), done.stderr
    assert done.stdout.count(": failed: ") == (9 if missing() else 0), done.stdout
    assert len(finished) == 20
    before, after = (set(map(_job, lines)) for lines in (finished, done.stdout.splitlines()))
    assert len(before) == len(finished)
    assert not before & after
    for name in names:
        assert (tmp_path / "report" / f"{name}-smoke-1.md").stat().st_size
    pictures = list((tmp_path / "report").glob("*.png"))
    assert pictures
    assert all(path.with_suffix(".pdf").exists() for path in pictures)


def _job(line: str) -> str:
    """The command in a line of progress."""
    return line.strip().partition("] ")[2].removesuffix(": done")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_done_anew_is_what_it_was(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARDL_CACHE", str(tmp_path / "cache"))
    with choices.composing():
        work = small_work()
        jobs.complete(list(work.values()), runs, 2)
        outcomes = {ident: job.find(runs) for ident, job in work.items()}
        found = {ident: entry(work[ident], each) for ident, each in outcomes.items() if each}
    assert found.keys() == work.keys()
    book = Book("versions")
    compare(found, book)
    book.save()


def test_changed_result_needs_new_edition() -> None:
    machine = bits_depend_on()
    old = {"command": "echo", "editions": {}, "figures": [1.0, {"x": 2.0}], "digests": {machine: "a"}}
    book = Book("none")
    book.writing = False
    assert not book.figures
    with pytest.raises(AssertionError, match="echo: not in the book"):
        compare({"1": old}, book)
    for writing in (False, True):
        book.figures, book.writing = {"1": old}, writing
        compare({"1": old}, book)
        with pytest.raises(AssertionError, match="echo: results changed: raise the recipe"):
            compare({"1": {**old, "digests": {machine: "b"}}}, book)
    raised = {**old, "editions": {"spardl.OkTopk": 2}, "digests": {machine: "b"}}
    compare({"1": raised}, book)
    assert book.figures == {"1": raised}
    compare({"2": old}, book)  # a raised recipe gives another id
    assert book.figures == {"2": old}
    elsewhere = {**old, "figures": [1.01, {"x": 2.0}], "digests": {"another": "c"}}
    compare({"2": elsewhere}, book)
    assert book.figures["2"]["digests"] == {machine: "a", "another": "c"}
    with pytest.raises(AssertionError, match="results changed"):
        compare({"2": {**elsewhere, "figures": [2.0, {"x": 2.0}], "digests": {"a third": "c"}}}, book)
