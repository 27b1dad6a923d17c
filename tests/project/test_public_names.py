"""The names of the ``spardl`` package: few, with deprecated aliases for those that have moved."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import spardl
from tests.project.test_examples import NO_DEPRECATED_NAMES
from tests.support.driver import QUICK, composed
from tests.support.labs import ROOT
from trainer.targets import hashed_targets, importable

PUBLIC = {
    *("attach", "attach_fsdp", "Synchronizer", "Outer", "all_reduce", "make_method", "method_names", "method_options"),
    *("Method", "WeightSync", "advise", "ConfigError", "PeerError", "SpardlError", "__version__"),
}
MOVED = spardl._MOVED
FOLDERS = ("spardl", "trainer", "tasks", "scripts", "examples")
CODE = [ROOT / "train.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
# Short names of parts in configurations.
TARGETS = sorted(
    {
        target
        for path in (ROOT / "conf").rglob("*.yaml")
        for target in re.findall(r"_target_: (spardl\.\w+)$", path.read_text(), re.MULTILINE)
    }
)


def test_the_package_has_few_names() -> None:
    assert set(spardl.__all__) == PUBLIC
    assert not PUBLIC & MOVED.keys()
    assert all(hasattr(spardl, name) for name in PUBLIC)


@pytest.mark.slow
def test_the_package_imports_no_sharding() -> None:
    """``torch.distributed.fsdp`` takes 0.4 s to import, the rest of this package 0.1 s."""
    program = "import sys, spardl; print({'torch.distributed.fsdp', 'sympy', 'numba', 'triton'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", sorted(MOVED))
def test_a_moved_name_warns_and_names_its_new_import(name: str) -> None:
    module = import_module(MOVED[name])
    assert name in module.__all__
    with pytest.warns(DeprecationWarning, match=re.escape(f"use `from {MOVED[name]} import {name}`")) as caught:
        found = getattr(spardl, name)
    assert found is getattr(module, name)
    assert caught[0].filename == __file__


def test_a_from_import_of_a_moved_name_works() -> None:
    with pytest.warns(DeprecationWarning, match="from spardl.compressors import TopK"):
        from spardl import TopK
    assert TopK is import_module("spardl.compressors").TopK


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'spardl' has no attribute 'TopKK'"):
        _ = spardl.TopKK


def deprecated_names(code: str) -> Iterator[str]:
    """Moved names that code takes from the package itself."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "spardl":
            yield from (alias.name for alias in node.names if alias.name in MOVED)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spardl":
            yield from {node.attr} & MOVED.keys()


def test_code_and_docs_use_no_deprecated_names() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [
        (page, block)
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    ]
    texts = [*((path, path.read_text()) for path in CODE), *blocks]
    found = {f"{path.relative_to(ROOT)}: {name}" for path, text in texts for name in deprecated_names(text)}
    assert not found


@pytest.mark.parametrize("target", TARGETS)
def test_short_targets_resolve_without_a_warning(target: str) -> None:
    config = {"compressor": {"_target_": target, "density": 0.1}, "inside": {"warmup": [{"_target_": target}]}}
    found = importable(config)
    module, _, name = found["compressor"]["_target_"].rpartition(".")
    assert module != "spardl"
    assert found["compressor"]["density"] == 0.1
    assert found["inside"] == {"warmup": [{"_target_": f"{module}.{name}"}]}
    assert getattr(import_module(module), name).__name__ == name == target.partition(".")[2]
    # Ids are made from the configuration as it was written.
    assert config["compressor"]["_target_"] == target
    assert hashed_targets(config) == hashed_targets({**config})


def test_configurations_keep_their_short_targets() -> None:
    assert len(TARGETS) > 40
    config = composed("compressor=topk", "warmup=dense")
    targets = {config[part]["_target_"] for part in ("compressor", "communicator", "residual", "warmup", "wire")}
    assert targets == {"spardl.TopK", "spardl.AllGather", "spardl.LocalResidual", "spardl.Warmup", "spardl.Wire"}


@pytest.mark.slow
def test_a_training_uses_no_deprecated_names(tmp_path: Path) -> None:
    words = [*QUICK, "compressor=topk", "warmup=dense", "warmup.steps=2", "training.max_steps=4"]
    done = subprocess.run(
        [sys.executable, "-W", NO_DEPRECATED_NAMES, str(ROOT / "train.py"), *words, f"output_dir={tmp_path}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DeprecationWarning" not in done.stderr
