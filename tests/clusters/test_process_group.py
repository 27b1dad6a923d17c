"""Real processes: lost peers, and what is counted."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from spardl.basics.errors import PeerError, WorkerError
from spardl.clusters import ProcessGroupCluster, gather_rows, process_group
from spardl.clusters.precompile import precompile
from spardl.diagnostics.doctor.correctness import every_method, try_method
from spardl.protocol.programs import Exchange, Phase, Program, Receive, Send
from tests.diagnostics.doctor.common import Collected
from tests.support.driver import wait_until
from tests.support.harness import run_workers
from tests.support.measuring import undisturbed


def _ring(rank: int, size: int) -> Program[list[float]]:
    arrived = yield Exchange(
        [Send((rank + 1) % size, torch.full((3,), float(rank)), 3)],
        [Receive((rank - 1) % size, 3, torch.float32)],
    )
    return arrived[0].tolist()


def _aside(rank: int, size: int, done: list[int]) -> Program[list[int]]:
    yield Phase.PACK
    for round_ in range(3):
        message, work = torch.full((300_000,), rank), partial(done.append, round_)
        (arrived,) = yield Exchange(
            [Send((rank + 1) % size, message, 3)], [Receive((rank - 1) % size, 300_000, torch.int64)], work
        )
        assert (arrived == (rank - 1) % size).all()
    # Alone, without a message.
    yield Exchange([], [], partial(done.append, 3))
    return done


def _worked(cluster: ProcessGroupCluster) -> tuple[list[int], float]:
    (worker,) = cluster.local_workers
    return cluster.run([_aside(worker.rank, worker.size, [])])[0], cluster.ledgers[0].seconds[Phase.PACK]


def test_overlapped_work_runs_once_per_round() -> None:
    for done, seconds in run_workers(2, _worked):
        assert done == [0, 1, 2, 3]
        assert seconds > 0


def _counted(cluster: ProcessGroupCluster) -> tuple[list[float], int, int, list[list[float]]]:
    (worker,) = cluster.local_workers
    found = cluster.run([_ring(worker.rank, worker.size)])[0]
    rows = gather_rows(cluster, [torch.tensor([float(worker.rank)])])
    ledger = cluster.ledgers[0]
    return found, ledger.bytes_sent, ledger.rounds, [row.tolist() for row in rows]


def test_exchange_and_housekeeping() -> None:
    for rank, (found, sent, rounds, rows) in enumerate(run_workers(3, _counted)):
        assert found == [float((rank - 1) % 3)] * 3
        assert (sent, rounds) == (12, 1)
        assert rows == [[0.0], [1.0], [2.0]]


def _lose_one(cluster: ProcessGroupCluster) -> str:
    (worker,) = cluster.local_workers
    cluster.run([_ring(worker.rank, worker.size)])
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):
            cluster.run([_ring(worker.rank, worker.size)])
            time.sleep(0.01)
    except PeerError as error:
        return str(error)
    return "nothing noticed"


def test_a_killed_peer_is_named() -> None:
    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL at step 0"):
        run_workers(3, _lose_one, timeout=10)


def test_silent_peer_times_out(tmp_path: Path) -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        (worker,) = cluster.local_workers
        if worker.rank == 1:
            wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
            return "late"
        try:
            cluster.run([_ring(worker.rank, worker.size)])
        except PeerError as error:
            (tmp_path / str(worker.rank)).touch()
            raise WorkerError(str(error)) from error
        return "nothing noticed"

    with pytest.raises(WorkerError, match=r"rank [02] lost contact in an exchange \(receiving from rank"):
        run_workers(3, work, timeout=4)


def test_missing_peer_of_a_new_group_times_out(tmp_path: Path) -> None:
    def absent(cluster: ProcessGroupCluster) -> None:
        if cluster.local_ranks[0] == 1:
            wait_until((tmp_path / "said").exists)
            return
        with pytest.raises(PeerError) as error:
            ProcessGroupCluster(timeout=1.5).open()
        (tmp_path / "said").write_text(str(error.value))

    with pytest.raises(WorkerError):  # gloo closes the connections of the given group after a timeout
        run_workers(2, absent)
    found = (tmp_path / "said").read_text()
    assert found.startswith("rank 0 lost contact in creating a process group, which needs all workers: ")
    assert "no answer from rank 1; " in found
    assert "\n" not in found


def test_dead_worker_is_named_at_once(tmp_path: Path) -> None:
    """Rank 1 ends before it makes its handle; the others would wait for the default timeout of 1,800 s."""

    def dying(cluster: ProcessGroupCluster) -> None:
        rank = cluster.local_ranks[0]
        if rank == 1:
            time.sleep(0.5)  # until the others wait for it
            os._exit(3)
        began = time.monotonic()
        with pytest.raises(PeerError) as error:
            ProcessGroupCluster(timeout=1800).open()
        (tmp_path / f"{rank}").write_text(f"{time.monotonic() - began} {error.value}")

    def noticed() -> float:
        with pytest.raises(WorkerError, match="worker 1 ended with exit code 3"):
            run_workers(3, dying)
        seconds, _, said = (tmp_path / "0").read_text().partition(" ")
        assert "needs all workers: no answer from rank 1; " in said
        return float(seconds)

    undisturbed(noticed, lambda seconds: seconds < 5)


def _averages(cluster: ProcessGroupCluster) -> dict[str, torch.Tensor]:
    every = every_method(Collected())
    return {name: try_method(cluster, method).average for name, method in every.items()}


def test_messages_through_host_memory_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gloo needs it for tensors on a GPU; here the host's memory is copied to itself."""
    precompile(torch.float32, every_method(Collected()).values())
    straight = run_workers(2, _averages)[0]
    copied = []
    monkeypatch.setattr(process_group, "by_host", lambda group, device: True)
    own = process_group._host_copy
    monkeypatch.setattr(process_group, "_host_copy", lambda tensor: copied.append(tensor) or own(tensor))
    around, seen = run_workers(2, lambda cluster: (_averages(cluster), len(copied)))[0]
    assert seen > len(straight)
    assert all(torch.equal(around[name], average) for name, average in straight.items())


def test_only_gloo_needs_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    both, split = "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"
    for backends, device, needed in ((both, "cuda", True), (split, "cuda", False), (both, "cpu", False)):
        monkeypatch.setattr(process_group.dist, "get_backend_config", lambda group, backends=backends: backends)
        assert process_group.by_host(None, torch.device(device)) is needed
        assert process_group.over_gloo(None, torch.device("cpu"))
