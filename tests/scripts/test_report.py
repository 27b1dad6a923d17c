"""The pages of exhibits and of runs: what they hold, and that they need nothing but themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts import reproduce
from scripts.exhibits import base, jobs, tables, working
from scripts.exhibits.charts import palette, sheets
from scripts.exhibits.kinds import predictions
from scripts.exhibits.pages import page as html_page
from scripts.exhibits.pages import sections as report_sections
from spardl.basics.errors import DataError, WorkerError

ROOT = Path(__file__).resolve().parents[2]


class Reader(HTMLParser):
    """Ids, links, and text of a page; complains of what is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
        self.texts.append(" ")
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        self.texts.append(" ")
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def line(figure: Any) -> None:
    axes = figure.subplots()
    axes.plot([0, 1, 2], [0.123456, 1.987654, 1.5], label="a <b> & c")
    axes.bar([0.5], [1.0])
    axes.set_title("50 % & more")
    axes.legend()


def section(key: str = "a-smoke", title: str = "A", marks: int = 0, html: str = "<p>text</p>\n") -> Any:
    return html_page.Section(key, "Paper", title, "smoke", marks, html)


def page(*sections: Any, title: str = "T", lead: str = "L") -> str:
    text: str = html_page.page(title, lead, {"Name": "<value>"}, sections)
    return text


def assert_self_contained(text: str) -> None:
    found = Reader(text)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    for link in found.links:
        assert link == "data:," or (link.startswith("#") and link[1:] in found.ids), link
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(found.ids)
    assert not re.search(r"https?:|@import|<script|@font-face|url\((?!#)", text)


def results_of(exhibit: Any, folder: Path, fault: Exception | None = None) -> Any:
    for job in exhibit.jobs("smoke"):
        if fault:
            job.note(folder, fault)
        else:
            job.perform(folder)
    return base.Results.on_disk(folder, exhibit.jobs("smoke"))


def shares(number: int) -> dict[str, Any]:
    sheet = predictions.sheet
    return {"sheets": [sheet(f"Sheet {each}", ["case", "one"], {"x": [0.5], "y": ["none"]}) for each in range(number)]}


@pytest.fixture
def exhibit() -> Any:
    return predictions.Computed(
        name="paper.subject",
        title="A title",
        source="Table <1>",
        shows="something",
        basis=base.Basis("a clock", "all bytes", "no <jitter>"),
        function=shares,
        arguments={"smoke": (("number", 2),)},
        shell="python scripts/some.py",
        words="What & how",
        charts=(sheets.Dots("share"),),
    )


def test_exhibit_is_complete_in_its_section(exhibit: Any, tmp_path: Path) -> None:
    results = results_of(exhibit, tmp_path)
    made = report_sections.exhibit_section(exhibit, "Paper", "smoke", results)
    text = Reader(page(made)).text
    for words in ("Table <1>", "something", "What & how", "python scripts/reproduce.py paper.subject --scale smoke"):
        assert words in text
    assert text.count("Simulated a clock Measured all bytes Assumed no <jitter>") == 4  # two tables and two figures
    assert made.html.count('<svg class="plot"') == made.html.count('<details class="sources">') == 2
    assert str(next(iter(results.found.values())).where) in text
    assert made.marks == 0
    assert_self_contained(page(made))


def test_what_failed_is_marked_and_counted(exhibit: Any, tmp_path: Path) -> None:
    results = results_of(exhibit, tmp_path, WorkerError("out of <memory>"))
    made = report_sections.exhibit_section(exhibit, "Paper", "smoke", results)
    assert "<td class=bad>failed: out of &lt;memory&gt;</td>" in made.html
    assert made.marks == 1
    text = Reader(page(made)).text
    assert text.count("\u2717 1 cell") == 2  # in the contents, and beside the title
    assert "failed: out of <memory>; see " in text
    assert re.search(r"td\.bad::before \{ content:", page(made))  # not by colour alone


def test_the_page_tells_what_explain_tells(
    exhibit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    results = results_of(exhibit, tmp_path)
    told = reproduce.explain(exhibit, "smoke", "x", tmp_path)
    text = Reader(report_sections.exhibit_section(exhibit, "Paper", "smoke", results).html).text
    assert "python scripts/some.py" in told
    for words in told.splitlines():
        assert words.strip() in text or words.endswith(", x:")


def test_what_is_behind_every_row_is_told_once(tmp_path: Path) -> None:
    rows = [tables.Row(name, [tables.Cell("1", 1.0)], []) for name in ("a", "b")]
    content = tables.Table("T", ("row", "value"), rows)
    basis = base.Basis("", "", "")
    same = html_page.table(content, "t", basis, lambda row: [html_page.Source("do", "there")])
    other = html_page.table(content, "t", basis, lambda row: [html_page.Source(f"do {row.name}", "there")])
    assert (same.count("<dt>"), other.count("<dt>")) == (1, 2)
    assert "every row" in same
    assert "<details" not in html_page.table(content, "t", basis, lambda row: [])
    assert "figcaption" not in same
    assert "<td class=number>1</td>" in same
    wordy = tables.Table("T", ("row", "words"), [tables.Row("a", [tables.Cell("many words " * 5)], [])])
    assert "<td class=long>many" in html_page.table(wordy, "t", basis, lambda row: [])


@settings(max_examples=20)
@example(words="<i>&lt;", marks=1)
@given(words=st.text("<>&'\"/ aé\u2717", min_size=1), marks=st.integers(0, 3))
def test_any_words_are_only_words(words: str, marks: int) -> None:
    found = Reader(page(section(title=words, marks=marks), title=words, lead=words))
    assert " ".join(words.split()) in found.text
    assert not found.open
    assert found.ids == ["contents", "a-smoke"]


def test_figures_have_the_page_s_colours_and_letters() -> None:
    drawn = html_page.inline(line, {}, "one", "a <title>")
    assert 'aria-labelledby="one-title"' in drawn
    assert '<title id="one-title">a &lt;title&gt;</title>' in drawn
    assert "a &lt;b&gt; &amp; c</text>" in drawn
    assert "50 % &amp; more</text>" in drawn
    assert {"var(--c0)", "currentColor", "var(--paper)", "var(--sans)"} <= set(
        re.findall(r"currentColor|var\(--\w+\)", drawn)
    )
    assert not re.search(r"#000000|#ffffff|DejaVu|xmlns|xlink|fe01|<style|<metadata|\d\.\d{3}", drawn)
    assert len(drawn) < 8_000


def test_two_figures_do_not_clash_and_are_drawn_alike() -> None:
    one, other = (html_page.inline(line, {}, ident, "title") for ident in ("one", "other"))
    text = page(section(html=one + other))
    assert_self_contained(text)
    ids = Reader(text).ids
    assert len(ids) == len(set(ids)) > 6
    assert one == html_page.inline(line, {}, "one", "title")


def test_the_style_has_every_colour_for_light_and_dark() -> None:
    style = html_page.STYLE.read_text()
    light, dark = palette.css().split("@media screen and (prefers-color-scheme: dark)")
    defined = [set(re.findall(r"(--[\w-]+):", part)) for part in (light, dark)]
    assert defined[0] == defined[1]
    assert set(palette.variables().values()) <= {f"var({name})" for name in defined[0]}
    own = set(re.findall(r"(--[\w-]+):", style))
    assert own == {"--sans", "--serif", "--mono"}
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= defined[0] | own


def keys(folder: Path) -> Sequence[str]:
    text = (folder / "index.html").read_text()
    return re.findall(r'<section id="([^"]+)">', text)


def test_sections_gather_over_many_commands(tmp_path: Path) -> None:
    add = report_sections.add
    order = ["a-smoke", "a-laptop", "b-smoke"]
    add(tmp_path, [section("b-smoke"), section("z-smoke")], order)
    add(tmp_path, [section("a-laptop")], order)
    add(tmp_path, [section("a-smoke", html="<p>first version</p>\n")], order)
    assert add(tmp_path, [section("a-smoke", html="<p>second version</p>\n")], order) == tmp_path / "index.html"
    assert keys(tmp_path) == [*order, "z-smoke"]
    text = (tmp_path / "index.html").read_text()
    assert "second version" in text
    assert "first version" not in text
    assert_self_contained(text)


def test_a_section_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    add = report_sections.add
    add(tmp_path, [section()], [])
    before = (tmp_path / "index.html").read_text()
    (tmp_path / "sections" / "b-smoke.json").write_text('{"key": "b"}')
    with pytest.raises(DataError, match=r"b-smoke\.json is not a section of a report .*; delete it") as caught:
        add(tmp_path, [section()], [])
    assert "\n" not in str(caught.value)
    assert (tmp_path / "index.html").read_text() == before


def test_a_section_of_tables_alone(tmp_path: Path) -> None:
    content = tables.Table("Claims", ("claim", "verdict"), [tables.Row("c<1>", [tables.Cell("no", bad=True)], [])])
    results = base.Results(tmp_path, {})
    made = report_sections.tables_section(
        "claims-smoke", "Claims", "Words & more", "smoke", [content], base.Basis("", "counted", ""), results
    )
    assert made.marks == 0  # nothing has failed
    assert "Words & more Claims \u2022 no c<1>" in Reader(made.html).text
    assert_self_contained(page(made))


def test_every_exhibit_has_a_place_and_a_paper() -> None:
    assert list(reproduce.papers()) == list(reproduce.catalogue())
    assert all(words and "\n" not in words for words in reproduce.papers().values())


def test_claims_come_first(tmp_path: Path) -> None:
    nothing = base.Results(tmp_path, {})
    report_sections.add(tmp_path, [section("spardl.complexity-smoke"), section("dear.speed-smoke")], [])
    reproduce.report([], "smoke", nothing, tmp_path, [section("claims-smoke")])
    assert keys(tmp_path) == ["claims-smoke", "spardl.complexity-smoke", "dear.speed-smoke"]


def test_what_must_run_alone_comes_last(tmp_path: Path, capfd: Any) -> None:

    class Alone(jobs.Computation):  # type: ignore[misc]
        alone = True

    work = [
        kind("x", shares, (("number", number),), f"do {number}")
        for number, kind in enumerate([Alone, jobs.Computation, Alone, jobs.Computation])
    ]
    working.complete(work, tmp_path, at_once=1)
    told = capfd.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in told[1:]] == ["do 1: done", "do 3: done", "do 0: done", "do 2: done"]
    assert told[-1].startswith("[4/4, ")


def test_where_a_page_was_made() -> None:
    found = {"python": "3.12", "torch": "2.7", "spardl": "0.1.0", "commit": None, "machine": "a machine"}
    assert html_page.in_words(found) == "Python 3.12, torch 2.7, spardl 0.1.0; a machine"
    assert html_page.in_words({}) == ""
    assert set(html_page.here()) == {"Made with", "On", "Date"}


def test_of_many_sources_the_page_names_the_first() -> None:
    found = [html_page.Source(f"command {number}", "there") for number in range(30)]
    assert report_sections._few(found[:13]) == found[:13]
    assert report_sections._few(found)[:12] == found[:12]
    assert report_sections._few(found)[12:] == [html_page.Source("and 18 more", "listed by --explain")]
