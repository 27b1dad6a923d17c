"""The doctor finds slow links, and fits a network."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spardl.clusters import Network, ProcessGroupCluster
from spardl.diagnostics.doctor import board, links
from tests.diagnostics.doctor.common import Doctor, lines
from tests.support.harness import run_workers
from tests.support.measuring import undisturbed


@given(hosts=st.lists(st.sampled_from("abcdef"), min_size=2, max_size=12))
def test_pairs_measured_at_once_share_no_host(hosts: list[str]) -> None:
    groups = links.batches(hosts)
    assert sorted(itertools.chain(*groups)) == list(itertools.combinations(range(len(hosts)), 2))
    for group in groups:
        used = [host for pair in group for host in {hosts[rank] for rank in pair}]
        assert len(used) == len(set(used))


def test_sixteen_hosts_are_done_in_few_turns(doctor: Doctor) -> None:
    groups = links.batches([str(rank) for rank in range(16)])
    assert len(groups) <= 2 * 15 - 1


@pytest.mark.parametrize(
    ("size", "changed", "said"),
    [
        (4, {}, []),
        (4, {(1, 2): 0.6}, []),
        (4, {(1, 2): 0.3}, ["links: from 1 to 2 0.3 Gbit/s, at least 2 x slower"]),
        (2, {(1, 0): 0.3}, ["links: from 1 to 0 0.3 Gbit/s, at least 2 x slower than usual"]),
        (3, {(1, 0): 0.1, (1, 2): 0.2}, ["links: all from worker 1 0.1 Gbit/s"]),
        (
            3,
            {(1, 0): 0.1, (1, 2): 0.2, (0, 1): 0.15, (2, 1): 0.1},
            ["links: all from worker 1 0.1 Gbit/s", "links: all to worker 1 0.1 Gbit/s"],
        ),
        (4, {(2, 3): 0.7, (3, 2): 1.6}, ["links: from 2 to 3 0.7 Gbit/s, but 1.6 in the other direction"]),
    ],
)
def test_slow_links_are_pointed_out(
    size: int,
    changed: dict[tuple[int, int], float],
    said: list[str],
    doctor: Doctor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = warnings_of(size, capsys, gbit=changed)
    assert len(found) == len(said), found
    assert all(line.startswith(text) for line, text in zip(found, said, strict=True)), found


def test_late_links_are_pointed_out(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    assert not warnings_of(4, capsys, seconds={(0, 1): 450e-6})
    (found,) = warnings_of(4, capsys, seconds={(0, 1): 5e-3})
    assert found.startswith("links: from 0 to 1 5000 us, at least 2 x the usual latency; check its cables")


def test_single_machine_messages_mention_no_cables(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = warnings_of(4, capsys, networked=False, seconds={(0, 1): 5e-3})
    assert re.search(r"4 workers share \d+ cores here; check what else runs on them$", found)
    assert "cables" not in found


def warnings_of(
    size: int, capsys: pytest.CaptureFixture[str], networked: bool = True, **changed: dict[tuple[int, int], float]
) -> list[str]:
    """What is said of links of 1 Gbit/s and 100 us but for some."""
    values = {
        name: [[changed.get(name, {}).get((a, b), usual) for b in range(size)] for a in range(size)]
        for name, usual in (("seconds", 1e-4), ("gbit", 1.0))
    }
    links.check_links(links.Links(**values), networked, board.Findings(prints=True))
    return lines(capsys.readouterr().out, "warning")


def test_what_rounds_say_of_a_network(doctor: Doctor) -> None:
    sizes = (8, 1_000_000, 4_000_000)
    assert links.network_of(sizes, [1e-3 + 8e-9 * size for size in sizes]).gbit == pytest.approx(1)
    assert links.network_of(sizes, [1e-3, 9e-3, 33e-3]).alpha == 1e-3
    # Where noise hides the bandwidth, it is at least what the longest message had.
    assert links.network_of(sizes, [4e-3, 3e-3, 2e-3]).gbit == pytest.approx(16)


def test_few_rounds_take_no_negative_time(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "seconds", lambda cluster, program, turns: [1e-3, 9e-3, 20e-3, 90e-3][:turns])

    class Alone:
        local_ranks, size, device = (0,), 2, None

    assert links._round(Alone(), 8, 4) >= 1e-3


def _fitted(cluster: ProcessGroupCluster) -> Network:
    slow = ProcessGroupCluster(throttle=Network(alpha=5e-3, gbit=0.2))
    found: Network = links.fit(slow, speed=25e6)
    return found


@pytest.mark.slow
def test_alpha_and_beta_of_a_known_network(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a throttle makes of this machine is known, but for what cores do on top."""
    # Of more and longer messages than in the other tests, a busy core disturbs a smaller part.
    for name, value in (("_SHORT_PROBES", 50), ("_LONG_PROBES", 24), ("_LONGEST", 1 << 20)):
        monkeypatch.setattr(links, name, value)

    def measured() -> Network:
        one, other = run_workers(2, _fitted)
        assert one == other
        found: Network = one
        assert found.alpha >= 5e-3
        return found

    undisturbed(
        measured,
        lambda found: found.alpha <= 10e-3 and found.gbit == pytest.approx(0.2, rel=0.1),
        times=20,
    )
