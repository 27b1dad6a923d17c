"""Clusters run the communication programs (sequences of messages) of workers: on real processes, or simulated."""

from spardl.clusters.base import Cluster, gather_rows
from spardl.clusters.ledger import Ledger
from spardl.clusters.network import PRESETS, Network, parse_network
from spardl.clusters.process_group import ProcessGroupCluster
from spardl.clusters.simulated import SimulatedCluster

__all__ = [
    "PRESETS",
    "Cluster",
    "Ledger",
    "Network",
    "ProcessGroupCluster",
    "SimulatedCluster",
    "gather_rows",
    "parse_network",
]
