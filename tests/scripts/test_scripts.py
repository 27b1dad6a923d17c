"""The scripts that the docs of methods rest on."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path

import pytest

from scripts import choices, complexity
from scripts.exhibits.kinds.trainings import LEFT_OUT
from spardl.method.recipes import recipes
from tests.support.harness import published_methods

ROOT = Path(__file__).resolve().parents[2]


TRAINED = "settings.methods, laptop, table 1"


def section(name: str, page: str = "methods") -> list[list[str]]:
    """The cells of a generated table, without its header."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end of {name} -->", text, flags=re.DOTALL)
    assert found
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[1].strip().splitlines()[2:]]


def test_every_method_has_a_row() -> None:
    """If it is published; and every row is of one that there is."""
    for name in ("methods", "laws"):
        rows = {row[0].strip("`") for row in section(name)}
        assert published_methods() <= rows <= recipes().keys()


def test_the_table_says_who_is_biased() -> None:
    """A method is unbiased if it sends all, or rounds at random and clips nothing."""
    rows = {row[0].strip("`"): row[7] for row in section("methods")}
    assert {name for name, biased in rows.items() if biased == "no"} == {"none", "qsgd"}
    assert rows["terngrad"] == "yes"


def test_methods_have_three_seeds_or_an_explanation() -> None:
    """What another choice trains alike, or what needs a dense warm-up longer than the run, need not be."""
    rows = {row[0]: row for row in section(TRAINED, "tables/settings")}
    assert published_methods() - set(rows) <= LEFT_OUT
    assert all(len(row[3].split(",")) == 3 for row in rows.values())
    reached = {name: float(row[1].split()[1]) for name, row in rows.items()}
    explained = (ROOT / "docs" / "methods.md").read_text().split("## Accuracy of all methods")[1]
    behind = {name for name, accuracy in reached.items() if accuracy < reached["none"] - 0.03}
    assert {name for name in behind if f"`{name}`" not in explained} <= {"alone"}


def counted(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["complexity.py", *words])
    return complexity.main()


@pytest.mark.slow
def test_counts_agree_with_the_formulas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert counted(monkeypatch, "--workers", "4,7,8,14,16") == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert {tuple(row[:2]) for row in rows} == set(product(choices.names(), ("4", "7", "8", "14", "16")))
    assert {row[-1] for row in rows} == {""}


def test_a_method_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert counted(monkeypatch, "--methods", "foo") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
