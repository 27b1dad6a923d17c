"""How figures are drawn: means and bands, few lines in a panel, axes of factors, legends, colours."""

from __future__ import annotations

import math
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from scripts.exhibits import pages
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.charts import curves, sheets, style
from scripts.exhibits.kinds.predictions import sheet
from scripts.exhibits.measures import Curve
from tests.support import made_up, shown


def figure() -> Any:
    return Figure(figsize=style.SIZE, layout="constrained")


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
    axes, few = figure().subplots(), figure().subplots()
    broken = Curve((1, 2), (1.0, 2.0), (3.0, math.nan))
    found = {"SparDL": [ONE, OTHER], "a" * 40: [ONE], "lost": [], "broken": [broken], "bare": [Curve((), (), ())]}
    curves.draw_means(axes, found, "steps", "steps", metric)
    assert axes.get_yscale() == scale
    assert list(axes.lines[0].get_ydata()) == [5.0, 5.0]
    assert len(axes.collections) == 3
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
    with style.drawing():
        drawn = style.drawn(lambda whole: whole.subplots().plot([1, 2]), style.looks(names), "A title " * 12)
        drawn.draw_without_rendering()
    (legend,) = drawn.legends
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == names
    box, whole = legend.get_window_extent(), drawn.bbox
    assert whole.x0 <= box.x0
    assert box.x1 <= whole.x1
    assert box.y1 <= drawn.axes[0].get_window_extent().y0
    assert drawn.axes[0].get_window_extent().height > 0.5 * style.SIZE[1] * drawn.dpi
    assert not style.drawn(lambda whole: None, {}).legends


def made(**columns: list[Any]) -> Any:
    figures = zip(*columns.values(), strict=True)
    rows = {name: list(values) for name, values in zip(("a, x", "a, y", "b, x"), figures, strict=True)}
    return sheet("Title", ("row", *columns), rows)


def test_a_panel_for_what_rows_have_in_common() -> None:
    chart = sheets.Dots("times", ": words", columns=("ratio",), ratio=True)
    one, other = chart.pictures("1", made(seconds=[1.0, 2.0, 3.0], ratio=[0.5, "none", 2.0]))
    assert (one.title, other.title, one.caption) == ("a", "b", "Title: words")
    assert one.name != other.name
    axes = shown.axes(one)
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y"]
    assert [list(line.get_xdata()) for line in axes.lines if line.get_marker() not in ("None", None, "")] == [[0.5]]
    low, high = axes.get_xlim()
    assert low < 0.5
    assert high > 1  # the line at 1 can be seen
    assert one.key == {}  # one column is named at the axis
    (both, _) = sheets.Dots("s").pictures("1", made(seconds=[1.0, 2.0, 3.0], ratio=[1.0, 1.0, 1.0]))
    assert set(both.key) == {"seconds", "ratio"}
    axes = shown.axes(both)
    assert (axes.get_xscale(), axes.get_xlim()[0]) == ("linear", 0)  # seconds begin at zero


def test_lines_over_numbers_in_the_columns_names() -> None:
    chart = sheets.Lines("efficiency", across="workers")
    rows = {"m, one": [1.0, 0.5], "m, other": [0.9, 0.8]}
    (picture,) = chart.pictures("1", sheet("T", ("row", "P = 4", "P = 16"), rows))
    axes = shown.axes(picture)
    assert axes.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in axes.lines] == [[4, 16], [4, 16]]
    assert list(picture.key) == ["one", "other"]
    with pytest.raises(ValueError, match="'words' has no number"):
        chart.pictures("1", sheet("T", ("row", "words"), {"m, one": [1.0]}))[0].draw(figure())


def test_an_axis_of_factors_needs_something_above_zero() -> None:
    axes = figure().subplots()
    style.logarithmic(axes.yaxis, [0.0, math.nan, math.inf])
    assert axes.get_yscale() == "linear"


def test_a_figure_fits_its_title_and_legend(tmp_path: Path) -> None:
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

    assert pages.write(Drawn(), "smoke", None, tmp_path) == []
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".png"]


# What those see who lack a kind of cones (Machado, Oliveira and Fernandes, 2009, severity 1), row by row.
SEEING = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours as WCAG 2 defines it, from 1 to 21."""
    darker, lighter = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB, for white of D65."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    x, y, z = (
        np.cbrt(part) if part > 0.008856 else 7.787 * part + 16 / 116 for part in to_xyz @ rgb / [0.95047, 1, 1.08883]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seeing", SEEING)
def test_series_can_be_distinguished(seeing: str) -> None:
    seen = [lab(np.clip(SEEING[seeing] @ linear(each), 0, 1)) for each in style.SERIES]
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)) > 12


def test_letters_in_any_colour_can_be_read() -> None:
    """Labels have the colours of their lines, so lines have the contrast of text."""
    light, dark, _ = re.split(r"\(prefers-color-scheme: dark\)|\* \{ box-sizing", pages.STYLE.read_text())
    schemes = [dict(re.findall(r"--([\w-]+): (#\w+);", part)) for part in (light, dark)]
    assert set(schemes[0]) == set(schemes[1])
    for own in schemes:
        for paper in (own["paper"], own["panel"]):
            assert all(contrast(own[front], paper) >= 4.5 for front in ("ink", "soft", "link"))
        for verdict in ("good", "half", "open", "built", "bad"):
            assert contrast(own[verdict], own[f"{verdict}-paper"]) >= 4.5
    names = ("paper", "ink", "soft", "line")
    assert [schemes[0][name] for name in names] == [style.PAPER, style.INK, style.SOFT, style.LINE]
    assert all(contrast(each, style.PAPER) >= 4.5 for each in (style.INK, style.SOFT, *style.SERIES))
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


def test_numbers_on_coloured_fields_can_be_read() -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    for name in ("viridis", "viridis_r"):
        for value in range(256):
            field = colormaps[name](value)
            assert contrast(to_hex(style.readable(field)), to_hex(field)) >= 4.5


def written(drawn: Any) -> list[tuple[str, Any]]:
    """Texts of a figure and their boxes; labels of ticks beyond an axis are not drawn."""
    beyond = set()
    for axis in (axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    texts = [each for each in drawn.findobj(Text) if each.get_text().strip() and each not in beyond]
    return [(each.get_text(), each.get_window_extent()) for each in texts if each.get_visible()]


@pytest.mark.slow
def test_no_text_of_a_figure_is_cut_off_or_over_another(tmp_path: Path) -> None:
    """Of an exhibit of each kind, with as many rows, names and lines as the scale laptop has."""
    for exhibit in {type(each): each for each in reversed(catalogue().values())}.values():
        for picture in exhibit.pictures("laptop", made_up.results(exhibit, "laptop", tmp_path))[:3]:
            with style.drawing():
                drawn = style.drawn(picture.draw, picture.key)
                drawn.draw_without_rendering()
            texts, whole = written(drawn), drawn.bbox.padded(2)
            for words, box in texts:
                inside = whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1)
                assert inside, (exhibit.name, picture.name, words)
            for (one, a), (other, b) in combinations(texts, 2):
                over = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
                assert over[0] <= 0.5 or over[1] <= 0.12 * a.height, (exhibit.name, picture.name, one, other)


def test_a_method_has_one_colour_everywhere() -> None:
    rivals = style.looks(["SparDL", "dense", "alone", "bf16", "PowerSGD"])
    assert len({look.color for look in rivals.values()}) == 5
    names = {"dense": ["dense", "none", "torch dense all-reduce"], "SparDL": ["spardl", "SparDL, B-SAG, d = 7"]}
    for name, others in names.items():
        (color,) = {style.looks([each])[each].color for each in (name, *others)}
        for exhibit in catalogue().values():
            methods = list(getattr(exhibit, "methods", ()))
            looks = style.looks(methods)
            if name in methods:
                assert looks[name].color == color


def test_variants_differ_by_dash_and_colour() -> None:
    looks = style.looks(["SparDL, P = 5", "Ok-Topk, P = 5", "SparDL, P = 8", "something", "anything"])
    one, _, other, *strangers = looks.values()
    assert one.color == other.color
    assert one.dash != other.dash
    assert len({look.color for look in (one, *strangers)}) == 3
    rare, often, other = style.looks(["new, every 15", "new, every 5", "something"]).values()
    assert rare.color == often.color != other.color
    assert rare.dash != often.dash
    many = style.looks([f"stranger {place}" for place in range(12)])
    assert len({(look.color, str(look.dash)) for look in many.values()}) == 12
