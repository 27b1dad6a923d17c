"""Trains a model on a cluster: the loop, and what configurations choose for it by name."""

from spardl.training.launch import ProcessGroup, Simulated
from spardl.training.lr import Constant, Cosine, Exponential, LinearDecay, MultiStep
from spardl.training.observers import NoLogger, Wandb

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "LinearDecay",
    "MultiStep",
    "NoLogger",
    "ProcessGroup",
    "Simulated",
    "Wandb",
]
