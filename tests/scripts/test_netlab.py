"""The network lab: real bytes over links of a chosen bandwidth and delay, and nothing left behind."""

from __future__ import annotations

import errno
import json
import math
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import netlab as script
from scripts.labs.delay_line import PACKET, Held, acceptance, attribute, binding, check, message, packet_number
from scripts.labs.first_process import Lab, tool
from tests.support.labs import (
    BAD_INPUT,
    LAB,
    ROOT,
    TERMINATED,
    TIMED_OUT,
    BackgroundRun,
    Started,
    in_a_lab,
    lab,
    missing,
    processes_in,
    processes_with,
    run,
    until,
)

BURST = 131072

# Prints one line of JSON per worker: its rank, and for each transfer seconds and the bytes that its interface sent and
# received. Only rank 0's link is full in the last two: in one direction each.
TRANSFERS = """
import json, sys, time
import torch
import torch.distributed as dist

def counted():
    folder = "/sys/class/net/eth0/statistics"
    return [int(open(f"{folder}/{way}_bytes").read()) for way in ("tx", "rx")]

def all_reduce():
    dist.all_reduce(data)

def fan_out():
    works = [dist.isend(data, peer) for peer in peers] if rank == 0 else [dist.irecv(data, 0)]
    [work.wait() for work in works]
    dist.barrier()

def fan_in():
    works = [dist.irecv(data.clone(), peer) for peer in peers] if rank == 0 else [dist.isend(data, 0)]
    [work.wait() for work in works]

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, data, line = dist.get_rank(), torch.ones(2 << 20), {}
peers = range(1, dist.get_world_size())
for transfer in (all_reduce, fan_out, fan_in):
    dist.barrier()
    before, start = counted(), time.monotonic()
    transfer()
    seconds = time.monotonic() - start
    line[transfer.__name__] = [seconds, *(new - old for new, old in zip(counted(), before))]
assert data[0].item() == dist.get_world_size()
sys.stdout.write(json.dumps({"rank": rank, **line}) + chr(10))
sys.stdout.flush()
dist.barrier()
"""
PAYLOAD = 4 * (2 << 20)
RING = PAYLOAD * 2 * 3 / 4


@pytest.fixture
def background_lab(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    started.end()


@in_a_lab
def test_links_have_the_bandwidth_and_count_the_bytes(tmp_path: Path) -> None:
    """What went over a link cannot have been faster than the link; what was counted is the payload and little more."""
    program, file = tmp_path / "transfers.py", tmp_path / "report.json"
    program.write_text(TRANSFERS)
    done = run("--json", str(file), "--", sys.executable, "-W", "ignore", str(program), workers=4, gbit="1")
    assert done.returncode == 0, done.stderr
    reported = [line[line.index("{") :] for line in [done.stdout, *done.stderr.splitlines()] if '{"rank"' in line]
    lines = sorted((json.loads(line) for line in reported), key=lambda line: line["rank"])
    assert [line["rank"] for line in lines] == list(range(4))
    for line in lines:
        seconds, _, received = line["all_reduce"]
        assert RING <= received <= 1.06 * RING
        assert seconds >= (received - BURST) * 8 / 1e9
    seconds, sent, _ = lines[0]["fan_out"]
    assert 3 * PAYLOAD <= sent <= 1.06 * 3 * PAYLOAD
    assert seconds >= (3 * PAYLOAD - BURST) * 8 / 1e9
    seconds, _, received = lines[0]["fan_in"]
    assert 3 * PAYLOAD <= received <= 1.06 * 3 * PAYLOAD
    assert seconds >= (3 * PAYLOAD - BURST) * 8 / 1e9
    report = json.loads(file.read_text())
    assert (report["workers"], report["gbit"], report["exit_code"]) == (4, 1.0, 0)
    for rank, interface in enumerate(report["interfaces"]):
        payload = RING + (PAYLOAD if rank else 3 * PAYLOAD)
        assert payload <= interface["sent"] <= 1.06 * payload
        assert payload <= interface["received"] <= 1.06 * payload


@in_a_lab
@pytest.mark.parametrize("options", [(), ("--user-namespace",)], ids=["default", "user namespace"])
def test_lines_of_workers_carry_their_rank(options: tuple[str, ...]) -> None:
    if reason := missing(*options):
        pytest.skip(reason)
    words = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME"
    script = f"echo {words} $(readlink /proc/self/ns/net) $(ls /sys/class/net)"
    done = run(*options, "--", "sh", "-c", script, workers=3, gbit="0.5")
    assert done.returncode == 0, done.stderr
    reported = sorted(line for line in done.stderr.splitlines() if line.startswith("["))
    assert [line[:6] for line in reported] == ["[1] 1 ", "[2] 2 "]
    fields = [line.split() for line in (done.stdout, *(line[4:] for line in reported))]
    assert [" ".join(row[:6]) for row in fields] == [f"{rank} 3 {rank} 3 10.77.0.1 eth0" for rank in range(3)]
    assert len({row[6] for row in fields} | {str(Path("/proc/self/ns/net").readlink())}) == 4
    assert [row[7:] for row in fields] == [["eth0", "lo"]] * 3


@in_a_lab
def test_bytes_of_the_table_are_those_of_the_run() -> None:
    """And of no other: the table of what two workers sent adds up."""
    sending = (
        "import os, socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); os.environ['RANK'] == '1' or "
        "[s.sendto(bytes(1000), ('10.77.0.2', 9)) for _ in range(1000)]"
    )
    done = run("--", sys.executable, "-c", sending, gbit="1")
    assert done.returncode == 0, done.stderr
    table = [line.replace(",", "").split() for line in done.stderr.splitlines()]
    sent = {row[0]: int(row[-2]) for row in table[-3:]}
    assert 1_000_000 <= sent["0"] <= 1_060_000
    assert sent["all"] == sent["0"] + sent["1"]


@in_a_lab
def test_a_worker_that_fails_ends_all_with_its_exit_code(tmp_path: Path) -> None:
    script = f"[ $RANK = 1 ] && exit 7; sleep 77; touch {tmp_path}/went_on"
    done = run("--", "sh", "-c", script, workers=3)
    assert done.returncode == 7
    assert "error: worker 1 ended with exit code 7; terminating all workers" in done.stderr.splitlines()
    assert not (tmp_path / "went_on").exists()


@in_a_lab
def test_nothing_is_left_of_a_lab_and_what_its_workers_started(tmp_path: Path) -> None:
    """Also not of a worker's child in a session of its own, which ends later than its worker."""
    script = f"readlink /proc/self/ns/net; setsid sh -c 'sleep 77; : {tmp_path}' >/dev/null 2>&1 & exit 0"
    done = run("--", "sh", "-c", script)
    assert done.returncode == 0
    assert not processes_with(str(tmp_path))
    assert not processes_in(done.stdout.strip())


@in_a_lab
def test_the_timeout_ends_all() -> None:
    done = lab("run", "--workers", "2", "--gbit", "inf", "--timeout", "0.3", "--", "sleep", "77")
    assert done.returncode == TIMED_OUT
    assert "did not end within 0.3 s" in done.stderr


@in_a_lab
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, TERMINATED)])
def test_an_interrupted_lab_ends_its_workers_with_sigterm(
    background_lab: Started, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    script = f"trap 'touch {tmp_path}/ended$RANK; exit 0' TERM; touch {tmp_path}/ready$RANK; sleep 77 & wait"
    one = background_lab(script=script)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    one.process.send_signal(number)
    assert one.process.wait(timeout=60) == code
    assert (tmp_path / "ended0").exists()
    assert (tmp_path / "ended1").exists()
    assert one.gone()


@in_a_lab
def test_a_killed_launcher_takes_its_lab_along(background_lab: Started) -> None:
    one = background_lab()
    one.process.kill()
    until(one.gone)


@in_a_lab
def test_two_labs_do_not_see_each_other(background_lab: Started) -> None:
    one, two = background_lab(), background_lab()
    assert len({*one.namespaces, *two.namespaces}) == 4


@pytest.mark.parametrize(
    ("workers", "gbit", "delay", "part"),
    [
        (4, 5.0, 0.0, None),
        (4, 5.1, 0.0, "0.1 Gbit/s to 5 with 4, 2.5 with 8, 1 with 16 workers; 5.1 with 4 may differ"),
        (5, 3.0, 0.0, "3 with 5 may differ"),
        (16, 1.0, 0.0, None),
        (4, 0.05, 0.0, "0.05 with 4 may"),
        (17, 1.0, 0.0, "1 with 17 may"),
        (17, math.inf, 10.0, None),
        (2, 1.0, 0.5, None),
        (2, 1.0, 0.4, "from 0.5 to 10 ms; 0.4 ms may"),
        (2, 0.1, 11.0, "11 ms may"),
        (2, 2.0, 5.0, None),
        (2, 2.1, 5.0, "2.5 MB of a connection are in flight; at 5 ms, 2 Gbit/s"),
    ],
)
def test_what_was_not_verified_is_doubted(workers: int, gbit: float, delay: float, part: str | None) -> None:
    doubts = list(Lab(workers, gbit, 1.0, delay).doubts())
    assert len(doubts) == (part is not None)
    assert all(part in doubt for doubt in doubts if part)


@in_a_lab
def test_a_doubt_is_reported_and_the_lab_still_runs() -> None:
    done = run("--", "true", gbit="5.5")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: on two cores, links had the requested bandwidth")


@pytest.mark.parametrize(("gbit", "burst"), [(0.1, BURST), (2.0, BURST), (2.5, 1_250_000), (5.0, 2_500_000)])
def test_a_fast_link_lets_one_tick_of_the_kernel_through(gbit: float, burst: int) -> None:
    (line,) = Lab(2, gbit, 1.0).shaping("eth0")
    assert f"rate {round(gbit * 1e9)}bit burst {burst} " in line


@pytest.fixture
def netlab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module."""
    handler = signal.getsignal(signal.SIGTERM)
    yield script
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", "required: run"),
        ("foo", "invalid choice: 'foo'"),
        ("run --gbit 1 -- true", "required: --workers"),
        ("run --workers 2 --gbit 1", "no command given; put it after --"),
        ("run --workers 0 --gbit 1 -- true", "--workers must be from 1 to 250, got 0"),
        ("run --workers 251 --gbit 1 -- true", "got 251"),
        ("run --workers 2 --gbit nan -- true", "--gbit must be from 0.001 to 100, or inf"),
        ("run --workers 2 --gbit=-inf -- true", "got -inf"),
        ("run --workers 2 --gbit 1 --timeout 0 -- true", "--timeout must be above 0"),
        ("run --workers 2 --gbit 1 --delay-ms=0.001 -- true", "--delay-ms must be from 0.01 to 1000"),
        ("run --workers 2 --gbit 1 --delay-ms=-1 -- true", "or 0 for no delay, got -1"),
        ("run --workers 2 --gbit 1 --delay-ms=1001 -- true", "or 0 for no delay, got 1001"),
        ("run --workers 2 --gbit 1 --delay-ms=inf -- true", "or 0 for no delay, got inf"),
        ("run --workers 2 --gbit 1 --delay-ms=nan -- true", "or 0 for no delay, got nan"),
        ("run --workers 2 --gbit 1 --delay-ms=soon -- true", "argument --delay-ms: invalid float value: 'soon'"),
        ("run --workers 2 --gbit 1 -- no-such-program", "program no-such-program not found"),
        ("run --workers 2 --gbit 1 --json /no/such/folder/x -- true", "create the folder /no/such/folder first"),
    ],
)
def test_bad_input_is_one_line(netlab: Any, capsys: pytest.CaptureFixture[str], words: str, part: str) -> None:
    assert netlab.main(words.split()) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert part in line


def test_missing_programs_are_named(
    netlab: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlab, "tool", lambda name: None if name == "tc" else name)
    assert netlab.main(["run", "--workers", "2", "--gbit", "1", "--", sys.executable]) == BAD_INPUT
    error = "error: missing programs: tc; install iproute2, as in apt-get install iproute2\n"
    assert capsys.readouterr().err == error


@in_a_lab
def test_without_permission_the_line_says_what_to_do() -> None:
    """In a user namespace that allows no network namespace, neither way is open."""
    forbidding = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" "$@"'
    command = [*LAB, "run", "--workers", "2", "--gbit", "1", "--", "true"]
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", forbidding, *command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == BAD_INPUT
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: namespaces are not allowed here")
    assert "run as root" in line


DELAY_LINE = str(ROOT / "scripts" / "labs" / "delay_line.py")
DELAY = 3.0
BYTES = 4 << 20

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
    result = min(round_trip(there) for _ in range(20))
    there.sendall(bytes({BYTES}))
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
    result = [int(Path("/sys/class/net/eth0/statistics/rx_packets").read_text()), int(queued[7])]
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(result))
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


def run_delayed(*words: str, delay: float = DELAY) -> Any:
    return lab("run", "--workers", "2", "--gbit", "inf", "--delay-ms", str(delay), "--timeout", "200", *words)


@delayed
@pytest.mark.parametrize("options", [(), ("--user-namespace",)], ids=["default", "user namespace"])
def test_nothing_arrives_too_early_and_all_is_counted(options: tuple[str, ...], tmp_path: Path) -> None:
    if reason := missing(*options):
        pytest.skip(reason)
    report = tmp_path / "report.json"
    done = run_delayed(*options, "--json", str(report), "--", sys.executable, "-c", TALK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert json.loads((tmp_path / "0").read_text()) >= 2e-3 * DELAY
    received, queued = json.loads((tmp_path / "1").read_text())
    # Large segments are one packet: they would be many in the queue if they had been cut on their way into it.
    assert 0 < queued <= received
    found = json.loads(report.read_text())
    assert found["delay_ms"] == DELAY
    assert BYTES <= found["interfaces"][0]["sent"] <= 1.06 * BYTES
    assert BYTES <= found["interfaces"][1]["received"] <= 1.06 * BYTES


@delayed
def test_without_its_delay_line_a_lab_ends_with_an_error() -> None:
    done = run_delayed("--", sys.executable, "-c", SIGNALLING, "kill", DELAY_LINE)
    assert done.returncode == 128 + signal.SIGKILL
    assert "error: the delay line ended with exit code 137; terminating all workers" in done.stderr.splitlines()


@delayed
@pytest.mark.parametrize("options", [(), ("--user-namespace",)], ids=["default", "user namespace"])
def test_dropped_packets_are_reported(options: tuple[str, ...]) -> None:
    if reason := missing(*options):
        pytest.skip(reason)
    done = run_delayed(*options, "--", sys.executable, "-c", SIGNALLING, "flood", DELAY_LINE)
    assert done.returncode == 0, done.stderr
    (reported,) = re.findall(r"warning: full queues of the delay line dropped (\d+) packets", done.stderr)
    assert 70000 - 65536 <= int(reported) <= 70000


def delay_lines(of: BackgroundRun) -> list[int]:
    """The delay line of a lab, while there is one."""
    return [
        process
        for process in processes_with("delay_line.py")
        if int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]) == of.first()
    ]


@delayed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_delay_line_ends_with_its_lab(background_lab: Started, number: signal.Signals) -> None:
    one = background_lab("--delay-ms", "1")
    (line,) = delay_lines(one)
    one.process.send_signal(number)
    until(one.gone)
    until(lambda: not Path(f"/proc/{line}").exists())


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


@given(st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=9), max_size=3))
def test_a_packets_number_is_found_behind_other_attributes(number: int, others: list[bytes]) -> None:
    before = [struct.pack("=HH", 4 + len(value), 7) + value + bytes(-len(value) % 4) for value in others]
    report = message(PACKET, 0, *before, attribute(1, "IHB", number, 0x800, 1), *before)
    assert packet_number(report) == number


def test_other_messages_are_errors() -> None:
    refusal = struct.pack("=IHHIIi", 36, 2, 0, 0, 0, -errno.ENOBUFS) + bytes(16)
    for read in (packet_number, check):
        with pytest.raises(OSError, match="No buffer space"):
            read(refusal)
    check(struct.pack("=IHHIIi", 36, 2, 0, 0, 0, 0) + bytes(16))
    with pytest.raises(OSError, match="has no packet number"):
        packet_number(message(PACKET, 0, attribute(3, "I", 5)))


def test_messages_have_the_layout_of_the_kernel() -> None:
    """As linux/netlink.h and linux/netfilter/nfnetlink_queue.h say."""
    head = struct.pack("=IHHII", 32, 0x303, 1, 0, 0) + bytes(4)
    assert acceptance(258) == head + struct.pack("=HH", 12, 2) + bytes.fromhex("00000001 00000102")
    text = binding()
    assert struct.unpack_from("=IHH", text) == (len(text), 0x302, 5)
    assert len(text) % 4 == 0
    assert bytes.fromhex("01000002") in text[20:]  # bind, IPv4
    assert struct.pack("=HH", 9, 2) + bytes.fromhex("00000000 01") in text  # no data


def test_only_a_delay_needs_iptables(
    netlab: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlab, "tool", lambda name: None if name == "iptables" else name)
    monkeypatch.setattr(netlab, "isolation", lambda user: ["true"])
    monkeypatch.setattr(netlab, "attend", lambda command, timeout: 0)
    words = ["run", "--workers", "2", "--gbit", "1", "--", sys.executable]
    assert netlab.main(words) == 0
    assert netlab.main([*words[:5], "--delay-ms", "1", *words[5:]]) == BAD_INPUT
    error = "error: missing programs: iptables; install iptables, as in apt-get install iptables\n"
    assert capsys.readouterr().err == error
