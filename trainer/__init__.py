"""The trainer that train.py runs: the training loop, and the classes that a configuration can name."""

from trainer.launch import ProcessGroup, Simulated
from trainer.loggers import Csv, Several, TensorBoard
from trainer.lr import Constant, Cosine, Exponential, LinearDecay, MultiStep
from trainer.observers import NoLogger, Wandb
from trainer.optimizers import MuonAdamW
from trainer.sweep import SweepFolder

__all__ = [
    "Constant",
    "Cosine",
    "Csv",
    "Exponential",
    "LinearDecay",
    "MultiStep",
    "MuonAdamW",
    "NoLogger",
    "ProcessGroup",
    "Several",
    "Simulated",
    "SweepFolder",
    "TensorBoard",
    "Wandb",
]
