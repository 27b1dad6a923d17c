"""Communication in flight during the computation: order, clocks, waiting, failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spardl.basics.errors import ConfigError, PeerError, ProgramError, WorkerError
from spardl.clusters import Cluster, Network, ProcessGroupCluster, SimulatedCluster
from spardl.clusters.ledger import PhaseStack
from spardl.clusters.process_group import Background
from spardl.clusters.profile import LayerTimes, Profile
from spardl.protocol.programs import Boundary, Exchange, Phase, Program, Receive, Send, Worker
from tests.support.harness import run_workers

# A message of 125 bytes takes 1 s.
NETWORK = Network(alpha=0.0, gbit=1e-6)


def swap(worker: Worker, value: float, seconds: int = 1, boundary: bool = False) -> Program[float]:
    """Two workers swap a value, in a message that takes so many seconds, once or twice."""
    other = 1 - worker.rank
    for _ in range(2 if boundary else 1):
        payload = torch.zeros(125 * seconds, dtype=torch.uint8)
        payload[0] = int(value)
        arrived = yield Exchange([Send(other, payload, 1)], [Receive(other, 125 * seconds, torch.uint8)])
        value = float(arrived[0][0])
        if boundary:
            yield Boundary(arrived[0])
    return value


def cluster(profile: Profile | None = None) -> SimulatedCluster:
    return SimulatedCluster(2, NETWORK, count_local=False, profile=profile)


def test_stream_runs_released_programs() -> None:
    pair = cluster()
    first, second = (pair.enqueue([swap(worker, value) for worker in pair.local_workers]) for value in (3, 4))
    for local in range(2):
        first.release(local)
        second.release(local)
    assert [second.wait(local) for local in range(2)] == [4, 4]
    assert pair.seconds() == 2
    assert [first.wait(local) for local in range(2)] == [3, 3]
    assert pair.seconds() == 2
    assert [ledger.seconds[Phase.WAIT] for ledger in pair.ledgers] == [2, 2]
    assert [ledger.rounds for ledger in pair.ledgers] == [2, 2]


def test_synchronization_starts_at_the_last_release() -> None:
    pair = cluster(Profile("m", "d", 1, (LayerTimes("a", 1, 0.0, 4.0),), forward=1.0, backward=4.0, update=0.0))
    flight = pair.enqueue([swap(worker, 1) for worker in pair.local_workers])
    flight.release(0)
    with pair.computing(1):
        pair.reach(1, [0], backward=True)
        assert pair.now(1) == 5
        flight.release(1)
    flight.wait(0)
    assert (pair.now(0), pair.now(1)) == (6, 5)
    flight.wait(1)
    assert pair.now(1) == 6


def test_half_now_half_later() -> None:
    pair = cluster()
    flight = pair.enqueue([swap(worker, worker.rank, boundary=True) for worker in pair.local_workers], pauses=True)
    for local in range(2):
        flight.release(local)
    assert [int(flight.boundary(local).shard[0]) for local in range(2)] == [1, 0]
    assert pair.seconds() == 1
    with pair.timed(Phase.COMPUTE, [0]):
        pass
    flight.resume()
    assert [flight.wait(local) for local in range(2)] == [0, 1]
    assert pair.seconds() == 2


def test_a_result_that_was_never_released() -> None:
    pair = cluster()
    flight = pair.enqueue([swap(worker, 1) for worker in pair.local_workers])
    flight.release(0)
    with pytest.raises(ProgramError, match="rank 1 has not released its program"):
        flight.wait(0)


def test_profile_replaces_measured_seconds() -> None:
    layers = (LayerTimes("a", 2, 0.0, 8.0), LayerTimes("b", 3, 2.0, 5.0))
    pair = cluster(Profile("m", "d", 1, layers, forward=4.0, backward=8.0, update=0.0))
    pair.expect([2, 3])
    with pair.computing(0):
        pair.reach(0, [1], backward=False)
        assert pair.now(0) == 2
        pair.reach(0, [0, 1], backward=False)  # the first was earlier
        assert pair.now(0) == 2
        pair.reach(0, [], backward=True)
        assert pair.now(0) == 4
        pair.reach(0, [1], backward=True)
        assert pair.now(0) == 9
    assert pair.now(0) == 12
    assert pair.ledgers[0].seconds[Phase.COMPUTE] == 12
    with pair.computing(0):
        pass
    assert pair.now(0) == 24
    with pytest.raises(
        ConfigError, match=r"cluster\.profile describes a model with 2 layers and 5 parameters, but this model has 1"
    ):
        pair.expect([5])


def test_phases_that_interrupt_one_another() -> None:
    clock = iter([0.0, 2.0, 5.0, 6.0])
    charged: list[tuple[Phase, float]] = []
    stack = PhaseStack(lambda phase, local, seconds: charged.append((phase, seconds)), lambda: next(clock))
    with stack.timed(Phase.COMPUTE, [0]), stack.timed(Phase.SELECT, [0]):
        pass
    assert charged == [(Phase.COMPUTE, 2.0), (Phase.SELECT, 3.0), (Phase.COMPUTE, 1.0)]


def test_after_a_job_that_failed_all_fail() -> None:
    thread = Background(torch.device("cpu"))

    def fail() -> None:
        raise LookupError("once")

    assert thread.result(thread.submit(lambda: 5)) == 5
    for job in (fail, lambda: None):
        with pytest.raises(LookupError, match="once"):
            thread.result(thread.submit(job))
    thread.close()
    assert not thread._thread.is_alive()


def test_jobs_record_no_gradients() -> None:
    thread = Background(torch.device("cpu"))
    assert thread.result(thread.submit(torch.is_grad_enabled)) is False
    thread.close()


def real(work: Callable[[ProcessGroupCluster], Any]) -> list[Any]:
    return run_workers(2, work, timeout=30)


def test_overlapped_and_direct_messages_do_not_mix() -> None:
    """The main thread exchanges messages of its own meanwhile, and results may be asked for in any order."""

    def work(pair: ProcessGroupCluster) -> list[float]:
        (worker,) = pair.local_workers
        flights = [pair.enqueue([swap(worker, value)]) for value in range(20)]
        paused = pair.enqueue([swap(worker, worker.rank, boundary=True)], pauses=True)
        for flight in (*flights, paused):
            flight.release(0)
        aside = [pair.run([swap(worker, 7)])[0] for _ in range(20)]
        last = [flight.wait(0) for flight in reversed(flights)]
        shard = float(paused.boundary(0).shard[0])
        paused.resume()
        return [*aside, *last, shard, paused.wait(0), float(pair.ledgers[0].rounds)]

    for rank, found in enumerate(real(work)):
        assert found == [7.0] * 20 + [float(value) for value in reversed(range(20))] + [1 - rank, rank, 42]


def test_two_streams_run_concurrently() -> None:
    """With one, the second synchronization would wait for the first, and that for the second's end."""

    def work(pair: ProcessGroupCluster) -> tuple[float, float, int]:
        (worker,) = pair.local_workers
        both, over = ProcessGroupCluster(timeout=20, streams=2), threading.Event()

        def selecting() -> Program[float]:
            assert over.wait(timeout=240)
            return (yield from swap(worker, 5))

        first, second = both.enqueue([selecting()]), both.enqueue([swap(worker, 6)])
        first.release(0)
        second.release(0)
        found = second.wait(0)
        over.set()
        return first.wait(0), found, both.ledgers[0].rounds

    assert real(work) == [(5, 6, 2)] * 2


def test_streams_rotate_in_order() -> None:
    def work(pair: ProcessGroupCluster) -> list[float]:
        (worker,) = pair.local_workers
        many = ProcessGroupCluster(timeout=20, streams=3)
        flights = [many.enqueue([swap(worker, value, boundary=value % 2 == 0)]) for value in range(40)]
        for flight in flights:
            flight.release(0)
        return [*(flight.wait(0) for flight in flights), many.ledgers[0].rounds]

    assert real(work) == [[*range(40), 60]] * 2


def test_streams_that_cannot_be() -> None:
    for streams in (0, 1.5, "2"):
        with pytest.raises(ConfigError, match=r"cluster\.streams must be an integer, at least 1"):
            ProcessGroupCluster(group=object(), streams=streams)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="can deadlock on GPUs"):
        ProcessGroupCluster(group=object(), device="cuda", streams=2)
    with pytest.raises(ConfigError, match="cannot be combined with a throttle"):
        ProcessGroupCluster(group=object(), throttle=NETWORK, streams=2)


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_lost_peer_is_detected_by_wait(signum: signal.Signals) -> None:
    def work(pair: ProcessGroupCluster) -> None:
        (worker,) = pair.local_workers
        limited = ProcessGroupCluster(timeout=4)
        flight = limited.enqueue([swap(worker, 1, boundary=True)], pauses=True)
        flight.release(0)
        flight.boundary(0)
        if worker.rank == 1:
            os.kill(os.getpid(), signum)
        flight.resume()
        try:
            flight.wait(0)
        except PeerError as error:
            raise LookupError(f"noticed: {error}") from error

    with pytest.raises(
        WorkerError, match=r"noticed: rank 0 lost contact|worker 1 was killed|worker 1 stopped answering"
    ):
        real(work)


def test_synchronization_overlaps_the_main_thread() -> None:
    def work(pair: Cluster) -> bool:
        (worker,) = pair.local_workers
        flight = pair.enqueue([swap(worker, 1)])
        flight.release(0)
        model = nn.Linear(8, 8)
        until = time.monotonic() + 20
        while not flight._ended.done() and time.monotonic() < until:  # type: ignore[attr-defined]
            model(torch.ones(4, 8)).sum().backward()
        return bool(flight._ended.done())  # type: ignore[attr-defined]

    assert real(work) == [True, True]
