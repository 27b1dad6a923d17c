"""Exhibits of settings train the commands in docs/choosing-a-method.md."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.exhibits import jobs
from scripts.exhibits.kinds.trainings import LEFT_OUT
from scripts.exhibits.papers.catalogue import catalogue
from scripts.pages.methods import documented
from trainer.build import build_dataset, build_plan

WARM_UP, WIRE = (catalogue()[f"settings.{name}"] for name in ("warm_up", "wire"))
BASE = ("recipe=published", "compressor=spardl", "cluster.workers=4", "seed=1")


def trained(exhibit: Any, row: str, place: int = 0) -> str:
    """The id of a training with seed 1."""
    plan = exhibit.plans["laptop"]
    return str(exhibit.job(plan, plan.cases[place], row, 1).id)


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("no warm-up", ("warmup.steps=0",)),
        ("density falls, a tenth of the steps", ("compressor.warmup_steps=66",)),
        ("dense, a tenth of the steps", ("warmup.steps=66",)),
        ("dense, a third", ("warmup.steps=220",)),
    ],
)
def test_warm_ups_of_four_workers_are_those_of_the_page(row: str, words: tuple[str, ...]) -> None:
    assert trained(WARM_UP, row) == jobs.Training((*BASE, "compressor.density=0.001", *words)).id


@pytest.mark.usefixtures("composing")
def test_warm_ups_of_eight_are_as_long_a_share() -> None:
    words = ("recipe=published", "compressor=spardl", "cluster.workers=8", "seed=1", "warmup.steps=33")
    assert trained(WARM_UP, "dense, a tenth of the steps", 1) == jobs.Training(words).id
    assert trained(WARM_UP, "dense, a third", 1) == jobs.Training((*words, "warmup.steps=110")).id


@pytest.mark.usefixtures("composing")
def test_wires_are_those_of_the_page() -> None:
    for name in ("exact", "bfloat16", "int4"):
        assert trained(WIRE, f"wire={name}") == jobs.Training((*BASE, f"wire={name}")).id
    assert trained(WIRE, "wire=exact") == jobs.Training(BASE).id


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("exhibit", [WARM_UP, WIRE], ids=lambda exhibit: exhibit.name)
def test_every_training_is_valid(exhibit: Any) -> None:
    for job in exhibit.jobs("laptop"):
        if "seed=1" in job.words:
            build_plan(job.config, build_dataset(job.config)).check(job.workers)


def test_every_method_on_the_page_has_a_row_or_is_left_out() -> None:
    """A method of one's own, which is on no page, asks for no training."""
    rows = [*catalogue()["settings.methods"].methods]
    assert rows[:2] == ["none", "alone"]
    assert {*rows, *LEFT_OUT} - {"alone"} == {*documented()}
    assert not {*rows[1:]} & LEFT_OUT
