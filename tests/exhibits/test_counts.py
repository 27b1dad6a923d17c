"""Counted costs: words on the longest path, and over a cycle of steps."""

from __future__ import annotations

from math import log2
from pathlib import Path

import pytest

from scripts.exhibits import base, jobs
from scripts.exhibits.claims import oktopk as claims
from scripts.exhibits.kinds import counts, schedules
from scripts.exhibits.papers.catalogue import catalogue


@pytest.mark.parametrize("workers", [4, 8])
def test_the_path_through_a_tree_is_longer_than_its_mean(workers: int) -> None:
    """4k log2 P words one after the other, where a worker sends 4k(P-1)/P on average."""
    (kind,) = counts.count_costs("gtopk", (), workers)["kinds"]
    assert kind["path"][0] / kind["k"] == pytest.approx(4 * log2(workers), rel=0.02)
    assert kind["words"][0] / kind["k"] == pytest.approx(4 * (workers - 1) / workers, rel=0.02)


def test_where_all_send_alike_the_path_is_the_mean() -> None:
    (kind,) = counts.count_costs("spardl", (), 8)["kinds"]
    assert kind["path"] == kind["words"]


def kind(share: float, words: float) -> dict[str, object]:
    return {
        "share": share,
        "k": 10.0,
        "rounds": [2, 2],
        "words": [words, words],
        "bounds": [0, 100],
        "path": [2 * words] * 2,
        "within": True,
    }


def test_words_over_a_cycle_by_hand() -> None:
    exhibit = catalogue()["oktopk.volume"]
    kinds = [kind(0.25, 80.0), kind(0.75, 40.0)]
    found = {job: jobs.Outcome(Path("x"), {"kinds": kinds}) for job in exhibit.jobs("smoke")}
    results = base.Results(Path("x"), found)
    assert counts.amortized(kinds) == 5.0
    cell = exhibit.tables("smoke", results)[0].rows[0].cells[0].text
    assert cell == "2 rounds, 8 k [0..10 k], path 16 k; 2 rounds, 4 k [0..10 k], path 8 k; over a cycle 5 k"
    figures = claims.volume(exhibit, "smoke", results)
    assert [figure.values for figure in figures] == [(4.0,), (5.0,)] * 2
    assert [figure.remark for figure in figures] == ["", "steps that evaluate thresholds: 8k"] * 2


def test_shares_are_of_a_whole_cycle() -> None:
    kinds = counts.count_costs("oktopk", (), 4)["kinds"]
    assert [kind["share"] for kind in kinds] == [2 / 128, 124 / 128, 2 / 128]


def test_spardl_selects_as_many_blocks_as_there_are_workers() -> None:
    """Half a millisecond, and 39 microseconds a block; of 64 blocks it is 3 ms."""
    lines = schedules.bench_schedules.assumed_compression
    assert lines(64)["spardl"].fixed == pytest.approx(3e-3)
    assert lines(16)["spardl"].fixed == pytest.approx(0.5e-3 + 16 * 2.5e-3 / 64)
    assert lines(16)["topka"] == lines(64)["topka"]


@pytest.mark.slow
def test_what_fusion_gains_where_launches_are_those_of_16_blocks() -> None:
    found = schedules._seconds(("densenet201",), "ethernet_10g", ())["densenet201", "spardl"]
    layers, buckets, _, fused, _ = found
    assert layers / fused == pytest.approx(2.455, abs=1e-3)
    assert buckets / fused == pytest.approx(1.0, abs=0.01)
