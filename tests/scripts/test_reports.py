"""Reports of exhibits and of runs: content, pages that need nothing but themselves, and comparisons of runs."""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts import report, reproduce
from scripts.exhibits import base, jobs, pages, tables
from scripts.exhibits.charts import sheets, style
from scripts.exhibits.kinds import predictions
from spardl.basics.errors import WorkerError
from tests.support.run_folders import SUMMARY, write_run

ROOT = Path(__file__).resolve().parents[2]


class Reader(HTMLParser):
    """Collects ids, links and text of a page; fails if a tag is not closed."""

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
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.texts.append(" ")
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def line(figure: Any) -> None:
    figure.subplots().plot([0, 1, 2], [0.123456, 1.987654, 1.5])


def section(key: str = "a-smoke", title: str = "A", marks: int = 0, html: str = "<p>text</p>\n") -> Any:
    return pages.Section(key, "Paper", title, "smoke", marks, html)


def page(*sections: Any, title: str = "T", lead: str = "L") -> str:
    text: str = pages.page(title, lead, {"Name": "<value>"}, sections)
    return text


def assert_self_contained(text: str) -> None:
    found = Reader(text)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    for link in found.links:
        assert link.startswith(("data:,", "data:image/svg+xml;base64,")) or link.removeprefix("#") in found.ids, link
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
    made = pages.exhibit_section(exhibit, "Paper", "smoke", results)
    text = Reader(page(made)).text
    for words in ("Table <1>", "something", "What & how", "python scripts/reproduce.py paper.subject --scale smoke"):
        assert words in text
    assert text.count("Simulated a clock Measured all bytes Assumed no <jitter>") == 4  # two tables and two figures
    assert made.html.count('<img class="plot"') == made.html.count('<details class="sources">') == 2
    reported = reproduce.explain(exhibit, "smoke", "x", tmp_path)
    assert "python scripts/some.py" in reported
    for words in reported.splitlines():
        assert words.strip() in text or words.endswith(", x:")
    assert made.marks == 0
    assert_self_contained(page(made))


def test_what_failed_is_marked_and_counted(exhibit: Any, tmp_path: Path) -> None:
    results = results_of(exhibit, tmp_path, WorkerError("out of <memory>"))
    made = pages.exhibit_section(exhibit, "Paper", "smoke", results)
    assert "<td class=bad>failed: out of &lt;memory&gt;</td>" in made.html
    assert made.marks == 1
    text = Reader(page(made)).text
    assert text.count("\u2717 1 cell") == 2  # in the contents, and next to the title
    assert "failed: out of <memory>; see " in text
    assert re.search(r"td\.bad::before \{ content:", page(made))  # not by colour alone


def test_the_source_of_every_row_is_printed_once(tmp_path: Path) -> None:
    rows = [tables.Row(name, [tables.Cell("1", 1.0)], []) for name in ("a", "b")]
    content = tables.Table("T", ("row", "value"), rows)
    basis = base.Basis("", "", "")
    same = pages.table(content, "t", basis, lambda row: [pages.Source("do", "there")])
    other = pages.table(content, "t", basis, lambda row: [pages.Source(f"do {row.name}", "there")])
    assert (same.count("<dt>"), other.count("<dt>")) == (1, 2)
    assert "every row" in same
    assert "<details" not in pages.table(content, "t", basis, lambda row: [])
    assert "figcaption" not in same
    assert "<td class=number>1</td>" in same
    wordy = tables.Table("T", ("row", "words"), [tables.Row("a", [tables.Cell("many words " * 5)], [])])
    assert "<td class=long>many" in pages.table(wordy, "t", basis, lambda row: [])


@settings(max_examples=20)
@example(words="<i>&lt;", marks=1)
@given(words=st.text("<>&'\"/ aé\u2717", min_size=1), marks=st.integers(0, 3))
def test_any_words_are_only_words(words: str, marks: int) -> None:
    found = Reader(page(section(title=words, marks=marks), title=words, lead=words))
    assert " ".join(words.split()) in found.text
    assert not found.open
    assert found.ids == ["contents", "a-smoke"]


def test_a_figure_is_an_image_of_its_own() -> None:
    drawn = pages.image(line, {}, 'a <title> & "more"')
    text = page(section(html=drawn + drawn))
    assert_self_contained(text)
    alt, source = re.findall(r'<img class="plot" alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)">', text)[0]
    assert alt == "a &lt;title&gt; &amp; &#34;more&#34;"
    figure = base64.b64decode(source).decode()
    assert ElementTree.fromstring(figure).tag.endswith("svg")
    assert "</text>" in figure  # letters of the reader
    assert drawn == pages.image(line, {}, 'a <title> & "more"')


def test_what_must_run_alone_comes_last(tmp_path: Path, capfd: Any) -> None:

    class Alone(jobs.Computation):  # type: ignore[misc]
        alone = True

    work = [
        kind("x", shares, (("number", number),), f"do {number}")
        for number, kind in enumerate([Alone, jobs.Computation, Alone, jobs.Computation])
    ]
    jobs.complete(work, tmp_path, at_once=1)
    reported = capfd.readouterr().out.splitlines()
    assert [line.split("] ")[1] for line in reported[1:]] == ["do 1: done", "do 3: done", "do 0: done", "do 2: done"]
    assert reported[-1].startswith("[4/4, ")


def test_where_a_page_was_made_and_the_first_of_many_sources() -> None:
    found = {"python": "3.12", "torch": "2.7", "spardl": "0.1.0", "commit": None, "machine": "a machine"}
    assert pages.in_words(found) == "Python 3.12, torch 2.7, spardl 0.1.0; a machine"
    assert pages.in_words({}) == ""
    assert set(pages.here()) == {"Made with", "On", "Date"}
    work = [jobs.Computation("x", shares, (("number", number),), f"do {number}") for number in range(30)]
    nothing = base.Results(Path("x"), {})
    listed = [pages.few_sources(tables.Row("", [], work[:count]), nothing) for count in (13, 30)]
    assert [source.command for source in listed[0]] == [job.command for job in work[:13]]
    assert listed[1] == [*listed[0][:12], pages.Source("and 18 more", "listed by --explain")]


def compared(*folders: Path) -> list[Any]:
    finished, others = report.collect(folders)
    assert not others
    return report.compare(finished)


def names_and_runs(comparison: Any) -> dict[str, list[str]]:
    return {method.name: [run.folder.name for run in method.runs] for method in comparison.methods}


def test_seeds_share_a_row_and_all_else_that_matters_does_not(tmp_path: Path) -> None:
    changes = [
        {"seed": 3, "training__seed": 3, "training__log_every": 50},
        {"seed": 1, "compressor__seed": 8},
        {"compressor__density": 0.1},
        {"compressor__density": 0.1, "cluster__workers": 8, "summary": {"workers": 8}},
    ]
    for number, each in enumerate(changes):
        write_run(tmp_path / f"run{number}", **each)
    (comparison,) = compared(tmp_path)
    assert comparison.title == "Accuracy on digits"
    found = names_and_runs(comparison)
    assert list(found.values()) == [["run1", "run0"], ["run2"], ["run3"]]
    assert next(iter(found)) == "spardl, cluster.workers=4, compressor.density=0.01"
    both = {"cluster.workers": ["4", "4", "8"], "compressor.density": ["0.01", "0.1", "0.1"]}
    assert report.differences(comparison.methods) == both


def test_names_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    oktopk = "spardl.communicators.oktopk.OkTopk"
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", communicator___target_=oktopk, compressor__density=0.5)
    write_run(tmp_path / "c", momentum__factor=0.9)
    (comparison,) = compared(tmp_path)
    names = ["spardl, momentum.factor=null", "spardl, communicator=oktopk", "spardl, momentum.factor=0.9"]
    assert list(names_and_runs(comparison)) == names
    found = report.differences(comparison.methods)
    assert found["communicator"] == ["spardl", "oktopk", "spardl"]
    assert found["momentum.factor"] == ["\u2014", "\u2014", "0.9"]
    assert set(found) == {"communicator", "compressor.density", "momentum.factor"}


def test_tasks_metrics_and_data_do_not_mix(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", summary={"metric": "perplexity"})
    write_run(tmp_path / "c", dataset__crop_padding=2)
    write_run(tmp_path / "d", task___target_="tasks.image_regression.ImageRegression")
    found = compared(tmp_path)
    assert [list(names_and_runs(each).values()) for each in found] == [[["a"]], [["b"]], [["c"]], [["d"]]]
    titles = [each.title for each in found]
    assert len(set(titles)) == 4
    assert titles[1] == "Perplexity on digits"
    assert "crop_padding=2" in titles[2]
    assert "ImageRegression" in titles[3]


def spoil(folder: Path, name: str, text: str | None) -> None:
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)


SPOILT = [
    ("summary.json", '{"status": "running"}', "still running, or killed; step 4 was logged last"),
    ("summary.json", '{"status": "interrupted"}', "interrupted; step 4 was logged last"),
    (
        "summary.json",
        '{"status": "failed", "reason": "replicas differ"}',
        "failed: replicas differ; step 4 was logged last",
    ),
    ("summary.json", '{"status": "fin', "cannot be read: "),
    ("summary.json", "[]", "cannot be read: "),
    ("summary.json", None, "has no summary.json"),
    ("metrics.jsonl", None, "has no metrics.jsonl"),
    ("metrics.jsonl", '{"kind": "eval", "step"', "cannot be read: "),
    ("metrics.jsonl", '{"kind": "eval", "step": 3}', "lacks 'accuracy'"),
    ("config.yaml", "a: [", "cannot be read: "),
    ("config.yaml", "cluster: {}", "lacks 'dataset'"),
    ("summary.json", json.dumps({**SUMMARY, "final": {}}), "lacks 'accuracy'"),
    ("summary.json", json.dumps({"status": "finished"}), "lacks 'metric'"),
]


@pytest.mark.parametrize(("name", "text", "state"), SPOILT)
def test_no_folder_is_lost(tmp_path: Path, name: str, text: str | None, state: str) -> None:
    write_run(tmp_path / "good")
    spoil(write_run(tmp_path / "bad"), name, text)
    (good,), (bad,) = report.collect([tmp_path / "good", tmp_path / "bad"])
    assert (good.folder.name, bad.folder.name) == ("good", "bad")
    assert bad.state.startswith(state)
    assert "\n" not in bad.state


def test_folders_of_runs_and_what_is_no_run(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    write_run(outputs / "a")
    (outputs / "logs").mkdir()
    (outputs / "notes.txt").write_text("")
    same = outputs / "logs" / ".." / "a"
    finished, others = report.collect([outputs, same, outputs / "logs", outputs / "notes.txt", tmp_path / "x"])
    assert [run.folder for run in finished] == [outputs / "a"]
    assert [(each.folder.name, each.state) for each in others] == [
        ("logs", "not a run folder"),
        ("notes.txt", "not a run folder"),
        ("x", "does not exist"),
    ]


def test_what_is_measured_by_hand(tmp_path: Path) -> None:
    run = report.read(write_run(tmp_path / "a", value=0.8))
    assert (run.metric, run.train_loss, run.share, run.seconds) == (0.8, 1.0, 0.02, 8.0)
    assert run.curve == ((2, 4), (4.0, 8.0), (0.4, 0.8))
    assert run.simulated
    assert run.command == "python train.py seed=1"
    other = write_run(tmp_path / "b", summary={"step_bytes": 0.0, "step_bytes_dense": 0.0})
    (other / "metrics.jsonl").write_text('{"kind": "eval", "step": 4, "accuracy": 0.5}\n')
    (other / "command.txt").unlink()
    run = report.read(other)
    assert (run.share, run.train_loss) == (0.0, None)
    assert report.source(run).command.startswith("the command was not recorded")


def test_virtual_and_real_seconds_are_distinguished(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    real = write_run(tmp_path / "b", cluster___target_="spardl.training.launch.ProcessGroup")
    text = (real / "config.yaml").read_text()
    (real / "config.yaml").write_text(text.replace("  network: ethernet_1g\n", ""))
    (comparison,) = compared(tmp_path)
    table = report.results(comparison)
    assert [row.cells[-2].text for row in table.rows] == ["virtual", "real"]
    every = [run for method in comparison.methods for run in method.runs]
    assert report.basis(every).simulated.startswith("of 1 of 2 runs")
    assert report.basis(every[1:]).simulated == "nothing"
    assert report.basis(every[:1]).simulated.startswith("seconds: ")


def called(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
    code: int = report.main()
    return code


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    for seed, value in ((1, 0.5), (2, 0.6), (3, 0.7)):
        write_run(tmp_path / "runs" / f"a{seed}", seed, value, summary={"caveats": ["stand-in <data>"]})
    write_run(tmp_path / "runs" / "b", summary={"metric": "perplexity"})
    spoil(write_run(tmp_path / "runs" / "c"), *SPOILT[2][:2])
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    assert called(monkeypatch, tmp_path / "runs", "--html", page, "--plot", picture) == 0
    out = capsys.readouterr().out
    assert (
        "| spardl | 0.6 ± 0.25 | 0.3516 to 0.8484 | 0.5, 0.6, 0.7 | 1 ± 0 | 2.00% | 8 ± 0 | virtual | torch 2.7 |"
    ) in out
    assert "Perplexity on digits" in out
    assert "Perplexity on digits\n" in out
    assert "| stand-in <data> | a1, a2, a3 |" in out
    assert f"| {tmp_path / 'runs' / 'c'} | failed: replicas differ; step 4 was logged last |" in out
    text = page.read_text()
    for words in ("stand-in &lt;data&gt;", "failed: replicas differ", "python train.py seed=2", "Perplexity on digits"):
        assert words in text
    assert text.count('<img class="plot"') == 4
    assert "Python 3.12, torch 2.7, spardl 0.1.0, commit abc; a machine" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_names_are_those_that_users_type(tmp_path: Path) -> None:
    reused, local = "spardl.compressors.ReusedThreshold", "spardl.residuals.LocalResidual"
    oktopk = {"compressor___target_": reused, "communicator___target_": "spardl.communicators.OkTopk"}
    partial = {"residual___target_": "spardl.residuals.PartialResidual"}
    write_run(tmp_path / "a", **oktopk, **partial)
    write_run(tmp_path / "b", **oktopk, residual___target_=local)
    typed = write_run(tmp_path / "c", **oktopk, **partial, compressor__density=0.5)
    (typed / "command.txt").write_text("python train.py compressor=oktopk_bert seed=1\n")
    write_run(tmp_path / "d", compressor___target_="mine.Mine")
    (comparison,) = compared(tmp_path)
    assert list(names_and_runs(comparison)) == ["oktopk", "oktopk, residual=local", "oktopk_bert", "Mine"]


def test_one_table_of_runs_for_readers_programs_and_papers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    for seed, value in ((1, 0.5), (2, 0.7)):
        write_run(tmp_path / f"a_{seed}", seed, value)
    spoil(write_run(tmp_path / "c"), *SPOILT[0][:2])
    assert called(monkeypatch, "runs", tmp_path) == 0
    said = capsys.readouterr()
    paths = f"{tmp_path / 'a_1'}; {tmp_path / 'a_2'}"
    row = "| spardl | Accuracy on digits | 2 | accuracy | 0.6 | 0.14 | 8 | 0 | virtual | torch 2.7 | 2 | 2.00% |"
    assert f"{row} {paths} |" in said.out
    assert said.err == f"skipped {tmp_path / 'c'}: still running, or killed; step 4 was logged last\n"
    assert called(monkeypatch, "runs", tmp_path, "--csv") == 0
    (read,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (read["method"], read["metric"], float(read["mean"])) == ("spardl", "accuracy", 0.6)
    assert float(read["standard deviation"]) == pytest.approx(0.1414213562)
    assert read["path"] == paths
    assert called(monkeypatch, "runs", tmp_path, "--latex", "--png", tmp_path / "curves.png") == 0
    assert "a\\_1" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert called(monkeypatch, "runs", tmp_path, "--png", tmp_path / "no" / "curves.png") == 2
    assert "\nerror: cannot write the report (" in capsys.readouterr().err


def test_runs_of_several_machines_have_no_mean_time(tmp_path: Path) -> None:
    for seed, cpu in ((1, "A"), (2, "B")):
        write_run(tmp_path / f"a{seed}", seed, summary={"environment": {"cpu": cpu}, "cluster_seconds": 8.0 * seed})
    comparisons = compared(tmp_path)
    for table, seconds in (
        (report.run_table(comparisons), ["8; 16", "-"]),
        (report.results(comparisons[0]), ["8; 16"]),
    ):
        texts = [cell.text for cell in table.rows[0].cells]
        place = table.columns.index("clock") - 1
        assert texts[place - len(seconds) : place + 2] == [*seconds, "virtual", "A; B"]


def test_nothing_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    spoil(write_run(tmp_path / "c"), *SPOILT[0][:2])
    for words in ((), ("runs",)):
        assert called(monkeypatch, *words, tmp_path) == 2
        assert "still running, or killed" in "".join(capsys.readouterr())
    assert called(monkeypatch, tmp_path, "--html", tmp_path / "page.html") == 2
    said = capsys.readouterr()
    assert said.err == "error: none of these folders contains a finished run; create one with python train.py\n"
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("option", ["--html=no/where.html", "--plot=picture.xyz"])
def test_a_file_that_cannot_be_written(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert called(monkeypatch, write_run(tmp_path / "a"), option) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("error: cannot write the report (")
    assert reported.count("\n") == 1
    monkeypatch.setattr(style, "find_spec", lambda _: None)
    assert called(monkeypatch, tmp_path / "a", option) == 2
    reported = capsys.readouterr()
    assert reported.err == "error: figures need matplotlib, which is not installed: pip install -e '.[report]'\n"
    assert "Accuracy on digits" in reported.out


def test_a_figure_that_was_not_finite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is ``null`` in the files; the run is still shown, next to others of its kind."""
    broken = write_run(tmp_path / "a")
    for seed in (2, 3):
        write_run(tmp_path / f"{seed}", seed)
    for name in ("summary.json", "metrics.jsonl"):
        (broken / name).write_text((broken / name).read_text().replace("0.5", "null"))
    run = report.read(broken)
    assert math.isnan(run.metric)
    assert run.curve.values[0] == 0.25
    assert math.isnan(run.curve.values[1])
    assert called(monkeypatch, tmp_path, "--plot", tmp_path / "curves.png") == 0
    assert "| nan ± nan | nan to nan | nan, 0.5, 0.5 |" in capsys.readouterr().out
