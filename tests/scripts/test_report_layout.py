"""A whole report in a real browser: nothing is cut off, no text lies over another, and every verdict can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import choices, reproduce
from scripts.exhibits.base import Results
from scripts.exhibits.claims.catalogue import claims_section, judge_all, load_all
from scripts.exhibits.papers.catalogue import catalogue, papers
from scripts.exhibits.records import SHIPPED, RecordStore
from tests.scripts.test_report_browser import BOXES, CHROMIUM, OPTIONS, check_contrast, pytestmark, sync_api
from tests.support import looking, made_up

__all__ = ["pytestmark"]

ROOT = Path(__file__).resolve().parents[2]
SCALE = "laptop"
OPEN = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All exhibits and claims, with as many rows, names and lines as the scale has."""
    folder = tmp_path_factory.mktemp("report")
    exhibits = catalogue()
    found = [made_up.results(exhibit, SCALE, folder / "outputs").found for exhibit in exhibits.values()]
    results = Results(folder / "outputs", {job: outcome for each in found for job, outcome in each.items()})
    with choices.composing():
        claims = claims_section(judge_all(exhibits, SCALE, results), SCALE, results)
    return reproduce.report(list(exhibits.values()), SCALE, results, folder / "report", [claims])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS)
        yield opened
        opened.close()


@contextmanager
def shown(browser: Any, path: Path, width: int, scheme: str = "light") -> Iterator[Any]:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(path.as_uri())
    yield page
    context.close()


@pytest.fixture
def opened(browser: Any, report: Path, width: int, scheme: str) -> Iterator[Any]:
    with shown(browser, report, width, scheme) as page:
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_all_can_be_read(opened: Any) -> None:
    check_reading(opened)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report that ``reproduce.py all --scale evening --done`` makes of the records in the repository."""
    folder = tmp_path_factory.mktemp("recorded")
    exhibits, store = catalogue(), RecordStore(ROOT / SHIPPED)
    with choices.composing():
        jobs = dict.fromkeys(job for exhibit in exhibits.values() for job in exhibit.jobs("evening"))
        results = Results.on_disk(folder / "outputs", list(jobs), store)
        claims = claims_section(judge_all(exhibits, "evening", results), "evening", results)
        return reproduce.report(list(exhibits.values()), "evening", results, folder / "report", [claims])


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_report_of_the_records_can_be_read(browser: Any, recorded: Path, width: int) -> None:
    with shown(browser, recorded, width) as page:
        check_reading(page)


def check_reading(opened: Any) -> None:
    """What a reader sees is whole, folded and unfolded."""
    assert opened.evaluate(looking.OVERFLOW) == []  # folded
    opened.evaluate(OPEN)
    for measure in (looking.OVERFLOW, looking.TABLES, looking.OVERLAP, looking.VERDICTS):
        assert opened.evaluate(measure) == []
    check_contrast(opened)
    assert min(opened.evaluate(looking.STROKES)) >= 3
    assert opened.evaluate("document.querySelectorAll('svg.plot').length") > 100
    assert opened.evaluate("document.querySelectorAll('.verdict').length") > 60


@pytest.mark.parametrize(("width", "scheme"), [(670, "dark")])
def test_on_paper_exhibits_are_unfolded_and_nothing_is_cut_off(opened: Any) -> None:
    opened.emulate_media(media="print")
    seen = "(words) => [...document.querySelectorAll(words)].map((each) => each.checkVisibility())"
    assert set(opened.evaluate(seen, ".exhibit > section")) == {True}
    assert set(opened.evaluate(seen, ".sources")) == {False}
    assert opened.evaluate("document.documentElement.scrollWidth") <= 670
    assert all(box["right"] <= 670 for box in opened.evaluate(BOXES))


# What is done to the page, and what has to find it.
FAULTS = {
    "a wide table": (looking.OVERFLOW, "document.querySelector('.stack').style.width = '1500px'"),
    "a long word": (looking.OVERFLOW, "document.querySelector('h1').style.whiteSpace = 'nowrap'"),
    "a column that scrolls away": (
        looking.TABLES,
        "document.querySelectorAll('.sheet th:first-child').forEach((each) => { each.style.position = 'static'; })",
    ),
    "a column that cannot be reached": (
        looking.TABLES,
        "document.querySelectorAll('.scroll').forEach((each) => { each.style.overflowX = 'clip'; })",
    ),
    "text over text": (
        looking.OVERLAP,
        "{ const [one, other] = document.querySelectorAll('.plot text'); "
        "one.setAttribute('transform', other.getAttribute('transform') || ''); "
        "for (const key of ['x', 'y', 'style']) one.setAttribute(key, other.getAttribute(key)); }",
    ),
    "text beyond the figure": (
        looking.OVERLAP,
        "document.querySelector('.plot text').setAttribute('transform', 'translate(-300 0)')",
    ),
    "a verdict beyond the window": (
        looking.VERDICTS,
        "document.querySelector('.claim .verdict').style.marginLeft = '400px'",
    ),
    "a verdict in a closed part": (
        looking.VERDICTS,
        "document.querySelector('.stack .judged .verdict').closest('td').style.display = 'none'",
    ),
    "a verdict without words": (looking.VERDICTS, "document.querySelector('.verdict').textContent = '\u2717'"),
    "verdicts of one colour": (
        looking.VERDICTS,
        "document.querySelectorAll('.verdict').forEach((each) => { each.style.color = 'red'; "
        "each.style.background = 'white'; })",
    ),
}


@pytest.mark.parametrize(("width", "scheme"), [(390, "light")])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_found(opened: Any, fault: str) -> None:
    measure, harm = FAULTS[fault]
    opened.evaluate(OPEN)
    assert opened.evaluate(measure) == []
    opened.evaluate(f"() => {{ {harm} }}")
    assert opened.evaluate(measure) != []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light")])
def test_the_summary_is_first_and_exhibits_are_folded(opened: Any) -> None:
    places = "(words) => words.map((each) => document.querySelector(each).getBoundingClientRect().top)"
    parts = opened.evaluate(places, ["nav", "#summary", ".claimed", ".paper", "details.exhibit"])
    assert parts == sorted(parts)
    claims = "[...document.querySelectorAll('.claims tbody th')].map((each) => each.textContent)"
    assert sorted(opened.evaluate(claims)) == sorted(claim.name for claim in load_all())
    assert opened.evaluate("[...document.querySelectorAll('details')].every((each) => !each.open)")
    assert opened.evaluate("document.querySelectorAll('#summary .paper').length") == len(set(papers().values()))
    assert opened.evaluate("[...document.querySelectorAll('.paper')].every((each) => each.querySelector('.plot'))")
    opened.locator(".tally a").click()
    assert opened.evaluate("document.querySelector('#claims-laptop').closest('details').open")
    opened.locator("#claims-laptop .claim summary").first.click()
    assert opened.locator("#claims-laptop .claim dd").first.is_visible()
