"""A clone has tables, claims and reports of records alone, without any training."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import claims, report, reproduce
from scripts.exhibits import base
from scripts.exhibits.charts import sheets
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.claims import figures as found_in
from scripts.exhibits.claims import judging
from scripts.exhibits.claims.rules import AtMost
from scripts.exhibits.kinds import predictions
from scripts.exhibits.records import SHIPPED, read_records
from tests.support.driver import ROOT
from trainer import report as summary

COMMIT = "0123456789ab"


def halves(number: int) -> dict[str, Any]:
    return {"sheets": [predictions.sheet("Halves", ["case", "half"], {"x": [number / 2]})]}


def cell(exhibit: Any, scale: str, results: Any) -> Any:
    return list(found_in.cells(found_in.tables(exhibit, scale, results), "half").values())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of all exhibits and claims: one of each. The code is at a known commit."""
    exhibit = predictions.Computed(
        name="x.y",
        title="T",
        source="Table 1",
        shows="something",
        basis=base.Basis("a", "b", "c"),
        function=halves,
        arguments=dict.fromkeys(base.SCALES, (("number", 9),)),
        shell="echo",
        words="words",
        charts=(sheets.Dots("halves"),),
    )
    published = judging.Published("5", judging.Known.LOW)
    claim = judging.Claim("X: half", "It is small.", published, "x.y", cell, AtMost(5), "halves")
    monkeypatch.setattr(summary, "_commit", lambda: COMMIT)
    for module in (reproduce, claims):
        monkeypatch.setattr(module, "catalogue", lambda: {"x.y": exhibit})
    monkeypatch.setattr(reproduce, "papers", lambda: {"x.y": "Paper"})
    monkeypatch.setattr(claims_catalogue, "load_all", lambda: (claim,))


class Clone:
    """Commands in a folder with records, and perhaps runs."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        folder.mkdir(exist_ok=True)

    def __call__(self, script: Any, *words: str) -> int:
        self.patch.chdir(self.folder)
        self.patch.setattr(sys, "argv", ["script.py", *words])
        return int(script.main())


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    return Clone(tmp_path / "mine", monkeypatch)


@pytest.fixture
def yours(tmp_path: Path, mine: Clone, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Clone:
    """A clone of what was recorded there: without the runs."""
    assert mine(reproduce, "all", "--scale=laptop", "--record") == 0
    assert f"recorded: 1 jobs in {SHIPPED}\n" in capsys.readouterr().out
    clone = Clone(tmp_path / "yours", monkeypatch)
    shutil.copytree(tmp_path / "mine" / "docs", tmp_path / "yours" / "docs")
    return clone


def test_tables_are_made_of_records(yours: Clone, capsys: Any) -> None:
    assert yours(reproduce, "x.y", "--scale=laptop") == 0
    out = capsys.readouterr().out
    assert "1 of 1 jobs are on record\n" in out
    assert "jobs to do" not in out
    assert "| x | 4.5 |" in out
    for ending in ("1.md", "1.csv", "1.tex", "1.html", "png", "pdf"):
        assert list(Path("report").glob(f"x.y-laptop-*{ending}"))
    (key,) = read_records(SHIPPED / "laptop.jsonl")
    path = f"{SHIPPED / 'laptop.jsonl'}#{key}"
    assert f"{path}, commit {COMMIT}, on " in Path("report", "index.html").read_text()
    assert yours(reproduce, "x.y", "--scale=laptop", "--explain=x") == 0
    assert f"    {path}, commit {COMMIT}, on {summary.environment()['cpu']}\n" in capsys.readouterr().out
    assert not Path("outputs").exists()
    assert yours(reproduce, "x.y", "--scale=laptop", "--explain=z") == 2
    assert "x.y has no row 'z'; choose from x\n" in capsys.readouterr().err


def test_all_can_be_done_here_instead_or_nothing(yours: Clone, capsys: Any) -> None:
    assert yours(reproduce, "x.y", "--scale=laptop", "--done", "--records=others") == 0
    said = capsys.readouterr()
    assert "not run yet |" not in said.out
    assert "\nNot run yet: 1 run, 1 row of unknown time\n" in said.out
    assert "| x.y | T | " in said.out
    assert not Path("outputs").exists()
    assert yours(reproduce, "x.y", "--scale=laptop", "--own") == 0
    assert "1 of 1 jobs to do" in capsys.readouterr().out
    assert yours(reproduce, "x.y", "--scale=laptop", "--explain=x") == 0
    assert "    outputs/computed/x.y-" in capsys.readouterr().out


def test_uncommitted_work_is_not_recorded(mine: Clone, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(summary, "_commit", lambda: f"{COMMIT}-dirty")
    assert mine(reproduce, "x.y", "--scale=laptop", "--record") == 1
    said = capsys.readouterr()
    assert "| x | 4.5 |" in said.out
    (path,) = Path("outputs", "computed").iterdir()
    assert said.err == (
        f"error: not recorded, because they were done with uncommitted changes ({COMMIT}-dirty); "
        f"commit, delete them and run them again: {path}\n"
    )
    assert not SHIPPED.exists()


def test_claims_are_judged_by_own_runs_first(yours: Clone, capsys: Any) -> None:
    path = SHIPPED / "laptop.jsonl"

    def verdict() -> str:
        capsys.readouterr()
        assert yours(claims, "--scale=laptop") == 0
        (found,) = re.findall(r"^\| (.*?) \| 1 \| X: half \|$", capsys.readouterr().out, re.MULTILINE)
        return str(found)

    assert verdict() == "reproduced"
    assert yours(reproduce, "x.y", "--scale=laptop", "--own") == 0
    (own,) = Path("outputs", "computed").iterdir()
    own.write_text(own.read_text().replace("4.5", "7.5"))
    assert verdict() == "not reproduced"
    own.unlink()
    path.write_text(path.read_text().replace("4.5", "6.0"))
    assert verdict() == "not reproduced"
    path.unlink()
    assert verdict() == "cannot be judged here"


def test_records_of_trainings_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ("model=gpt_chars", " training.max_steps=400 ", "compressor=none cluster.workers=1 ")
    shipped = read_records(ROOT / SHIPPED / "learning.jsonl").values()
    records = [each for each in shipped if all(word in each["command"] for word in words)]
    records = [each for each in records if "optimizer=muon" not in each["command"]]
    other = {"id": "0", "command": "echo", "environment": {}, "name": "n", "arguments": {}, "recipe": 1, "result": {}}
    (tmp_path / "kept").mkdir()
    path = tmp_path / "kept" / "some.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (other, *records)))
    clone, first = Clone(tmp_path, monkeypatch), records[0]
    assert clone(report, "kept", "--html=page.html") == 0
    said = capsys.readouterr()
    assert "Perplexity on pydocs chars" in said.out
    assert "| none, optimizer.lr=0.01 | " in said.out
    assert "without a finished run" not in said.out  # records of computations are skipped
    assert f"kept/some.jsonl#{first['id']}; " in Path("page.html").read_text()
    changed = [{**first, "command": first["command"] + " training.clip_norm=3"}, *records[1:]]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in changed))
    assert clone(report, "kept/some.jsonl") == 0
    said = capsys.readouterr()
    assert f"| kept/some.jsonl#{first['id']} | its command now stands for another run; record it again |" in said.out
    path.write_text("{")
    assert clone(report, "kept") == 2
    assert "| kept/some.jsonl | cannot be read: kept/some.jsonl, line 1: not a valid record" in capsys.readouterr().out


def test_work_is_recorded_as_soon_as_it_is_done(mine: Clone, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Whatever ends the command after it."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "write_arrays", interrupted)
    assert mine(reproduce, "x.y", "--scale=laptop", "--record") == 130
    assert capsys.readouterr().err == "error: interrupted; the same command continues from here\n"
    assert len(read_records(SHIPPED / "laptop.jsonl")) == 1
