"""Ids where the scope is left open: those of before, but where it is chunks."""

from __future__ import annotations

import pytest

from tests.support.driver import composed
from trainer.experiment import experiment_id
from trainer.targets import resolve_recipe, resolve_scope

ADAM = "optimizer=adamw"


def scope(words: str) -> str:
    found = resolve_scope(resolve_recipe(composed(*words.split())))["compressor"]["scope"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("compressor=spardl", "model"),
        (f"compressor=spardl {ADAM}", "auto"),
        (f"compressor=topka {ADAM}", "auto"),
        (f"compressor=spardl {ADAM} optimizer._target_=torch.optim.Adam", "auto"),
        (f"compressor=spardl {ADAM} recipe=published", "model"),
        (f"compressor=spardl {ADAM} momentum=adam", "model"),
        (f"compressor=spardl {ADAM} schedule=diloco", "model"),
        (f"compressor=spardl {ADAM} compressor.density=0.0002", "model"),
        (f"compressor=oktopk {ADAM}", "model"),
        (f"compressor=gaussiank {ADAM}", "model"),
        (f"compressor=spardl {ADAM} compressor.scope=chunk", "chunk"),
    ],
)
def test_a_scope_stays_open_only_where_it_is_chunks(words: str, expected: str) -> None:
    assert scope(words) == expected


def test_an_open_scope_is_a_run_of_its_own_only_there() -> None:
    def run(words: str) -> str:
        return experiment_id(composed(*words.split()), 4)

    assert run("compressor=spardl") == run("compressor=spardl compressor.scope=model")
    assert run(f"compressor=spardl {ADAM}") != run(f"compressor=spardl {ADAM} compressor.scope=model")
    assert run(f"compressor=spardl {ADAM}") != run(f"compressor=spardl {ADAM} compressor.scope=chunk")
