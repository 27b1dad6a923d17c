"""Communicators: algorithms that sum the compressed gradients of all workers, one per module."""

from spardl.communicators.allgather import AllGather
from spardl.communicators.allgather_codes import AllGatherCodes
from spardl.communicators.allgather_dense import AllGatherDense
from spardl.communicators.allreduce_codes import AllReduceCodes
from spardl.communicators.backend import Backend
from spardl.communicators.base import Communicator, DenseCommunicator, Synchronization
from spardl.communicators.dense import Dense
from spardl.communicators.gtopk import GTopk
from spardl.communicators.oktopk import OkTopk
from spardl.communicators.spardl import SparDL
from spardl.communicators.topkdsa import TopkDSA

__all__ = [
    "AllGather",
    "AllGatherCodes",
    "AllGatherDense",
    "AllReduceCodes",
    "Backend",
    "Communicator",
    "Dense",
    "DenseCommunicator",
    "GTopk",
    "OkTopk",
    "SparDL",
    "Synchronization",
    "TopkDSA",
]
