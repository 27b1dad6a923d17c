"""Methods by name: the library and the trainer use the same names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import spardl
from spardl.basics.errors import ConfigError
from spardl.communicators import GTopk, SparDL
from spardl.compressors import SampledTopK, TopK
from spardl.method import CorrectedMomentum, Option, PartialResidual, registry
from spardl.method.names import MethodName
from spardl.method.recipes import GROUP, recipes
from spardl.protocol.programs import Combination
from tests.support.driver import composed
from trainer.build import CONFIGURATIONS, build_method

CHOICES = sorted(path.stem for path in (CONFIGURATIONS / "compressor").glob("*.yaml"))


def parts(method: spardl.Method) -> tuple[Any, ...]:
    """Returns what two methods must have in common; rules are identified by their type."""
    rules = (type(method.residual), type(method.momentum))
    factor = getattr(method.momentum, "factor", None)  # weight decay belongs to the optimizer
    return method.compressor, method.communicator, *rules, factor, method.warmup, method.wire


def test_the_trainer_and_the_library_know_the_same_methods() -> None:
    undeclared = set(CHOICES) - set(recipes())
    assert not undeclared, "declare them in METHODS, in the file of their compressor or communicator"
    assert set(CHOICES) == set(recipes()), "a method needs a file in conf/compressor"


def test_editors_know_the_names() -> None:
    assert list(get_args(MethodName)) == spardl.method_names() == sorted(recipes()), "run scripts/docs.py --write"


@pytest.mark.parametrize("name", CHOICES)
def test_a_name_means_the_same_to_the_trainer(name: str) -> None:
    """Except seeds, which each run sets."""
    of_trainer, of_library = build_method(composed(f"compressor={name}")), spardl.make_method(name)
    if hasattr(of_library.compressor, "seed"):
        of_trainer = replace(of_trainer, compressor=replace(of_trainer.compressor, seed=of_library.compressor.seed))  # type: ignore[type-var]
    assert parts(of_trainer) == parts(of_library)


def test_options_reach_their_parts() -> None:
    method = spardl.make_method("spardl", density=0.2, teams=3, residual="partial", wire="bfloat16", dense_steps=7)
    assert (method.compressor, method.communicator) == (TopK(0.2), SparDL(teams=3))
    assert isinstance(method.residual, PartialResidual)
    assert (method.warmup.steps, method.wire.values) == (7, "bfloat16")
    assert spardl.make_method(method) is method


def test_the_factor_of_momentum_is_not_that_of_a_compressor() -> None:
    method = spardl.make_method("dgc", factor=0.7, momentum_factor=0.5)
    assert method.momentum == CorrectedMomentum(factor=0.5)
    assert method.compressor == SampledTopK(factor=0.7, scope="layer")
    assert spardl.make_method("dgc", factor=0.7).momentum == CorrectedMomentum()
    assert spardl.make_method("dgc", momentum_factor=0.0).momentum == CorrectedMomentum(factor=0.0)


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("none", 0.5, "momentum_factor=0.5 has no effect, because momentum=optimizer of this method has no"),
        ("none", 0.0, "momentum_factor=0.0 has no effect, because momentum=optimizer of this method has no"),
        ("spardl", 1.0, "momentum.factor must be at least 0 and below 1, got 1.0"),
        ("dgc", 1.0, "momentum.factor must be at least 0 and below 1, got 1.0"),
    ],
)
def test_invalid_momentum_factor(name: str, factor: float, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spardl.make_method(name, momentum_factor=factor)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError, match="unknown option teem; this method has") as unknown:
        spardl.make_method(name, teem=2)
    assert ("momentum_factor" in str(unknown.value)) is (name != "none")
    assert "\n" not in str(caught.value)


def test_a_method_without_options_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        spardl.make_method("none", density=0.1)
    assert str(caught.value) == (
        "unknown option density; this method has communicator, residual, residual_decay, wire, dense_steps and recipe"
    )
    assert type(caught.value) is spardl.ConfigError


@pytest.mark.parametrize("name", [None, 5, ["spardl"], True, "spardle"])
def test_unknown_name(name: Any) -> None:
    for ask in (spardl.make_method, spardl.method_options):
        with pytest.raises(ConfigError) as caught:
            ask(name)
        hint = "; did you mean spardl?" if name == "spardle" else ""
        assert str(caught.value) == f"unknown method {name!r}; use one of {', '.join(spardl.method_names())}{hint}"


def test_misspelt_options_are_corrected_and_parts_explained() -> None:
    cases = {
        "did you mean density?": lambda: spardl.make_method("spardl", densty=0.1),
        "did you mean optimizer?": lambda: spardl.make_method("spardl", optimiser=None),
        "pass process_group= to Distributed": lambda: spardl.make_method("spardl", group=None),
        "combine parts with spardl.Method(": lambda: spardl.make_method(TopK(0.1)),  # type: ignore[arg-type]
    }
    for words, call in cases.items():
        with pytest.raises(ConfigError) as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("none", {"beta2": 0.9}, "momentum=optimizer of this method never uses Adam"),
        ("spardl", {"beta2": 0.9, "recipe": "published"}, "momentum=optimizer of this method never uses Adam"),
        ("dgc", {"beta2": 0.9}, "momentum=corrected of this method never uses Adam"),
        ("spardl", {"beta2": 1.0}, "beta2 must be at least 0 and below 1, got 1.0"),
        ("spardl", {"beta2": "0.9"}, "beta2 must be at least 0 and below 1, got '0.9'"),
        ("dgc", {"update_scale": "measured"}, "momentum=corrected of this method never uses Adam"),
        ("spardl", {"update_scale": "root"}, "update_scale must be one of none, measured, got 'root'"),
    ],
)
def test_invalid_beta2(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        spardl.make_method(name, **options)
    assert words in str(error.value)


# --- options


def test_options_are_described() -> None:
    found = {option.name: option for option in spardl.method_options("dgc")}
    assert found["scope"].default == "layer"
    assert found["density"] == Option(
        "density",
        "compressor",
        "float",
        0.01,
        "Share of entries to send, k / n, in (0, 1]; lower is more aggressive.",
    )
    assert (found["momentum_factor"].part, found["momentum_factor"].default) == ("method", 0.9)
    assert "beta2" not in found
    assert "momentum_factor" not in {option.name for option in spardl.method_options("none")}
    assert "beta2" in {option.name for option in spardl.method_options("spardl")}
    twice = [(each.part, each.default) for each in spardl.method_options("oktopk_lstm") if each.name == "lower_factor"]
    assert twice == [("compressor", 1.012), ("communicator", 1.01)]


@pytest.mark.parametrize("name", CHOICES)
def test_options_are_those_that_the_method_takes(name: str) -> None:
    """Each option has a description, and passing its default makes the same method."""
    options = spardl.method_options(name)
    assert all(each.about and "\n" not in each.about and each.type for each in options)
    once = {each.name: each.default for each in options if [other.name for other in options].count(each.name) == 1}
    assert parts(spardl.make_method(name, **once)) == parts(spardl.make_method(name))
    with pytest.raises(ConfigError) as caught:
        spardl.make_method(name, nothing=1)
    assert {each.name for each in options} == set(
        re.findall(r"\w+", str(caught.value).split("this method has ")[1])
    ) - {"and"}


# --- what files declare


def declaring(monkeypatch: pytest.MonkeyPatch, *methods: Combination) -> None:
    """Adds a module that declares methods to the package of compressors."""
    module = ModuleType("spardl.compressors.added")
    vars(module)["METHODS"] = methods
    own = registry._modules
    monkeypatch.setattr(
        registry, "_modules", lambda package: [*own(package), *[module] * ("compr" in package.__name__)]
    )
    registry.combinations.cache_clear()
    recipes.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    yield
    registry.combinations.cache_clear()
    recipes.cache_clear()


def test_a_file_declares_a_method(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    declaring(
        monkeypatch, Combination("added", "topk", "gtopk", "global", communicator_options={"variant": "doubling"})
    )
    assert spardl.make_method("added", density=0.5).communicator == GTopk("doubling")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Combination("spardl", "topk", "dense", "none"), "both declare a method 'spardl'"),
        (Combination("added", "topk", "denze", "none"), "communicator of the method added must be one of allgather, "),
        (Combination("added", "topk", "dense", "none", "x"), "momentum of the method added must be one of adam, "),
    ],
)
def test_file_with_an_invalid_declaration(
    method: Combination, message: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    declaring(monkeypatch, method)
    with pytest.raises(ConfigError, match=message):
        spardl.method_names()


# --- other packages


MODULE = '''
import spardl
from spardl.communicators import AllGather
from spardl.compressors import TopK
from spardl.method import LocalResidual

def keep_one(density: float = 0.5):
    """Keeps a share.

    Args:
        density: share of
            entries.
    """
    return spardl.Method(TopK(density), AllGather(), LocalResidual())

def nothing():
    pass
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Adds entry points as an installed package does."""

    def put(points: str) -> None:
        (tmp_path / "theirs.py").write_text(MODULE)
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    sys.modules.pop("theirs", None)


def test_other_packages_add_methods(install: Callable[[str], None]) -> None:
    install("keep_one = theirs:keep_one")
    assert "keep_one" in spardl.method_names()
    assert spardl.make_method("keep_one", density=0.25).compressor == TopK(0.25)
    assert spardl.method_options("keep_one") == [Option("density", "method", "float", 0.5, "share of entries.")]


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        ("one = theirs:keep_one", {"teem": 2}, "unknown option teem; this method has density"),
        ("one = theirs:missing", {}, "method one cannot be loaded from theirs:missing: "),
        ("one = theirz:keep_one", {}, "method one cannot be loaded from theirz:keep_one: No module named 'theirz'"),
        (
            "one = theirs:nothing",
            {},
            "method one returned a NoneType, expected a spardl.Method",
        ),
    ],
)
def test_a_method_of_another_package_that_cannot_be_used(
    points: str, options: dict[str, Any], message: str, install: Callable[[str], None]
) -> None:
    install(points)
    with pytest.raises(ConfigError) as caught:
        spardl.make_method("one", **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
