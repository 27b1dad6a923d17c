"""The page for newcomers, followed to the letter in a copy of the tree: nothing else needs an edit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
TREE = ("conf", "docs", "examples", "scripts", "slurm", "spardl", "tasks", "tests", "trainer", ".ci")
# All that walk over methods, parts, configurations and docs.
WALKING = (
    *(f"tests/project/test_{name}.py" for name in ("add_a_method", "api", "docs", "architecture")),
    *("tests/laws/test_laws.py", "tests/laws/test_overflow.py"),
    *("tests/scripts/test_scripts.py", "tests/scripts/test_study.py"),
    *("tests/compressors/test_mine.py", "tests/communicators/test_star.py"),
    *("tests/diagnostics/doctor/test_correctness.py", "tests/hooks/test_recipes.py"),
    *("tests/method/test_method.py", "tests/tasks/test_configs.py::test_only_what_sets_several_groups_is_global"),
)


def files_of_the_page() -> dict[str, str]:
    """What the page has to be written to which file: those that it names right before their content."""
    pattern = r"`((?:spardl|conf|tests)/[\w/]+\.\w+)`[^`]*:\n\n```(?:python|yaml)\n(.*?)^```$"
    return dict(re.findall(pattern, PAGE.read_text(), flags=re.DOTALL | re.MULTILINE))


def commands_of_the_page() -> list[list[str]]:
    """Without the remarks behind them."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_the_page_has_two_methods_and_three_commands() -> None:
    compressor = ("spardl/compressors/mine.py", "conf/compressor/mine.yaml", "tests/compressors/test_mine.py")
    communicator = ("spardl/communicators/star.py", "conf/communicator/star.yaml", "conf/compressor/star.yaml")
    assert list(files_of_the_page()) == [*compressor, *communicator, "tests/communicators/test_star.py"]
    assert [words[1] for words in commands_of_the_page()] == ["scripts/docs.py", "-m", "train.py"]


ATTACHED = """
import torch, spardl, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name in ("mine", "star"):
    model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10))
    handle = spardl.attach(model, name, density=0.1)
    model(torch.randn(5, 100)).sum().backward()
    print(name, sum(parameter.grad.count_nonzero().item() for parameter in model.parameters()))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as the page leaves it, after its first command."""
    copy = tmp_path_factory.mktemp("tree")
    for name in TREE:
        shutil.copytree(ROOT / name, copy / name)
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("*.py"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.in"),
        *ROOT.glob("*.cff"),
        ROOT / "LICENSE",
        ROOT / ".gitignore",
    ):
        shutil.copy2(path, copy)
    if (cache := ROOT / ".mypy_cache").exists():  # mypy then checks only new files
        shutil.copytree(cache, copy / cache.name)
    for name, text in files_of_the_page().items():
        assert not (copy / name).exists(), name
        (copy / name).write_text(text)
    run(copy, *commands_of_the_page()[0])
    return copy


def run(copy: Path, *words: str) -> str:
    """Runs a command in the copy, where ``spardl`` is the copy's own."""
    words = (sys.executable if words[0] == "python" else words[0], *words[1:])
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        words,
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_library_knows_the_methods(copy: Path) -> None:
    assert run(copy, "python", "-c", ATTACHED).splitlines() == ["mine 101", "star 101"]
    names = run(copy, "python", "-c", "import spardl; print(*(each.name for each in spardl.method_options('mine')))")
    assert {"density", "looks", "seed", "residual"} <= set(names.split())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mine", "star"])
def test_the_trainer_knows_the_methods(copy: Path, method: str) -> None:
    words = [word.replace("mine", method) for word in commands_of_the_page()[2]]
    run(copy, *words, "training.max_steps=2", "training.eval_examples=8", "logger=none", "output_dir=outputs")
    assert len(list((copy / "outputs").glob(f"{method}-*/summary.json"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_that_walks_over_methods_takes_them(copy: Path) -> None:
    # Of the tests with one case for each file or method, those of the new ones; all others were run in this tree.
    cases = "laws or overflow or mine or star or not ["
    run(copy, *commands_of_the_page()[1], "-q", "-x", "-p", "no:cacheprovider", "-k", cases, *WALKING)


@pytest.mark.slow
def test_the_examples_follow_the_style_of_the_library(copy: Path) -> None:
    files = [name for name in files_of_the_page() if name.endswith(".py")]
    run(copy, "python", "-m", "ruff", "check", *files)
    run(copy, "python", "-m", "ruff", "format", "--check", *files)
    modules = [name for name in files if name.startswith("spardl/")]
    run(copy, "python", "-m", "mypy", *modules, "spardl/method/names.py")
