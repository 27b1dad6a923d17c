"""The tables of learning: plans, records, and the page that is made of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import choices, learning
from scripts.evidence.plans import Comparison, Line, Task, excerpts_in, tasks_in
from scripts.exhibits.jobs import Outcome, Training
from scripts.exhibits.records import on_record, read_records, record
from scripts.exhibits.tables import markdown
from scripts.learning import summary_of, table_of
from spardl.basics.errors import ConfigError, TrainingError
from tests.support.driver import ROOT, here
from trainer import report

WORDS = ("model=resnet20", "training.max_steps=3", "cluster.workers=2")
LINES = (
    Line("dense", ("compressor=none",), (0.1, 0.2)),
    Line("alone", ("compressor=none", "cluster.workers=1"), (0.1,)),
    Line("published", ("compressor=spardl", "recipe=published"), (0.1,)),
    Line("better", ("compressor=spardl",), (0.1,)),
)
COMPARED = (Comparison("1%", "published", "better"), Comparison("5%", None, "better"))
TASK = Task("toy", "a toy", WORDS, "loss", True, (1, 2), LINES, COMPARED)


RECORDS = "learning.jsonl"


def keep(training: Training, path: Path, **figures: Any) -> None:
    data = {"final": {"loss": 1.0}, "step_bytes": 13.0, "step_bytes_dense": 1000.0, "residual_age": 41.7, **figures}
    data |= {"metric": "loss", "steps": 3, "workers": 2, "evaluations": [], "environment": {}}
    key = hashlib.sha256(training.command.encode()).hexdigest()
    kept = read_records(path) if path.exists() else {}
    kept[key] = {"id": key, "command": training.command, **data}
    path.write_text("".join(f"{json.dumps(each)}\n" for each in kept.values()))


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Records in which the second learning rate of dense is better, and the last row is worse than nothing sent."""
    losses = {"dense": 1.0, "alone": 2.0, "published": 3.0, "better": 2.5}
    for line in LINES:
        for seed, rate in itertools.product(TASK.seeds, line.rates):
            # A little better on the first seed, and much worse on the second.
            worse = (-0.1 if seed == 1 else 5.0) if rate == 0.1 and line.name == "dense" else 0.0
            keep(TASK.training(line, rate, seed), tmp_path / RECORDS, final={"loss": losses[line.name] + worse})
    return tmp_path / RECORDS


def test_reference_rates_use_all_seeds(filled: Path) -> None:
    records = dict(on_record(filled))
    assert TASK.rate(LINES[0], records) == 0.2
    assert len(TASK.first()) == 2 * 4 + 1
    assert len(TASK.rest(records)) == 1
    assert learning.missing(TASK, records) == []
    gone = [TASK.training(LINES[0], 0.1, 2), TASK.training(LINES[3], 0.1, 2)]
    for each in gone:
        del records[each.command]
    assert learning.missing(TASK, records) == gone


def test_tasks_with_other_numbers_of_workers_share_the_single_worker() -> None:
    more = Task("more", "more workers", (*WORDS[:2], "cluster.workers=4"), "loss", True, (1, 2), LINES)
    assert more.training(LINES[1], 0.1, 2).command == TASK.training(LINES[1], 0.1, 2).command
    assert more.training(LINES[0], 0.1, 2).command != TASK.training(LINES[0], 0.1, 2).command
    assert TASK.training(LINES[1], 0.1, 2).words == (*WORDS[:2], *LINES[1].words, "optimizer.lr=0.1", "seed=2")


def test_the_first_seed_only(filled: Path) -> None:
    records = dict(on_record(filled))
    for line, rate, seed in ((LINES[3], 0.1, 2), (LINES[0], 0.1, 2)):
        del records[TASK.training(line, rate, seed).command]
    assert learning.missing(TASK.cut(1), records) == []
    assert TASK.cut(None) == TASK


def test_the_table(filled: Path) -> None:
    rows = [line.split(" | ") for line in markdown(table_of(TASK, on_record(filled))).splitlines()[2:]]
    assert [row[1] for row in rows] == ["0.2", "0.1", "0.1", "0.1"]
    assert [row[2] for row in rows] == [f"{value} (2 seeds)" for value in ("1", "2", "3", "2.5")]
    assert [row[4] for row in rows] == [
        "",
        "",
        "**worse than a single worker**",
        "**worse than a single worker**",
    ]
    assert [row[5] for row in rows] == ["1.30%", "0", "1.30%", "1.30%"]


def test_some_rows_of_a_table(filled: Path) -> None:
    records = on_record(filled)
    whole, some = table_of(TASK, records), table_of(TASK, records, ["better", "dense"])
    assert [*some.rows] == [whole.rows[3], whole.rows[0]]


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({"toy": ["dense", "x"]}, "page a shows rows that task toy does not have: x"),
        ({"b": ["dense"]}, "that task b does not have"),
    ],
)
def test_pages_show_rows_that_there_are(tmp_path: Path, shown: dict[str, list[str]], words: str) -> None:
    plan = tmp_path / "plan.yaml"
    content = {"tasks": {"toy": {"rates": {"dense": [1]}}}, "excerpts": {"a": {"toy": ["dense"]}}}
    plan.write_text(json.dumps(content))
    assert excerpts_in(plan) == {"a": {"toy": ["dense"]}}
    plan.write_text(json.dumps({**content, "excerpts": {"a": shown}}))
    with pytest.raises(ConfigError, match=words):
        excerpts_in(plan)


def test_the_summary(filled: Path) -> None:
    assert markdown(summary_of([TASK], on_record(filled))).splitlines()[2:] == [
        "| a toy | 1% | 1 (2 seeds) | 3 (2 seeds) | 2.5 (2 seeds) | 2 (2 seeds) |",
        "| a toy | 5% | 1 (2 seeds) |  | 2.5 (2 seeds) | 2 (2 seeds) |",
    ]


@pytest.mark.parametrize(("loss", "gap"), [(1.25, "75%"), (0.5, "150%"), (2.0, "0%")])
def test_gaps_are_measured_from_a_single_worker(loss: float, gap: str, filled: Path) -> None:
    for seed in TASK.seeds:
        keep(TASK.training(LINES[3], 0.1, seed), filled, final={"loss": loss})
    last = markdown(table_of(TASK, on_record(filled))).splitlines()[-1]
    assert last.split(" | ")[4] == gap


def test_what_is_not_on_record(tmp_path: Path) -> None:
    assert markdown(summary_of([TASK], on_record(tmp_path / RECORDS))).splitlines()[2:] == []
    assert "| better | not run yet |" in markdown(table_of(TASK, on_record(tmp_path / RECORDS)))


def test_a_run_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_commit", lambda: "0123456789ab")  # whatever is changed while tests are written
    words = ("cluster=simulated", "cluster.workers=2", "training.max_steps=3", "compressor=spardl", "seed=7")
    assert here(*words, f"output_dir={tmp_path / 'runs'}") == 0
    with choices.composing():
        training = Training(words[1:])
        found = training.find(tmp_path / "runs")
        assert isinstance(found, Outcome)
        path = tmp_path / RECORDS
        record(training, found, path)
        kept = on_record(path).get(training.command)
    assert path.stat().st_size < 4000
    assert kept is not None
    assert (kept.command, kept.id) == (training.command, training.id)
    assert kept.final("accuracy") == found.data["final"]["accuracy"]
    assert kept.figures["weights_sha256"] == found.data["weights_sha256"]
    assert kept.figures["evaluations"][-1]["step"] == 3
    assert 0.01 < kept.share < 0.02
    assert kept.figures["residual_age"] > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"rates": {"dense": [1]}}, "comparisons need: alone"),
        (
            {"rates": {"dense": [1], "alone": [1], "published": [1]}, "compared": {"1%": [None, "y"]}},
            "comparisons need: y",
        ),
        ({"rates": {"dense": [1], "alone": [1], "published": [1], "x": [1]}}, "has an undefined row 'x'"),
    ],
)
def test_plans_that_cannot_be(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    task = {"title": "", "words": "", "metric": "loss", "lower": True, "seeds": [1], "compared": {}, **content}
    rows = {"dense": "", "alone": "", "published": ""}
    (tmp_path / "plan.yaml").write_text(json.dumps({"rows": rows, "tasks": {"toy": task}}))
    with pytest.raises(ConfigError, match=words):
        tasks_in(tmp_path / "plan.yaml")


def test_a_record_of_another_run_is_reported(filled: Path) -> None:
    task = Task("toy", "a toy", WORDS, "loss", True, (1,), LINES[2:3])
    with choices.composing():
        assert learning.stale([task], on_record(filled)) == [task.first()[0].command]


def test_the_quickstart_says_what_the_records_say() -> None:
    adam = "Adam moved, beta2 of 0.99, decay 0.98, quota per chunk, 3%, values in 4 bits, scale measured"
    sgd = "SGD moved, momentum of 0.5, 3%, values in 4 bits"
    rows = {"gpt_pieces": adam, "gpt_chars": adam, "ptb_short": sgd, "cifar10_short": sgd}
    records = on_record(ROOT / "docs" / "results" / "learning.jsonl")
    tables = [
        markdown(table_of(task, records, [rows[task.name]])) for task in tasks_in(learning.PLANS) if task.name in rows
    ]
    closed = sorted(int(found) for table in tables for found in re.findall(r"\| (\d+)% \|", table))
    assert len(closed) == len(rows)
    said = f"close {closed[0]} to {closed[-1]}% of the gap between a single"
    for page in ("docs/quickstart.md", "README.md"):
        assert said in (ROOT / page).read_text().replace("closes", "close"), page


@pytest.mark.slow
def test_the_records_are_those_of_today() -> None:
    learning.check(tasks_in(learning.PLANS), on_record(ROOT / "docs" / "results" / "learning.jsonl"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--only nothing", "table 'nothing' does not exist; choose one from learning.yaml"),
        ("--seeds 1", "--seeds has no effect without --run; add --run or remove --seeds"),
        ("--run --jobs 0", "--jobs must be at least 1, got 0"),
    ],
)
def test_commands_that_cannot_be(words: str, complaint: str, program: Any) -> None:
    assert program("learning", *words.split()) == (2, "", f"error: {complaint}\n")


def test_a_row_without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any) -> None:
    plan = {"rows": {"dense": "", "alone": "", "published": "compresor=none"}, "tasks": {}}
    plan["tasks"]["toy"] = {"title": "", "words": "cluster.workers=2", "metric": "loss", "lower": True, "seeds": [1]}
    plan["tasks"]["toy"] |= {"rates": {name: [1] for name in plan["rows"]}, "compared": {}}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    monkeypatch.setattr(learning, "PLANS", tmp_path / "plan.yaml")
    monkeypatch.setattr(learning, "unshippable", lambda _: "")
    done = program("learning", "--run", f"--outputs={tmp_path}", f"--records={tmp_path / RECORDS}")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: Could not override 'compresor'.")


def test_a_run_that_fails_keeps_no_others_from_being_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, tried = TASK.training(LINES[2], 0.1, 2).command, []

    def complete(todo: list[Training], outputs: Path, jobs: int, ended: Any) -> None:
        for each in todo:
            tried.append(each.command)
            if each.command == bad:
                ended(each, TrainingError("the loss is not finite"))
            else:
                keep(each, tmp_path / RECORDS)

    monkeypatch.setattr(learning, "complete", complete)
    monkeypatch.setattr(Training, "find", lambda *_: None)
    assert learning.run([TASK], tmp_path / RECORDS, tmp_path / "runs", 1) == 1
    assert len(tried) == len(set(tried)) == len(TASK.first()) + 1
    assert learning.missing(TASK, on_record(tmp_path / RECORDS)) == [TASK.training(LINES[2], 0.1, 2)]


def test_seeds_that_no_rows_share_close_no_gap_and_waits_are_means(tmp_path: Path) -> None:
    for line, seed in ((LINES[0], 1), (LINES[0], 2), (LINES[1], 2), (LINES[2], 2), (LINES[3], 1)):
        for rate in line.rates:
            keep(TASK.training(line, rate, seed), tmp_path / RECORDS, residual_age=10.0)
    last = markdown(table_of(TASK, on_record(tmp_path / RECORDS))).splitlines()[-1]
    assert last.split(" | ")[4] == ""
    keep(TASK.training(LINES[3], 0.1, 2), tmp_path / RECORDS, residual_age=20.0)
    assert markdown(table_of(TASK, on_record(tmp_path / RECORDS))).splitlines()[-1].endswith("| 15 steps |")
