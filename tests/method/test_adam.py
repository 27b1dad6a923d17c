"""Adam's moments before compression, against torch's optimizer and a reference of Efficient-Adam."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators import Dense
from spardl.compressors import NoCompression
from spardl.method.elastic import sources
from spardl.method.method import Method
from spardl.method.momentum import AdamMomentum, Spread
from spardl.method.residuals import NoResidual
from spardl.protocol.programs import Context, Worker
from tests.support.harness import Bench, same_bits, spardl, to_dense, topka

BETAS = [(0.9, 0.999), (0.0, 0.95), (0.5, 0.0)]


def exact(rule: AdamMomentum) -> Method:
    return Method(NoCompression(), Dense(), NoResidual(), rule)


def sparse(rule: AdamMomentum, density: float = 0.2, teams: int = 1) -> Method:
    parts = spardl(density, teams)
    return Method(parts.compressor, parts.communicator, parts.residual, rule)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("betas", 0.9),
        ("betas", (True, 0.9)),
        ("eps", 0),
        ("eps", "a"),
        ("update_scale", "P"),
    ],
)
def test_invalid_values(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"momentum.{field} must be"):
        AdamMomentum(**{field: value})


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("density", [None, 1.0])
def test_one_worker_without_compression_equals_adamw(betas: tuple[float, float], density: float | None) -> None:
    rule = AdamMomentum(betas, eps=1e-6)
    bench = Bench.build(exact(rule) if density is None else sparse(rule, density), 1, 50)
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 50).double()) for _ in range(2))
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=betas, eps=1e-6, weight_decay=0.1)
    for step in range(12):
        gradient = torch.randn(50, dtype=torch.float64) * 10.0 ** (step % 5 - 2)
        average = to_dense(bench.step([gradient])[0])
        with torch.no_grad():
            mine.mul_(1 - 0.01 * 0.1).sub_(average, alpha=0.01)
        theirs.grad = gradient
        reference.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


class LocalAdam:
    """A worker of Efficient-Adam without its compression, by the formulas."""

    def __init__(self, betas: tuple[float, float], eps: float, length: int) -> None:
        self.betas, self.eps, self.steps = betas, eps, 0
        self.m, self.v = torch.zeros(length).double(), torch.zeros(length).double()

    def update(self, gradient: Tensor) -> Tensor:
        b1, b2 = self.betas
        self.steps += 1
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        return (self.m / (1 - b1**self.steps)) / ((self.v / (1 - b2**self.steps)).sqrt() + self.eps)


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("workers", [3, 4])
def test_workers_without_compression_average_local_updates(betas: tuple[float, float], workers: int) -> None:
    bench = Bench.build(exact(AdamMomentum(betas)), workers, 30)
    models = [LocalAdam(betas, 1e-8, 30) for _ in range(workers)]
    for _ in range(6):
        gradients = [torch.randn(30, dtype=torch.float64) for _ in range(workers)]
        expected = torch.stack([model.update(own) for model, own in zip(models, gradients, strict=True)]).mean(0)
        torch.testing.assert_close(to_dense(bench.step(gradients)[0]), expected, rtol=1e-12, atol=1e-14)


@hypothesis.given(
    workers=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 4),
    rule=st.sampled_from([AdamMomentum(betas) for betas in BETAS]),
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_mass_of_updates_is_conserved(workers: int, seed: int, steps: int, rule: AdamMomentum) -> None:
    """Averages and residuals together are all updates of the workers' Adam; replicas are equal."""
    generator = torch.Generator().manual_seed(seed)
    bench = Bench.build(sparse(rule), workers, 40)
    models = [LocalAdam(tuple(rule.betas), rule.eps, 40) for _ in range(workers)]
    made, applied = torch.zeros(40).double(), torch.zeros(40).double()
    for _ in range(steps):
        gradients = [torch.randn(40, dtype=torch.float64, generator=generator) for _ in range(workers)]
        made += torch.stack([model.update(own) for model, own in zip(models, gradients, strict=True)]).sum(0)
        averages = bench.step(gradients)
        assert all(same_bits(each, averages[0]) for each in averages)
        applied += to_dense(averages[0]) * workers
    torch.testing.assert_close(applied + bench.residuals(), made, rtol=1e-9, atol=1e-9)


def test_nonfinite_gradient_does_not_change_moments() -> None:
    bench = Bench.build(sparse(AdamMomentum()), 2, 10)
    good = torch.ones(10).double()
    bench.step([good * float("nan"), good])
    broken, fine = (state.moments for state in bench.states)
    assert broken.updates == 0 and not broken.variance.any() and not broken.velocity.any()
    assert fine.updates == 1 and bool(fine.variance.all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strength", [1e-30, 1.0, 1e37])
def test_finite_gradients_make_finite_updates(dtype: torch.dtype, strength: float) -> None:
    """Law 6: residuals and moments stay finite, whatever overflows."""
    limit = torch.finfo(dtype)
    bench = Bench.build(sparse(AdamMomentum((0.9, 0.5))), 2, 40, dtype)
    for step in range(8):
        values = (torch.randn(2, 40) * strength).clamp(-limit.max, limit.max).to(dtype) * (step % 3 != 2)
        bench.step(list(values))
        for state in bench.states:
            kept = (state.memory, state.moments.velocity, state.moments.variance)
            assert all(bool(each.isfinite().all()) for each in kept)


def test_small_gradients_in_half_precision() -> None:
    """Roots of squares below what float16 can hold do not divide by zero."""
    bench = Bench.build(exact(AdamMomentum((0.0, 0.5))), 1, 20, torch.float16)
    for strength in (6e-8, 1e-6, 6e-8, 0.0, 6e-8):
        average = to_dense(bench.step([torch.full((20,), strength, dtype=torch.float16)])[0])
        assert float(average.abs().max()) < 3


def test_loss_scale_does_not_enter_the_variance() -> None:
    """The factor of a GradScaler multiplies updates like gradients, but not the variance."""
    plain, scaled = (Bench.build(exact(AdamMomentum()), 1, 20) for _ in range(2))
    for factor in (1024.0, 1024.0, 64.0):
        gradient = torch.randn(20, dtype=torch.float64)
        (state,) = scaled.states
        state.change(factor / state.moments.scale)
        state.moments.scale = factor
        expected, found = plain.step([gradient])[0], scaled.step([gradient * factor])[0]
        torch.testing.assert_close(to_dense(found), to_dense(expected) * factor, rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled.states[0].moments.variance, plain.states[0].moments.variance)


def test_saved_state_continues_bit_identically() -> None:
    first, second = (Bench.build(sparse(AdamMomentum()), 2, 30) for _ in range(2))
    draw = [[torch.randn(30, dtype=torch.float64) for _ in range(2)] for _ in range(6)]
    for gradients in draw[:3]:
        first.step(gradients)
    for old, new in zip(first.states, second.states, strict=True):
        new.load_state_dict(old.state_dict())
    for gradients in draw[3:]:
        assert same_bits(first.step(gradients)[0], second.step(gradients)[0])


@pytest.mark.parametrize(("before", "now"), [(4, 3), (3, 6), (2, 5)])
def test_variance_survives_a_change_of_world_size(before: int, now: int) -> None:
    """A gap in the variance would make huge updates; velocities keep their mean."""
    method = sparse(AdamMomentum())
    old = Bench.build(method, before, 30)
    for _ in range(3):
        old.step([torch.randn(30, dtype=torch.float64) for _ in range(before)])
    new = Bench.build(method, now, 30)
    for rank, state in enumerate(new.states):
        worker = Worker(rank, now)
        state.adopt([old.states[each].state_dict() for each in sources(worker, before)], worker, before)
        assert torch.equal(state.moments.variance, old.states[rank % before].moments.variance)
        assert state.moments.updates == 3
    means = [sum(state.moments.velocity for state in bench.states) / len(bench.states) for bench in (old, new)]
    torch.testing.assert_close(*means, rtol=1e-12, atol=1e-15)


def test_updates_are_compressed_like_gradients() -> None:
    """Top-k selects large updates, not large gradients."""
    parts = topka(0.5)
    bench = Bench.build(Method(parts.compressor, parts.communicator, parts.residual, AdamMomentum((0.0, 0.9))), 1, 2)
    bench.step([torch.tensor([100.0, 0.001]).double()])
    sent = to_dense(bench.step([torch.tensor([50.0, 0.002]).double()])[0])
    assert sent.nonzero().flatten().tolist() == [1]


MEASURED = AdamMomentum((0.0, 0.9), update_scale="measured")


def noisy(workers: int, length: int, noise: float, generator: torch.Generator) -> list[Tensor]:
    """Gradients with a common signal and independent noise."""
    signal = torch.randn(length, dtype=torch.float64, generator=generator)
    return [signal + noise * torch.randn(length, dtype=torch.float64, generator=generator) for _ in range(workers)]


def factors(bench: Bench) -> list[float]:
    return [state.moments.spread.factor for state in bench.states]


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 1.0, 1.0 + 1e-9), (1.0, 1.1, 1.5), (1e6, 1.8, 2.0)])
def test_measured_factor_follows_the_noise(noise: float, low: float, high: float) -> None:
    """1 where workers agree, at most sqrt(P); bit-identical on all workers."""
    generator = torch.Generator().manual_seed(0)
    bench = Bench.build(sparse(MEASURED), 4, 1000)
    assert factors(bench) == [1.0] * 4
    for _ in range(10):
        averages = bench.step(noisy(4, 1000, noise, generator))
        assert all(same_bits(each, averages[0]) for each in averages)
    assert len(set(factors(bench))) == 1
    assert low <= factors(bench)[0] <= high


@pytest.mark.parametrize("density", [None, 0.2])
def test_updates_have_the_factor_of_earlier_steps(density: float | None) -> None:
    """At density 1, an average is the mean of the workers' updates times the factor."""
    generator = torch.Generator().manual_seed(1)
    bench = Bench.build(exact(MEASURED) if density is None else sparse(MEASURED, density), 3, 60)
    models = [LocalAdam((0.0, 0.9), 1e-8, 60) for _ in range(3)]
    made, applied = torch.zeros(60).double(), torch.zeros(60).double()
    for _ in range(12):
        (factor,) = set(factors(bench))
        gradients = noisy(3, 60, 2.0, generator)
        total = factor * sum(model.update(own) for model, own in zip(models, gradients, strict=True))
        average = to_dense(bench.step(gradients)[0])
        if density is None:
            torch.testing.assert_close(average, total / 3, rtol=1e-12, atol=1e-14)
        made, applied = made + total, applied + 3 * average
    assert factor > 1.1
    if density is not None:
        torch.testing.assert_close(applied + bench.residuals(), made, rtol=1e-9, atol=1e-9)


def test_single_worker_measures_nothing() -> None:
    benches = [Bench.build(sparse(rule), 1, 40) for rule in (AdamMomentum((0.0, 0.9)), MEASURED)]
    for _ in range(10):
        gradient = torch.randn(40, dtype=torch.float64)
        assert same_bits(*(bench.step([gradient])[0] for bench in benches))


@pytest.mark.parametrize("workers", [1, 3])
def test_empty_bucket_is_not_measured(workers: int) -> None:
    """All parameters of a bucket may be empty."""
    bench = Bench.build(sparse(MEASURED), workers, 0)
    for _ in range(3):
        bench.step([torch.zeros(0, dtype=torch.float64)] * workers)
    assert factors(bench) == [1.0] * workers
    assert bench.method.cost(Context(Worker(0, 3), bench.states[0].layout, 0)).rounds.high < 10


def test_measurement_has_the_stated_cost() -> None:
    plain, measured = (Bench.build(sparse(rule), 3, 600) for rule in (AdamMomentum((0.0, 0.9)), MEASURED))
    more = []
    for step in range(18):
        gradients = [torch.randn(600, dtype=torch.float64) for _ in range(3)]
        sent = []
        for bench in (plain, measured):
            before = bench.cluster.ledgers[0].rounds
            bench.step(gradients)
            sent.append(bench.cluster.ledgers[0].rounds - before)
        context = Context(Worker(0, 3), measured.states[0].layout, step)
        costs = [bench.method.cost(context).rounds.high for bench in (plain, measured)]
        more.append(sent[1] - sent[0])
        assert more[-1] == costs[1] - costs[0]
    assert [step for step, each in enumerate(more) if each] == [0, 1, 2, 4, 8, 16]


def test_nonfinite_gradient_is_not_measured() -> None:
    bench = Bench.build(sparse(MEASURED), 2, 40)
    good = [torch.randn(40, dtype=torch.float64) for _ in range(2)]
    bench.step(good)
    before = bench.states[0].moments.spread
    bench.step([good[0] * float("nan"), good[1]])
    assert [state.moments.spread for state in bench.states] == [before] * 2
    bench.step(good)
    assert bench.states[0].moments.spread != before


def test_measured_factor_is_saved_and_old_states_load() -> None:
    generator = torch.Generator().manual_seed(2)
    first, second = (Bench.build(sparse(MEASURED), 2, 30) for _ in range(2))
    draw = [noisy(2, 30, 3.0, generator) for _ in range(22)]
    for gradients in draw[:11]:
        first.step(gradients)
    for old, new in zip(first.states, second.states, strict=True):
        new.load_state_dict(old.state_dict())
    assert factors(second) == factors(first) != [1.0] * 2
    for gradients in draw[11:]:
        assert same_bits(first.step(gradients)[0], second.step(gradients)[0])
    for state in second.states:
        without = state.state_dict()
        del without["spread"]
        state.load_state_dict(without)
    assert factors(second) == [1.0] * 2
    assert "spread" not in Bench.build(sparse(AdamMomentum()), 2, 30).states[0].state_dict()


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 6), (3, 1), (1, 3)])
def test_factor_for_another_world_size(before: int, now: int) -> None:
    """For the same signal and noise: own = s + n, common = s + n / P."""
    spread = Spread(3.0, 1.0 + 2.0 / before, before) if before > 1 else Spread()
    old, new = Bench.build(sparse(MEASURED), before, 30), Bench.build(sparse(MEASURED), now, 30)
    for state in old.states:
        state.moments.spread = spread
    for rank, state in enumerate(new.states):
        worker = Worker(rank, now)
        state.adopt([old.states[each].state_dict() for each in sources(worker, before)], worker, before)
    expected = (3.0 / (1.0 + 2.0 / now)) ** 0.5 if before > 1 else 1.0
    assert factors(new) == pytest.approx([expected] * now)


def test_new_buckets_have_the_common_factor() -> None:
    found = Spread.pooled([Spread(4.0, 2.0, 3), Spread(2.0, 1.0, 3)])
    assert (found.own, found.common, found.workers) == (6.0, 3.0, 3)
    assert Spread.pooled([Spread()]).factor == 1.0
