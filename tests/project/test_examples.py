"""Every example runs by the commands that its first lines give."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from spardl.clusters.workers.processes import run_processes
from tests.project.test_docs import blocks
from tests.support.driver import STARTED_BY, free_port
from tests.support.labs import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Makes the use of a deprecated name of this library an error.
NO_DEPRECATED_NAMES = "error:spardl.:DeprecationWarning"
# What an example prints, among other things.
PRINTS = {
    "ddp": blocks(ROOT / "docs" / "quickstart.md", "text")[0],
    "resume": "\nstep 100: sum of all weights",
    "resume_dcp": "\nstep 100, 3 workers: sum of all weights",
}
# Those that do not train, or print something else that is compared.
NO_LOSSES = {"collective", "resume", "resume_dcp"}
# Those with a separate test, which makes them smaller.
LONG = {"adamw"}
NEEDS = {"hf_accelerate": "accelerate", "hf_trainer": "accelerate", "lightning_fit": "lightning"}
# torchrun and its workers spend most of the time on importing torch. All other examples have a command of the same
# form, and their workers are forked from this process.
AS_TYPED = {"ddp", "resume", "resume_dcp", *NEEDS}
# A thread of gloo that outlives the process group may free a tensor while the interpreter exits, which aborts the
# process: "terminate called without an active exception". These examples end all of them.
WITHOUT_GLOO_THREADS = {"hf_trainer", "resume_dcp"}
# Python imports this file, sitecustomize.py, at its start; each worker then prints its threads when it exits.
LIST_THREADS = """
import atexit, os, sys
from pathlib import Path

def list_threads():
    names = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    sys.stdout.write(f"threads: {' '.join(names)}\\n")  # one write, so that the lines of workers stay whole

if "RANK" in os.environ:
    atexit.register(list_threads)
"""


def head(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def commands(path: Path) -> list[list[str]]:
    """The commands in a file's first lines, as words."""
    lines = re.findall(r"^(?:torchrun|python) .*", head(path), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, with its capital words replaced by folders there."""
    program, *rest = [str(folder / word.lower()) if word.isupper() else word for word in words]
    place = ["--local-addr", "127.0.0.1"] if program == "torchrun" else []
    rest = [str(ROOT / word) if word.startswith("examples/") else word for word in rest]
    environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}", "PYTHONWARNINGS": NO_DEPRECATED_NAMES}
    return subprocess.run(
        [str(Path(sys.executable).parent / program), *place, *rest],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run(words: list[str], folder: Path) -> str:
    done = start(words, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(words: list[str], folder: Path) -> str:
    """Runs a command as torchrun would, but in processes that are forked from this one."""
    assert words[:3] == ["torchrun", "--standalone", "--nproc-per-node"]
    workers, script, arguments = int(words[3]), ROOT / words[4], words[5:]
    shared = {"WORLD_SIZE": f"{workers}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    output = folder / "stdout.txt"

    def target(rank: int, heartbeat: Callable[[int], None]) -> None:
        os.environ.update(shared, RANK=f"{rank}", LOCAL_RANK=f"{rank}")
        os.chdir(folder)
        warnings.resetwarnings()
        warnings.filterwarnings("error", r"spardl\.", DeprecationWarning)
        sys.argv = [str(script), *arguments]
        sys.stdout = output.open("a", buffering=1)
        runpy.run_path(str(script), run_name="__main__")

    run_processes(workers, target, folder)
    return output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in LONG], ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "torch"), reason="its own first lines say what to install")
    if path.stem in WITHOUT_GLOO_THREADS:
        (tmp_path / "sitecustomize.py").write_text(LIST_THREADS)
    way = run if path.stem in AS_TYPED else run_forked
    said = "".join(way(words, tmp_path) for words in commands(path))
    if path.stem in WITHOUT_GLOO_THREADS:
        threads = re.findall(r"^threads: (.*)$", said, re.MULTILINE)
        assert len(threads) == sum(int(words[words.index("--nproc-per-node") + 1]) for words in commands(path))
        assert not any("gloo" in each for each in threads)
    losses = [float(loss) for loss in re.findall(r"loss\D{1,4}(\d+\.\d+)", said)]
    assert said.strip()
    assert PRINTS.get(path.stem, "") in said
    if path.stem in NO_LOSSES:
        assert not losses
    else:
        assert len(losses) >= 2
        assert losses[-1] < 0.8 * losses[0]
    assert "off by" not in said or max(map(float, re.findall(r"off by (\S+)", said))) < 1e-5


@pytest.mark.slow
def test_adamw_learns_more_where_it_is_given_to_spardl(tmp_path: Path) -> None:
    (words,) = commands(ROOT / "examples" / "adamw.py")
    # Equal rates, so that it is not the rate that makes the difference.
    small = shlex.split("--steps 100 --width 32 --layers 1 --moved 0.03 --published 0.03")
    said = run_forked([*words, *small], tmp_path)
    found = re.findall(r"^(\w+) +(\d+\.\d+) nats, +(\d+\.\d)% of the bytes of dense$", said, re.MULTILINE)
    losses = {way: float(loss) for way, loss, _ in found}
    shares = {way: float(share) for way, _, share in found}
    assert list(losses) == ["dense", "moved", "alone", "published"]
    assert losses["moved"] < losses["published"] - 0.15
    assert shares["dense"] == 100
    assert shares["alone"] == 0
    # The measured scale of the updates costs a fixed number of bytes, which show in a model of this size.
    assert 1 < shares["published"] < shares["moved"] < 2


@pytest.mark.slow
def test_resume_stops_where_ranks_have_different_steps(tmp_path: Path) -> None:
    words, _ = commands(ROOT / "examples" / "resume.py")
    run(words, tmp_path)
    saved = tmp_path / "checkpoint"
    assert sorted(path.name for path in saved.iterdir()) == ["rank-0.pt", "rank-1.pt"]
    (saved / "rank-1.pt").unlink()
    done = start(words, tmp_path)
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: ranks in checkpoint saved different steps [50, 0]; delete it"
    ]
    assert 'resume.py", line' not in done.stderr  # no traceback but torchrun's own


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_small_and_says_how_to_run_it(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (99 if path.stem in LONG else 65)
    assert all(f"examples/{path.name}" in words for words in commands(path))
    assert commands(path)
    needed = NEEDS.get(path.stem)
    assert needed is None or f"pip install '.[{needed}]'" in head(path)


def test_pages_run_examples_by_the_same_commands() -> None:
    known = {shlex.join(words) for path in EXAMPLES for words in commands(path)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    lines = {
        line for page in pages for block in blocks(page, "sh") for line in block.splitlines() if "examples/" in line
    }
    assert lines
    assert lines <= known
