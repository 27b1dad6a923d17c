"""What is built, and that it works where nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import spardl
from tests.support.driver import STARTED_BY, free_port
from tests.support.labs import ROOT

pytestmark = pytest.mark.slow

LOOP = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(100, 50))
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
{lines}
draws = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    optimizer.zero_grad()
    ddp_model(torch.randn(4, 100, generator=draws)).square().mean().backward()
    optimizer.step()
total = ddp_model.module.weight.detach().sum()
least, most = total.clone(), total.clone()
dist.all_reduce(least, dist.ReduceOp.MIN)
dist.all_reduce(most, dist.ReduceOp.MAX)
stats = handle.stats()
if dist.get_rank() == 0:  # two workers' lines may fall into each other
    print(spardl.__version__, stats.steps, stats.bytes_sent < stats.dense_bytes / 10, bool(least == most))
dist.destroy_process_group()
"""

TRAINING = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10)), torch.randn(16, 100)
"""


def run(*words: str | Path, cwd: Path, timeout: float = 300) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in {*STARTED_BY, "PYTHONPATH"}}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of what git has, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--outdir", folder, source, cwd=folder)
    return folder


def test_the_wheel_has_what_can_be_used_and_the_sdist_all(built: Path) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "spardl").rglob("*.py")} | {"spardl/py.typed"}
    version = spardl.__version__
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"spardl-{version}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == modules
    with tarfile.open(built / f"spardl-{version}.tar.gz") as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert modules <= packed
    assert {
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "train.py",
        "conf/train.yaml",
        "tests/project/test_packaging.py",
    } <= packed
    tracked = run(
        "git", "ls-files", "conf", "docs", "examples", "scripts", "slurm", "tasks", "tests", "trainer", cwd=ROOT
    ).split()
    assert {name for name in tracked if (ROOT / name).is_file()} <= packed


def test_the_metadata(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"spardl-{spardl.__version__}.dist-info/METADATA").decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(needed) == ["click", "numpy", "torch"]
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE))
    assert {"train", "wandb", "slurm", "accelerate", "lightning", "dev"} <= extras
    assert "\nAuthor: spardl authors\n" in metadata
    assert "\nClassifier: Typing :: Typed\n" in metadata


def test_an_editable_install_lets_scripts_run_from_anywhere(built: Path, tmp_path: Path) -> None:
    """They import one another by their whole names. This one asks for nothing but Python."""
    source, environment = built / "source", tmp_path / "venv"
    venv.create(environment, with_pip=True)
    run(environment / "bin" / "pip", "install", "-q", "--no-deps", "-e", source, cwd=tmp_path)
    reported = run(environment / "bin" / "python", source / "scripts" / "netlab.py", "--help", cwd=tmp_path)
    assert "python scripts/netlab.py run --workers 4" in reported


def requirements(lines: Iterable[str]) -> list[str]:
    """The names in requirements that hold on this machine without extras."""
    needed = [Requirement(line) for line in lines]
    return [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]


def install(wheel: Path, environment: Path) -> None:
    """Installs a wheel in a new environment, with links to the requirements that are installed here.

    Nothing else can be imported there. Downloading torch anew would take minutes.
    """
    venv.create(environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", wheel, cwd=environment)
    todo, seen = list(requirements(next(iter(metadata.distributions(path=[str(site)]))).requires or ())), set()
    while todo:
        if (name := canonicalize_name(todo.pop())) not in seen:
            seen.add(name)
            needed = metadata.distribution(name)
            todo += requirements(needed.requires or ())
            for top in {path.parts[0] for path in needed.files or ()} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(str(needed.locate_file(top)))
    run(*pip, "check", cwd=environment)
    (environment / "bin" / "torchrun").write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
    (environment / "bin" / "torchrun").chmod(0o755)


@pytest.mark.timeout(600)
def test_two_lines_work_with_the_wheel_alone(built: Path, tmp_path: Path) -> None:
    """In a new environment, with what the wheel asks for: the README's two lines, on two workers over gloo."""
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "venv"
    install(wheel, environment)
    programs = environment / "bin"
    unknown = "import importlib.util as known, sys; print(*(name for name in sys.argv[1:] if known.find_spec(name)))"
    extras = ("hydra", "wandb", "transformers", "numba", "submitit", "lightning", "accelerate", "tests", "trainer")
    assert run(programs / "python", "-c", unknown, *extras, cwd=tmp_path).split() == []
    readme = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"^```python\n(import spardl\n\nhandle = spardl\.attach\(.*\)\n)```", readme, re.MULTILINE)
    assert len(lines.split("\n\n")) == 2
    (tmp_path / "loop.py").write_text(LOOP.format(lines=lines))
    workers = (programs / "torchrun", "--master-port", str(free_port()), "--nproc-per-node", "2")
    assert run(*workers, "loop.py", cwd=tmp_path).strip() == f"{spardl.__version__} 5 True True"
    shutil.copyfile(ROOT / "examples" / "ddp.py", tmp_path / "ddp.py")
    assert "2 workers sent" in run(*workers, "ddp.py", cwd=tmp_path)
    check_commands(programs, tmp_path)


def check_commands(programs: Path, folder: Path) -> None:
    """Each command of ``spardl``, as it is typed, one after the other: what one writes, the next one reads."""
    front = programs / "spardl"
    assert run(front, "version", cwd=folder).startswith(f"spardl {spardl.__version__}, torch ")
    overview = run(front, "--help", cwd=folder)
    for command in ("advise", "doctor", "profile", "timeline"):
        assert f"\n  {command} " in overview
        assert "Examples:" in run(front, command, "--help", cwd=folder)
    said = run(front, "doctor", "--workers", "2", "--device", "cpu", "--out", "network.yaml", cwd=folder)
    assert f"ok       methods: all {len(spardl.method_names())} have equal replicas" in said
    (folder / "training.py").write_text(TRAINING)
    run(front, "profile", "training:make", "--passes", "1", "--out", "model.json", cwd=folder)
    words = ("--bandwidth", "network.yaml", "--workers", "2")
    # Which of the two depends on the load of this machine.
    advice = run(front, "advise", "model.json", *words, cwd=folder)
    assert re.search(r": (keep plain DDP; |use spardl\.attach\()", advice)
    words = ("--network", "network.yaml", "--workers", "2", "--methods", "none,spardl,powersgd")
    assert "\n| powersgd | " in run(front, "timeline", "model.json", *words, cwd=folder)
    start = (programs / "torchrun", "--master-port", str(free_port()), "--nproc-per-node", "2")
    for words in (("--no-python", front, "doctor"), ("-m", "spardl.diagnostics.doctor")):
        assert "ok       methods: all" in run(*start, *words, "--device", "cpu", cwd=folder)
    refused = subprocess.run([front, "advise", "none.json"], cwd=folder, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)
