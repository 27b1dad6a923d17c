"""Selection by a normal fit: its threshold, its corrections, and what no distribution fits."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather
from spardl.compressors import GaussianK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual
from spardl.protocol.programs import State
from tests.support.harness import Bench, context, selected, to_dense


def choose(compressor: GaussianK, values: Tensor, k: int) -> Tensor:
    return compressor.choose(values, k, 0, context(values.numel()), State())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("density", 0),
        ("corrections", -1),
        ("corrections", 1.5),
        ("factor", 0),
        ("factor", 1),
        ("factor", "a"),
        ("low", -0.1),
        ("low", 1.1),
        ("high", 0.9),
        ("high", math.inf),
        ("high", None),
    ],
)
def test_values_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"compressor.{field} must be"):
        GaussianK(**{field: value})


def reference(values: np.ndarray, k: int, compressor: GaussianK) -> list[int]:
    """The published loop, threshold by threshold; only for values that some threshold fits."""
    z = NormalDist().inv_cdf(1 - k / len(values) / 2)
    threshold = abs(values.mean()) + z * values.std()
    for _ in range(compressor.corrections):
        count = int((abs(values) > threshold).sum())
        if count < compressor.low * k:
            threshold *= 1 - compressor.factor
        elif count > compressor.high * k:
            threshold *= 1 + compressor.factor
        else:
            break
    return np.flatnonzero(abs(values) > threshold).tolist()


@pytest.mark.parametrize("shape", ["normal", "laplace", "uniform", "shifted"])
@pytest.mark.parametrize("density", [0.3, 0.05, 0.01])
def test_equals_the_reference(shape: str, density: float) -> None:
    source = np.random.default_rng(5)
    draw = {
        "normal": lambda: source.normal(size=5000),
        "laplace": lambda: source.laplace(size=5000),
        "uniform": lambda: source.uniform(-1, 1, size=5000),
        "shifted": lambda: source.normal(-2, 1, size=5000),
    }[shape]
    compressor, k = GaussianK(density), round(5000 * density)
    for _ in range(3):
        values = draw()
        expected = reference(values, k, compressor)
        assert choose(compressor, torch.from_numpy(values), k).tolist() == (
            expected or np.sort(np.argsort(-abs(values))[:k]).tolist()
        )


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_of_normal_values_it_keeps_about_k(density: float) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    k = round(density * 100_000)
    assert 0.75 * k <= len(choose(GaussianK(density), values, k)) <= 1.25 * k
    # Uncorrected, the fit alone is good for normal values.
    assert 0.6 * k <= len(choose(GaussianK(density, corrections=0), values, k)) <= 1.4 * k


def test_corrections_go_both_ways() -> None:
    """Of values with heavy tails fewer than the fit expects exceed a low threshold, and more a high one."""
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(2)) ** 3
    for k, too_many in ((4000, False), (200, True)):
        fit, corrected = (len(choose(GaussianK(corrections=tries), values, k)) for tries in (0, 40))
        assert (fit > 1.25 * k) if too_many else (fit < 0.75 * k)
        assert 0.75 * k <= corrected <= 1.25 * k


@pytest.mark.parametrize("corrections", [20, 80])
def test_of_heavy_tails_it_keeps_several_k(corrections: int) -> None:
    """As its docstring says: of Student's t with three degrees of freedom, unless there are more corrections."""
    source = torch.Generator().manual_seed(1)
    normal, *others = torch.randn(4, 300_000, generator=source, dtype=torch.float64)
    values = normal / (torch.stack(others).square().mean(0)).sqrt()
    share = len(choose(GaussianK(0.001, corrections=corrections), values, 300)) / 300
    assert 3 < share < 3.6 if corrections == 20 else 0.75 <= share <= 1.25


@pytest.mark.parametrize("tries", range(4))
@pytest.mark.parametrize("k", [4000, 200])
def test_corrections_are_bounded(k: int, tries: int) -> None:
    """A few steps are not enough here; the result is what they reach."""
    values = np.random.default_rng(2).normal(size=20_000) ** 3
    compressor = GaussianK(corrections=tries)
    expected = reference(values, k, compressor)
    assert not 0.75 * k <= len(expected) <= 1.25 * k
    assert choose(compressor, torch.from_numpy(values), k).tolist() == expected


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(50),
        torch.full((50,), 3.0),
        torch.full((50,), -3.0),
        torch.tensor([2.0, -2.0]).repeat(25),
        torch.full((50,), torch.finfo(torch.float32).max),
        torch.full((50,), torch.finfo(torch.float32).tiny / 1024),
        torch.cat((torch.zeros(49), torch.ones(1))),
        torch.cat((torch.zeros(49), torch.full((1,), 1e30))),
    ],
    ids=["zeros", "constant", "negative", "two", "huge", "tiny", "one", "one huge"],
)
@pytest.mark.parametrize("k", [1, 5])
def test_values_that_no_normal_fits(values: Tensor, k: int) -> None:
    """Something is sent, the largest among it, and not everything."""
    positions = choose(GaussianK(), values, k)
    assert 1 <= len(positions) <= k
    assert positions.tolist() == sorted(set(positions.tolist()))
    assert values.abs().argmax() in positions or values.abs().min() == values.abs().max()


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-3, -40.0]), min_size=1, max_size=40), st.data())
def test_any_values(numbers: list[float], data: st.DataObject) -> None:
    values, k = torch.tensor(numbers, dtype=torch.float64), data.draw(st.integers(1, len(numbers)))
    positions = choose(GaussianK(), values, k)
    assert positions.tolist() == sorted(set(positions.tolist()))
    assert len(positions) >= 1
    # No unsent entry is larger than a sent one.
    left = torch.ones(len(numbers), dtype=torch.bool)
    left[positions] = False
    assert not left.any() or values[left].abs().max() <= values[positions].abs().min()
    # Signs do not matter.
    assert torch.equal(choose(GaussianK(), -values, k), positions)


def test_the_nearer_of_two_thresholds() -> None:
    """Between 9 entries and 1 lies no threshold: with k = 2 the 1 is nearer, with k = 7 the 9."""
    values = torch.cat((torch.full((9,), 1.0), torch.tensor([5.0]), torch.zeros(90))).double()
    compressor = GaussianK(corrections=100)
    assert choose(compressor, values, 2).tolist() == [9]
    assert choose(compressor, values, 7).tolist() == list(range(10))


def test_density_one_is_everything() -> None:
    values = torch.tensor([0.0, 1.0, -5.0])
    assert choose(GaussianK(1.0), values, 3).tolist() == [0, 1, 2]


def test_of_each_layer_its_own() -> None:
    """A layer with small entries is not passed over."""
    values = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    values[:32] *= 1e-6
    compressor = GaussianK(0.1, scope="layer")
    positions = selected(compressor, values, compressor.count(context(64)))
    assert any(position < 32 for position in positions)
    assert any(position >= 32 for position in positions)


def test_conserves_mass_and_gathers_counts() -> None:
    method = Method(GaussianK(0.1), AllGather(), GlobalResidual())
    bench = Bench.build(method, 3, 200)
    source = torch.Generator().manual_seed(4)
    for step in range(3):
        gradients = [torch.randn(200, generator=source, dtype=torch.float64) for _ in range(3)]
        before = bench.residuals() + torch.stack(gradients).sum(0)
        average = bench.step(gradients)[0]
        torch.testing.assert_close(bench.residuals() + 3 * to_dense(average), before)
        assert bench.cluster.ledgers[0].rounds == 4 * (step + 1)
