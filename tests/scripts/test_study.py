"""The grid of the sparse communication study: all points are legal, and all that is legal is in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import combinations, product
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from spardl.method import registry
from spardl.method.registry import incompatibility
from tests.support.driver import here, only_run, summary
from trainer.build import CONFIGURATIONS, build_method

EXPERIMENT = "sparse_communication_study"
COMPRESSORS = ("topk", "threshold", "random_k", "random_block", "signsgd")
SCOPES = ("layer", "model")
RESIDUALS = ("local", "none", "rescaled")
MOMENTA = {"after": "optimizer", "before": "local", "corrected": "corrected"}
COMMUNICATORS = ("dense", "allgather_dense", "allgather", "allgather_codes")


def points() -> list[tuple[str, ...]]:
    """What the sweeper makes of the experiment."""
    config = yaml.safe_load((CONFIGURATIONS / "experiment" / f"{EXPERIMENT}.yaml").read_text())
    ((key, text),) = config["hydra"]["sweeper"]["params"].items()
    override = OverridesParser.create().parse_override(f"{key}={text}")
    return [tuple(point.strip("[]").split(",")) for point in override.sweep_string_iterator()]


def legal_points() -> set[tuple[str, ...]]:
    """All combinations of the axes in which the parts fit together."""
    found = set()
    for compressor, scope, residual, momentum, communicator in product(
        COMPRESSORS, SCOPES, RESIDUALS, MOMENTA, COMMUNICATORS
    ):
        kind = registry.compressors()[compressor]
        parts = (registry.communicators()[communicator], registry.residual_rules()[residual])
        if incompatibility(kind, *parts, registry.momentum_rules()[MOMENTA[momentum]]) is None:
            scoped = "scope" in {field.name for field in fields(kind)}
            found.add((compressor, *[scope] * scoped, residual, momentum, communicator))
    return found


def covering() -> Iterator[tuple[str, ...]]:
    """Points in which each pair of choices occurs that occurs at all."""
    seen: set[tuple[str, ...]] = set()
    for point in points():
        pairs = set(combinations(point, 2))
        if not pairs <= seen:
            seen |= pairs
            yield point


def test_the_grid_is_all_that_is_legal() -> None:
    found = points()
    assert len(found) == len(set(found))
    assert set(found) == legal_points()
    for axis in (COMPRESSORS, SCOPES, RESIDUALS, MOMENTA, COMMUNICATORS):
        assert all(any(choice in point for point in found) for choice in axis)


def test_the_points_of_the_grid_are_those_of_one_file() -> None:
    kept = yaml.safe_load((CONFIGURATIONS / "points.yaml").read_text())
    assert set(kept) == {choice for point in points() for choice in point}
    assert ConfigStore.instance().list("point") == [f"{name}.yaml" for name in sorted(kept)]


def check(point: tuple[str, ...]) -> None:
    """A point makes the method that it names, and one optimizer for it."""
    compressor, *scope, residual, momentum, communicator = point
    config = compose("train", [f"experiment={EXPERIMENT}", f"+point=[{','.join(point)}]"])
    plain = OmegaConf.to_container(config, resolve=True)
    method = build_method(plain)
    named = (method.compressor.name, method.residual.name, method.momentum.name, method.communicator.name)
    assert named == (compressor, residual, MOMENTA[momentum], communicator)
    assert plain["compressor"].get("scope") == (scope[0] if scope else None)
    assert plain["compressor"].get("density", plain["study"]["density"]) == plain["study"]["density"]
    # Applied once: before compression, or after it.
    for key, before in (("momentum", method.momentum.remembers), ("weight_decay", method.momentum.decay > 0)):
        assert bool(plain["optimizer"][key]) is not before
    assert plain["cluster"]["network"]


@pytest.mark.slow
def test_choices_make_methods() -> None:
    with initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        for point in covering():
            check(point)


@pytest.mark.slow
def test_every_point_makes_a_method() -> None:
    with initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        for point in points():
            check(point)


def test_a_point_trains(tmp_path: Path) -> None:
    """Also without -m: the experiment is a sweep by itself."""
    point = "+point=[random_block,layer,local,corrected,allgather_dense]"
    assert here(f"experiment={EXPERIMENT}", point, "training.max_steps=2", f"output_dir={tmp_path}") == 0
    outcome = summary(only_run(tmp_path))
    assert (outcome["status"], outcome["steps"]) == ("finished", 2)
