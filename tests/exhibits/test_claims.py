"""Claims: what they find, results that are missing or failed, limits, and the page."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import choices
from scripts import claims as claims_script
from scripts.exhibits import base, tables
from scripts.exhibits import jobs as exhibit_jobs
from scripts.exhibits.claims import base as claims_base
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.claims import evidence, judging
from scripts.exhibits.kinds import lab, predictions, trainings
from scripts.exhibits.papers import catalogue as papers_catalogue
from spardl.basics.errors import WorkerError
from tests.claiming import bound, figures, module, seeded

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("spardl", "oktopk", "study", "dear", "sketch_fusion")


@pytest.fixture
def composing() -> Iterator[None]:
    with choices.composing():
        yield


def claim(rule: Any, find: Callable[..., Any], limits: Sequence[Any] = ()) -> Any:
    published = judging.Published("much", judging.Known.LOW, "a note")
    return judging.Claim("X: name", "It is so.", published, "x.y", find, rule, "seconds", tuple(limits))


def judged(made: Any, scale: str = "laptop", found: Any = None) -> Any:
    comparison = trainings.MethodComparison
    basis = base.Basis("nothing: it ran", "seconds", "a < b")
    case = trainings.Case("Digits", ("model=resnet20",), "digits")
    plan = trainings.Plan((case,), (), (1, 2, 3), "")
    exhibit = comparison(
        "x.y", "T", "", "", basis, {"one": ("a=1",), "two": ("a=2",)}, dict.fromkeys(("smoke", "laptop", "paper"), plan)
    )
    outcomes = dict(zip(exhibit.jobs(scale), found or [], strict=False))
    results = base.Results(Path("runs"), outcomes)
    return judging.judge(made, {"x.y": exhibit}, scale, results)


def accuracies(exhibit: Any, scale: str, results: Any) -> Any:
    return evidence.metrics(exhibit, scale, results, "one", "two")


def outcome(value: float, reason: str | None = None, metric: str = "accuracy") -> Any:
    data = {"metric": metric, "final": {metric: value}, "cluster_seconds": 10 * value}
    return exhibit_jobs.Outcome(Path("run"), {} if reason else data, reason)


def test_a_claim_is_judged_by_its_results() -> None:
    found = judged(claim(seeded("NoLoss"), accuracies), found=[outcome(value) for value in (0.9, 0.8, 0.7) * 2])
    assert found.finding.verdict.name == "REPRODUCED"
    assert found.finding.ours == "Digits: 0%"
    assert len(found.jobs) == 6
    lower = [outcome(value, metric="wer") for value in (0.9, 0.8, 0.7, 0.5, 0.4, 0.3)]
    assert judged(claim(seeded("NoLoss"), accuracies), found=lower).finding.verdict.name == "NOT"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "6 of 6 results that it needs are missing: not run yet"),
        ([0.9] * 5, "1 of 6 results that it needs are missing: not run yet"),
        ([0.9, "out of memory", *[0.9] * 3], "2 of 6 results that it needs are missing: out of memory; not run yet"),
        ([*[0.9] * 5, float("nan")], "1 of 6 trainings ended without a finite number"),
    ],
)
def test_what_is_missing_or_failed_is_not_judged(values: list[Any], reason: str) -> None:
    found = [outcome(0, value) if isinstance(value, str) else outcome(value) for value in values]
    judgement = judged(claim(seeded("NoLoss"), accuracies), found=found)
    assert judgement.finding.verdict.name == "UNJUDGED"
    assert judgement.finding.reason == reason
    assert judgement.finding.ours == "-"
    assert len(judgement.jobs) == 6


def test_limits_lower_a_verdict_and_say_why() -> None:
    verdicts = claims_base.Verdict
    limits = [judging.Limit("it is small", verdicts.DIRECTION, ("laptop",)), judging.LAB]

    def speed(value: float) -> Any:
        return claim(bound("UpTo", 2.0), lambda *_: figures(value), limits)

    capped = judged(speed(3.0)).finding
    assert capped.verdict is verdicts.DIRECTION
    assert "; in the same direction at best, because it is small, and four workers" in capped.reason
    assert "it is small" not in judged(speed(3.0), "paper").finding.reason
    assert judged(speed(1.5)).finding.reason == "a gain, but 1.5x is less than 0.9 of 2x"
    bad = judged(speed(0.5)).finding
    assert bad.verdict is verdicts.NOT
    assert "; here, where it is small, and four workers" in bad.reason
    free = replace(speed(3.0), limits=())
    assert judged(free).finding.verdict is verdicts.REPRODUCED
    trivial = judged(free, "smoke").finding
    assert trivial.verdict is verdicts.UNJUDGED
    assert trivial.reason == "work of this scale shows that everything runs, and nothing else"


def test_a_column_that_is_gone_is_no_missing_result() -> None:
    """Else a claim would be silently given up when its exhibit changes."""
    rows = [tables.Row("one", [tables.Cell("1.5", 1.5)], []), tables.Row("two", [tables.Cell("none")], [])]
    table = tables.Table("T", ("method", "speed"), rows)
    assert [figure.values for figure in evidence.cells([table], "speed", bool).values()] == [(1.5,)]
    with pytest.raises(KeyError, match="no table has a column 'pace'"):
        evidence.cells([table], "pace", bool)
    with pytest.raises(judging.NoEvidence, match="no such figures at this scale"):
        evidence.cells([table], "speed", lambda name: name == "two")


def test_turns_are_read_and_compared_one_by_one() -> None:
    rows = [tables.Row(name, [tables.Cell(text)], []) for name, text in (("a", "2, 4.5"), ("b", "1, 1.5"))]
    found = evidence.turns([tables.Table("T", ("method", lab.TURNS), rows)])
    assert evidence.ratio("a / b", found["a"], found["b"], 3.0)[:3] == ("a / b", [2.0, 3.0], (3.0,))


def test_metrics_are_turned_as_their_tasks_say() -> None:
    higher = evidence.HIGHER_IS_BETTER
    found = {
        metric: direction == "True"
        for path in (ROOT / "tasks").rglob("*.py")
        for metric, direction in re.findall(
            r"^    metric: ClassVar\[str\] = \"(\w+)\"\n    higher_is_better: ClassVar\[bool\] = (\w+)$",
            path.read_text(),
            re.MULTILINE,
        )
    }
    assert len(found) >= 5
    assert {metric for metric, direction in found.items() if direction} == higher


def test_every_claim_refers_to_an_exhibit() -> None:
    known = papers_catalogue.catalogue()
    claims = claims_catalogue.CLAIMS
    assert {each.exhibit for each in claims} <= set(known)
    assert len({each.name for each in claims}) == len(claims) >= 28


@pytest.mark.parametrize("part", PARTS)
def test_no_verdict_stands_in_a_declaration(part: str) -> None:
    text = (ROOT / "scripts" / "exhibits" / "claims" / f"{part}.py").read_text()
    verdicts = claims_base.Verdict
    assert "Verdict" not in text
    assert not [each for each in verdicts if str(each) in text.lower()]


def test_the_papers_headlines_are_all_there() -> None:
    published = " ".join(each.published.figure for each in claims_catalogue.CLAIMS)
    for figure in ("4.9x", "1.98x", "6k", "3.29x", "12.95x", "8.83x", "7.71x", "76.3%", "11%", "1.75x", "1.43x"):
        assert figure in published
    for figure in ("83%", "15%", "1.25x", "95%", "18.6%", "2.87x", "GRES > PRES > LRES"):
        assert figure in published


def timed(*names: str) -> Any:
    columns = ("method", lab.TURNS)
    rows = {name: ["2, 2.1, 2"] for name in names}
    return {"sheets": [predictions.sheet("Seconds", columns, rows)]}


def done(job: Any) -> Any:
    """A job's result: that of its work if that takes seconds, else one that looks like it."""
    in_labs = {
        "dear.lab": ("none, after_backward", "none, wfbp", "none, dear"),
        "spardl.lab": ("spardl", "oktopk", "topka"),
    }
    if not hasattr(job, "function"):
        return outcome(0.5)
    data = timed(*in_labs[job.name]) if job.name in in_labs else job.function(**dict(job.arguments))
    return exhibit_jobs.Outcome(Path("run"), data)


def figures_of(claims: Sequence[Any], results: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """What each claim finds at the smallest scale, if there is anything."""
    known = papers_catalogue.catalogue()
    for made in claims:
        try:
            yield made, made.find(known[made.exhibit], "smoke", results)
        except judging.NoEvidence as missing:
            assert str(missing) == "there are no such figures at this scale"
            assert made.exhibit == "oktopk.scaling"


def check(made: Any, found: Sequence[Any]) -> None:
    assert found
    assert all(figure.jobs for figure in found)
    assert len({figure.name for figure in found}) == len(found)
    assert made.rule.judge(found).reason


def test_claims_of_trainings_find_their_figures() -> None:
    """Claims and exhibits fit together: names of methods and cases, and what a summary holds."""
    kind = trainings.MethodComparison
    known = papers_catalogue.catalogue()
    claims = [each for each in claims_catalogue.CLAIMS if isinstance(known[each.exhibit], kind)]
    jobs = {job for each in claims for job in known[each.exhibit].jobs("smoke")}
    results = base.Results(Path("runs"), {job: outcome(0.5) for job in jobs})
    judged = [check(made, found) for made, found in figures_of(claims, results)]
    assert len(judged) == len(claims) >= 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_claims_find_their_figures(tmp_path: Path) -> None:
    """Likewise: names of tables, rows and columns, and what counts hold."""
    known, claims = papers_catalogue.catalogue(), claims_catalogue.CLAIMS
    jobs = {job for each in claims for job in known[each.exhibit].jobs("smoke")}
    results = base.Results(tmp_path, {job: done(job) for job in jobs})
    found = dict(figures_of(claims, results))
    for made, figures_found in found.items():
        check(made, figures_found)
    # The smallest scale has one model at few workers.
    assert len(claims) - len(found) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_judged_without_results(part: str, composing: None, tmp_path: Path) -> None:
    """Which also reads every claim's exhibit at every scale, as far as that goes without results."""
    known, results = (
        papers_catalogue.catalogue(),
        claims_catalogue.OnDemand(tmp_path),
    )
    for made in module(f"scripts.exhibits.claims.{part}").CLAIMS:
        found = judging.judge(made, known, "smoke", results)
        assert found.finding.verdict.name == "UNJUDGED"
        assert "not run yet" in found.finding.reason
        assert found.jobs


def test_results_are_looked_up_once(tmp_path: Path) -> None:
    job = exhibit_jobs.Computation("double", abs, (("x", 1),), "echo")
    results = claims_catalogue.OnDemand(tmp_path)
    assert results.of(job).reason == "not run yet"
    job.note(tmp_path, WorkerError("lost"))
    assert results.of(job).reason == "not run yet"
    assert claims_catalogue.OnDemand(tmp_path).of(job).reason == "lost"


def test_the_tables_count_and_mark() -> None:
    made = judged(claim(bound("UpTo", 2.0), lambda *_: figures(0.5)))
    summary, table = claims_catalogue.tables_of([made])
    assert {row.name: row.cells[0].value for row in summary.rows} == {
        "reproduced": 0,
        "in the same direction": 0,
        "cannot be judged here": 0,
        "not reproduced": 1,
    }
    cells = dict(zip(table.columns[1:], table.rows[0].cells, strict=True))
    assert cells["verdict"] == ("not reproduced", None, True)
    assert cells["ours"].text == "0.5x (a)"
    assert cells["basis"].text == "measured, assumed"
    assert cells["known"].text == "from memory, low certainty"


def test_the_page_tells_all_of_a_claim() -> None:
    made = judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.0), [judging.LAB]))
    page = judging.page([made], "laptop", Path("runs"), Path("docs/x.md"))
    for words in (
        "python scripts/claims.py --scale laptop --outputs runs --write docs/x.md",
        "| reproduced | 0 | - |",
        "### X: name\n\nIt is so.",
        "much (from memory, low certainty; a note)",
        "seconds: 3x (a)",
        made.claim.rule.words,
        "(in the same direction at best)",
        "`x.y`, scale laptop",
        "**Assumed:** a &lt; b",
    ):
        assert words in page


def script(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["claims.py", *words])
    return int(claims_script.main())


@pytest.fixture
def one_claim(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of all: what the script judges; may be changed."""
    made = [judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.0)))]
    monkeypatch.setattr(claims_script, "judge_all", lambda *_: made)
    return made


def test_the_page_is_written_and_checked(
    one_claim: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ("--scale=laptop", f"--outputs={tmp_path}", f"--write={tmp_path / 'claims.md'}")
    assert script(monkeypatch, *words, "--check") == 2
    assert capsys.readouterr().err.startswith("error: there is no page ")
    assert script(monkeypatch, *words) == 0
    assert "| X: name | much |" in capsys.readouterr().out
    assert script(monkeypatch, *words, "--check") == 0
    one_claim[0] = judged(claim(bound("UpTo", 2.0), lambda *_: figures(3.1)))
    assert script(monkeypatch, *words, "--check") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert script(monkeypatch, "--scale=laptop", f"--write={tmp_path / 'no' / 'claims.md'}") == 2


def test_the_report_gets_a_section(one_claim: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script(monkeypatch, "--scale=laptop", f"--outputs={tmp_path}", f"--report={tmp_path / 'report'}") == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "X: name" in page
    assert "3x (a)" in page


def test_the_page_in_the_docs_names_every_claim() -> None:
    page = (ROOT / "docs" / "claims.md").read_text()
    names = [each.name for each in claims_catalogue.CLAIMS]
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == names
