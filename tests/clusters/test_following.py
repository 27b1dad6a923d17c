"""Every message has its line: the same ones over gloo and simulated, and the bytes of all are the ledger's."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import Cluster, Network, SimulatedCluster, gather_rows
from spardl.clusters.ledger import LOGGER, VARIABLE, message_logging
from spardl.communicators import Backend
from spardl.compressors import NoCompression
from spardl.method import NoResidual
from spardl.method.method import Method
from tests.support.harness import NETWORK, layout_of, run_workers

LENGTH = 83
LINE = re.compile(r"step=(\d+) round=(\d+) from=(\d+) to=(\d+|all) words=(\d+) bytes=(\d+)")
METHODS = (
    spardl.make_method("spardl", density=0.1, dense_steps=1),
    spardl.make_method("oktopk", density=0.1),
    spardl.make_method("gtopk", density=0.1, wire="bfloat16"),
    spardl.make_method("qsgd"),
    spardl.Method(NoCompression(), Backend(), NoResidual()),
)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the logger says meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    try:
        yield lines
    finally:
        LOGGER.removeHandler(handler)


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "1")
    yield
    LOGGER.setLevel(logging.NOTSET)


def synchronize(cluster: Cluster, method: Method) -> None:
    """Two steps: one immediate, and one that overlaps the computation, with a rest where the method allows one."""
    states = [method.init_state(layout_of(LENGTH), torch.float32) for _ in cluster.local_ranks]
    for step in range(2):
        for rank, state in zip(cluster.local_ranks, states, strict=True):
            method.accumulate(torch.randn(LENGTH, generator=torch.Generator().manual_seed(10 * step + rank)), state)
        programs = [method.average(*pair) for pair in zip(cluster.local_workers, states, strict=True)]
        if not step:
            cluster.run(programs)
            continue
        flight = cluster.enqueue(programs, pauses=method.communicator.splits)
        for local in range(len(states)):
            flight.release(local)
        if method.communicator.splits:
            for local in range(len(states)):
                flight.boundary(local)
            flight.resume()
        for local in range(len(states)):
            flight.wait(local)


def lines_and_ledgers(cluster: Cluster) -> list[tuple[list[str], int, int]]:
    """For each method its lines, and the words and bytes that all local ranks sent."""
    found = []
    for method in METHODS:
        before = [(ledger.words, ledger.bytes_sent) for ledger in cluster.ledgers]
        with heard() as lines:
            synchronize(cluster, method)
            gather_rows(cluster, [torch.zeros(3)] * len(cluster.local_ranks))  # housekeeping
            gather_rows(cluster, [torch.zeros(3)] * len(cluster.local_ranks), counted=True)
        after = [(ledger.words, ledger.bytes_sent) for ledger in cluster.ledgers]
        sums = [sum(new[i] - old[i] for new, old in zip(after, before, strict=True)) for i in (0, 1)]
        found.append((lines, *sums))
    return found


def figures(line: str) -> Any:
    found = LINE.fullmatch(line)
    assert found, line
    return found.groups()


def test_both_clusters_log_the_messages_of_the_ledger(following: None) -> None:
    workers = 3
    real = run_workers(workers, lines_and_ledgers)
    simulated = lines_and_ledgers(SimulatedCluster(workers, NETWORK))
    for number, (lines, words, nbytes) in enumerate(simulated):
        parts = [rank[number] for rank in real]
        assert sorted(line for part, _, _ in parts for line in part) == sorted(lines)
        for logged, in_ledger, size in (*parts, (lines, words, nbytes)):
            assert (sum(int(figures(line)[4]) for line in logged), sum(int(figures(line)[5]) for line in logged)) == (
                in_ledger,
                size,
            )
        assert {figures(line)[0] for line in lines} == {"0", "1", "2"}


def test_lines_in_order(following: None) -> None:
    """Of a method by hand: two rounds of SparDL among three workers in each of its stages."""
    cluster = SimulatedCluster(3, NETWORK)
    with heard() as lines:
        synchronize(cluster, spardl.make_method("spardl", density=0.1))
    mine = [figures(line)[:4] for line in lines if figures(line)[2] == "0"]
    one = [("1", "1", "0", "2"), ("1", "2", "0", "1"), ("1", "3", "0", "2"), ("1", "4", "0", "1")]
    assert mine == [*one, *(("2", *each[1:]) for each in one)]


def test_messages_are_not_logged_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Any] = [object()]
    for value in ("", "0"):
        monkeypatch.setenv(VARIABLE, value)
        assert message_logging()(programs, []) is programs
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ConfigError, match=r"^SPARDL_DEBUG must be 0 or 1, got 'yes'$"):
        SimulatedCluster(2, Network(alpha=0, gbit=1))


def test_configured_logger_enables_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with heard() as lines:
        synchronize(SimulatedCluster(2, NETWORK), METHODS[0])
        assert not lines
        LOGGER.setLevel(logging.DEBUG)
        try:
            synchronize(SimulatedCluster(2, NETWORK), METHODS[0])
        finally:
            LOGGER.setLevel(logging.NOTSET)
    assert len(lines) > 4


SCRIPT = """
import torch, spardl
from spardl.vector.layout import Layout
method = spardl.make_method("spardl", density=0.01)
cluster = spardl.clusters.SimulatedCluster(4, spardl.clusters.Network(alpha=1e-4, gbit=1))
states = [method.init_state(Layout.flat(1000), torch.float32) for _ in cluster.local_ranks]
for state in states:
    method.accumulate(torch.randn(1000), state)
cluster.run([method.average(*pair) for pair in zip(cluster.local_workers, states)])
print(sum(ledger.bytes_sent for ledger in cluster.ledgers))
"""


@pytest.mark.slow
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_variable_prints_lines(value: str) -> None:
    """On standard error, and nothing else there."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env={**os.environ, VARIABLE: value}, capture_output=True, text=True, timeout=240, check=True
    )
    logged = [figures(line) for line in done.stderr.splitlines()]
    assert len(logged) == (16 if value == "1" else 0)
    assert sum(int(each[5]) for each in logged) == (int(done.stdout) if value == "1" else 0)
