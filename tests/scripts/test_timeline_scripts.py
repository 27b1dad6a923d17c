"""The scripts around the timeline model: what they print and write, and how they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench
from spardl.clusters.profile import Profile
from spardl.diagnostics.cli import front, run
from tests.scripts.conftest import Done

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "scripts" / "profiles"
# Parameters of the models as published; BERT with both heads and a vocabulary of 30528.
ENTRIES = {
    "resnet50": 25_557_032,
    "densenet201": 20_013_928,
    "inception_v4": 42_679_816,
    "bert_base": 110_111_042,
    "bert_large": 336_232_258,
}


@pytest.fixture
def spardl(capsys: pytest.CaptureFixture[str]) -> Any:
    """The command of the package in this process; returns its exit code and what it printed."""
    return lambda *words: Done(run(front, list(map(str, words)), "spardl"), *capsys.readouterr())


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("name", ENTRIES)
def test_the_profiles_are_of_the_published_models(name: str) -> None:
    profile = Profile.read(PROFILES / f"{name}.json")
    assert sum(profile.entries) == ENTRIES[name]
    assert profile.layers[-1].ready < profile.layers[0].ready
    assert profile.layers[0].needed < profile.layers[-1].needed
    # A backward pass takes about twice as long as a forward pass.
    assert 1 < profile.backward / profile.forward < 3


def test_a_choice_of_train_is_profiled_and_predicted(program: Any, spardl: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    words = ["--batch", 2, "--passes", 1, "--warmup", 1, "--threads", 1, "--out", path]
    done = program("profile_model", "train:model=resnet20,dataset=digits", *words)
    assert done.code == 0, done.err
    profile = Profile.read(path)
    assert (profile.model, profile.batch, sum(profile.entries)) == ("train:model=resnet20,dataset=digits", 2, 269434)
    files = ["--picture", tmp_path / "tiny.png", "--json", tmp_path / "predictions.json"]
    done = spardl("timeline", path, "--workers", 8, "--methods", "none,topka,spardl", "--compute", 0.01, *files)
    assert done.code == 0, done.err
    header, _, *rows = cells(done.out)
    assert [row[0] for row in rows] == ["none", "topka", "spardl"]
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert found[1]["dear"] == "-"
    assert found[0]["dear"] != "-" != found[2]["dear"]
    for row in found:
        assert float(row["layer_fusion"]) <= min(float(row[name]) for name in ("per_layer", "wfbp", "mg_wfbp"))
        assert 0.01 <= float(row["layer_fusion"]) <= float(row["after_backward"])
    assert (tmp_path / "tiny.png").stat().st_size > 10_000
    written = json.loads((tmp_path / "predictions.json").read_text())
    assert len(written["predictions"]) == 3 * 8 - 3
    assert (written["workers"], written["network"]) == (8, "1gbit")


def test_compression_is_measured_and_used(spardl: Any, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    assert bench.main(["compression", "--methods", "none,spardl", "--workers", "2", f"--json={path}"]) == 0
    plain = json.loads(path.read_text())
    assert plain["workers"] == 2
    assert plain["methods"]["spardl"]["seconds"][-1] > 0
    plain["methods"]["spardl"] = {"fixed": 5.0, "per_entry": 0.0}
    path.write_text(json.dumps(plain))
    words = ["timeline", PROFILES / "resnet50.json", "--methods", "spardl", "--schedules", "after_backward"]
    plainly, compressed = (
        float(cells(spardl(*words, "--workers", 2, *more).out)[-1][1]) for more in ([], ["--compression", path])
    )
    assert compressed == pytest.approx(plainly + 5, rel=1e-2)
    done = spardl(*words, "--workers", 4, "--compression", path)
    assert done.code == 2
    assert "was measured with 2 workers, not 4" in done.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("foo", "torchvision:NAME, timm:NAME, train:NAME, got foo"),
        ("torchvision:foo", "torchvision has no model foo"),
        ("train:model=foo", "train.py cannot make model=foo"),
        ("torchvision:resnet18 --cpu-seconds", "--threads 1"),
        ("torchvision:resnet18 --batch 0", "'--batch': 0 is not in the range x>=1"),
        ("timm:inception_v4", "; pip install timm"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    program: Any, words: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    done = program("profile_model", *words.split(), "--out", "x.json")
    assert done.code == 2
    assert complaint in done.err
    assert len(done.err.splitlines()) == 1
    assert not (ROOT / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--schedules", "foo"], "--schedules foo is unknown"),
        (["--network", "foo"], "foo is not a network"),
        (["--workers", 0], "'--workers': 0 is not in the range x>=1"),
        (["--compute", -1], "got -1"),
        (["--compression", "none.json"], "not a file of compression times"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(spardl: Any, words: list[object], complaint: str) -> None:
    done = spardl("timeline", PROFILES / "resnet50.json", *words)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert complaint in done.err


def commands() -> list[list[str]]:
    """Of the page, but those that profile the large models; test_bench.py runs benchmarks."""
    blocks = (ROOT / "docs" / "schedules.md").read_text().split("## The timeline model")[1].split("```sh\n")[1:]
    lines = [line.split(" #")[0] for block in blocks for line in block.split("```")[0].splitlines()]
    return [line.split() for line in lines if "train:model=resnet20" in line or "spardl timeline" in line]


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_run(
    program: Any, spardl: Any, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    options = [str(tmp_path / word) if word in ("timeline.png", "resnet20.json") else word for word in words]
    done = spardl(*options[1:]) if options[0] == "spardl" else program(Path(options[1]).stem, *options[2:])
    assert done.code == 0, done.err
