"""alpha and beta of the network between the workers, and whether they explain what torch's all-reduce takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import torch

from spardl.basics.files import write_atomically
from spardl.clusters import Network, ProcessGroupCluster, gather_rows
from spardl.clusters.network import network_text
from spardl.diagnostics.doctor.findings import Findings
from spardl.diagnostics.doctor.rounds import SHORT, ring, seconds
from spardl.protocol.programs import AllReduce, Program
from spardl.schedules.linear import Linear

__all__ = ["check_all_reduce", "fit", "network_of", "write_preset"]

# Bytes of the messages, and how many rounds of each; seconds that the rounds of long ones may take together.
_LEAST, _MOST, _SHORT_TURNS, _LONG_TURNS, _BUDGET = 1 << 16, 1 << 22, 200, 24, 6.0
# Bytes of the all-reduce, seconds it may take, how often, and how far it may be from the bound.
_BYTES, _PATIENCE, _TIMES, _FAR = 25_000_000, 1.0, 4, 2.0


def fit(cluster: ProcessGroupCluster, speed: float) -> Network:
    """What a round costs in which every worker sends to the next one, by the size of the message.

    Of each size the first decile counts: what else the cores do comes on top, and is none of the network's. Of the
    workers it is the median one, and all get the same.

    Args:
        cluster: the workers.
        speed: bytes per second of a link, roughly: on slow ones messages are shorter.
    """
    longest = int(min(_MOST, max(4 * _LEAST, speed * _BUDGET / (2 * _LONG_TURNS))))
    sizes = (SHORT, longest // 4, longest // 2, longest)
    mine = [_round(cluster, size, _SHORT_TURNS if size == SHORT else _LONG_TURNS) for size in sizes]
    rows = gather_rows(cluster, [torch.tensor(mine, dtype=torch.float64)])
    times = [median(column) for column in zip(*(row.tolist() for row in rows), strict=True)]
    return network_of(sizes, times)


def network_of(sizes: Sequence[int], times: Sequence[float]) -> Network:
    """What explains the seconds of rounds.

    Args:
        sizes: bytes of a message, from a short one to the longest.
        times: seconds of a round with such messages.
    """
    slope = Linear.fit(sizes, times).per_entry
    # On a loaded machine long messages may look no slower than short ones; each byte took no longer than this.
    return Network(alpha=times[0], gbit=8e-9 / (slope or times[-1] / sizes[-1]))


def _round(cluster: ProcessGroupCluster, size: int, turns: int) -> float:
    (rank,) = cluster.local_ranks
    found = seconds(cluster, lambda: ring(rank, cluster.size, size, cluster.device), turns)
    # Of few rounds, the other way of cutting finds less than the least.
    return quantiles(found, n=10, method="inclusive")[0]


def check_all_reduce(cluster: ProcessGroupCluster, network: Network, networked: bool, findings: Findings) -> None:
    """Compares torch's all-reduce of 25 MB, or less on slow links, with the bound of a ring."""
    share = 2 * (cluster.size - 1) / cluster.size
    nbytes = int(min(_BYTES, _PATIENCE / (share * network.beta))) // 4 * 4
    took = min(cluster.time_aside([_all_reduce(nbytes, cluster.device)])[0] for _ in range(_TIMES))
    slowest = max(float(row) for row in gather_rows(cluster, [torch.tensor([took])]))
    bound = 2 * (cluster.size - 1) * network.alpha + share * nbytes * network.beta
    text = (
        f"all-reduce: torch's takes {1e3 * slowest:.1f} ms for {nbytes / 1e6:.3g} MB, {slowest / bound:.2f} times the "
        f"bound of a ring on the network as fitted ({1e3 * bound:.1f} ms)"
    )
    if 1 / _FAR <= slowest / bound <= _FAR:
        findings.ok(text)
    else:
        used = "cores and links" if networked else "the cores"
        findings.warn(f"{text}: predictions will be as far off; see what else uses {used}, and measure again")


def _all_reduce(nbytes: int, device: torch.device) -> Program[None]:
    yield AllReduce(torch.zeros(nbytes // 4, device=device))


def write_preset(network: Network, hosts: Sequence[str], backend: str, out: Path | None, findings: Findings) -> None:
    """Says what was fitted, and writes it to a file if one is named."""
    found = f"network: alpha {1e6 * network.alpha:.0f} us, {network.gbit:.3g} Gbit/s in rounds of all workers"
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
        findings.fail(f"{found}; cannot be written to {out}: {error.strerror}; use another --out")
        return
    findings.ok(f"{found}; written to {out}, which spardl advise, spardl timeline and train.py take as a network")
