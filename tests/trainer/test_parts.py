"""What a configuration may name: everything in ``conf/``, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from spardl.basics.errors import ConfigError
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor
from tests.support.driver import ROOT
from trainer.build import KINDS
from trainer.targets import Kind

COMPRESSOR = Kind(Compressor)
TOP_K = {"_target_": "spardl.compressors.topk.TopK", "density": 0.01}


def nodes() -> list[tuple[str, dict[str, Any]]]:
    """Each node of ``conf/`` that names something to be made."""
    found = []
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        content = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(content, dict)
        parts = {path.parent.name: content} if "_target_" in content else content
        found += [(name, node) for name, node in parts.items() if isinstance(node, dict) and "_target_" in node]
    return found


def test_all_configured_targets_are_allowed() -> None:
    found = nodes()
    assert {name for name, _ in found} == set(KINDS)
    for name, node in found:
        KINDS[name].check(name, node)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("os.system", "it must be from spardl"),
        ("spardl", "it must be from spardl"),
        ("spardlings.TopK", "it must be from spardl"),
        (None, "it must be from spardl"),
        (["spardl.compressors.topk.TopK"], "it must be from spardl"),
        ("spardl.compressors.topk.", "has no attribute ''"),
        ("spardl.compressors.topk.NoSuchThing", "has no attribute 'NoSuchThing'"),
        ("spardl.compressors.nowhere.TopK", "has no attribute 'nowhere'"),
        ("spardl.nowhere.at.all.TopK", "No module named 'spardl.nowhere'"),
        ("spardl.compressors.topk", "it is not a subclass of Compressor from spardl"),
        ("spardl.OptimizerMomentum", "it is not a subclass of Compressor from spardl"),
        ("spardl.clusters.workers.processes.exit_now", "it is not a subclass of Compressor from spardl"),
        ("spardl.clusters.workers.processes.os.system", "it is not a subclass of Compressor from spardl"),
        ("spardl.clusters.workers.processes.Path", "it is not a subclass of Compressor from spardl"),
    ],
)
def test_other_targets_are_refused(target: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        COMPRESSOR.check("compressor", {**TOP_K, "_target_": target})
    assert str(error.value).startswith(f"compressor._target_={target} cannot be used: ")
    assert reason in str(error.value)
    assert str(error.value).endswith("; choose one with compressor=NAME")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"_args_": [1]}, "compressor._args_ has no effect here"),
        ({"_recursive_": False}, "compressor._recursive_ has no effect here"),
        ({"_partial_": True}, "compressor._partial_ must be false"),
        ({"density": {"_target_": "os.getcwd"}}, "compressor.density._target_ has no effect here"),
        ({"density": [1, {"a": {"_target_": "x"}}]}, r"compressor.density.1.a._target_ has no effect here"),
    ],
)
def test_special_keys_are_refused(more: dict[str, Any], message: str) -> None:
    COMPRESSOR.check("compressor", TOP_K)
    with pytest.raises(ConfigError, match=message):
        COMPRESSOR.check("compressor", {**TOP_K, **more})


@pytest.mark.parametrize("node", [None, {}, 5, "topk", [TOP_K], {"density": 0.01}])
def test_a_node_that_names_nothing(node: Any) -> None:
    with pytest.raises(ConfigError, match="this configuration has no compressor; choose one with compressor=NAME"):
        COMPRESSOR.check("compressor", node)


def test_nested_nodes_have_their_own_allowlist() -> None:
    kind = Kind(Compressor, inside={"communicator": Kind(Communicator)})
    kind.check("compressor", {**TOP_K, "communicator": {"_target_": "spardl.communicators.dense.Dense"}})
    with pytest.raises(ConfigError, match=r"compressor.communicator._target_=os.system cannot be used"):
        kind.check("compressor", {**TOP_K, "communicator": {"_target_": "os.system"}})


def test_refused_targets_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_imported.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="it must be from spardl"):
        COMPRESSOR.check("compressor", {"_target_": "never_imported.anything"})
    assert "never_imported" not in sys.modules


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="No module named 'no_such_package'"):
        Kind(Compressor, ("needy",)).check("compressor", {"_target_": "needy.Anything"})
