"""Seconds of a synchronization, reckoned by hand."""

from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.clusters.network import Network
from spardl.communicators import AllGather, Dense, GTopk, SparDL
from spardl.compressors import NoCompression, TopK
from spardl.diagnostics.timeline.model import GroupCost, Work, halves, whole
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual
from spardl.protocol.programs import Bounds, Cost
from spardl.schedules.fusion import Linear
from spardl.vector.packing import Slot, message_bytes

NETWORK = Network(alpha=1e-3, gbit=8)  # a byte takes a nanosecond
NOTHING = Linear(0.0, 0.0)
DENSE = Method(NoCompression(), Dense(), NoResidual())
SPARDL = Method(TopK(density=0.01), SparDL(), GlobalResidual())


def test_a_ring_takes_its_rounds_and_bytes() -> None:
    work = whole(DENSE, 4, NETWORK, NOTHING)(1_000_000)
    assert work == Work(0.0, pytest.approx(6 * 1e-3), pytest.approx(4 * 1.5e6 * 1e-9))


def test_halves_of_a_ring_are_equal_and_add_up() -> None:
    first, second = halves(DENSE, 4, NETWORK, NOTHING)
    expected = Work(0.0, pytest.approx(3 * 1e-3), pytest.approx(4 * 0.75e6 * 1e-9))
    assert first(1_000_000) == second(1_000_000) == expected


def test_halves_of_spardl_add_up_and_the_first_compresses() -> None:
    compressing = Linear(0.5, 1e-6)
    both = whole(SPARDL, 8, NETWORK, compressing)(100_000)
    entry = message_bytes(Slot(1000, 100_000), torch.float32) / 1000
    assert 5 < entry < 5.5
    first, second = (half(100_000) for half in halves(SPARDL, 8, NETWORK, compressing))
    assert first.transfer == second.transfer == pytest.approx(3e-3 + 7 * 125 * entry * 1e-9)
    assert first.transfer + second.transfer == pytest.approx(both.transfer)
    assert first.compress == both.compress == pytest.approx(0.6)
    assert second.compress == 0


def test_limits_count_with_their_mean() -> None:
    formula = lambda entries: Cost(Bounds(2, 4), Bounds(0, 2 * entries))  # noqa: E731
    cost = GroupCost(formula, lambda entries: 4.0, NETWORK, NOTHING)
    assert cost.seconds(500) == pytest.approx(3e-3 + 500 * 4e-9)


def test_seconds_and_startup_count_compression_and_messages() -> None:
    cost = whole(DENSE, 4, NETWORK, Linear(0.25, 0.0))
    assert cost.seconds(400) == pytest.approx(0.25 + 6e-3 + 4 * 600 * 1e-9)
    assert cost.startup == pytest.approx(0.256, rel=1e-5)


def test_a_single_worker_sends_nothing() -> None:
    assert whole(DENSE, 1, NETWORK, NOTHING)(100) == Work(0.0, 0.0)


def test_the_formula_is_worked_out_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    published = Method.published_cost

    def counting(self: Method, context: object) -> Cost:
        asked.append(1)
        return published(self, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Method, "published_cost", counting)
    cost = whole(DENSE, 4, NETWORK, NOTHING)
    assert cost(7) == cost(7)
    assert len(asked) == 1


def test_what_has_no_halves_is_refused() -> None:
    topka = Method(TopK(density=0.01), AllGather(), LocalResidual())
    with pytest.raises(ConfigError, match="cannot be split"):
        halves(topka, 4, NETWORK, NOTHING)


def test_a_number_of_workers_that_does_not_fit() -> None:
    teams = Method(TopK(density=0.01), SparDL(teams=3), GlobalResidual())
    for build in (whole, halves):
        with pytest.raises(ConfigError, match="teams=3"):
            build(teams, 4, NETWORK, NOTHING)


def test_an_ordinary_step_is_past_every_density_warm_up() -> None:
    warm = Method(TopK(density=0.01, warmup_steps=100), GTopk(), LocalResidual())
    plain = Method(TopK(density=0.01), GTopk(), LocalResidual())
    assert whole(warm, 4, NETWORK, NOTHING)(10_000) == whole(plain, 4, NETWORK, NOTHING)(10_000)
