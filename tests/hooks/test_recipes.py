"""Methods by name: what the library calls them is what the trainer calls them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import spardl
from spardl.basics.errors import ConfigError
from spardl.compressors import SampledTopK
from spardl.method.recipes import GROUP, RECIPES
from tests.driver import composed
from train import build_method


def parts(method: spardl.Method) -> tuple[Any, ...]:
    """What two methods must have in common; rules are known by their type."""
    rules = (type(method.residual), type(method.momentum))
    factor = getattr(method.momentum, "factor", None)  # weight decay is the affair of who has the weights
    return method.compressor, method.communicator, *rules, factor, method.warmup, method.wire


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_means_the_same_to_the_trainer(name: str) -> None:
    """But for seeds, which a run has of its own."""
    of_trainer, of_library = build_method(composed(f"compressor={name}")), spardl.make_method(name)
    if hasattr(of_library.compressor, "seed"):
        of_trainer = replace(of_trainer, compressor=replace(of_trainer.compressor, seed=of_library.compressor.seed))  # type: ignore[type-var]
    assert parts(of_trainer) == parts(of_library)


def test_options_reach_their_parts() -> None:
    method = spardl.make_method("spardl", density=0.2, teams=3, residual="partial", wire="bfloat16", dense_steps=7)
    assert (method.compressor, method.communicator) == (spardl.TopK(0.2), spardl.SparDL(teams=3))
    assert isinstance(method.residual, spardl.PartialResidual)
    assert (method.warmup.steps, method.wire.values) == (7, "bfloat16")
    assert spardl.make_method(method) is method


def test_the_factor_of_momentum_is_not_that_of_a_compressor() -> None:
    method = spardl.make_method("dgc", factor=0.7, momentum_factor=0.5)
    assert method.momentum == spardl.CorrectedMomentum(factor=0.5)
    assert method.compressor == SampledTopK(factor=0.7, scope="layer")
    assert spardl.make_method("dgc", factor=0.7).momentum == spardl.CorrectedMomentum()
    assert spardl.make_method("dgc", momentum_factor=0.0).momentum == spardl.CorrectedMomentum(factor=0.0)


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("spardl", 0.5, "momentum_factor=0.5: the momentum of this method, optimizer, has no factor; leave it out"),
        ("spardl", 0.0, "momentum_factor=0.0: the momentum of this method, optimizer, has no factor; leave it out"),
        ("dgc", 1.0, "momentum.factor must be at least 0 and below 1, got 1.0"),
    ],
)
def test_a_factor_of_momentum_that_cannot_be(name: str, factor: float, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spardl.make_method(name, momentum_factor=factor)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError, match="teem is no option of this method") as unknown:
        spardl.make_method(name, teem=2)
    assert ("momentum_factor" in str(unknown.value)) is (name == "dgc")
    assert "\n" not in str(caught.value)


def test_a_method_without_options_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        spardl.make_method("none", density=0.1)
    assert str(caught.value) == "density is no option of this method; it has residual, wire and dense_steps"
    assert type(caught.value) is spardl.ConfigError


MODULE = """
import spardl

def keep_one(density=0.5):
    return spardl.Method(spardl.TopK(density), spardl.AllGather(), spardl.LocalResidual())
"""


def test_other_packages_add_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point, as their installation leaves it."""
    (tmp_path / "theirs.py").write_text(MODULE)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nkeep_one = theirs:keep_one\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "keep_one" in spardl.method_names()
    assert spardl.make_method("keep_one", density=0.25).compressor == spardl.TopK(0.25)
    monkeypatch.delitem(sys.modules, "theirs")
