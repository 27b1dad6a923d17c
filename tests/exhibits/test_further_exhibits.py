"""Exhibits of schedules without fusion and of many teams: what they compare."""

from __future__ import annotations

import pytest

from scripts import choices
from scripts.exhibits.kinds import schedules
from scripts.exhibits.papers.catalogue import catalogue


def test_without_fusion_the_halves_start_as_many_messages() -> None:
    (made, _) = schedules.no_fusion(("resnet50",))["sheets"]
    assert made["columns"] == [
        "model",
        "WFBP (per layer)",
        "DeAR per layer",
        "DeAR tuned",
        "WFBP / DeAR, per layer",
        "per layer / tuned",
    ]
    ((model, whole, halves, tuned, gain, fusion),) = made["rows"]
    assert model == "resnet50"
    assert gain == whole / halves
    assert fusion == min(whole, halves) / tuned > 1  # on 10 GbE, 161 messages start too often
    (table, _) = schedules.speed(("resnet50",))["sheets"]
    columns = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert (columns["WFBP (per layer)"], columns["DeAR tuned"]) == (whole, tuned)


def test_buckets_are_tuned_as_groups_are() -> None:
    """So no bucket size that is tried beats them, and the best other schedule is one that was tuned."""
    (table, _) = schedules.speed(("resnet50",))["sheets"]
    columns = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert columns["buckets tuned"] <= columns["DDP-like 25 MB"]
    best = min(columns[name] for name in schedules.OTHERS)
    assert columns["best other / tuned"] == best / columns["DeAR tuned"]


@pytest.mark.parametrize("scale", ["smoke", "laptop", "paper"])
def test_teams_divide_the_workers(scale: str) -> None:
    exhibit = catalogue()["spardl.many_teams"]
    plan = exhibit.plans[scale]
    with choices.composing():
        configs = {name: exhibit.job(plan, plan.cases[0], name, 1).config for name in exhibit.methods}
    assert {config["cluster"]["workers"] for config in configs.values()} == {16}
    teams = [config["communicator"]["teams"] for name, config in configs.items() if name.startswith("R-SAG")]
    assert teams == [2, 4, 8, 16]
