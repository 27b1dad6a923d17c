"""Pictures: what is in them, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spardl.basics.errors import ConfigError
from spardl.diagnostics.commands.timeline import COLOURS, NAMES, draw
from spardl.diagnostics.timeline.model import Kind, Work, after_backward, in_halves
from tests.diagnostics.timeline.profiles import profile_of

TOY = profile_of([2, 1, 3], [0.0, 1.0, 2.0], [6.0, 4.0, 1.0], update=1.0, tail=1.0)


def work(entries: int) -> Work:
    return Work(0.5, float(entries))


PAIR = [
    ("none, after_backward", after_backward(TOY, lambda entries: Work(0.0, float(entries)))),
    ("spardl, dear", in_halves(TOY, [(0, 1), (1, 3)], work, work)),
]


def comments(path: Path) -> list[str]:
    """Every text of an SVG stands in a comment before its letters' outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    return [
        str(item.text).strip() for item in ElementTree.parse(path, parser).iter() if "function" in str(type(item.tag))
    ]


def test_a_picture_shows_every_schedule_kind_and_time(tmp_path: Path) -> None:
    draw(PAIR, tmp_path / "pair.svg", "two schedules")
    texts = comments(tmp_path / "pair.svg")
    for name, timeline in PAIR:
        assert name in texts
        assert f"{1e3 * timeline.seconds:,.0f} ms" in texts
    assert {*NAMES.values(), "two schedules"} <= set(texts)
    source = (tmp_path / "pair.svg").read_text().lower()
    assert all(COLOURS[kind].lower() in source for kind in Kind)


def test_only_the_kinds_that_occur_are_explained(tmp_path: Path) -> None:
    draw(PAIR[:1], tmp_path / "one.svg", "one")
    assert NAMES[Kind.GATHER] not in comments(tmp_path / "one.svg")
    assert NAMES[Kind.SEND] in comments(tmp_path / "one.svg")


def test_more_schedules_make_a_taller_picture(tmp_path: Path) -> None:
    heights = []
    for count in (1, 2):
        draw(PAIR[:count], tmp_path / "rows.png", "rows")
        data = (tmp_path / "rows.png").read_bytes()
        assert data[1:4] == b"PNG"
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[0] < heights[1]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.png"]


def test_kinds_have_distinct_colours() -> None:
    assert len(set(COLOURS.values())) == len(set(NAMES.values())) == len(Kind)


@pytest.mark.parametrize(("name", "count"), [("a.xyz", 1), ("plain", 1), ("a.png", 0)])
def test_what_cannot_be_drawn(tmp_path: Path, name: str, count: int) -> None:
    with pytest.raises(ConfigError):
        draw(PAIR[:count], tmp_path / name, "")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'spardl\[report\]'"):
        draw(PAIR, tmp_path / "a.png", "")
