"""The page of the claims, their tables, and the script that writes and checks them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from scripts import claims as claims_script
from scripts.exhibits import base
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.claims import judging
from scripts.exhibits.claims import page as claims_page
from tests.support.claiming import bound, claim, figures, judged

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_count_and_mark() -> None:
    made = judged(claim(bound("UpTo", 2.0), lambda *_: figures(0.5)))
    summary, table = claims_catalogue.tables_of([made])
    assert {row.name: row.cells[0].value for row in summary.rows} == {
        "reproduced": 0,
        "checked by construction": 0,
        "in the same direction": 0,
        "depends on the task": 0,
        "slightly worse": 0,
        "cannot be judged here": 0,
        "not reproduced": 1,
    }
    cells = dict(zip(table.columns[1:], table.rows[0].cells, strict=True))
    assert cells["verdict"] == ("not reproduced", None, True)
    assert cells["ours"].text == "0.5x (a)"
    assert cells["paper (table or figure)"].text == (
        "much (table or figure number unknown; from memory, low certainty)"
    )
    section = claims_catalogue.claims_section([made], "laptop", base.Results(Path("runs"), {}))
    assert section.html.count("<table") == 0  # claims fold out; how many there are of each verdict, the summary says


def test_the_page_tells_what_became_of_a_claim() -> None:
    made = judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.0), [judging.LAB], "it holds its rivals"))
    page = claims_page.page([made], "laptop", Path("runs"), "python the_command.py")
    for words in (
        "python scripts/reproduce.py all --scale laptop --jobs 2 --outputs runs\npython the_command.py\n```\n",
        "| reproduced | 0 | - |",
        "| checked by construction | 0 | - |",
        "| checked by construction, overshoot | 1 | X: name |",
        "| X: name | much (table or figure number unknown; from memory, low certainty) | 3x (a) | checked by cons",
        "\n## Why\n\n* **X: name**: far beyond the published figure",
        "judged only after at least 10/density synchronizations",
    ):
        assert words in page


def test_the_report_tells_what_a_verdict_rests_on() -> None:
    made = judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.0), [judging.LAB], "it holds its rivals"))
    html = claims_catalogue.claims_section([made], "laptop", base.Results(Path("runs"), {})).html
    for name, words in {
        "claimed": "It is so. (a note)",
        "compared": "seconds",
        "rule": made.claim.rule.words,
        "limits": f"{judging.LAB.reason} (in the same direction at best, cannot be judged here at worst)",
        "by construction": "it holds its rivals; if the rule is satisfied, the verdict is checked by construction",
        "exhibit": "x.y, laptop",
        "simulated": "nothing: it ran",
        "assumed": "a < b",
    }.items():
        assert f"<dt>{name}</dt><dd>{escape(words)}</dd>" in html


def script(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["claims.py", *words])
    return int(claims_script.main())


@pytest.fixture
def one_claim(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of all: what the script judges; may be changed."""
    made = [judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.0)))]
    monkeypatch.setattr(claims_script, "judge_all", lambda *_: made)
    return made


def test_the_page_is_written(
    one_claim: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = tmp_path / "claims.md"
    words = ("--scale=laptop", f"--outputs={tmp_path}", f"--write={page}")
    assert script(monkeypatch, *words) == 0
    assert "| X: name | much (" in capsys.readouterr().out
    command = f"python scripts/claims.py --scale laptop --outputs {tmp_path} --write {page}"
    before = page.read_text()
    assert f"{command}\n" in before
    one_claim[0] = judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.1)))
    assert script(monkeypatch, *words) == 0
    assert page.read_text() != before
    assert script(monkeypatch, "--scale=laptop", f"--write={tmp_path / 'no' / 'claims.md'}") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_report_gets_a_section(one_claim: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script(monkeypatch, "--scale=laptop", f"--outputs={tmp_path}", f"--report={tmp_path / 'report'}") == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "X: name" in page
    assert "3x (a)" in page


def test_the_page_in_the_docs_names_every_claim() -> None:
    page = (ROOT / "docs" / "tables" / "claims.md").read_text()
    names = [each.name for each in claims_catalogue.load_all()]
    table, _, reasons = page.partition("## Claim by claim")[2].partition("## Why")
    assert re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:] == names
    assert re.findall(r"^\* \*\*(.*?)\*\*: .", reasons, re.MULTILINE) == names
