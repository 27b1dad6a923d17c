"""Benchmarks of parts and links: they run, print every candidate and write what they print; bench.py runs them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import bench, bench_link, bench_merge, bench_packing, bench_selection, bench_simulated, bench_sketch
from scripts.benchmarks import timing as shared
from scripts.labs.first_process import tool
from tests.support.labs import in_a_lab, lab

ROOT = Path(__file__).resolve().parents[2]
BENCHES = {
    "bench_packing": (
        ["--entries", "20000", "--densities", "0.01", "--types", "float32", "bfloat16"],
        ["compiled write", "portable write", "compiled read", "portable read", "plain write", "plain read", "copy"],
    ),
    "bench_merge": (
        ["--entries", "20000", "--counts", "2", "3"],
        ["compiled", "portable", "coalesce", "copy"],
    ),
}


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # Put back afterwards: benches switch kernels on and off.
    monkeypatch.setenv("SPARDL_KERNELS", "compiled")
    return shared


@pytest.mark.parametrize("name", BENCHES)
def test_every_candidate_is_measured(
    name: str, timing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words, candidates = BENCHES[name]
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", [name, *words, "--repetitions", "3", "--json", str(tmp_path / "found.json")])
    importlib.import_module(f"scripts.{name}").main()
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["setting"]["entries"] == 20000
    assert len(written["cases"]) == 2
    for title, found in written["cases"].items():
        assert f"{title}: " in printed
        assert [row["name"] for row in found] == candidates
        assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in found)
        assert all(f"| {1000 * row['median']:.3f} |" in printed for row in found)


def test_selection_is_measured_and_exact(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--entries", "20000", "--settle", "30", "--repetitions", "3", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["bench_selection", *words])
    assert bench_selection.main() == 0
    ((_, found),) = json.loads((tmp_path / "found.json").read_text())["cases"].items()
    assert [row["name"] for row in found] == [
        "residual.add_(gradient)",
        "g + r, torch.topk",
        "spardl",
        "spardl, scope=chunk",
        "spardl, portable",
    ]
    assert found[2]["equals torch.topk"] == "True"
    assert "| spardl |" in capsys.readouterr().out


@pytest.mark.slow
def test_whole_synchronizations_are_measured(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    words = ["--entries", "50000", "--settle", "5", "--repetitions", "3", "--json", str(tmp_path / "found.json")]
    script = str(ROOT / "scripts" / "bench_sync.py")
    done = subprocess.run(
        [sys.executable, *launcher, script, *words, "--methods", "spardl,topka"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
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


@pytest.mark.slow
def test_bench_sync_wants_workers() -> None:
    script = str(ROOT / "scripts" / "bench_sync.py")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: no RANK in the environment; start this with torchrun, or with scripts/netlab.py run\n"


def test_packing_says_how_many_bytes_an_entry_takes(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = bench_packing.random_vector(50_000, 0.01)
    found = {row.name: row.figures for row in bench_packing.measure(vector, bench_packing.TYPES["bfloat16"], 1)}
    assert found["compiled read"]["bytes/entry"] == found["portable write"]["bytes/entry"] <= 3.3
    assert found["plain read"]["bytes/entry"] == 8
    assert "bytes saved by indices take" in bench_packing.verdict(
        bench_packing.measure(vector, bench_packing.TYPES["float32"], 1), bench_packing.TYPES["float32"]
    )


def test_candidates_take_turns(timing: ModuleType) -> None:
    calls: list[str] = []
    found = timing.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert [len(seconds) for seconds in found.values()] == [3, 3]


def test_table_and_file_have_medians_and_further_figures(timing: ModuleType, tmp_path: Path) -> None:
    found = timing.rows({"ours": [0.003, 0.001, 0.002], "floor": [0.001] * 3}, {"ours": {"bytes": 5.25, "note": "x"}})
    lines = timing.table(found, "floor").splitlines()
    assert lines[0] == "|  | median ms | least..most | x floor | bytes | note |"
    assert lines[2] == "| ours | 2.000 | 1.000..3.000 | 2.00 | 5.25 | x |"
    assert lines[3] == "| floor | 1.000 | 1.000..1.000 | 1.00 |  |  |"
    timing.write_json(tmp_path / "f.json", {"one": found}, {"entries": 4, "json": tmp_path, "none": None})
    written = json.loads((tmp_path / "f.json").read_text())
    assert written["setting"] == {"entries": 4}
    assert written["cases"]["one"][0] == {
        "name": "ours",
        "median": 0.002,
        "seconds": [0.003, 0.001, 0.002],
        "bytes": 5.25,
        "note": "x",
    }
    timing.write_json(None, {}, {})


def test_bad_options_are_named(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_merge", "--repetitions", "0"])
    with pytest.raises(SystemExit):
        bench_merge.main()
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_many_simulated_workers_are_measured(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    words = ["--workers", "3,8", "--entries", "5000", "--repetitions", "2", f"--json={tmp_path / 'found.json'}"]
    monkeypatch.setattr(sys, "argv", ["bench_simulated", *words])
    assert bench_simulated.main() == 0
    names = ["3 workers, 5,000 entries", "8 workers, 5,000 entries"]
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[3:]] == [
        f"| {name}" for name in names
    ]
    (found,) = json.loads((tmp_path / "found.json").read_text())["cases"].values()
    assert [row["name"] for row in found] == names
    for row, workers in zip(found, (3, 8), strict=True):
        assert len(row["seconds"]) == 2
        assert row[bench_simulated.PER_WORKER] == pytest.approx(1000 * row["median"] / workers)
        assert 0.05 < row[bench_simulated.MEMORY] < 50


@pytest.mark.slow
def test_importing_is_measured() -> None:
    words = [sys.executable, str(ROOT / "scripts" / "bench_import.py"), "--repeats", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    assert re.fullmatch(r"numpy, torch .* s .*\nnumpy, torch, spardl .* s .*\nbeyond torch: .*\n", done.stdout)


def test_sketches_are_measured_on_a_real_training(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "2", "--rows", "3", "--columns", "2", "--candidates", "4", "--lengths", "1000"]
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(sys, "argv", ["bench_sketch.py", *words])
    bench_sketch.main()
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 | 2 | 4 |")]
    shares = [float(share) for share in re.findall(r"([\d.]+)% \(", row)]
    assert len(shares) == 3
    assert all(10 < share <= 100 for share in shares)


SCRIPTS = Path(bench.__file__).parent


def called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", *words])
    return bench.main()


def test_the_list_has_every_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert called(monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem[6:] for path in SCRIPTS.glob("bench_*.py"))
    assert all(len(line.split()) > 4 for line in lines)


def test_a_benchmark_gets_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    found = tmp_path / "merge.json"
    words = ("--entries=1000", "--density=0.1", "--counts=2", "--repetitions=1", f"--json={found}")
    assert called(monkeypatch, "merge", *words) == 0
    assert found.is_file()
    assert "coalesce" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert called(monkeypatch, "mergee") == 2
    words = capsys.readouterr().err
    assert words.startswith("error: benchmark 'mergee' does not exist; choose from accuracy, ")
    assert words.count("\n") == 1


def test_the_help_of_a_benchmark_is_its_own(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, "merge", "--help")
    assert ended.value.code == 0
    assert "--counts" in capsys.readouterr().out


SHORTLY = ("--mb", "1", "--rounds", "2", "--short-rounds", "3")


def commands() -> list[str]:
    """Those of the page about slow networks that this script or the lab are in, as typed."""
    text = (ROOT / "docs" / "clusters.md").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if "scripts/bench_link.py" in line and line.startswith(("p", "t"))]


@in_a_lab
@pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
def test_a_lab_with_a_delay(tmp_path: Path) -> None:
    """A round takes gloo two ways: the receiver says that it is ready, then it is sent to."""
    file = tmp_path / "link.json"
    words = ["run", "--workers", "3", "--gbit", "1", "--delay-ms", "2", "--timeout", "200", "--", sys.executable]
    done = lab(*words, "-W", "ignore", "scripts/bench_link.py", *SHORTLY, "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["workers"], found["bytes"]) == (3, 1_000_000)
    assert {name: len(times) for name, times in found["seconds"].items()} == {
        "round_trip": 3,
        "short_round": 3,
        "long_round": 2,
    }
    assert min(found["seconds"]["round_trip"]) >= 4e-3
    assert min(found["seconds"]["short_round"]) >= 2e-3
    # 128 KiB may go at once.
    assert min(found["seconds"]["long_round"]) >= (found["bytes"] - 131072) * 8e-9 + 2e-3
    assert "| round trip |" in done.stdout


def program(*words: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [*start, "--nproc-per-node", "2", "scripts/bench_link.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_throttle_without_a_lab(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    done = program(*SHORTLY, "--throttle", "ethernet_1g", "--json", str(file))
    assert done.returncode == 0, done.stderr
    seconds = json.loads(file.read_text())["seconds"]
    assert min(seconds["short_round"]) >= 50e-6 + 8 * 8e-9
    assert min(seconds["long_round"]) >= 50e-6 + 1e6 * 8e-9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "start this with scripts/netlab.py run or torchrun"),
        ("--mb 0", "--mb, --rounds and --short-rounds must be above 0"),
        ("--rounds 0", "--mb, --rounds and --short-rounds must be above 0"),
        ("--throttle x", "--throttle=x is not a network; use ethernet_1g"),
    ],
)
def test_bad_input_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if words:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_link.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@in_a_lab
@pytest.mark.slow
@pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_run(command: str) -> None:
    words = [*shlex.split(command), *SHORTLY]
    words = [sys.executable if word == "python" else word for word in words]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "| long round |" in done.stdout
