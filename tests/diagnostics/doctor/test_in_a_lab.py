"""The doctor in networks that are known, or broken."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.labs.first_process import tool
from spardl.clusters import Network, parse_network
from tests.diagnostics.doctor.common import lines
from tests.support.labs import in_a_lab, lab
from tests.support.measuring import undisturbed

DOCTOR = f"{sys.executable} -m spardl.diagnostics.doctor"
# Seconds that the workers wait for each other: on a busy machine, some interpreters start much later than others.
PATIENCE = 15


def in_lab(script: str, *options: str, workers: int = 4) -> subprocess.CompletedProcess[str]:
    """The doctor as every worker of a lab at 1 Gbit/s, with something done before."""
    words = ["run", "--workers", str(workers), "--gbit", "1", *options, "--timeout", "200", "--", "sh", "-c", script]
    return lab(*words, timeout=240)


@in_a_lab
@pytest.mark.timeout(600)
@pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
def test_the_network_of_a_lab(tmp_path: Path) -> None:
    """A round of gloo takes the delay twice, see docs/clusters.md."""

    def measured() -> Network:
        done = in_lab(f"exec {DOCTOR} --out {tmp_path / 'lab.yaml'}", "--delay-ms", "4")
        assert done.returncode == 0, done.stdout + done.stderr
        found = parse_network(str(tmp_path / "lab.yaml"))
        assert found.alpha >= 8e-3
        return found

    undisturbed(
        measured,
        lambda found: found.gbit == pytest.approx(1.0, rel=0.1) and found.alpha <= 16e-3,
        seconds=300,
    )


@in_a_lab
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            "ip link set eth0 down",
            r"workers: worker 2 did not connect to 10\.77\.0\.1:29500 within 15 s \(3 of 4 did\); see",
        ),
        (
            # Once all have met, however long that takes.
            "(until grep -q '^ok  *peers:' {said}; do sleep 0.1; done; ip link set eth0 down) &",
            r"[\w -]+: worker 2 on \S+ stopped answering; see the output",
        ),
    ],
    ids=["from the start", "in the middle"],
)
def test_a_link_that_is_down(broken: str, said: str, tmp_path: Path) -> None:
    """Where it breaks in the middle, that is somewhere in a long row of examinations."""
    printed = tmp_path / "said.txt"
    printed.touch()
    again = f"while {DOCTOR} --timeout {PATIENCE} > {tmp_path}/$RANK.txt; do :; done"
    first = f"while {DOCTOR} --timeout {PATIENCE} > {printed}; do :; done; cat {printed}; exit 1"
    # The first worker must not be ended before it has spoken.
    third = f"{broken.format(said=printed)}\n {again}; sleep 190"
    done = in_lab(f"if [ $RANK = 2 ]; then {third}; fi; if [ $RANK = 0 ]; then {first}; fi; {again}; sleep 190")
    assert done.returncode == 1
    (line,) = lines(done.stdout, "FAILED")
    assert re.match(said, line), line


@in_a_lab
@pytest.mark.skipif(not tool("iptables"), reason="needs the program iptables")
def test_a_firewall_between_two(tmp_path: Path) -> None:
    wall = "if [ $RANK = 2 ]; then iptables -A INPUT -s 10.77.0.2 -j DROP; fi"
    done = in_lab(f"{wall}; exec {DOCTOR} --timeout {PATIENCE}", workers=3)
    assert done.returncode == 1
    found = lines(done.stdout, "FAILED")
    assert [re.sub(r"10\.77.*?\)", "..)", line).split(":")[1] for line in found] == [
        f" worker 1 ({socket.gethostname()}, ..) cannot be reached by worker 2",
        f" worker 2 ({socket.gethostname()}, ..) cannot be reached by worker 1",
    ]
