"""Trains a model on a cluster: the loop, and what configurations choose for it by name."""

from trainer.launch import ProcessGroup, Simulated
from trainer.loggers import Csv, Several, TensorBoard
from trainer.lr import Constant, Cosine, Exponential, LinearDecay, MultiStep
from trainer.observers import NoLogger, Wandb

__all__ = [
    "Constant",
    "Cosine",
    "Csv",
    "Exponential",
    "LinearDecay",
    "MultiStep",
    "NoLogger",
    "ProcessGroup",
    "Several",
    "Simulated",
    "TensorBoard",
    "Wandb",
]
