"""Synchronizations that rest at their boundary: nothing changes, and each half costs what its formula says."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.basics.errors import ConfigError
from spardl.clusters import Cluster, SimulatedCluster
from spardl.communicators import AllGather, Backend, Dense, SparDL, TopkDSA
from spardl.compressors import Cast, CountSketch, NoCompression, PowerSGD, RandomK, TopK
from spardl.method.method import Method
from spardl.method.residuals import GlobalResidual, LocalResidual, NoResidual, RescaledResidual
from spardl.method.warmup import Warmup
from spardl.protocol.programs import Worker
from tests.support.harness import NETWORK, context, layout_of, run_workers, same_bits, spardl, to_dense
from tests.support.measuring import undisturbed

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 83
METHODS = {
    "dense": Method(NoCompression(), Dense(), NoResidual()),
    "cast": Method(Cast("fp16"), Dense(), NoResidual()),
    "random_k": Method(RandomK(0.2), Dense(), LocalResidual()),
    "backend": Method(NoCompression(), Backend(halves=True), NoResidual()),
    "spardl": spardl(0.1),
    "spardl_teams": spardl(0.1, teams=2),
    "spardl_recursive": spardl(0.1, teams=2, gather="recursive"),
    "topkdsa": Method(TopK(0.1), TopkDSA(), GlobalResidual()),
    "topkdsa_dense": Method(TopK(0.1), TopkDSA(dense_above=0.0), GlobalResidual()),
    "warmup": Method(TopK(0.1), SparDL(), GlobalResidual(), warmup=Warmup(1)),
}


def gradients(workers: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(workers)
    return [torch.randn(LENGTH, generator=source, dtype=torch.float64) for _ in range(workers)]


def halves(method: Method, cluster: Cluster, all_gradients: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """The averages of two synchronizations in halves, and the residuals after them."""
    workers = cluster.local_workers
    states = [method.init_state(layout_of(LENGTH), torch.float64) for _ in workers]
    found = []
    for _ in range(2):
        for worker, state in zip(workers, states, strict=True):
            method.accumulate(all_gradients[worker.rank], state)
        flight = cluster.enqueue([method.average(*pair) for pair in zip(workers, states, strict=True)], pauses=True)
        for local in range(len(workers)):
            flight.release(local)
        shards = [
            method.shard(flight.boundary(local), worker, states[local]).clone() for local, worker in enumerate(workers)
        ]
        rounds = [ledger.rounds for ledger in cluster.ledgers]
        flight.resume()
        averages = [flight.wait(local) for local in range(len(workers))]
        found.append(
            ([average.clone() if isinstance(average, Tensor) else average for average in averages], shards, rounds)
        )
    return found, [state.memory for state in states]


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
@pytest.mark.parametrize("name", METHODS)
def test_a_rest_changes_nothing(name: str, workers: int) -> None:
    method = METHODS[name]
    if name.startswith("spardl_") and workers % 2:
        pytest.skip("two teams need an even number of workers")
    inputs = gradients(workers)
    cluster = SimulatedCluster(workers, NETWORK, count_local=False)
    straight = SimulatedCluster(workers, NETWORK, count_local=False)
    found, memories = halves(method, cluster, inputs)
    states = [method.init_state(layout_of(LENGTH), torch.float64) for _ in range(workers)]
    for averages, shards, _ in found:
        for gradient, state in zip(inputs, states, strict=True):
            method.accumulate(gradient, state)
        expected = straight.run([method.average(*pair) for pair in zip(straight.local_workers, states, strict=True)])
        assert all(same_bits(average, expected[0]) for average in averages)
        # Together the shards are the average, each entry once.
        entries = torch.cat(shards)
        dense = to_dense(expected[0])
        assert torch.equal(entries[entries != 0].sort().values, dense[dense != 0].sort().values)
    assert all(torch.equal(memory, state.memory) for memory, state in zip(memories, states, strict=True))


@pytest.mark.parametrize("workers", [2, 4, 6])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "warmup"])
def test_each_half_costs_what_its_formula_says(name: str, workers: int) -> None:
    method = METHODS[name]
    cluster = SimulatedCluster(workers, NETWORK, count_local=False)
    states = [method.init_state(layout_of(LENGTH), torch.float64) for _ in range(workers)]
    for gradient, state in zip(gradients(workers), states, strict=True):
        method.accumulate(gradient, state)
    flight = cluster.enqueue(
        [method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)], pauses=True
    )
    first, second = method.half_costs(context(LENGTH, Worker(0, workers)))
    for rank in range(workers):
        flight.release(rank)
    for rank, ledger in enumerate(cluster.ledgers):
        flight.boundary(rank)
        assert ledger.rounds in first.rounds
        assert ledger.words in first.words
    before = [(ledger.rounds, ledger.words) for ledger in cluster.ledgers]
    flight.resume()
    for rank, ledger in enumerate(cluster.ledgers):
        flight.wait(rank)
        assert ledger.rounds - before[rank][0] in second.rounds
        assert ledger.words - before[rank][1] in second.words


@pytest.mark.parametrize("name", ["dense", "spardl_teams", "topkdsa", "random_k"])
def test_real_workers_find_the_same(name: str) -> None:
    method, inputs = METHODS[name], gradients(4)
    expected, memories = halves(method, SimulatedCluster(4, NETWORK), inputs)
    for rank, (found, (memory,)) in enumerate(run_workers(4, partial(halves, method, all_gradients=inputs))):
        assert torch.equal(memory, memories[rank])
        for (averages, (shard,), rounds), (all_averages, shards, all_rounds) in zip(found, expected, strict=True):
            assert same_bits(averages[0], all_averages[rank])
            assert torch.equal(shard, shards[rank])
            assert rounds == [all_rounds[rank]]


@pytest.mark.parametrize("length", [1, 8, 11])
def test_the_backends_halves(length: int) -> None:
    """gloo's own collectives, also where P does not divide the length."""

    def work(cluster: Cluster) -> Tensor:
        method = METHODS["backend"]
        (worker,) = cluster.local_workers
        state = method.init_state(layout_of(length), torch.float64)
        method.accumulate(torch.full((length,), float(worker.rank)).double(), state)
        (average,) = cluster.run([method.average(worker, state)])
        return average

    for average in run_workers(3, work):
        assert average.tolist() == [1.0] * length


@pytest.mark.parametrize(
    "method",
    [Method(TopK(0.1), AllGather(), LocalResidual()), Method(NoCompression(), Backend(), NoResidual())],
    ids=["topka", "backend"],
)
def test_what_has_no_halves_says_what_has(method: Method) -> None:
    with pytest.raises(
        ConfigError, match=r"use communicator=allreduce_codes or dense or spardl or topkdsa with any.* except"
    ) as error:
        method.half_costs(context(LENGTH))
    assert "count_sketch" in str(error.value)
    assert "powersgd" in str(error.value)


@pytest.mark.parametrize(("compressor", "name"), [(PowerSGD(1), "powersgd"), (CountSketch(0.1), "count_sketch")])
def test_several_sums_have_no_halves(compressor: Any, name: str) -> None:
    """Another communicator would not help, so the error does not name one."""
    with pytest.raises(ConfigError, match=f"^compressor={name} runs several sums in sequence.*use another compressor"):
        Method(compressor, Dense(), LocalResidual()).half_costs(context(LENGTH))


def test_a_warm_up_without_halves() -> None:
    method = Method(TopK(0.1), SparDL(), GlobalResidual(), warmup=Warmup(1, Backend()))
    with pytest.raises(
        ConfigError, match=r"warmup\.communicator=backend cannot be split.*use warmup\.communicator=dense"
    ):
        method.check_split()


def test_sums_that_change_after_the_boundary() -> None:
    method = Method(RandomK(0.1), Dense(), RescaledResidual())
    method.check_split()
    with pytest.raises(ConfigError, match=r"use training\.clip_norm=null, or another schedule"):
        method.check_shards()


# Prints the bytes that the interface sent in each half of a dense all-reduce, over those of its entries.
ON_THE_WIRE = """
import sys, torch
import torch.distributed as dist
from spardl import Dense, Method, NoCompression, NoResidual, ProcessGroupCluster
from spardl.vector.layout import Layout

def sent():
    dist.barrier()
    return int(open("/sys/class/net/eth0/statistics/tx_bytes").read())

torch.set_num_threads(1)
dist.init_process_group("gloo")
cluster, method, length = ProcessGroupCluster(), Method(NoCompression(), Dense(), NoResidual()), 3 << 20
(worker,) = cluster.local_workers
state = method.init_state(Layout.flat(length), torch.float32)
flight = cluster.enqueue([method.average(worker, state)], pauses=True)
marks = [sent()]
flight.release(0)
flight.boundary(0)
marks.append(sent())
flight.resume()
flight.wait(0)
marks.append(sent())
ideal = 4 * length * (worker.size - 1) / worker.size
print(*((after - before) / ideal for before, after in zip(marks, marks[1:])))
"""


@pytest.mark.netlab
def test_each_half_sends_its_share_over_the_wire() -> None:
    """n(P-1)/P entries in each half, by the interface's counters; gloo's own reduce-scatter would send twice that."""
    lab = [sys.executable, "scripts/netlab.py", "run", "--workers", "3", "--gbit", "1", "--"]
    command = [*lab, sys.executable, "-c", ON_THE_WIRE]

    def shares() -> list[float]:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
        found = [*map(float, done.stdout.split())]
        assert min(found) >= 1
        return found

    undisturbed(shares, lambda found: max(found) < 1.06)
