"""Trains a model on a cluster: the loop, and what configurations choose for it by name."""

from spardl.training.launch import ProcessGroup
from spardl.training.loggers import NoLogger, Wandb
from spardl.training.lr import Constant, Cosine, Exponential, LinearDecay, MultiStep
from spardl.training.simulate import Simulated

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
