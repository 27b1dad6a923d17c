"""The trainer behind train.py: the training loop, and the parts that a configuration can name."""

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
