"""The pages in a real browser: nothing is fetched or complained of, all can be seen and read, in light and dark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import choices, report, reproduce
from scripts.exhibits.base import Results
from scripts.exhibits.catalogue import catalogue, papers
from scripts.exhibits.claims.catalogue import judge_all, load_all
from tests.support import looking, made_up
from tests.support.run_folders import write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 200_000  # milliseconds for what a browser does on a busy machine
SCALE = "laptop"
OPEN = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"),
]

# The least contrast of text in each colour with what is behind it, as WCAG 2 defines it.
CONTRASTS = """() => {
  const parse = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    return {rgb: parts.slice(0, 3), alpha: parts.length > 3 ? parts[3] : 1};
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255).map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let node = element; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.alpha === 1) return found.rgb;
    }
    return [255, 255, 255];
  };
  const results = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text) continue;
    const front = parse(getComputedStyle(element).color);
    const [a, b] = [light(front.rgb), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    results.push({text, ratio: front.alpha < 1 ? 0 : ratio});
  }
  return results;
}"""
BOXES = "() => [...document.querySelectorAll('img.plot, table')].map((e) => e.getBoundingClientRect().toJSON())"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS, timeout=PATIENCE)
        yield opened
        opened.close()


@contextmanager
def shown(browser: Any, path: Path, width: int, scheme: str = "light") -> Iterator[Any]:
    """A page that fetches nothing and complains of nothing."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, complaints = context.new_page(), list[str]()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda each: each.url.startswith((path.as_uri(), "data:")) or complaints.append(each.url))
    page.goto(path.as_uri())
    yield page
    assert complaints == []
    context.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of all exhibits and claims as long as at a whole scale, and one of runs, one of which failed."""
    folder, exhibits = tmp_path_factory.mktemp("pages"), catalogue()
    found = [made_up.results(exhibit, SCALE, folder / "outputs").found for exhibit in exhibits.values()]
    results = Results(folder / "outputs", {job: outcome for each in found for job, outcome in each.items()})
    with choices.composing():
        judgements = judge_all(exhibits, SCALE, results)
    index = reproduce.report(list(exhibits.values()), SCALE, results, folder / "report", judgements)
    write_run(folder / "runs" / "spardl", 1, 0.5)
    write_run(folder / "runs" / "oktopk", 1, 0.6, communicator___target_="spardl.communicators.oktopk.OkTopk")
    failed = write_run(folder / "runs" / ("a_name_" * 20))
    (failed / "summary.json").write_text('{"status": "failed", "reason": "replicas differ"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", str(folder / "runs"), f"--html={folder / 'runs.html'}"])
        assert report.main() == 0
    return {"exhibits": index, "runs": folder / "runs.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("name", ["exhibits", "runs"])
def test_all_can_be_read(name: str, width: int, scheme: str, browser: Any, pages: dict[str, Path]) -> None:
    """What a reader sees is whole, folded and unfolded."""
    with shown(browser, pages[name], width, scheme) as page:
        assert page.evaluate(looking.OVERFLOW) == []  # folded
        page.evaluate(OPEN)
        for measure in (looking.OVERFLOW, looking.TABLES, looking.VERDICTS):
            assert page.evaluate(measure) == []
        found = page.evaluate(CONTRASTS)
        assert len(found) > 50
        assert [each for each in found if each["ratio"] < 4.5] == []
        assert all(box["width"] > 200 and box["height"] > 50 for box in page.evaluate(BOXES))
        drawn = page.evaluate("[...document.querySelectorAll('img.plot')].map((each) => each.naturalWidth)")
        assert len(drawn) > (100 if name == "exhibits" else 1)
        assert min(drawn) > 200
        assert (page.evaluate("document.querySelectorAll('.verdict').length") > 60) == (name == "exhibits")
        background = {"light": "rgb(253, 253, 251)", "dark": "rgb(21, 23, 26)"}[scheme]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background


def test_wide_tables_scroll_and_failures_are_marked(browser: Any, pages: dict[str, Path]) -> None:
    with shown(browser, pages["runs"], 400) as page:
        wider = "(each) => each.scrollWidth > each.clientWidth"
        assert page.evaluate(f"[...document.querySelectorAll('.scroll')].some({wider})")
        mark = "getComputedStyle(document.querySelector('td.bad'), '::before').content"
        assert "\u2717" in page.evaluate(mark)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.localName") == "a"


def test_on_paper_exhibits_are_unfolded_and_nothing_is_cut_off(browser: Any, pages: dict[str, Path]) -> None:
    """Ink on white even for those who like it dark."""
    with shown(browser, pages["exhibits"], 670, "dark") as page:
        page.emulate_media(media="print")
        seen = "(words) => [...document.querySelectorAll(words)].map((each) => each.checkVisibility())"
        assert set(page.evaluate(seen, ".exhibit > section")) == {True}
        assert set(page.evaluate(seen, ".sources")) == {False}
        assert page.evaluate("document.documentElement.scrollWidth") <= 670
        assert all(box["right"] <= 670 for box in page.evaluate(BOXES))
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 32, 36)"


def test_the_summary_is_first_and_exhibits_are_folded(browser: Any, pages: dict[str, Path]) -> None:
    with shown(browser, pages["exhibits"], 1280) as page:
        places = "(words) => words.map((each) => document.querySelector(each).getBoundingClientRect().top)"
        parts = page.evaluate(places, ["nav", "#summary", ".claimed", ".paper", "details.exhibit"])
        assert parts == sorted(parts)
        claims = "[...document.querySelectorAll('.claims tbody th')].map((each) => each.textContent)"
        assert sorted(page.evaluate(claims)) == sorted(claim.name for claim in load_all())
        assert page.evaluate("[...document.querySelectorAll('details')].every((each) => !each.open)")
        assert page.evaluate("document.querySelectorAll('#summary .paper .plot').length") >= len(set(papers().values()))
        page.locator(".tally a").click()
        assert page.evaluate("document.querySelector('#claims-laptop').closest('details').open")
        page.locator("#claims-laptop .claim summary").first.click()
        assert page.locator("#claims-laptop .claim dd").first.is_visible()
