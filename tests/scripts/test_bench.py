"""scripts/bench.py and the benchmarks in one process or between equal workers: what they print, write and refuse."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import bench
from scripts.benchmarks import kernels, overlap, simulated, timing
from scripts.labs.first_process import tool
from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.measure import measure
from spardl.vector.flat import FlatGradient
from tests.support.labs import ROOT, in_a_lab, lab, missing
from tests.support.measuring import undisturbed

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
TIMED = {
    "kernels": (
        ["--entries=20000", "--densities=0.01", "--types", "float32", "bfloat16"],
        [f"{path} {what}" for path in timing.PATHS for what in ("write", "read", "merge")]
        + ["plain write", "plain read", "coalesce", "copy"],
    ),
    "selection": (
        ["--entries=20000", "--settle=30"],
        ["residual.add_(gradient)", "g + r, torch.topk", "spardl", "spardl, scope=chunk", "spardl, portable"],
    ),
    "simulated": (["--workers=3,8", "--entries=5000"], ["3 workers, 5,000 entries", "8 workers, 5,000 entries"]),
}
# The second layer is used last, though it is registered before the third.
LAYERS = (
    LayerTimes("a", 4000, 0.0, 0.012),
    LayerTimes("b", 7000, 0.008, 0.003),
    LayerTimes("c", 5000, 0.004, 0.009),
)
PROFILE = Profile("three", "none", 1, LAYERS, forward=0.012, backward=0.012, update=0.0)


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks switch kernels and set threads."""
    monkeypatch.setenv("SPARDL_KERNELS", "compiled")
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.chdir(ROOT)


def program(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout)  # noqa: PLW1510


@pytest.mark.parametrize("name", TIMED)
def test_every_candidate_is_measured(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (words, candidates), file = TIMED[name], tmp_path / "found.json"
    assert bench.main([name, *words, "--repetitions=3", f"--json={file}"]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert written["setting"]["repetitions"] == 3
    assert len(written["cases"]) == (2 if name == "kernels" else 1)
    for title, found in written["cases"].items():
        assert title in printed
        assert [row["name"] for row in found] == candidates
        assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in found)
        assert all(f"| {1000 * row['median']:.3f} |" in printed for row in found)
        assert name != "selection" or found[2]["equals torch.topk"] == "True"
        for row, workers in zip(found, (3, 8), strict=False) if name == "simulated" else ():
            assert row[simulated.PER_WORKER] == pytest.approx(1000 * row["median"] / workers)
            assert 0.05 < row[simulated.MEMORY] < 50


@pytest.mark.slow
def test_whole_synchronizations_are_measured(tmp_path: Path) -> None:
    words = ["--entries", "50000", "--settle", "5", "--repetitions", "3", "--json", str(tmp_path / "found.json")]
    done = program(*TORCHRUN, "scripts/bench.py", "sync", *words, "--methods", "spardl,topka")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    ((_, found),) = written["cases"].items()
    ours = ["spardl, exact", "spardl, bfloat16", "topka, exact", "topka, bfloat16"]
    torchs, measured = [row["name"] for row in found][:-4], [row["name"] for row in found][-4:]
    assert measured == ours
    assert {"torch fp16 hook", "torch bf16 hook", "torch PowerSGD hook, rank 4"} < set(torchs)
    header, *lines = written["setting"]["breakdown"]
    assert [line[0] for line in lines] == ours
    per_entry = [float(line[header.index("bytes/entry")]) for line in lines]
    assert 5 < per_entry[0] < 5.5
    assert 3 < per_entry[1] < 3.5
    assert all(f"| {name} |" in done.stdout for name in ours)


def test_kernels_have_bytes_and_time_per_entry() -> None:
    vectors = [kernels.random_vector(50_000, 0.01, seed) for seed in (1, 2)]
    found = {row.name: row for row in kernels.measure(vectors, torch.bfloat16, 1)}
    size = {name: row.figures.get("bytes/entry") for name, row in found.items()}
    assert size["compiled read"] == size["portable write"] <= 3.3
    assert (size["plain read"], size["copy"]) == (8, None)
    for name, entries in (("compiled write", len(vectors[0])), ("coalesce", len(vectors[0]) + len(vectors[1]))):
        assert found[name].figures["ns/entry"] == pytest.approx(1e9 * found[name].median / entries)


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    found = timing.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert [len(seconds) for seconds in found.values()] == [3, 3]


def test_table_and_file_have_medians_and_further_figures(tmp_path: Path) -> None:
    found = timing.rows({"ours": [0.003, 0.001, 0.002], "floor": [0.001] * 3}, {"ours": {"bytes": 5.25, "note": "x"}})
    lines = timing.table(found, "floor").splitlines()
    assert lines[0] == "|  | median ms | least..most | x floor | bytes | note |"
    assert lines[2] == "| ours | 2.000 | 1.000..3.000 | 2.00 | 5.25 | x |"
    assert lines[3] == "| floor | 1.000 | 1.000..1.000 | 1.00 |  |  |"
    written = timing.content({"one": found}, Namespace(entries=4, json=tmp_path, none=None), more=1)
    assert written["setting"] == {"entries": 4, "more": 1}
    row = {"name": "ours", "median": 0.002, "seconds": [0.003, 0.001, 0.002], "bytes": 5.25, "note": "x"}
    assert written["cases"]["one"][0] == row


def test_the_list_has_every_benchmark(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} > {"accuracy", "hooks", "overlap", "sync"}
    assert all(len(line.split()) > 4 for line in lines)
    assert not {"timing", "schedules"} & bench.benchmarks().keys()  # shared code


def test_ids_of_measurements_name_benchmarks() -> None:
    assert bench.current(["scripts/bench_sync.py", "--a b"]) == ["scripts/bench.py", "sync", "--a b"]
    assert bench.current(["train.py", "x"]) == ["train.py", "x"]


ACCURACY = "accuracy --case ddp --steps 2 --train model=lstm_imdb,dataset=synthetic_imdb "
HOOKS = "case foo: 'foo' does not exist; use one of alone, ddp, torch.fp16"
CONSECUTIVE, LM = "needs consecutive batches", "model=lstm_ptb,dataset=pydocs"
FOLDER = "--json none/x.json: create the folder none first"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("kernel", "benchmark 'kernel' does not exist; choose from accuracy, "),
        ("kernels --json none/x.json", FOLDER),
        ("kernels --densities 0.1 0", "--densities must be above 0 and at most 1, got 0"),
        ("kernels --densities 1.5", "at most 1, got 1.5"),
        ("kernels --densities nan", "at most 1, got nan"),
        ("kernels --entries 3 --densities 1e-9", "a vector of 3 entries at density 1e-09 is empty"),
        ("compression --methods foo", "compressor=foo does not exist"),
        ("sync --methods nothing", "compressor=nothing does not exist"),
        (f"{ACCURACY} --case foo", HOOKS),
        (f"{ACCURACY} --case spardl.topka,optimizer=adam", "write optimizer=True or optimizer=False, not 'adam'"),
        (f"{ACCURACY} --json none/x.json", FOLDER),
        (f"{ACCURACY} --train {LM}", CONSECUTIVE),
        (f"{ACCURACY} --train model=none", "--train model=none: "),
        (f"{ACCURACY} --train model=lstm_imdb,dataset=imdb,data_dir=/none", "imdb"),
        ("hooks --cases foo", HOOKS),
        ("hooks --cases ddp spardl.topka,density", "write an option as name=value, not 'density'"),
        (f"hooks --train {LM}", CONSECUTIVE),
    ],
)
def test_bad_input_is_one_line(words: str, reason: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert bench.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert reason in line


@pytest.mark.parametrize("words", ["sync", "overlap --gbit 1 --model profile:x", "hooks", ACCURACY])
def test_a_process_that_is_no_worker_is_refused(words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert bench.main(words.split()) == 2
    reason = "error: no RANK in the environment; start this with scripts/netlab.py run or torchrun\n"
    assert capsys.readouterr().err == reason


def test_a_count_of_none_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        bench.main(["kernels", "--repetitions", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


SHORTLY = {
    "overlap": "--model profile:scripts/profiles/resnet20.json --rounds 1 --steps 1 --settle 2 --compute 0.05",
    "sync": "--entries 50000 --settle 2 --repetitions 1",
    "hooks": "--rounds 2 --steps 2 --settle 2 --seeds 1 --train model=resnet20,dataset=digits",
    "selection": "--entries 20000 --settle 2 --repetitions 1",
    "kernels": "--entries 20000 --repetitions 1",
    "compression": "--methods none --workers 2",
}


def commands() -> list[str]:
    """Commands of the documentation that run a benchmark, as typed."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tables").glob("*.md")]
    lines = [line for page in pages for line in page.read_text().replace("\\\n", " ").splitlines()]
    return sorted(line for line in lines if re.match(r"(python|torchrun) .*scripts/bench\.py", line))


def test_the_documentation_runs_the_benchmarks() -> None:
    assert {shlex.split(line.split("bench.py")[1])[0] for line in commands()} == SHORTLY.keys()


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_run(command: str, tmp_path: Path) -> None:
    words = shlex.split(command, comments=True)
    if "scripts/netlab.py" in words and (reason := missing() or (not tool("iptables") and "needs iptables")):
        pytest.skip(reason)
    name = words[words.index("scripts/bench.py") + 1]
    words += [*SHORTLY[name].split(), f"--json={tmp_path / 'found.json'}"]
    words = [sys.executable if word == "python" else word for word in words]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    done = program(*words[1:])
    assert done.returncode == 0, done.stderr
    assert name == "compression" or "| --- |" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())


def test_sleeping_model_matches_its_profile(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "three.json")
    job = overlap.emulated(str(tmp_path / "three.json"), 0.048)
    gradient = FlatGradient(job.model.named_parameters())
    assert [layer.entries for layer in gradient.layers] == [4000, 5000, 7000]
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    found = measure(
        job.model, lambda: job.loss(job.model, job.data), optimizer, name="three", batch=1, passes=2, warmup=0
    )
    # No wait ends before its time.
    expected = sorted(PROFILE.scaled(0.048).layers, key=lambda layer: layer.needed)
    for ours, theirs in zip(found.layers, expected, strict=True):
        assert ours.needed >= theirs.needed - 1e-4
        assert ours.ready >= theirs.ready - 1e-4
    assert found.compute >= 0.048


@in_a_lab
@pytest.mark.timeout(900)
def test_schedules_on_a_shaped_network(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "three.json")
    words = (
        f"scripts/bench.py overlap --gbit 0.1 --model profile:{tmp_path}/three.json --methods none,spardl --rounds 2"
    )
    words += " --steps 1 --streams 1,2 --schedules after_backward,wfbp:bucket_mb=0,layer_fusion,dear:layers=1"
    begin = ["run", "--workers", "2", "--gbit", "0.1", "--", sys.executable]

    def measured() -> list[dict[str, Any]]:
        done = lab(*begin, *words.split(), f"--json={tmp_path}/o.json", timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n| none | ") == 8
        rows: list[dict[str, Any]] = json.loads((tmp_path / "o.json").read_text())
        assert all(min(row["seconds"]) >= 0.024 for row in rows)  # sleeping is a lower bound
        return rows

    def holds(rows: list[dict[str, Any]]) -> bool:
        """The ideal at the bandwidth that was measured just before is a lower bound."""
        return all(min(row["seconds"]) >= 0.9 * row["ideal"] for row in rows)

    found = undisturbed(measured, holds)
    alone, several = found[::2], found[1::2]
    assert [(row["method"], row["schedule"].partition(":")[0], row["groups"]) for row in alone[:2] + alone[3:4]] == [
        ("none", "after_backward", 1),
        ("none", "wfbp", 3),
        ("none", "dear", 3),
    ]
    assert [(row["method"], row["schedule"]) for row in several] == [(row["method"], row["schedule"]) for row in alone]
    assert [len(alone), len(several)] == [8, 8]
    # A prediction is made for one stream only.
    assert all(row["streams"] == 1 and row["predicted"] > 0 for row in alone)
    assert all(row["streams"] == 2 and row["predicted"] is None for row in several)
    assert all(len(row["seconds"]) == 2 for row in found)
