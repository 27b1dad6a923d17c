"""Real processes on a network that is slower than theirs: nothing is over too early, and results stay what they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.clusters import PRESETS, Cluster, Ledger, Network, ProcessGroupCluster, process_group
from spardl.clusters.process_group import Channel, lasting, traffic
from spardl.protocol.programs import (
    AllGather,
    AllReduce,
    Boundary,
    Exchange,
    Phase,
    Program,
    Receive,
    ReduceScatter,
    Send,
    Worker,
)
from tests.support.driver import here, only_run, summary
from tests.support.harness import layout_of, run_method, run_workers, same_bits, spardl, topka
from trainer.launch import Heartbeat, ProcessGroup

NETWORK = Network(alpha=1e-2, gbit=0.01)
ROUNDING = 1e-9  # of sums of seconds


class Clock:
    """Time that only passes in sleeps, which take longer than asked for, and with looks at the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sleeps = 0.0, list[float]()
        # Only there: others in this process have clocks to read and sleeps to sleep, too.
        monkeypatch.setattr(process_group, "time", SimpleNamespace(perf_counter=self.look, sleep=self.sleep))

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + 70e-6


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("nbytes", [0, 1, 1_000_000])
def test_a_wait_ends_when_it_should(rounds: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with lasting(Network(alpha=2e-3, gbit=8e-2), rounds, nbytes):
        pass
    bound = 2e-3 * rounds + 1e-7 * nbytes
    assert bound <= clock.now <= bound + 5e-6
    assert len(clock.sleeps) == (bound > 2e-4)


def test_slow_operations_are_not_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with lasting(Network(alpha=1.0, gbit=1), 1, 0):
        clock.now = 7.0
    assert clock.now == pytest.approx(7.0, abs=5e-6)
    assert clock.sleeps == []


def test_errors_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(LookupError), lasting(Network(alpha=1.0, gbit=1), 1, 0):
        raise LookupError
    assert clock.sleeps == []


def test_links_carry_both_directions_at_once() -> None:
    sends = [Send(1, torch.zeros(3), 3), Send(2, torch.zeros(4, dtype=torch.int16), 4)]
    assert traffic(Exchange(sends, [Receive(1, 19, torch.uint8)])) == 20
    assert traffic(Exchange(sends, [Receive(1, 2, torch.float64), Receive(2, 5, torch.uint8)])) == 21
    assert traffic(Exchange([], [])) == 0


def _uneven(worker: Worker) -> Program[Tensor]:
    """The first worker sends much and receives little, the second the other way round; then comes an empty round."""
    other, sizes = 1 - worker.rank, (20_000, 100)
    payload = torch.full((sizes[worker.rank],), float(worker.rank))
    (arrived,) = yield Exchange([Send(other, payload, 1)], [Receive(other, sizes[other], torch.float32)])
    yield Boundary(arrived)
    yield Exchange([], [])
    return arrived


def _collectives(worker: Worker) -> Program[Tensor]:
    tensor = torch.arange(1001.0) + worker.rank
    yield AllReduce(tensor)
    yield ReduceScatter(tensor)
    yield AllGather(tensor)
    return tensor


def _seconds(cluster: ProcessGroupCluster, program: Any, background: bool) -> tuple[float, int, int, Tensor]:
    """Of communication as the ledger has them, with its rounds and bytes, and the result."""
    (worker,), ledger = cluster.local_workers, cluster.ledgers[0]
    if not background:
        result = cluster.run([program(worker)])[0]
        return ledger.seconds[Phase.COMMUNICATE], ledger.rounds, max(ledger.bytes_sent, ledger.bytes_received), result
    flight = cluster.enqueue([program(worker)])
    flight.release(0)
    result = flight.wait(0)
    return ledger.overlapped[Phase.COMMUNICATE], ledger.rounds, max(ledger.bytes_sent, ledger.bytes_received), result


@pytest.mark.parametrize("background", [False, True], ids=["in front", "background"])
@pytest.mark.parametrize(
    ("program", "workers", "rounds", "nbytes"), [(_uneven, 2, 2, 80_000), (_collectives, 3, 8, 10_672)]
)
def test_no_round_is_over_too_early(program: Any, workers: int, rounds: int, nbytes: int, background: bool) -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        slow = ProcessGroupCluster(throttle=NETWORK)
        return _seconds(slow, program, background), _seconds(cluster, program, background)

    for slow, fast in run_workers(workers, work):
        assert slow[1:3] == fast[1:3] == (rounds, nbytes)
        assert slow[0] >= NETWORK.alpha * rounds + NETWORK.beta * nbytes - ROUNDING
        assert torch.equal(slow[3], fast[3])


def test_uncounted_programs_are_throttled() -> None:
    def work(cluster: ProcessGroupCluster) -> float:
        slow = ProcessGroupCluster(throttle=NETWORK)
        return slow.time_uncounted([_uneven(slow.local_workers[0])])[0]

    assert min(run_workers(2, work)) >= NETWORK.alpha * 2 + NETWORK.beta * 80_000


def test_throttled_methods_are_bitwise_equal_and_slower() -> None:
    def work(cluster: ProcessGroupCluster) -> list[Any]:
        found: list[Any] = []
        for one in (cluster, ProcessGroupCluster(throttle=NETWORK)):
            for method in (spardl(0.1), topka(0.1)):
                state = method.init_state(layout_of(500), torch.float32)
                method.accumulate(torch.sin(torch.arange(500.0) * (one.local_ranks[0] + 1)), state)
                found.append(run_method(method, one, [state])[0])
        ledger = one.ledgers[0]
        return [*found, ledger.seconds[Phase.COMMUNICATE], ledger.rounds, ledger.bytes_sent]

    for *results, seconds, rounds, sent in run_workers(4, work):
        assert same_bits(results[0], results[2])
        assert same_bits(results[1], results[3])
        assert rounds > 0
        assert seconds >= NETWORK.alpha * rounds + NETWORK.beta * sent - ROUNDING


def test_gpu_is_synchronized_before_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued before an exchange must not count as the exchange."""
    done: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            done.append("waited")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda group: "cuda:nccl")
    for slow in (None, Network(alpha=0.0, gbit=1)):
        Channel(None, torch.device("cuda"), slow).communicate(Exchange([], []), Ledger())
        assert done == ["waited"] * (slow is not None)


@pytest.mark.parametrize("value", ["ethernet_25g", {"alpha": 20e-6, "gbit": 25}])
def test_started_workers_are_throttled(value: Any, tmp_path: Path) -> None:
    def job(cluster: Cluster, device: torch.device, heartbeat: Heartbeat) -> None:
        assert isinstance(cluster, ProcessGroupCluster)
        assert cluster._throttle == PRESETS["ethernet_25g"]
        (tmp_path / str(cluster.local_ranks[0])).touch()

    ProcessGroup(workers=2, device="cpu", throttle=value).launch(job, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


def test_a_training_run_on_a_slow_network(tmp_path: Path) -> None:
    words = ["cluster.throttle={alpha: 2e-2, gbit: 1}", "cluster.workers=2", "training.max_steps=2"]
    assert here(*words, f"output_dir={tmp_path}") == 0
    found = summary(only_run(tmp_path))
    assert found["step_seconds"]["communicate"] >= 2e-2 * found["step_rounds"] - ROUNDING


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("cluster.throttle=token_ring", "cluster.throttle=token_ring is not a network; use ethernet_1g"),
        ("cluster.throttle=5", "cluster.throttle=5 is not a network; use a preset, a file path, or the keys"),
        ("cluster.throttle={alpha:1}", "cluster.throttle={'alpha': 1} is not a network; use a preset"),
        ("cluster.throttle={alpha:-1,gbit:1}", "cluster.throttle: alpha=-1, gbit=1 is not a network; set alpha >= 0"),
        ("cluster=simulated cluster.throttle=ethernet_1g", "with cluster=simulated, use cluster.network"),
    ],
)
def test_bad_throttles_are_one_line(typed: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here(*typed.split(), f"output_dir={tmp_path / 'out'}") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
