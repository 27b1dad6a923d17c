"""Exhibits that benches of this repository measure: how they are started, what is read from them, and what fails."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits import base, working
from scripts.exhibits.kinds import benches
from scripts.exhibits.papers.catalogue import catalogue
from spardl.basics.errors import TrainingError

BENCHES = [catalogue()["settings.selection"], catalogue()["settings.loopback"], catalogue()["settings.simulated"]]
BENCH = """
import json, os, sys
rank = int(os.environ.get("RANK", 0))
file = next(word.removeprefix("--json=") for word in sys.argv if word.startswith("--json="))
if "fails" in sys.argv:
    print("error: no such method", file=sys.stderr)
if {"fails", "dies"} & {*sys.argv}:
    sys.exit(3)
if rank == 0:
    times = {"floor": [0.001, 0.003, 0.002], "ours": [0.005, 0.01, 0.004]}
    asked = {*times} - {*sys.argv}
    rows = [{"name": name, "seconds": times[name], "exact": "True"} for name in sorted(asked)]
    words = [word for word in sys.argv[1:-1] if word not in times]
    title = " ".join([*words, os.environ.get("WORLD_SIZE", "alone")])
    open(file, "w").write(json.dumps({"cases": {title: rows}}))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "bench.py"
    path.write_text(BENCH)
    return str(path)


def test_each_run_has_its_tables(script: str) -> None:
    first, second = benches.timed(script, (("a", "b"), ("c",)), "floor", 0)["sheets"]
    assert (first["title"], second["title"]) == ("a b alone", "c alone")
    assert first["columns"] == ["what", "median ms", "least", "most", "x floor"]
    floor, ours = first["rows"]
    assert floor == ["floor", 2.0, 1.0, 3.0, 1.0]
    assert ours == ["ours", 5.0, 4.0, 10.0, 2.5]


def test_rows_with_equal_title_share_a_table(script: str) -> None:
    (made,) = benches.timed(script, (("a", "ours"), ("a", "floor")), "floor", 0)["sheets"]
    assert [row[0] for row in made["rows"]] == ["floor", "ours"]
    assert made["rows"][1][-1] == 2.5


def test_what_a_bench_knows_beside_is_shown(script: str) -> None:
    (made,) = benches.timed(script, (("a",),), "floor", 0, ("exact",))["sheets"]
    assert made["columns"][-2:] == ["x floor", "exact"]
    assert made["rows"][1] == ["ours", 5.0, 4.0, 10.0, 2.5, "True"]


def test_torchrun_starts_several(script: str) -> None:
    (made,) = benches.timed(script, (("a",),), "floor", 2)["sheets"]
    assert made["title"] == "a 2"


@pytest.mark.parametrize(
    ("word", "reason"), [("fails", "^no such method$"), ("dies", r"bench\.py ended with exit code 3$")]
)
def test_a_bench_that_fails_says_why(script: str, word: str, reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        benches.timed(script, ((word,),), "floor", 0)


def test_a_bench_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.py"
    path.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(benches, "LIMIT", 0.5)
    with pytest.raises(TrainingError, match=r"bench\.py did not end within 0\.5 s"):
        benches.timed(str(path), ((),), "floor", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exhibit", "ours"),
    [pytest.param(*pair, id=pair[0].name) for pair in zip(BENCHES, ("spardl", "spardl", "32 workers"), strict=True)],
)
def test_small_benches_run_alone_and_have_a_floor(exhibit: Any, ours: str, tmp_path: Path) -> None:
    job = exhibit.job("smoke")
    given = dict(job.arguments)
    assert job.alone
    assert exhibit.job("laptop").id == exhibit.job("paper").id != job.id
    working.complete([job], tmp_path, at_once=1)
    (table,) = exhibit.tables("smoke", base.Results.on_disk(tmp_path, [job]))
    times = {row.name: [cell.value for cell in row.cells] for row in table.rows}
    figures = {name: values[:4] for name, values in times.items()}
    assert all(len(values) == 4 + len(given.get("beside", ())) for values in times.values())
    assert figures[given["floor"]][-1] == 1
    assert all(0 < least <= middle <= most for middle, least, most, _ in figures.values())
    assert any(name.startswith(ours) for name in times)


@pytest.mark.parametrize("exhibit", BENCHES, ids=lambda exhibit: exhibit.name)
def test_what_is_typed_names_the_script_and_all_words(exhibit: Any) -> None:
    job = exhibit.job("laptop")
    given = dict(job.arguments)
    commands = [shlex.split(command) for command in job.command.split("; ")]
    for command, words in zip(commands, given["runs"], strict=True):
        place = command.index(given["script"])
        assert command[place + 1 :] == list(words)
        started = ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4"]
        assert command[:place] == (started if given["workers"] else ["python"])
    assert job.command in exhibit.caption("laptop")
