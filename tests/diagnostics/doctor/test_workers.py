"""The doctor and its workers: each check is one line, and none waits for ever."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from spardl.basics.errors import ConfigError, PeerError
from spardl.clusters import ProcessGroupCluster, parse_network
from spardl.clusters.workers.membership import Membership
from spardl.diagnostics.doctor import board
from spardl.diagnostics.doctor.examination import TimeBudget, place_of, run_stages
from tests.diagnostics.doctor.common import Collected, Doctor, lines, local
from tests.support.driver import command


def test_workers_of_this_machine(doctor: Doctor, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "network.yaml"
    code = doctor("--workers", "2", "--device", "cpu", "--budget", "1000", "--out", str(file))
    said = capfd.readouterr().out
    assert code == 0, said
    assert not lines(said, "FAILED")
    topics = [line.split(":")[0] for line in lines(said, "ok")]
    assert topics[:2] == ["installation", "extras"]
    for topic in ("peers", "backend", "links", "network", "SparDL at density 1", "SparDL at density 0.01", "methods"):
        assert topic in topics, said
    assert f"torch {torch.__version__}" in said
    assert "workers 0, 1 on " in said
    network = parse_network(str(file))
    assert network.alpha > 0
    measured = yaml.safe_load(file.read_text())["measured"]
    assert (measured["workers"], measured["backend"]) == (2, "gloo")


@pytest.mark.parametrize(
    ("gpus", "wanted", "alone", "expected"),
    [
        (1, "cuda", True, ("cuda:0", "gloo")),
        (4, "cuda", True, ("cuda:3", "nccl")),
        (4, "cuda", False, ("cuda:3", "nccl")),
        (1, "auto", True, ("cpu", "gloo")),
        (0, "auto", True, ("cpu", "gloo")),
        (4, "cpu", True, ("cpu", "gloo")),
    ],
)
def test_workers_share_the_gpus_of_one_machine(
    gpus: int, wanted: str, alone: bool, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(gpus, monkeypatch)
    device, backend = place_of(wanted, Membership(3, 4, 3, 4, "127.0.0.1", 0, alone=alone))
    assert (str(device), backend) == expected


@pytest.mark.parametrize(("gpus", "alone"), [(0, True), (1, False)])
def test_too_few_gpus(gpus: int, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(gpus, monkeypatch)
    with pytest.raises(ConfigError, match=rf"--device=cuda needs 4 GPU\(s\) on this machine, .* torch finds {gpus}"):
        place_of("cuda", Membership(3, 4, 3, 4, "127.0.0.1", 0, alone=alone))


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGKILL, "workers: worker 1 was killed by SIGKILL; the other workers were stopped"),
        (signal.SIGSTOP, "synchronizations: worker 1 on "),
    ],
)
def test_a_lost_worker_is_named(
    signum: int, said: str, brief: Doctor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lose(cluster: ProcessGroupCluster, networked: bool, findings: Any) -> None:
        if cluster.local_ranks[0] == 1:
            os.kill(os.getpid(), signum)
        dist.barrier()

    monkeypatch.setattr("spardl.diagnostics.doctor.correctness.check_spardl", _within_the_library(lose))
    monkeypatch.setattr("spardl.diagnostics.doctor.peers._PUBLISHING", 1.0)
    code, output = local(brief, capfd, "--timeout", "5")
    (line,) = lines(output, "FAILED")
    assert (code, line[: len(said)]) == (1, said)


def _within_the_library(check: Callable[..., None]) -> Callable[..., None]:
    """Contact is lost as the library tells it."""

    def checked(*arguments: Any) -> None:
        try:
            check(*arguments)
        except RuntimeError as error:
            raise PeerError("lost contact") from error

    return checked


def test_a_check_that_breaks_on_one_worker(
    brief: Doctor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stumble(cluster: ProcessGroupCluster, networked: bool, findings: Any) -> None:
        if cluster.local_ranks[0] == 1:
            raise ValueError("two\nlines")
        raise PeerError("nothing came")

    monkeypatch.setattr("spardl.diagnostics.doctor.correctness.check_spardl", stumble)
    code, output = local(brief, capfd)
    assert code == 1
    (line,) = lines(output, "FAILED")
    assert line.startswith("synchronizations: worker 1: ValueError: two; ")


def test_checks_end_with_the_time(findings: Collected) -> None:
    now, done = [0.0], []

    def check(name: str, seconds: float) -> tuple[str, Callable[[], None]]:
        def run() -> None:
            done.append(name)
            now[0] += seconds

        return name, run

    budget = TimeBudget(60.0, clock=lambda: now[0])
    stages = [check("links", 20.0), check("network", 45.0), check("methods", 1.0), check("pace", 1.0)]
    run_stages(stages, lambda: budget.left, findings)  # type: ignore[arg-type]
    assert done == ["links", "network"]
    assert findings.lines[:2] == ["progress checking links (1 of 4) ...", "progress checking network (2 of 4) ..."]
    assert len(findings.lines) == 3
    assert findings.lines[2].startswith("warning not checked within --budget: methods, pace; run this again ")


def test_workers_agree_that_the_time_is_over(brief: Doctor, capfd: pytest.CaptureFixture[str]) -> None:
    assert brief("--workers", "2", "--device", "cpu", "--budget", "1e-6") == 0
    out, err = capfd.readouterr()
    missing = "links, network, all-reduce, SparDL, methods, pace"
    assert any(f"not checked within --budget: {missing}; run" in line for line in lines(out, "warning"))
    assert "doctor: the checks stop after about 0 s" in err
    assert "checking links" not in err


def test_a_network_that_cannot_be_written(
    brief: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spardl.diagnostics.doctor.links.write_atomically", full)
    code, output = local(brief, capfd, "--out", str(tmp_path / "x"))
    assert code == 1
    (line,) = lines(output, "FAILED")
    assert f"cannot be written to {tmp_path / 'x'}: No space left on device; choose another --out" in line


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ("--workers 1", {}, "--workers must be at least 2, got 1"),
        ("--workers x", {}, "Invalid value for '--workers': 'x' is not a valid integer; see spardl doctor --help"),
        ("--timeout 0", {}, "--timeout must be from 1 to 3600 seconds, got 0"),
        ("--timeout nan", {}, "--timeout must be from 1 to 3600 seconds, got nan"),
        ("--budget 0", {}, "--budget must be above 0 seconds, got 0"),
        ("--out /nowhere/x", {}, "--out /nowhere/x must be a file in an existing folder"),
        ("--out .", {}, "--out . must be a file in an existing folder"),
        ("--foo", {}, "No such option '--foo'"),
        ("--interface none9", {}, "--interface none9 is not on "),
        ("--device tpu", {}, "Invalid value for '--device': 'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (
            "--workers 3",
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "differs from the 2 started workers",
        ),
        ("", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "at least 2, got 1"),
    ],
)
def test_bad_input_is_one_line(
    words: str,
    environment: dict[str, str],
    said: str,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert doctor(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.slow
def test_workers_of_torchrun(tmp_path: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    words = ["-m", "spardl.diagnostics.doctor", "--device", "cpu", "--budget", "1000"]
    done = command(*words, "--out", str(tmp_path / "network.yaml"), program=(sys.executable, *start))
    assert done.returncode == 0, done.stdout + done.stderr
    topics = [line.split(":")[0] for line in lines(done.stdout, "ok")]
    assert {"peers", "backend", "network", "SparDL at density 0.01", "methods"} <= set(topics)
    assert parse_network(str(tmp_path / "network.yaml")).alpha > 0


@pytest.mark.slow
def test_worker_without_worker_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)  # the doctor itself keeps torch quiet
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = command("--timeout", "2", program=(sys.executable, "-m", "spardl.diagnostics.doctor"), env=environment)
    assert done.returncode == 1
    (line,) = lines(done.stdout, "FAILED")
    assert "cannot reach worker 0 at 127.0.0.1:9: " in line
    assert not done.stderr


def test_missing_libraries_are_named(doctor: Doctor, findings: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.7", 'none-9>=1; extra == "fast"', "pytest>=8; extra == 'dev'", 'spardl[fast]; extra == "dev"']
    monkeypatch.setattr("spardl.diagnostics.doctor.board.metadata.requires", lambda name: wanted)
    board.check_extras(findings)
    assert findings.lines == [
        "warning extras: selection is about 3 x slower without none-9; pip install 'spardl[fast]'",
        "ok extras: dev; incomplete: fast (without none-9); pip install 'spardl[NAME]' to complete one",
    ]
