"""How figures are drawn: means and bands, few lines in a panel, axes of factors, legends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import curves, palette, sheets
from scripts.exhibits.kinds.predictions import sheet
from scripts.exhibits.measures import Curve
from scripts.exhibits.pages import sections


def figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=axes_of.SIZE, layout="constrained")


ONE = Curve((1, 2, 3), (1.0, 2.0, 3.0), (4.0, 2.0, 1.0))
OTHER = Curve((1, 2), (3.0, 4.0), (6.0, 8.0))


def test_a_band_by_hand() -> None:
    """At the steps that both were evaluated at; seconds are those of the mean run."""
    found = curves.band([ONE, OTHER], "seconds")
    assert found == ((2.0, 3.0), (5.0, 5.0), (4.0, 2.0), (6.0, 8.0))
    assert curves.band([ONE], "steps") == ((1, 2, 3), ONE.values, ONE.values, ONE.values)
    assert curves.band([ONE, Curve((), (), ())], "steps") == ((), (), (), ())


@pytest.mark.parametrize(("metric", "scale"), [("perplexity", "log"), ("accuracy", "linear")])
def test_lines_bands_and_names(metric: str, scale: str) -> None:
    drawn = figure()
    axes = drawn.subplots()
    broken = Curve((1, 2), (1.0, 2.0), (3.0, math.nan))
    found = {"SparDL": [ONE, OTHER], "a" * 40: [ONE], "lost": [], "broken": [broken], "bare": [Curve((), (), ())]}
    curves.draw_means(axes, found, "steps", "steps", metric)
    assert axes.get_yscale() == scale
    assert list(axes.lines[0].get_ydata()) == [5.0, 5.0]
    assert len(axes.collections) == 3
    few = figure().subplots()
    curves.draw_means(few, found, "steps", "steps", metric, shown=["a" * 40])
    assert len(few.lines) == 1
    assert few.get_ylim()[0] == pytest.approx(axes.get_ylim()[0]) or metric == "accuracy"


@pytest.mark.parametrize(("metric", "shown"), [("accuracy", False), ("loss", True)])
def test_an_axis_of_accuracy_leaves_the_start_out(metric: str, shown: bool) -> None:
    axes = figure().subplots()
    found = {"SparDL": [Curve((0, 1, 2, 4), (0.0, 1.0, 2.0, 4.0), (0.1, 0.97, 0.96, 0.99))], "lost": []}
    curves.draw_means(axes, found, "steps", "steps", metric)
    assert (axes.get_ylim()[0] < 0.1) == shown
    assert axes.get_ylim()[0] < 0.96
    assert axes.get_ylim()[1] > 0.99


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (5, [5]), (6, [4, 3]), (9, [5, 5]), (10, [4, 4, 4]), (27, [5, 5, 5, 5, 5, 4, 4])]
)
def test_a_panel_has_few_lines_and_the_baseline(count: int, sizes: list[int]) -> None:
    names = [f"method {number}" for number in range(count - 1)] + ["dense"]
    found = curves.panels(names, ["dense"])
    assert sorted(map(len, found), reverse=True) == sorted(sizes, reverse=True)
    assert all("dense" in each for each in found)
    assert {name for each in found for name in each} == set(names)
    assert sum(len(each) - 1 for each in found) == count - 1  # every method once
    assert all(len(each) <= 5 for each in curves.panels(names))


def test_a_legend_fits_the_figure() -> None:
    names = ["short", "a name of several words that is much longer than half of a line", "other", "b" * 50 + " c" * 30]
    with axes_of.drawing():
        drawn = axes_of.drawn(lambda whole: whole.subplots().plot([1, 2]), palette.looks(names), "A title " * 12)
        drawn.draw_without_rendering()
    (legend,) = drawn.legends
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == names
    box, whole = legend.get_window_extent(), drawn.bbox
    assert whole.x0 <= box.x0
    assert box.x1 <= whole.x1
    assert box.y1 <= drawn.axes[0].get_window_extent().y0
    assert drawn.axes[0].get_window_extent().height > 0.5 * axes_of.SIZE[1] * drawn.dpi
    assert not axes_of.drawn(lambda whole: None, {}).legends


def made(**columns: list[Any]) -> Any:
    figures = zip(*columns.values(), strict=True)
    rows = {name: list(values) for name, values in zip(("a, x", "a, y", "b, x"), figures, strict=True)}
    return sheet("Title", ("row", *columns), rows)


def test_a_panel_for_what_rows_have_in_common() -> None:
    chart = sheets.Dots("times", ": words", columns=("ratio",), ratio=True)
    one, other = chart.pictures("1", made(seconds=[1.0, 2.0, 3.0], ratio=[0.5, "none", 2.0]))
    assert (one.title, other.title, one.caption) == ("a", "b", "Title: words")
    assert one.name != other.name
    drawn = figure()
    one.draw(drawn)
    (axes,) = drawn.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y"]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() not in ("None", None, "")] == [[0.5]]
    low, high = axes.get_xlim()
    assert low < 0.5
    assert high > 1  # the line at 1 can be seen
    assert one.key == {}  # one column is named at the axis
    assert set(sheets.Dots("s").pictures("1", made(seconds=[1.0, 2.0, 3.0], ratio=[1.0, 1.0, 1.0]))[0].key) == {
        "seconds",
        "ratio",
    }


def test_seconds_begin_at_zero() -> None:
    (one, _) = sheets.Dots("seconds").pictures("1", made(seconds=[1.0, 2.0, 3.0]))
    drawn = figure()
    one.draw(drawn)
    assert drawn.axes[0].get_xscale() == "linear"
    assert drawn.axes[0].get_xlim()[0] == 0


def test_lines_over_numbers_in_the_columns_names() -> None:
    chart = sheets.Lines("efficiency", across="workers")
    rows = {"m, one": [1.0, 0.5], "m, other": [0.9, 0.8]}
    (picture,) = chart.pictures("1", sheet("T", ("row", "P = 4", "P = 16"), rows))
    drawn = figure()
    picture.draw(drawn)
    (axes,) = drawn.axes
    assert axes.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in axes.lines] == [[4, 16], [4, 16]]
    assert list(picture.key) == ["one", "other"]
    with pytest.raises(ValueError, match="'words' has no number"):
        chart.pictures("1", sheet("T", ("row", "words"), {"m, one": [1.0]}))[0].draw(figure())


def test_an_axis_of_factors_needs_something_above_zero() -> None:
    axes = figure().subplots()
    axes_of.logarithmic(axes.yaxis, [0.0, math.nan, math.inf])
    assert axes.get_yscale() == "linear"


def test_a_file_has_room_for_its_title_and_its_key(tmp_path: Path) -> None:
    """One row leaves little; matplotlib would warn, and a warning is an error here."""
    chart = sheets.Dots("seconds", " in words" * 12)
    rows = {"model, row": [1.0, 2.0, 3.0, 4.0, 5.0]}
    pictures = chart.pictures("1", sheet("Title", ("row", "a", "b", "c", "d", "e"), rows))

    class Drawn:
        name = "paper.subject"

        def tables(self, *_: Any) -> list[Any]:
            return []

        def pictures(self, *_: Any) -> list[Any]:
            return [picture._replace(title="") for picture in pictures]

    assert sections.write(Drawn(), "smoke", None, tmp_path) == []
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".png"]
