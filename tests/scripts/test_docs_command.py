"""Generated pages are current, and scripts/docs.py writes, checks and lists them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import docs
from spardl.basics.errors import ConfigError
from tests.support.driver import ROOT

# These pages take from ten seconds to minutes.
SLOW = ("methods", "tables/break-even", "tables/claims", "tables/measurements", "tables/results", "tables/timeline")
NAMES = "spardl/method/names.py"
HOOKS = "docs/tables/torch-hooks.md"


def script(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["docs.py", *words])
    return docs.main()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two generated files in a tree of their own."""
    for name in (NAMES, HOOKS):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    return tmp_path


def _marked(name: str) -> object:
    slow = [pytest.mark.slow, pytest.mark.timeout(900)] if name in {f"docs/{page}.md" for page in SLOW} else []
    return pytest.param(name, marks=slow)


@pytest.mark.parametrize("name", [_marked(name) for name in docs.pages()])
def test_the_page_is_current(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(monkeypatch, "--check", name) == 0, capsys.readouterr().err


def test_an_edited_page_is_reported_and_written_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, edited = (tree / HOOKS).read_text(), "| 1.00 |"
    assert edited in before
    (tree / HOOKS).write_text(before.replace(edited, "| 0.50 |"))
    assert script(monkeypatch, "--check", NAMES, HOOKS) == 1
    command = f"python scripts/docs.py --write {HOOKS}"
    assert capsys.readouterr().err == f"error: {HOOKS} is out of date; write it with {command}\n"
    inode = (tree / NAMES).stat().st_ino
    assert script(monkeypatch, "--write", NAMES, HOOKS) == 0
    assert (tree / HOOKS).read_text() == before
    assert (tree / NAMES).stat().st_ino == inode
    assert script(monkeypatch, "--check", NAMES, HOOKS) == 0
    assert capsys.readouterr().err == ""


def test_missing_files_are_reported(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = "docs/images/frontier.png"
    (tree / NAMES).unlink()
    assert script(monkeypatch, "--check", NAMES, figure) == 1
    assert [line.split("; ")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"error: {NAMES} is out of date",
        f"error: {figure} does not exist",
    ]
    (tree / "docs" / "images").mkdir()
    monkeypatch.setattr(docs, "FIGURES", {figure: lambda: b"drawn"})
    assert script(monkeypatch, "--write", NAMES, figure) == 0
    assert (tree / figure).read_bytes() == b"drawn"
    assert (tree / NAMES).read_text() == (ROOT / NAMES).read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["README.md"], "README.md is not a generated file; choose one from python scripts/docs.py --list"),
        ([HOOKS], "a page must have one section '<!-- hooks: ... -->', got 0; add or remove one"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], complaint: str, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / HOOKS).write_text("no marks")
    assert script(monkeypatch, "--check", *words) == 2
    assert capsys.readouterr().err == f"error: {complaint}\n"


@pytest.mark.parametrize("words", [[], ["--write", "--check"], ["--list", "--check"]])
def test_exactly_one_action_is_required(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        script(monkeypatch, *words)


def test_list_names_every_page_with_marks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert script(monkeypatch, "--list") == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    marked = {
        path.relative_to(ROOT).as_posix() for path in pages if ": written by scripts/docs.py -->" in path.read_text()
    }
    assert marked <= listed
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tables").glob("*.md")} <= listed
    templates = {path.relative_to(ROOT).as_posix().removesuffix(".j2") for path in (ROOT / "docs").rglob("*.j2")}
    assert templates <= listed
    assert all((ROOT / name).is_file() for name in listed)


def test_a_page_has_one_renderer(tree: Path) -> None:
    mark = "<!-- x.y, smoke, table 1: written by scripts/docs.py -->"
    (tree / HOOKS).write_text(mark)
    with pytest.raises(ConfigError, match=f"{HOOKS} is generated, so it must not quote tables of exhibits"):
        docs.pages()
