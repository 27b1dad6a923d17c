"""Compatibility of parts, and error messages that name compatible ones."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGather, AllGatherCodes, Dense
from spardl.compressors import QSGD, NoCompression, TopK
from spardl.method import registry
from spardl.method.method import Method
from spardl.method.momentum import LocalMomentum, Momentum, OptimizerMomentum
from spardl.method.registry import incompatibility
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual, Residual
from spardl.vector.layout import Layout
from spardl.vector.wire import Wire
from tests.support.harness import Bench, same_bits, spardl

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = list(
    itertools.product(
        registry.compressors().values(), registry.communicators().values(), registry.residual_rules().values()
    )
)


def test_registry_finds_every_part() -> None:
    assert {"none", "topk"} <= set(registry.compressors())
    assert {"dense", "backend", "allgather", "spardl"} <= set(registry.communicators())
    for group, parts in {
        "compressor": registry.compressors(),
        "communicator": registry.communicators(),
        "residual": registry.residual_rules(),
        "momentum": registry.momentum_rules(),
    }.items():
        assert set(parts) <= {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


@pytest.mark.parametrize(("compressor", "communicator", "residual"), PRODUCT)
def test_combinations_run_or_are_refused(compressor, communicator, residual) -> None:
    reason = incompatibility(compressor, communicator, residual)
    if reason is None:
        method = Method(compressor(), communicator(), residual())
        bench = Bench.build(method, 4, 50)
        averages = bench.step([torch.randn(50, dtype=torch.float64) for _ in range(4)])
        assert len(averages) == 4
        return
    with pytest.raises(ConfigError, match=re.escape(reason)):
        Method(compressor(), communicator(), residual())
    assert "\n" not in reason
    for offer in re.findall(r"communicator=(\w+)(?: or (\w+))*, or with", reason):
        for name in filter(None, offer):
            assert compressor.output in registry.communicators()[name].sums


def test_messages_name_compatible_parts() -> None:
    with pytest.raises(ConfigError, match=r"use communicator=allgather or gtopk or .*spardl.*compressor=.* or none"):
        Method(TopK(0.1), Dense(), LocalResidual())
    with pytest.raises(ConfigError, match=r"communicator=allgather_dense or backend or dense.*compressor=.* or topk"):
        Method(NoCompression(), AllGather(), NoResidual())
    with pytest.raises(ConfigError, match="use residual=none"):
        Method(NoCompression(), Dense(), GlobalResidual())


@pytest.mark.parametrize("bad", [None, torch.nan])
@pytest.mark.parametrize("momentum", [OptimizerMomentum(), LocalMomentum(0.5)])
@pytest.mark.parametrize("residual", [GlobalResidual(), LocalResidual(), NoResidual()])
def test_gradient_is_cleared_only_on_request(residual: Residual, momentum: Momentum, bad: float | None) -> None:
    """Also a skipped one; residual and moments do not depend on it."""
    method = Method(TopK(0.1), AllGather(), residual, momentum)
    states = [method.init_state(Layout.flat(40), torch.float32) for _ in range(2)]
    for step in range(3):
        gradient = torch.randn(40)
        if bad is not None and step == 1:
            gradient[3] = bad
        kept, cleared = gradient.clone(), gradient.clone()
        method.accumulate(kept, states[0])
        method.accumulate(cleared, states[1], clear=True)
        assert same_bits(kept, gradient)
        assert same_bits(cleared, torch.zeros(40))
        assert same_bits(states[0].memory, states[1].memory)
        assert same_bits(states[0].moments.velocity, states[1].moments.velocity)
    assert states[0].refused == states[1].refused == (bad is not None)


@pytest.mark.parametrize(
    "method", [Method(NoCompression(), Dense(), NoResidual()), Method(QSGD(), AllGatherCodes(), NoResidual())]
)
def test_wire_needs_a_sparse_compressor(method: Method) -> None:
    output, name = method.compressor.output.value, method.compressor.name
    for wire in ("bfloat16", "float16", "float32"):
        with pytest.raises(ConfigError) as caught:
            replace(method, wire=Wire(wire))
        assert str(caught.value) == (
            f"wire.values={wire} needs a sparse compressor, but compressor={name} sends {output}; use wire.values=exact"
        )
    assert replace(method, wire=Wire("exact")) == method
    assert Method(TopK(0.1), AllGather(), LocalResidual(), wire=Wire("bfloat16")).wire == Wire("bfloat16")


def test_average_divides_the_sum() -> None:
    gradients = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 7.0])]
    for method in (spardl(1.0), Method(NoCompression(), Dense(), NoResidual())):
        average = Bench.build(method, 2, 2, torch.float32).step(gradients)[0]
        found = average if isinstance(average, torch.Tensor) else average.dense()
        assert found.tolist() == [2.0, 6.0]
