"""Where workers listen, and what strangers who connect there can do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from spardl.basics.errors import ConfigError
from spardl.clusters import Cluster, gather_rows
from spardl.clusters.workers import store as store_module
from spardl.clusters.workers.membership import Membership, address_of, find_secret, listen, listen_as
from spardl.clusters.workers.store import hold_store
from tests.support.driver import (
    QUICK,
    ROOT,
    STARTED_BY,
    background_ranks,
    command,
    free_port,
    only_run,
    processes,
    steps_logged,
    summary,
    wait_until,
)
from tests.trainer.test_train_cli import TORCHRUN
from trainer.launch import Heartbeat, ProcessGroup
from trainer.rendezvous import Rendezvous


class Place(NamedTuple):
    """Where somebody listens."""

    address: str
    port: int


def listening(*pids: int) -> set[Place]:
    """Where processes listen on TCP."""
    links = {link for pid in pids for link in _links(Path(f"/proc/{pid}/fd"))}
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                address, port = words[1].split(":")
                found.add(Place(_address(family, address), int(port, 16)))
    return found


def _links(folder: Path) -> Iterable[str]:
    for path in folder.iterdir():
        with suppress(OSError):
            yield str(path.readlink())


def _address(family: socket.AddressFamily, text: str) -> str:
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def stranger(place: Place, seconds: float = 5) -> Any:
    """Somebody who connects to a store and knows nothing of it but what the sources say."""
    patience = timedelta(seconds=seconds)
    return dist.TCPStore(place.address, place.port, None, False, timeout=patience, wait_for_workers=False)


def test_what_listens_is_seen() -> None:
    with closing(socket.create_server(("", 0))) as everywhere, closing(socket.create_server(("127.0.0.1", 0))) as here:
        found = listening(os.getpid())
        assert Place("0.0.0.0", everywhere.getsockname()[1]) in found
        assert Place("127.0.0.1", here.getsockname()[1]) in found


def test_local_workers_listen_on_the_loopback_only(tmp_path: Path) -> None:
    def job(cluster: Cluster, device: torch.device, heartbeat: Heartbeat) -> None:
        assert {place.address for place in listening(os.getpid())} == {"127.0.0.1"}
        if cluster.leads:
            (store,) = listening(os.getppid())  # the launcher's only socket, which rank 0's store took over
            other = stranger(store)
            for key in ("stop", "stop/0", "stop/1"):
                other.set(key, "1")
        for step in range(1, 8):
            time.sleep(0.1)
            assert not heartbeat(step)
        gather_rows(cluster, [torch.zeros(1)])
        (tmp_path / str(cluster.local_ranks[0])).touch()

    ProcessGroup(workers=2, device="cpu", timeout=20).launch(job, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def met(interface: str | None = None) -> tuple[list[Any], set[Place]]:
    """The stores of two ranks of torchrun, whose agent listens on all addresses, and where rank 0 listens then."""
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = listening(os.getpid())
    members = [Membership(rank, 2, rank, 2, "127.0.0.1", agent.port, served=True) for rank in range(2)]
    both = [Rendezvous(member, 10, interface=interface) for member in members]
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda rendezvous: rendezvous.store, both))
    return [both, stores], listening(os.getpid()) - before


@pytest.mark.parametrize("interface", [None, "lo"])
def test_torchrun_rank_0_listens_on_the_given_address(interface: str | None) -> None:
    (both, stores), places = met(interface)
    (place,) = places
    assert place.address == "127.0.0.1"
    other = stranger(place)
    for key in ("stop", "run", "here/1"):
        other.set(key, "from a stranger")
    assert not any(store.check(["stop"]) or store.check(["run"]) for store in stores)
    stores[1].set("mark", "of 1")
    assert all(rendezvous.connect().get("mark") == b"of 1" for rendezvous in both)


def test_every_run_has_another_word() -> None:
    words = set()
    for _ in range(2):
        (_, stores), (place,) = met()
        stores[0].set("mark", "")
        other = stranger(place)
        if not hasattr(other, "list_keys"):
            pytest.skip("this torch does not list keys")
        words |= {key.split("/")[0] for key in other.list_keys()}
    assert len(words) == 2


def test_a_rank_with_another_secret_is_ignored() -> None:
    with closing(listen("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        first = Rendezvous(Membership(0, 2, 0, 2, "127.0.0.1", port), 0.5, listener, "ours")
        opened = first._open()
        Rendezvous(Membership(1, 2, 1, 2, "127.0.0.1", port), 5, secret="theirs")._open().set("here/1", "")
        assert not opened.check(["here/1"])
        Rendezvous(Membership(1, 2, 1, 2, "127.0.0.1", port), 5, secret="ours")._open().set("here/1", "")
        assert opened.check(["here/1"])


def test_what_workers_know_of_their_run() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert find_secret({}) == ""
    assert find_secret(step) == "7.0"
    assert find_secret({**step, "TORCHELASTIC_RUN_ID": "x"}) == "x"
    assert find_secret({**step, "SPARDL_SECRET": "s"}) == "s"


def answer(*addresses: str) -> Any:
    """Stands for ``getaddrinfo``."""
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]


@pytest.mark.parametrize(
    ("host", "alone", "resolved", "bound"),
    [
        ("127.0.0.1", False, ["127.0.0.1"], "127.0.0.1"),
        ("here", True, ["127.0.1.1"], "127.0.1.1"),
        ("here", False, ["127.0.1.1"], None),  # elsewhere, that name means another address
        ("here", True, ["192.0.2.250", "127.0.0.1"], "127.0.0.1"),
        ("service", True, ["192.0.2.250"], None),
    ],
)
def test_which_address_a_name_stands_for(
    host: str, alone: bool, resolved: list[str], bound: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answer(*resolved))
    listener = listen_as(host, 0, alone=alone)
    assert (listener and listener.getsockname()[0]) == bound
    if listener:
        listener.close()


def test_an_interface_s_address() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("nonsense") is None


def test_a_store_on_all_addresses_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(store_module, "listen_as", lambda *_, **__: None)
    before = listening(os.getpid())
    store = hold_store("localhost", 0, 5, alone=False)
    (place,) = listening(os.getpid()) - before
    assert ip_address(place.address).is_unspecified
    assert place.port == store.port
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: localhost is not an address at which other machines reach this one")


def test_a_port_that_is_taken() -> None:
    with closing(listen("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"at 127.0.0.1:{port}: Address already in use; MASTER_ADDR and MASTER_P"):
            Rendezvous(Membership(0, 2, 0, 1, "127.0.0.1", port), 5).store  # noqa: B018


@pytest.mark.slow
def test_a_stranger_does_not_end_a_run_of_torchrun(tmp_path: Path) -> None:
    words = ("train.py", "training.max_steps=40", "training.log_every=1", "logger=none", f"output_dir={tmp_path}")
    environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY}
    started = subprocess.Popen([*TORCHRUN, "--nproc-per-node", "2", *words], cwd=ROOT, env=environment)
    try:
        wait_until(lambda: steps_logged(tmp_path) >= 2 or started.poll() is not None)
        workers = [pid for pid, fields in processes().items() if fields[3] == str(started.pid)]
        places = listening(*workers)
        assert len(workers) == 2
        assert len(places) >= 3  # the store, and one of gloo's for each worker
        assert {place.address for place in places} == {"127.0.0.1"}
        for place in places:
            with suppress(RuntimeError):  # gloo does not answer
                stranger(place, 1).set("stop", "")
        assert started.wait(60) == 0
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert summary(only_run(tmp_path))["status"] == "finished"


@pytest.mark.slow
def test_all_ranks_of_torchrun_end_if_the_run_is_finished(tmp_path: Path) -> None:
    """By workers that were started in another way."""
    words = (*QUICK, "training.max_steps=2", "resume=auto", f"output_dir={tmp_path}")
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    with background_ranks([words] * 2, [{**both, "RANK": f"{rank}"} for rank in range(2)], tmp_path) as runs:
        assert [run.wait() for run in runs] == [0, 0]
        assert "results: " in runs[0].stdout
    done = command(*words, program=(*TORCHRUN, "--nproc-per-node", "2", "train.py"))
    assert done.returncode == 0, done.stderr
    assert "already finished: " in done.stdout
    assert "error: " not in done.stderr
    assert only_run(tmp_path)
