"""Exhibits of settings train the commands in docs/choosing-a-method.md."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.exhibits import jobs
from scripts.exhibits.papers import settings
from scripts.pages.methods import documented
from trainer.build import build_dataset, build_plan

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
        (settings.FALLING, ("compressor.warmup_steps=66",)),
        (settings.TENTH, ("warmup.steps=66",)),
        (settings.THIRD, ("warmup.steps=220",)),
    ],
)
def test_warm_ups_of_four_workers_are_those_of_the_page(row: str, words: tuple[str, ...]) -> None:
    assert trained(settings.WARM_UP, row) == jobs.Training((*BASE, "compressor.density=0.001", *words)).id


@pytest.mark.usefixtures("composing")
def test_warm_ups_of_eight_are_as_long_a_share() -> None:
    words = ("recipe=published", "compressor=spardl", "cluster.workers=8", "seed=1", "warmup.steps=33")
    assert trained(settings.WARM_UP, settings.TENTH, 1) == jobs.Training(words).id
    assert trained(settings.WARM_UP, settings.THIRD, 1) == jobs.Training((*words, "warmup.steps=110")).id


@pytest.mark.usefixtures("composing")
def test_wires_are_those_of_the_page() -> None:
    for name in ("exact", "bfloat16", "int4"):
        assert trained(settings.WIRE, f"wire={name}") == jobs.Training((*BASE, f"wire={name}")).id
    assert trained(settings.WIRE, "wire=exact") == jobs.Training(BASE).id


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("exhibit", [settings.WARM_UP, settings.WIRE], ids=lambda exhibit: exhibit.name)
def test_every_training_is_valid(exhibit: Any) -> None:
    for job in exhibit.jobs("laptop"):
        if "seed=1" in job.words:
            build_plan(job.config, build_dataset(job.config)).check(job.workers)


def test_every_method_on_the_page_has_a_row_or_is_left_out() -> None:
    """A method of one's own, which is on no page, asks for no training."""
    rows = [*settings.METHODS.methods]
    assert rows[:2] == ["none", "alone"]
    assert {*rows, *settings.LEFT_OUT} - {"alone"} == {*documented()}
    assert not {*rows[1:]} & settings.LEFT_OUT
