"""Delays in the network lab: nobody gets anything too early, nothing is lost, and no lab goes on without its delay."""

from __future__ import annotations

import errno
import json
import math
import re
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import netlab as script
from scripts.labs.delay_line import PACKET, Held, acceptance, attribute, binding, check, message, packet_number
from scripts.labs.first_process import Lab, tool
from tests.support.labs import BAD_INPUT, ROOT, Beside, Started, in_a_lab, lab, missing, processes_with, until

DELAY_LINE = str(ROOT / "scripts" / "labs" / "delay_line.py")
DELAY = 3.0
PAYLOAD = 4 << 20

# Worker 0 tells the shortest of some round trips in seconds; worker 1, whom it then sends the payload to, how many
# packets its interface has received and how many of them were in the queue.
TALK = f"""
import json, os, socket, sys, time
from pathlib import Path

def round_trip(there):
    began = time.monotonic()
    there.sendall(b"x")
    there.recv(1)
    return time.monotonic() - began

if os.environ["RANK"] == "0":
    with socket.create_server(("", 5000)) as server:
        print("", file=open(sys.argv[1] + "/listening", "w"))
        there = server.accept()[0]
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    told = min(round_trip(there) for _ in range(20))
    there.sendall(bytes({PAYLOAD}))
    there.shutdown(socket.SHUT_WR)
    there.recv(1)
else:
    while not os.path.exists(sys.argv[1] + "/listening"):
        time.sleep(0.01)
    there = socket.create_connection(("10.77.0.1", 5000))
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(20):
        there.recv(1)
        there.sendall(b"x")
    while there.recv(1 << 16):
        pass
    queued = Path("/proc/net/netfilter/nfnetlink_queue").read_text().split()
    told = [int(Path("/sys/class/net/eth0/statistics/rx_packets").read_text()), int(queued[7])]
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(told))
"""

# Worker 0 kills the delay line, or stops it and sends more than it has room for.
SIGNALLING = """
import os, signal, socket, sys, time
from pathlib import Path

def line():
    commands = Path("/proc").glob("[0-9]*/cmdline")
    (found,) = [path for path in commands if path.read_bytes().split(bytes(1))[1:2] == [sys.argv[-1].encode()]]
    return int(found.parent.name)

if os.environ["RANK"] == "1":
    time.sleep(77 * (sys.argv[1] == "kill"))
elif sys.argv[1] == "kill":
    os.kill(line(), signal.SIGKILL)
    time.sleep(77)
else:
    os.kill(line(), signal.SIGSTOP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        for _ in range(70000):
            there.sendto(b"", ("10.77.0.2", 9))
    os.kill(line(), signal.SIGCONT)
"""


def delayed(test: Callable[..., Any]) -> Callable[..., Any]:
    needy = pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
    marked: Callable[..., Any] = needy(in_a_lab(test))
    return marked


def run(*words: str, delay: float = DELAY) -> Any:
    return lab("run", "--workers", "2", "--gbit", "inf", "--delay-ms", str(delay), "--timeout", "200", *words)


@delayed
@pytest.mark.parametrize("options", [(), ("--user-namespace",)], ids=["default", "user namespace"])
def test_nothing_arrives_too_early_and_all_is_counted(options: tuple[str, ...], tmp_path: Path) -> None:
    if reason := missing(*options):
        pytest.skip(reason)
    report = tmp_path / "report.json"
    done = run(*options, "--json", str(report), "--", sys.executable, "-c", TALK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert json.loads((tmp_path / "0").read_text()) >= 2e-3 * DELAY
    received, queued = json.loads((tmp_path / "1").read_text())
    # Large segments are one packet: they would be many in the queue if they had been cut on their way into it.
    assert 0 < queued <= received
    found = json.loads(report.read_text())
    assert found["delay_ms"] == DELAY
    assert PAYLOAD <= found["interfaces"][0]["sent"] <= 1.06 * PAYLOAD
    assert PAYLOAD <= found["interfaces"][1]["received"] <= 1.06 * PAYLOAD


@delayed
def test_without_its_delay_line_a_lab_ends_with_an_error() -> None:
    done = run("--", sys.executable, "-c", SIGNALLING, "kill", DELAY_LINE)
    assert done.returncode == 128 + signal.SIGKILL
    assert "error: the delay line ended with exit code 137; terminating all workers" in done.stderr.splitlines()


@delayed
@pytest.mark.parametrize("options", [(), ("--user-namespace",)], ids=["default", "user namespace"])
def test_packets_that_found_no_room_are_told_of(options: tuple[str, ...]) -> None:
    if reason := missing(*options):
        pytest.skip(reason)
    done = run(*options, "--", sys.executable, "-c", SIGNALLING, "flood", DELAY_LINE)
    assert done.returncode == 0, done.stderr
    (told,) = re.findall(r"warning: full queues of the delay line dropped (\d+) packets", done.stderr)
    assert 70000 - 65536 <= int(told) <= 70000


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    started.end()


def delay_lines(of: Beside) -> list[int]:
    """The delay line of a lab, while there is one."""
    return [
        process
        for process in processes_with("delay_line.py")
        if int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]) == of.first()
    ]


@delayed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_delay_line_ends_with_its_lab(beside: Started, number: signal.Signals) -> None:
    one = beside("--delay-ms", "1")
    (line,) = delay_lines(one)
    one.process.send_signal(number)
    until(one.gone)
    until(lambda: not Path(f"/proc/{line}").exists())


@delayed
def test_a_queue_has_one_owner() -> None:
    again = f"[ $RANK = 1 ] || exec {sys.executable} {ROOT}/scripts/labs/delay_line.py 1 netlab-w0"
    done = run("--", "sh", "-c", again)
    assert done.returncode == 1
    assert done.stdout == "[Errno 1] Operation not permitted\n"


@given(
    st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=30),
    st.floats(0.001, 5),
)
def test_packets_are_held_as_long_as_asked_for_and_in_order(steps: list[tuple[float, bool]], delay: float) -> None:
    """Time goes on by some seconds, then a packet arrives, or those may go whose time has come."""
    held, now, arrived, gone = Held(delay), 0.0, list[float](), 0
    for passed, arrives in steps:
        now += passed
        if arrives:
            held.add(len(arrived), now)
            arrived.append(now)
            continue
        last = held.pop(now)
        late = [number for number, when in enumerate(arrived) if when + delay <= now]
        assert last == (late[-1] if len(late) > gone else None)
        gone = len(late)
        assert held.due() == (arrived[gone] + delay if gone < len(arrived) else None)


def of_kernel(kind: int, *attributes: bytes) -> bytes:
    return message(kind, 0, *attributes)


@given(st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=9), max_size=3))
def test_a_packets_number_is_found_behind_other_attributes(number: int, others: list[bytes]) -> None:
    before = [struct.pack("=HH", 4 + len(value), 7) + value + bytes(-len(value) % 4) for value in others]
    assert packet_number(of_kernel(PACKET, *before, attribute(1, "IHB", number, 0x800, 1), *before)) == number


def test_other_messages_are_errors() -> None:
    refusal = struct.pack("=IHHIIi", 36, 2, 0, 0, 0, -errno.ENOBUFS) + bytes(16)
    for read in (packet_number, check):
        with pytest.raises(OSError, match="No buffer space"):
            read(refusal)
    check(struct.pack("=IHHIIi", 36, 2, 0, 0, 0, 0) + bytes(16))
    with pytest.raises(OSError, match="has no packet number"):
        packet_number(of_kernel(PACKET, attribute(3, "I", 5)))


def test_messages_have_the_layout_of_the_kernel() -> None:
    """As linux/netlink.h and linux/netfilter/nfnetlink_queue.h say."""
    assert acceptance(258) == struct.pack("=IHHII", 32, 0x303, 1, 0, 0) + bytes(4) + struct.pack(
        "=HH", 12, 2
    ) + bytes.fromhex("00000001 00000102")
    text = binding()
    assert struct.unpack_from("=IHH", text) == (len(text), 0x302, 5)
    assert len(text) % 4 == 0
    assert bytes.fromhex("01000002") in text[20:]  # bind, IPv4
    assert struct.pack("=HH", 9, 2) + bytes.fromhex("00000000 01") in text  # no data


@pytest.mark.parametrize(
    ("gbit", "delay", "part"),
    [
        (1.0, 0.0, None),
        (1.0, 0.5, None),
        (1.0, 10.0, None),
        (math.inf, 10.0, None),
        (1.0, 0.4, "from 0.5 to 10 ms; 0.4 ms may"),
        (0.1, 11.0, "11 ms may"),
        (2.0, 5.0, None),
        (2.1, 5.0, "2.5 MB in flight, which at 5 ms is 2 Gbit/s"),
    ],
)
def test_a_delay_that_was_not_checked_is_doubted(gbit: float, delay: float, part: str | None) -> None:
    doubt = Lab(2, gbit, 1.0, delay).delay_doubt()
    assert (part in doubt) if part and doubt else doubt is part


@pytest.fixture
def netlab(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    handler = signal.getsignal(signal.SIGTERM)
    yield script
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("value", ["-1", "0.001", "1001", "nan", "inf", "soon"])
def test_bad_delays_are_one_line(netlab: ModuleType, capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert netlab.main(["run", "--workers", "2", "--gbit", "1", f"--delay-ms={value}", "--", "true"]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "--delay-ms" in line
    assert value in line


def test_only_a_delay_needs_iptables(
    netlab: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlab, "tool", lambda name: None if name == "iptables" else name)
    monkeypatch.setattr(netlab, "isolation", lambda user: ["true"])
    monkeypatch.setattr(netlab, "attend", lambda command, timeout: 0)
    words = ["run", "--workers", "2", "--gbit", "1", "--", sys.executable]
    assert netlab.main(words) == 0
    assert netlab.main([*words[:5], "--delay-ms", "1", *words[5:]]) == BAD_INPUT
    error = "error: missing programs: iptables; install iptables, as in apt-get install iptables\n"
    assert capsys.readouterr().err == error
