"""The scripts that the docs of methods rest on, and the choices of compressor= that they compose."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

from scripts import choices
from scripts.exhibits.kinds.trainings import LEFT_OUT
from spardl.method.recipes import recipes
from tests.support.harness import published_methods

ROOT = Path(__file__).resolve().parents[2]


TRAINED = "settings.methods, laptop, table 1"


def section(name: str, page: str = "methods") -> list[list[str]]:
    """The cells of a generated table, without its header."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)<!-- end of {name} -->", text, flags=re.DOTALL)
    assert found
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found[1].strip().splitlines()[2:]]


def test_every_method_has_a_row() -> None:
    """If it is published; and every row is of one that there is."""
    for name in ("methods", "laws"):
        rows = {row[0].strip("`") for row in section(name)}
        assert published_methods() <= rows <= recipes().keys()


def test_the_table_says_who_is_biased() -> None:
    """A method is unbiased if it sends all, or rounds at random and clips nothing."""
    rows = {row[0].strip("`"): row[7] for row in section("methods")}
    assert {name for name, biased in rows.items() if biased == "no"} == {"none", "qsgd"}
    assert rows["terngrad"] == "yes"


def test_methods_have_three_seeds_or_an_explanation() -> None:
    """What another choice trains alike, or what needs a dense warm-up longer than the run, need not be."""
    rows = {row[0]: row for row in section(TRAINED, "tables/settings")}
    assert published_methods() - set(rows) <= LEFT_OUT
    assert all(len(row[3].split(",")) == 3 for row in rows.values())
    reached = {name: float(row[1].split()[1]) for name, row in rows.items()}
    explained = (ROOT / "docs" / "methods.md").read_text().split("## Accuracy of all methods")[1]
    behind = {name for name, accuracy in reached.items() if accuracy < reached["none"] - 0.03}
    assert {name for name in behind if f"`{name}`" not in explained} <= {"alone"}


@pytest.mark.slow
def test_counts_agree_with_the_formulas(program: Any) -> None:
    done = program("complexity", "--workers", "4,7,8,14,16")
    assert done.code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.out.splitlines()[2:]]
    assert {tuple(row[:2]) for row in rows} == set(product(choices.names(), ("4", "7", "8", "14", "16")))
    assert {row[-1] for row in rows} == {""}


def test_a_method_that_is_none(program: Any) -> None:
    done = program("complexity", "--methods", "foo")
    assert (done.code, len(done.err.splitlines())) == (2, 1)


LINES = (
    (),
    ("seed=7", "compressor=topka", "training.max_steps=3", "cluster=simulated"),
    ("cluster.network={alpha:1e-4,gbit:2}", "cluster=simulated", "optimizer.lr=0.1", "optimizer.lr=0.2"),
    ("+model.more=1", "~training.log_every", "data_dir=${output_dir}/data", "++training.epochs=2"),
    ("experiment=spardl/bert_wikipedia", "compressor.density=0.02", "optimizer=sgd"),
    ("model=bert_tiny", "momentum=adam", "momentum.betas=[0,0.95]", "optimizer.lr=${optimizer.weight_decay}"),
    ("+point=[signsgd,layer,local,after,allgather_codes]", "experiment=sparse_communication_study", "seed=2"),
    ("hydra.job.chdir=true", "~dataset", "+dataset=digits"),
    ("compressor.density=0.5", "compressor={density:0.1}"),
    ("compressor={density:0.1}", "compressor.density=0.5", "seed=3", "seed=3"),
)


def whole(*words: str) -> Any:
    return OmegaConf.to_container(compose("train", list(words)), resolve=True)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_the_same_is_composed(words: tuple[str, ...]) -> None:
    assert choices.composed(*words) == whole(*words)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    "word", ["compressor=nothing", "nonsense=1", "seed=1,2", "compressor=topk,none", "~nonsense", "+seed=1", "a=[", "x"]
)
def test_the_same_is_refused(word: str) -> None:
    with pytest.raises(HydraException) as of_hydra:
        whole(word)
    with pytest.raises(type(of_hydra.value)) as ours:
        choices.composed(word)
    assert str(ours.value) == str(of_hydra.value)
