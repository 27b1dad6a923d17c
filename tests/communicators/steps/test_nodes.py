"""Nodes of several workers: the method sees one worker per node, and the link of a node carries each message once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import SimulatedCluster
from spardl.communicators.steps.nodes import Nodes
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import AllReduce, Program, Worker
from spardl.vector.layout import Layout
from spardl.vector.sparse import Sum
from tests.support.harness import NETWORK, Bench, same_bits

LAYOUT = Layout.of([(9, 8), (7,), (20, 6)])
METHODS: dict[str, dict[str, Any]] = {
    "spardl": {"density": 0.1},
    "gtopk": {"density": 0.1},
    "topka": {"density": 0.1},
    "oktopk": {"density": 0.1, "dense_steps": 1},
    "powersgd": {"rank": 2},
    "int8": {},
    "none": {},
}


def test_collectives_of_all_workers_are_refused() -> None:
    """They would sum over all workers what only one worker of each node should contribute."""

    def total() -> Program[None]:
        yield AllReduce(torch.ones(3))

    with pytest.raises(ConfigError, match="does not support a communicator that yields AllReduce"):
        next(Nodes(2).between(Worker(0, 4), total(), torch.device("cpu")))


def test_means_inside_a_node_do_not_overflow_in_half_precision() -> None:
    cluster = SimulatedCluster(2, NETWORK, count_local=False)
    gradients = [torch.full((3,), 40_000.0, dtype=torch.float16) for _ in cluster.local_ranks]
    cluster.run([Nodes(2).mean_inside(*each) for each in zip(cluster.local_workers, gradients, strict=True)])
    assert all(torch.equal(each, torch.full((3,), 40_000.0, dtype=torch.float16)) for each in gradients)


def in_nodes(nodes: Nodes, method: Method, worker: Worker, gradient: torch.Tensor, state: MethodState) -> Program[Sum]:
    yield from nodes.mean_inside(worker, gradient)
    method.accumulate(gradient, state)
    average = method.average(nodes.node_of(worker), state)
    return (yield from nodes.between(worker, average, torch.device("cpu")))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)], ids=str)
def test_a_node_is_one_worker_of_the_method(name: str, shape: tuple[int, int]) -> None:
    count, local = shape
    method, nodes = spardl.make_method(name, **METHODS[name]), Nodes(local)
    cluster = SimulatedCluster(count * local, NETWORK, count_local=False)
    states = [method.init_state(LAYOUT, torch.float64) for _ in cluster.local_ranks]
    plain = Bench(
        method,
        SimulatedCluster(count, NETWORK, count_local=False),
        [method.init_state(LAYOUT, torch.float64) for _ in range(count)],
    )
    for step in range(4):
        source = torch.Generator().manual_seed(step)
        gradients = torch.randn(count, local, LAYOUT.length, generator=source, dtype=torch.float64)
        means = [sum(own[1:], own[0].clone()).div_(local) for own in gradients]
        wanted = plain.step(means)
        workers = zip(cluster.local_workers, gradients.clone().flatten(0, 1), states, strict=True)
        found = cluster.run([in_nodes(nodes, method, *each) for each in workers])
        assert all(same_bits(each, wanted[0]) for each in found)
    for rank, state in enumerate(states):
        assert torch.equal(state.memory, plain.states[rank // local].memory)
    for node, ledger in enumerate(plain.cluster.ledgers):
        own = cluster.ledgers[node * local : (node + 1) * local]
        assert sum(each.bytes_sent for each in own) == ledger.bytes_sent
        assert sum(each.words for each in own) == ledger.words
        assert {each.rounds for each in own} == {ledger.rounds}
        assert max(each.bytes_sent for each in own) <= ledger.bytes_sent / local + 8 * ledger.messages
