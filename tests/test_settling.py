"""Pages that scripts make are written where they change, and told of where they would."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scripts.docs.settling import CURRENT, OUT_OF_DATE, add_options, settle


def test_pages_that_are_not_as_made_are_told_of_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same, other, absent = (tmp_path / name for name in ("same.md", "other.md", "absent.md"))
    same.write_text("as made")
    other.write_text("by hand")
    before, made = same.stat().st_ino, dict.fromkeys((same, other, absent), "as made")
    assert settle(made, "make it", check=True) == OUT_OF_DATE
    assert capsys.readouterr().err == (
        "error: other.md is out of date; make it again with make it\n"
        "error: absent.md is out of date; make it again with make it\n"
    )
    assert (other.read_text(), absent.exists()) == ("by hand", False)
    assert settle(made, "make it", check=False) == CURRENT
    assert {path.read_text() for path in made} == {"as made"}
    assert same.stat().st_ino == before
    assert settle(made, "make it", check=True) == CURRENT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [[], ["--write", "--check"]])
def test_one_thing_is_done(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "the page")
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert parser.parse_args(["--check"]).check


def test_a_script_that_can_do_something_else_needs_no_option() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "the page", run="train")
    assert not any(vars(parser.parse_args([])).values())
    assert parser.parse_args(["--run"]).run
    with pytest.raises(SystemExit):
        parser.parse_args(["--run", "--write"])
