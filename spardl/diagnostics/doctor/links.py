"""Measures latency and bandwidth of the network: of every link between two workers, and fitted over all workers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

from spardl.basics.files import write_atomically
from spardl.clusters import Network, ProcessGroupCluster, gather_rows
from spardl.clusters.network import network_text
from spardl.diagnostics.doctor.board import Findings
from spardl.diagnostics.doctor.peers import SHORT, ring, round_trip, seconds
from spardl.protocol.programs import AllReduce, Program
from spardl.schedules.fusion import Linear

__all__ = [
    "Links",
    "batches",
    "check_all_reduce",
    "check_links",
    "fit",
    "measure",
    "network_of",
    "probe",
    "write_preset",
]


# Fitted alpha and beta, and a comparison with the time of torch's all-reduce.


# Shortest and longest message in bytes, rounds of short and long messages, and seconds for all rounds of long ones.
_SHORTEST, _LONGEST, _SHORT_PROBES, _LONG_PROBES, _PROBE_BUDGET = 1 << 16, 1 << 22, 200, 24, 6.0
# Bytes of the all-reduce, longest duration in seconds, repetitions, and largest accepted ratio to the bound.
_BYTES, _PATIENCE, _TIMES, _FAR = 25_000_000, 1.0, 4, 2.0


def fit(cluster: ProcessGroupCluster, speed: float) -> Network:
    """Measures rounds in which every worker sends to the next one, and fits latency and bandwidth to their durations.

    For each message size, a worker takes the first decile of its durations, because other work on the cores only adds
    time. The fit uses the median of the workers' values, so the result is equal on all of them.

    Args:
        cluster: Cluster that connects the workers.
        speed: Rough bandwidth of a link in bytes per second; on slow links, messages are shorter.
    """
    longest = int(min(_LONGEST, max(4 * _SHORTEST, speed * _PROBE_BUDGET / (2 * _LONG_PROBES))))
    sizes = (SHORT, longest // 4, longest // 2, longest)
    mine = [_round(cluster, size, _SHORT_PROBES if size == SHORT else _LONG_PROBES) for size in sizes]
    rows = gather_rows(cluster, [torch.tensor(mine, dtype=torch.float64)])
    times = [median(column) for column in zip(*(row.tolist() for row in rows), strict=True)]
    return network_of(sizes, times)


def network_of(sizes: Sequence[int], times: Sequence[float]) -> Network:
    """Returns the network whose latency and bandwidth best fit the durations of rounds.

    Args:
        sizes: Sizes of messages in bytes, in ascending order.
        times: Duration of a round in seconds, for each size.
    """
    slope = Linear.fit(sizes, times).per_entry
    # On a loaded machine long messages may look no slower than short ones; then the longest message gives a lower bound
    # of the bandwidth.
    return Network(alpha=times[0], gbit=8e-9 / (slope or times[-1] / sizes[-1]))


def _round(cluster: ProcessGroupCluster, size: int, turns: int) -> float:
    (rank,) = cluster.local_ranks
    found = seconds(cluster, lambda: ring(rank, cluster.size, size, cluster.device), turns)
    # The default "exclusive" method extrapolates below the minimum when there are few rounds.
    return quantiles(found, n=10, method="inclusive")[0]


def check_all_reduce(cluster: ProcessGroupCluster, network: Network, networked: bool, findings: Findings) -> None:
    """Times torch's all-reduce of 25 MB (less on slow links), and compares it with the bound of a ring all-reduce."""
    share = 2 * (cluster.size - 1) / cluster.size
    nbytes = int(min(_BYTES, _PATIENCE / (share * network.beta))) // 4 * 4
    # The minimum, because other work on the cores only adds time.
    took = min(cluster.time_uncounted([_all_reduce(nbytes, cluster.device)])[0] for _ in range(_TIMES))
    slowest = max(float(row) for row in gather_rows(cluster, [torch.tensor([took])]))
    bound = 2 * (cluster.size - 1) * network.alpha + share * nbytes * network.beta
    text = (
        f"all-reduce: torch takes {1e3 * slowest:.1f} ms for {nbytes / 1e6:.3g} MB, {slowest / bound:.2f} x the ring "
        f"bound of the measured network ({1e3 * bound:.1f} ms)"
    )
    if 1 / _FAR <= slowest / bound <= _FAR:
        findings.ok(text)
    else:
        used = "cores and links" if networked else "the cores"
        findings.warn(
            f"{text}; predictions will be wrong by this factor; check what else uses {used}, and measure again"
        )


def _all_reduce(nbytes: int, device: torch.device) -> Program[None]:
    yield AllReduce(torch.zeros(nbytes // 4, device=device))


def write_preset(network: Network, hosts: Sequence[str], backend: str, out: Path | None, findings: Findings) -> None:
    """Reports the fitted network, and writes it to the file ``out``, if given."""
    found = f"network: alpha {1e6 * network.alpha:.0f} us, {network.gbit:.3g} Gbit/s when all workers send at once"
    if not out:
        findings.ok(f"{found}; --out network.yaml writes it to a file")
        return
    measured: dict[str, str | float] = {
        "by": "spardl doctor: rounds in which every worker sends to the next, first deciles by message size",
        "units": "alpha in seconds, gbit in Gbit/s of a link, each way",
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "workers": len(hosts),
        "hosts": ", ".join(dict.fromkeys(hosts)),
        "backend": backend,
    }
    try:
        write_atomically(out, network_text(network, measured).encode())
    except OSError as error:
        findings.fail(f"{found}; cannot be written to {out}: {error.strerror}; choose another --out")
        return
    findings.ok(f"{found}; written to {out}, which spardl advise, spardl timeline and train.py accept")


# Seconds for all pairs together, which limit the size of long messages; then bytes: least, most, and of the probe.
_BUDGET, _LEAST, _MOST, _PROBE = 12.0, 1 << 16, 1 << 22, 1 << 20
_SHORT_TURNS, _LONG_TURNS = 20, 4
# A link is reported if it is off by this factor; a latency must also exceed the usual one by these seconds, because
# busy cores answer late.
_OFF, _LATE = 2.0, 0.5e-3
_MOST_LINES = 8
# What to check: between machines, and within one.
_NETWORK = "check its cables, ports and drivers, and what else uses it"
_CORES = "{workers} workers share {cores} cores here; check what else runs on them"


@dataclass(frozen=True)
class Links:
    """Latency and bandwidth of all links: entry [i][j] is the link from worker i to worker j; [i][i] is 0.

    Attributes:
        seconds: One-way time of a short message in seconds, half of the round trip.
        gbit: Bandwidth in Gbit/s.
    """

    seconds: list[list[float]]
    gbit: list[list[float]]


def batches(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Divides all pairs of workers into groups whose pairs are measured at the same time.

    No host occurs in two pairs of a group, because the pairs would then share its link or its cores.

    Args:
        hosts: Host of each worker.
    """
    groups: list[list[tuple[int, int]]] = []
    busy: list[set[str]] = []
    for pair in itertools.combinations(range(len(hosts)), 2):
        taken = {hosts[rank] for rank in pair}
        place = next((place for place, used in enumerate(busy) if not used & taken), len(groups))
        if place == len(groups):
            groups.append([])
            busy.append(set())
        groups[place].append(pair)
        busy[place] |= taken
    return groups


def probe(cluster: ProcessGroupCluster) -> float:
    """Returns the rough bandwidth of the slowest link in bytes per second, which sets the size of later messages."""
    (rank,) = cluster.local_ranks
    found = median(seconds(cluster, lambda: ring(rank, cluster.size, _PROBE, cluster.device), 2))
    return _PROBE / max(float(row) for row in gather_rows(cluster, [torch.tensor([found])]))


def measure(cluster: ProcessGroupCluster, hosts: Sequence[str], speed: float) -> Links:
    """Measures all links; every worker must call this, and all get the same result.

    Args:
        cluster: Cluster that connects the workers.
        hosts: Host of each worker.
        speed: Rough bandwidth of a link in bytes per second.
    """
    groups, size = batches(hosts), cluster.size
    turns = 2 * (_LONG_TURNS + 1) * len(groups)
    length = int(min(_MOST, max(_LEAST, speed * _BUDGET / turns)))
    links = Links(*([[0.0] * size for _ in range(size)] for _ in range(2)))
    # Each direction separately: a link may be slow in one direction only.
    for group, swap in itertools.product(groups, (False, True)):
        pairs = [pair[::-1] if swap else pair for pair in group]
        mine = next((pair for pair in pairs if cluster.local_ranks[0] in pair), None)
        row = torch.tensor(_round_trips(cluster, mine, length) if mine else [0.0, 0.0], dtype=torch.float64)
        # Also a barrier: idle workers must not start with the next group.
        rows = gather_rows(cluster, [row])
        for first, second in pairs:
            short, long = rows[first].tolist()
            links.seconds[first][second] = short / 2
            # On busy cores a short message may take longer than a long one, so the difference is bounded from below.
            links.gbit[first][second] = 8e-9 * (length - SHORT) / max(long - short, long / 2)
    return links


def _round_trips(cluster: ProcessGroupCluster, pair: tuple[int, int], length: int) -> list[float]:
    """Returns the round-trip seconds of a short message, and of a long message with a short reply."""
    (rank,) = cluster.local_ranks

    # The minimum of several: other work on the cores only adds time, and a median of a few would look like a slow link.
    def least(size: int, turns: int) -> float:
        return min(seconds(cluster, lambda: round_trip(rank, *pair, size, cluster.device), turns))

    return [least(SHORT, _SHORT_TURNS), least(length, _LONG_TURNS)]


def check_links(links: Links, networked: bool, findings: Findings) -> None:
    """Prints all links, and reports those with low bandwidth, high latency, or one slow direction.

    Args:
        links: Measured links.
        networked: Whether a network connects the workers.
        findings: Receives the results.
    """
    usual, delay = _usual(links.gbit, max), _usual(links.seconds, min)
    findings.ok(f"links: typically {usual:.3g} Gbit/s and {1e6 * delay:.0f} us one way; rows send to columns:")
    findings.show(_matrix("Gbit/s", [[f"{value:.3g}" for value in row] for row in links.gbit]))
    findings.show(_matrix("us", [[f"{1e6 * value:.0f}" for value in row] for row in links.seconds]))
    fix = _NETWORK if networked else _CORES.format(workers=len(links.gbit), cores=os.cpu_count())
    lines = [*_slow(links, usual), *_uneven(links, usual), *_late(links, delay)]
    for line in lines[:_MOST_LINES]:
        findings.warn(f"links: {line}; {fix}")
    if len(lines) > _MOST_LINES:
        findings.warn(f"links: {len(lines) - _MOST_LINES} more problems of this kind; see the tables")


def _usual(values: list[list[float]], best: Callable[[Iterable[float]], float]) -> float:
    # Of each worker's best link, because one slow worker among three takes part in most links.
    return median(best([*row[:rank], *row[rank + 1 :]]) for rank, row in enumerate(values))


def _slow(links: Links, usual: float) -> list[str]:
    slow = {(a, b) for a, b in _pairs(links) if links.gbit[a][b] * _OFF < usual}
    return [
        f"{name} {min(links.gbit[a][b] for a, b in pairs):.3g} Gbit/s, at least {_OFF:g} x slower than usual"
        for name, pairs in _grouped(slow, len(links.gbit))
    ]


def _late(links: Links, delay: float) -> list[str]:
    late = {(a, b) for a, b in _pairs(links) if links.seconds[a][b] > max(_OFF * delay, delay + _LATE)}
    return [
        f"{name} {1e6 * max(links.seconds[a][b] for a, b in pairs):.0f} us, at least {_OFF:g} x the usual latency"
        for name, pairs in _grouped(late, len(links.gbit))
    ]


def _uneven(links: Links, usual: float) -> list[str]:
    """Returns links that are not slow, but much slower than their opposite direction."""
    return [
        f"from {a} to {b} {links.gbit[a][b]:.3g} Gbit/s, but {links.gbit[b][a]:.3g} in the other direction"
        for a, b in _pairs(links)
        if links.gbit[a][b] * _OFF < links.gbit[b][a] and links.gbit[a][b] * _OFF >= usual
    ]


def _pairs(links: Links) -> Iterator[tuple[int, int]]:
    return itertools.permutations(range(len(links.gbit)), 2)


def _grouped(pairs: set[tuple[int, int]], size: int) -> Iterator[tuple[str, set[tuple[int, int]]]]:
    """Groups links that leave the same worker or reach the same worker; the others stay single."""
    left = set(pairs)
    for place, way in enumerate(("from", "to")):
        for rank in range(size):
            whole = {pair for pair in itertools.permutations(range(size), 2) if pair[place] == rank}
            if size > 2 and whole <= pairs:
                left -= whole
                yield f"all {way} worker {rank}", whole
    for a, b in sorted(left):
        yield f"from {a} to {b}", {(a, b)}


def _matrix(corner: str, cells: list[list[str]]) -> list[str]:
    rows = [[corner, *map(str, range(len(cells)))]]
    rows += [[str(a), *("-" if a == b else cell for b, cell in enumerate(row))] for a, row in enumerate(cells)]
    width = max(6, *(len(cell) for row in rows for cell in row)) + 1
    return ["".join(f"{cell:>{width}}" for cell in row) for row in rows]
