"""Communicators: how P workers add up what they kept. One published all-reduce is one file."""

from spardl.communicators.allgather import AllGather
from spardl.communicators.backend import Backend
from spardl.communicators.base import Communicator, DenseCommunicator
from spardl.communicators.dense import Dense
from spardl.communicators.spardl import SparDL

__all__ = ["AllGather", "Backend", "Communicator", "Dense", "DenseCommunicator", "SparDL"]
