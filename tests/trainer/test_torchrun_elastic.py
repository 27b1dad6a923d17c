"""A node of torchrun dies, another joins: training continues with the nodes that are present."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.driver import (
    QUICK,
    ROOT,
    STARTED_BY,
    events,
    free_port,
    only_run,
    processes,
    steps_logged,
    summary,
    wait_until,
)

TRAINING = ("training.elastic=true", "training.epochs=10000", "training.checkpoint_every=5")
FAST = "join_timeout=60,last_call_timeout=10,keep_alive_interval=3,keep_alive_max_attempt=3"


class Node:
    """An agent of torchrun and its two workers; ``hosts``: the store where all agents meet."""

    def __init__(self, port: int, hosts: bool, steps: int, outputs: Path, log: Path, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY} | variables
        words = [
            *(str(Path(sys.executable).parent / "torchrun"), "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=5"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"),
            f"--rdzv-conf={FAST},is_host={int(hosts)}",
            *("--local-addr=127.0.0.1", "--monitor-interval=0.2", "train.py"),
            *(*QUICK, *TRAINING, f"training.max_steps={steps}", "resume=auto", "training.eval_every=1000"),
            f"output_dir={outputs}",
        ]
        self._log = log.open("w")
        self.agent = subprocess.Popen(
            words, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=self._log, stderr=subprocess.STDOUT
        )

    def pids(self) -> list[int]:
        workers = [pid for pid, fields in processes().items() if fields[3] == str(self.agent.pid)]
        return [self.agent.pid, *workers]

    def die(self) -> None:
        """As when the machine loses its power."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait(60)

    def close(self) -> None:
        if self.agent.poll() is None:
            self.die()
        self._log.close()


@contextmanager
def nodes(steps: int, outputs: Path, folder: Path, **variables: str) -> Iterator[Callable[[], Node]]:
    """What starts a further node; none of them is left behind."""
    port, started = free_port(), list[Node]()

    def start() -> Node:
        started.append(Node(port, not started, steps, outputs, folder / f"node-{len(started)}.txt", **variables))
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.close()


def restarts(outputs: Path) -> list[tuple[int, int]]:
    lines = [json.loads(line) for path in outputs.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    changes = [line for line in lines if line["kind"] == "restart"]
    for change in changes:
        assert change["residual_sum"] == pytest.approx(change["residual_sum_before"], rel=1e-5, abs=1e-3)
    return [(change["workers_before"], change["workers"]) for change in changes]


@pytest.mark.slow
def test_a_node_dies(tmp_path: Path) -> None:
    outputs = tmp_path / "out"
    with nodes(100, outputs, tmp_path) as start:
        first, second = start(), start()
        wait_until(lambda: steps_logged(outputs) >= 20, 90)
        second.die()
        assert first.agent.wait(150) == 0, (tmp_path / "node-0.txt").read_text()[-3000:]
    found = summary(only_run(outputs))
    assert (found["status"], found["steps"], found["workers"]) == ("finished", 100, 2)
    assert restarts(outputs) == [(4, 2)]


@pytest.mark.slow
def test_a_node_joins(tmp_path: Path) -> None:
    """The first one's workers are asked to stop, and save; so no step is done twice."""
    outputs = tmp_path / "out"
    # With a store that outlives rounds, torchrun's agents do not tell one that joins later where it is.
    with nodes(100_000, outputs, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as start:
        first = start()
        wait_until(lambda: steps_logged(outputs) >= 5, 90)
        start()
        wait_until(lambda: (2, 4) in restarts(outputs), 120)
        after = steps_logged(outputs)
        wait_until(lambda: steps_logged(outputs) > after + 2, 60)
        first.agent.send_signal(signal.SIGTERM)
        wait_until(lambda: summary(only_run(outputs))["status"] == "stopped", 60)
    steps = [event["step"] for event in events(only_run(outputs)) if event["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
