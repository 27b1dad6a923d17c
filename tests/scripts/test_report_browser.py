"""The pages in a real browser: nothing is fetched or complained of, all can be seen and read, in light and dark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts import choices, reproduce
from scripts.exhibits.base import Results
from scripts.exhibits.claims.catalogue import judge_all, load_all
from scripts.exhibits.papers.catalogue import catalogue, papers
from tests.support import looking, made_up
from tests.support.run_folders import write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
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
EXHIBITS = ("dear.breakdown", "sketch_fusion.fusion")

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
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(path.as_uri())
    yield page
    context.close()


def script(name: str, *words: str) -> None:
    command = [sys.executable, f"scripts/{name}.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of exhibits, and one of two runs of long names and one that failed."""
    folder = tmp_path_factory.mktemp("pages")
    script("reproduce", *EXHIBITS, f"--outputs={folder / 'outputs'}", f"--report={folder / 'report'}")
    write_run(folder / "runs" / "spardl", 1, 0.5)
    write_run(folder / "runs" / "oktopk", 1, 0.6, communicator___target_="spardl.communicators.oktopk.OkTopk")
    failed = write_run(folder / "runs" / ("a_name_" * 20))
    (failed / "summary.json").write_text('{"status": "failed", "reason": "replicas differ"}')
    script("report", str(folder / "runs"), f"--html={folder / 'runs.html'}")
    return {"exhibits": folder / "report" / "index.html", "runs": folder / "runs.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["exhibits", "runs"])
def test_a_page(name: str, scheme: str, browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    address = pages[name].as_uri()
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1100, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.on("request", lambda request: own(request.url, address) or complaints.append(request.url))
    page.goto(address)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    check_contrast(page)
    check_sizes(page)
    wide = page.screenshot(path=tmp_path / "wide.png", full_page=True)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate(looking.OVERFLOW) == []
    check_sizes(page)
    narrow = page.screenshot(path=tmp_path / "narrow.png", full_page=True)
    assert min(len(wide), len(narrow)) > 10_000
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(253, 253, 251)" if scheme == "light" else "rgb(21, 23, 26)"
    )
    assert page.pdf(path=tmp_path / "page.pdf", format="A4").startswith(b"%PDF")
    assert complaints == []
    context.close()


def own(url: str, address: str) -> bool:
    """Whether a request stays within the page."""
    return url == address or url.startswith("data:")


def check_contrast(page: Any) -> None:
    found = page.evaluate(CONTRASTS)
    assert len(found) > 50
    assert [each for each in found if each["ratio"] < 4.5] == []


def check_sizes(page: Any) -> None:
    boxes = page.evaluate(BOXES)
    assert len(boxes) >= 4
    assert all(box["width"] > 200 and box["height"] > 50 for box in boxes), boxes


def test_wide_tables_scroll_and_failures_are_marked(browser: Any, pages: dict[str, Path]) -> None:
    with shown(browser, pages["runs"], 400) as page:
        wider = "(each) => each.scrollWidth > each.clientWidth"
        assert page.evaluate(f"[...document.querySelectorAll('.scroll')].some({wider})")
        mark = "getComputedStyle(document.querySelector('td.bad'), '::before').content"
        assert "\u2717" in page.evaluate(mark)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.localName") == "a"


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
        judgements = judge_all(exhibits, SCALE, results)
    return reproduce.report(list(exhibits.values()), SCALE, results, folder / "report", judgements)


@pytest.fixture
def opened(browser: Any, report: Path, width: int, scheme: str) -> Iterator[Any]:
    with shown(browser, report, width, scheme) as page:
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_all_can_be_read(opened: Any) -> None:
    """What a reader sees is whole, folded and unfolded."""
    assert opened.evaluate(looking.OVERFLOW) == []  # folded
    opened.evaluate(OPEN)
    for measure in (looking.OVERFLOW, looking.TABLES, looking.VERDICTS):
        assert opened.evaluate(measure) == []
    check_contrast(opened)
    drawn = opened.evaluate("[...document.querySelectorAll('img.plot')].map((each) => each.naturalWidth)")
    assert len(drawn) > 100
    assert min(drawn) > 200
    assert opened.evaluate("document.querySelectorAll('.verdict').length") > 60


@pytest.mark.parametrize(("width", "scheme"), [(670, "dark")])
def test_on_paper_exhibits_are_unfolded_and_nothing_is_cut_off(opened: Any) -> None:
    opened.emulate_media(media="print")
    seen = "(words) => [...document.querySelectorAll(words)].map((each) => each.checkVisibility())"
    assert set(opened.evaluate(seen, ".exhibit > section")) == {True}
    assert set(opened.evaluate(seen, ".sources")) == {False}
    assert opened.evaluate("document.documentElement.scrollWidth") <= 670
    assert all(box["right"] <= 670 for box in opened.evaluate(BOXES))


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
