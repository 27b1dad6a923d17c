"""All-gather of codes, with simple compressors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.communicators import AllGatherCodes, AllGatherDense
from spardl.compressors import CodeCompressor, Mass, NoCompression
from spardl.method.method import Method
from spardl.method.residuals import LocalResidual, NoResidual
from spardl.protocol.programs import Context, State
from tests.support.harness import Bench, context


@dataclass(frozen=True)
class Whole(CodeCompressor):
    """Sends integers from -128 to 127, one byte each."""

    decoded: list[int] = field(default_factory=list)

    name = "whole"
    mass = Mass.LEFT

    def size(self, context: Context, dtype: torch.dtype = torch.float32) -> int:
        return context.layout.length

    def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
        return vector.trunc().to(torch.int8).view(torch.uint8)

    def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        self.decoded.append(context.worker.rank)
        return message.clone().view(torch.int8).to(dtype)


def bench(workers: int, length: int, dtype: torch.dtype = torch.float64) -> Bench:
    return Bench.build(Method(Whole(), AllGatherCodes(), LocalResidual()), workers, length, dtype)


def test_compression_error_stays() -> None:
    found = bench(2, 3)
    gradients = [torch.tensor([1.5, -2.25, 0.0]), torch.tensor([0.75, 4.0, -0.5])]
    assert found.step([gradient.double() for gradient in gradients])[0].tolist() == [0.5, 1.0, 0.0]
    assert [state.memory.tolist() for state in found.states] == [[0.5, -0.25, 0.0], [0.75, 0.0, -0.5]]
    zeros = [torch.zeros(3, dtype=torch.float64)] * 2
    assert found.step(zeros)[0].tolist() == [0.0, 0.0, 0.0]
    assert found.step([zeros[0], torch.full((3,), 0.25, dtype=torch.float64)])[0].tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [0, 1, 17])
def test_equals_a_loop_over_the_ranks(workers: int, length: int) -> None:
    source = np.random.default_rng(workers)
    found = bench(workers, length)
    memory = np.zeros((workers, length))
    for _ in range(4):
        gradients = 20 * source.standard_normal((workers, length))
        memory += gradients
        sent = np.trunc(memory)
        memory -= sent
        averages = found.step([torch.from_numpy(gradient) for gradient in gradients])
        assert all(np.array_equal(average.numpy(), sent.sum(0) / workers) for average in averages)
        assert all(np.array_equal(state.memory.numpy(), row) for state, row in zip(found.states, memory, strict=True))


def test_every_worker_decodes_each_message_once() -> None:
    found = bench(5, 4)
    found.step([torch.ones(4, dtype=torch.float64)] * 5)
    compressor = found.method.compressor
    assert isinstance(compressor, Whole)
    assert sorted(compressor.decoded) == [rank for rank in range(5) for _ in range(5)]


def test_adds_up_by_rank() -> None:
    """Only one order of additions gives this float32 result."""

    class Powers(Whole):
        """The exponent of 2."""

        def encode(self, vector: Tensor, context: Context, state: State) -> Tensor:
            return vector.sign().mul_(vector.abs().log2()).to(torch.int8).view(torch.uint8)

        def decode(self, message: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
            exponents = super().decode(message, context, dtype)
            return exponents.sign() * exponents.abs().exp2()

    method = Method(Powers(), AllGatherCodes(), NoResidual())
    gradients = [torch.full((1,), value) for value in (2.0**60, -(2.0**60), 2.0, 2.0**50, -(2.0**50))]
    for average in Bench.build(method, 5, 1, torch.float32).step(gradients):
        assert average.tolist() == [0.0]
    gradients = [gradients[place] for place in (0, 1, 3, 4, 2)]
    for average in Bench.build(method, 5, 1, torch.float32).step(gradients):
        assert average.tolist() == pytest.approx([0.4])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 16])
def test_cost(workers: int) -> None:
    """A message of 10 bytes takes 3 words of 32 bits."""
    found = bench(workers, 10)
    found.step([torch.ones(10, dtype=torch.float64)] * workers)
    for ledger in found.cluster.ledgers:
        assert ledger.rounds == ledger.messages == math.ceil(math.log2(workers))
        assert ledger.words == 3 * (workers - 1)
        assert ledger.bytes_sent == ledger.bytes_received == 10 * (workers - 1)
    for rank in range(workers):
        cost = found.method.cost(context(10, found.cluster.local_workers[rank]))
        assert cost.rounds.low == cost.rounds.high == math.ceil(math.log2(workers))
        assert cost.words.low == cost.words.high == 3 * (workers - 1)


def test_dense_compressors_are_refused() -> None:
    with pytest.raises(ConfigError, match="use communicator=allgather_codes"):
        Method(Whole(), AllGatherDense(), NoResidual())
    with pytest.raises(ConfigError, match="allgather_codes cannot sum dense tensors"):
        Method(NoCompression(), AllGatherCodes(), NoResidual())
