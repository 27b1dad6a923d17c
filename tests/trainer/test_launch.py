from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spardl.basics.errors import ConfigError, PeerError, WorkerError
from spardl.clusters import Cluster, SimulatedCluster, gather_rows
from spardl.clusters.workers.membership import Membership, find_membership, pick_device, restart_warning
from trainer.launch import Heartbeat, ProcessGroup, Simulated, count_gpus_in_child
from trainer.rendezvous import Rendezvous
from trainer.runs import Run

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
TORCHRUN |= {"MASTER_PORT": "5", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
SRUN |= {"SLURM_JOB_ID": "70001"}


def test_without_torchrun_and_srun() -> None:
    assert find_membership({}) is None
    assert find_membership({"RANK": "0"}) is None
    assert find_membership({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None  # a batch script
    assert find_membership({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None  # an interactive shell


def test_torchrun_and_srun() -> None:
    assert find_membership(TORCHRUN) == Membership(3, 4, 1, 2, "h", 5)
    assert find_membership({**SRUN, "MASTER_ADDR": "m"}) == Membership(2, 4, 0, 1, "m", 15000 + 10001)
    assert find_membership({**SRUN, "MASTER_ADDR": "m", "MASTER_PORT": "9"}) == Membership(2, 4, 0, 1, "m", 9)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"MASTER_PORT": "99999"},
            "MASTER_PORT=99999 in the environment is not valid; set it to an integer from 1 to",
        ),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 "),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http "),
        ({"RANK": "4"}, "RANK=4 in the environment is not valid; set it to an integer from 0 to 3"),
        ({"RANK": "-1"}, "RANK=-1 "),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is not valid; set it to an integer of at least 1"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK= in the environment is not valid; set it to an integer of at least 0"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE=two "),
    ],
)
def test_environments_that_are_not_valid(changed: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        find_membership({**TORCHRUN, **changed})


def test_a_port_of_srun_that_is_not_valid() -> None:
    with pytest.raises(ConfigError, match=r"^MASTER_PORT=99999 "):
        find_membership({**SRUN, "MASTER_ADDR": "m", "MASTER_PORT": "99999"})


def test_what_a_restart_needs() -> None:
    assert restart_warning({}, resumes=False) is None
    assert restart_warning({"TORCHELASTIC_MAX_RESTARTS": "0"}, resumes=False) is None
    assert restart_warning({"TORCHELASTIC_MAX_RESTARTS": "3"}, resumes=True) is None
    assert "use resume=auto to continue" in str(restart_warning({"TORCHELASTIC_MAX_RESTARTS": "3"}, resumes=False))


def test_torchrun_s_own_store() -> None:
    found = find_membership({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found is not None
    assert found.served


def test_keys_of_earlier_workers_are_ignored() -> None:
    """Its store outlives them: here, it has the port of one who is gone, and an old run."""
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent.set("spardl/port", "1")
    agent.set("run", "old")
    members = [Membership(rank, 3, rank, 3, "127.0.0.1", agent.port, served=True) for rank in range(3)]
    meetings = [Rendezvous(member, 10) for member in members]
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda rendezvous: rendezvous.store, meetings))
    stores[1].set("mark", "of 1")
    assert not stores[0].check(["run"])
    assert all(rendezvous.connect().get("mark") == b"of 1" for rendezvous in meetings)


@pytest.mark.parametrize(
    ("names", "resolves", "host"),
    [("n1\nn2\n", True, "n1"), ("n1\nn2\n", False, "10.0.0.1"), ("", True, None)],
)
def test_the_first_host_of_a_job(names: str, resolves: bool, host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        ("scontrol", "show", "hostnames", "n[1-2]"): names,
        ("scontrol", "--oneliner", "show", "node", "n1"): "NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=vm\n",
    }

    def run(words: list[str], **options: Any) -> Any:
        return subprocess.CompletedProcess(words, 0, answers[tuple(words)])

    def resolve(name: str, port: None) -> list[object]:
        if not resolves:
            raise socket.gaierror("Name or service not known")
        return []

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    if host:
        found = find_membership(SRUN)
        assert found is not None
        assert found.host == host
    else:
        with pytest.raises(ConfigError, match="set MASTER_ADDR to the host of rank 0"):
            find_membership(SRUN)


def test_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessGroup().workers == 4
    assert ProcessGroup(workers=3).workers == 3
    assert ProcessGroup().leads
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert ProcessGroup().workers == ProcessGroup(workers=4).workers == 4
    assert not ProcessGroup().leads
    with pytest.raises(ConfigError, match=r"cluster\.workers=3, but 4 workers were started"):
        ProcessGroup(workers=3)
    with pytest.raises(ConfigError, match="start it without torchrun or srun"):
        Simulated()


@pytest.mark.parametrize("kind", [ProcessGroup, Simulated])
@pytest.mark.parametrize(
    ("name", "value"), [("workers", 0), ("workers", "x"), ("workers", True), ("threads", 0), ("device", "tpu")]
)
def test_out_of_range(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{name} must be"):
        kind(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 65536, "x", 1.5])
def test_invalid_ports(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.port must be a port number"):
        ProcessGroup(port=value)


def ranks_of(launcher: Any, tmp_path: Path) -> list[list[float]]:
    """What every process of a launcher sees."""

    def job(cluster: Cluster, device: torch.device, heartbeat: Heartbeat) -> None:
        heartbeat(1)
        rows = gather_rows(cluster, [torch.tensor([float(rank)]) for rank in cluster.local_ranks])
        assert torch.get_num_threads() == 2
        torch.save([float(row) for row in rows], tmp_path / f"{cluster.local_ranks[0]}.pt")

    launcher.launch(job, tmp_path)
    return [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]


def test_real_workers(tmp_path: Path) -> None:
    assert ranks_of(ProcessGroup(workers=3, threads=2, device="cpu"), tmp_path) == [[0.0, 1.0, 2.0]] * 3


def test_simulated_workers(tmp_path: Path) -> None:
    assert ranks_of(Simulated(workers=3, threads=2, device="cpu"), tmp_path) == [[0.0, 1.0, 2.0]]
    assert torch.get_num_threads() == 1


def test_the_network_of_a_simulation(tmp_path: Path) -> None:
    def job(cluster: Cluster, device: torch.device, heartbeat: Heartbeat) -> None:
        assert isinstance(cluster, SimulatedCluster)
        assert (cluster._network.alpha, cluster._network.gbit) == (0.5, 8.0)

    Simulated(workers=2, network={"alpha": 0.5, "gbit": 8}).launch(job, tmp_path)


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.backend=nccl needs a GPU for each worker"):
        ProcessGroup(workers=2, backend="nccl", device="cpu").launch(lambda *worker: None, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert pick_device("auto", 1, 2) == torch.device("cuda", 1)
    assert pick_device("cpu", 1, 2) == torch.device("cpu")
    assert pick_device("auto", 3, 4) == torch.device("cpu")
    assert pick_device("auto", 3, 1) == torch.device("cuda", 1)  # srun hands out GPUs by itself
    with pytest.raises(ConfigError, match=r"needs 4 GPU\(s\) on this machine, .* torch finds 2"):
        pick_device("cuda", 3, 4)


def test_gpus_are_counted_in_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA, once asked, does not survive a fork."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(1) or True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert count_gpus_in_child("auto", 4) == 2
    assert count_gpus_in_child("cpu", 4) == 0
    with pytest.raises(ConfigError, match=r"needs 4 GPU\(s\) on this machine, .* torch finds 2"):
        count_gpus_in_child("cuda", 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: os._exit(1))
    with pytest.raises(ConfigError, match=r"torch cannot count GPUs \(the counting process died\); use clus"):
        count_gpus_in_child("cuda", 4)
    assert not asked


def test_a_worker_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 1.0)
    opens = Rendezvous._open

    def late(self: Rendezvous) -> Any:
        if self._member.rank == 1:
            time.sleep(60)
        return opens(self)

    monkeypatch.setattr(Rendezvous, "_open", late)
    with pytest.raises(
        ConfigError,
        match=r"rank 0 cannot connect to the other workers at 127\.0\.0\.1:\d+: rank 1 did not connect",
    ):
        ProcessGroup(workers=2, timeout=1).launch(lambda *worker: None, tmp_path)


class MemoryStore:
    """A TCPStore for ranks that take turns."""

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content

    def set(self, key: str, value: str) -> None:
        self.content[key] = value.encode()

    def get(self, key: str) -> bytes:
        if key not in self.content:
            raise RuntimeError("wait timeout\nstack")
        return self.content[key]

    def wait(self, keys: list[str], timeout: Any) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= set(self.content)


def member(rank: int, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    for name, value in {**TORCHRUN, "RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = ProcessGroup()
    monkeypatch.setattr(Rendezvous, "_open", lambda rendezvous: MemoryStore(content))
    monkeypatch.setattr(Rendezvous, "_greet", lambda rendezvous, store: None)
    return found


def test_ranks_agree_on_the_run_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content: dict[str, bytes] = {}
    run = Run("abc", tmp_path, tmp_path / "step-1")
    assert member(0, content, monkeypatch).share(lambda: run) == run
    assert member(1, content, monkeypatch).share(lambda: pytest.fail("rank 1 decides nothing")) == run
    assert "heard/1" in content


@pytest.mark.parametrize("error", [ConfigError("no folder"), OSError("no folder")])
def test_ranks_raise_the_error_of_rank_0(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Run:
        raise error

    content: dict[str, bytes] = {}
    with pytest.raises(type(error), match="no folder"):
        member(0, content, monkeypatch).share(fail)
    with pytest.raises(ConfigError, match="no folder"):
        member(1, content, monkeypatch).share(fail)


def test_ranks_raise_when_settings_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"given/1": json.dumps({"seed": "2"}).encode()}
    said = "rank 1 has seed=2, rank 0 has seed=1; all workers need the same value"
    with pytest.raises(ConfigError, match=said):
        member(0, content, monkeypatch).share(lambda: pytest.fail("there is no run"), {"seed": "1"})
    with pytest.raises(ConfigError, match=said):
        member(1, content, monkeypatch).share(lambda: pytest.fail("rank 1 decides nothing"), {"seed": "2"})


def test_a_rank_that_does_not_send_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="rank 1 connected, but did not send its"):
        member(0, {}, monkeypatch).share(lambda: pytest.fail("there is no run"), {"seed": "1"})


def test_rank_0_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="rank 0 exited before it chose the run folder: wait timeout"):
        member(1, {}, monkeypatch).share(lambda: pytest.fail("rank 1 decides nothing"))


@pytest.mark.parametrize(("error", "expected"), [(PeerError("lost"), PeerError), (KeyError("x"), WorkerError)])
def test_errors_of_a_rank_that_was_started_elsewhere(
    error: Exception, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = member(1, {}, monkeypatch)

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(found, "_work", fail)
    with pytest.raises(expected):
        found.launch(lambda *worker: None, tmp_path)
    assert (tmp_path / "errors" / "rank-1.txt").exists()
    assert os.environ["RANK"] == "1"
