"""What the papers' trainings have in common at scales that are not theirs."""

from __future__ import annotations

from scripts.exhibits.base import Basis
from scripts.exhibits.kinds.trainings import Case, Plan

__all__ = ["PICTURES", "SEEDS", "SMALL", "TINY", "VIRTUAL", "as_published"]

VIRTUAL = Basis(
    simulated="seconds: measured local work, plus counted rounds and bytes on a modelled network",
    measured="training: every worker's gradients, selections, messages and updates are real",
    assumed="the network's latency and bandwidth; that workers do not disturb each other",
)
SEEDS = (1, 2, 3)
SMALL = ("training.eval_batch_size=512", "training.log_every=100", "training.check_every=1000")
TINY = (
    *SMALL,
    "logger.mode=disabled",
    "cluster.workers=14",
    "training.max_steps=2",
    "training.eval_examples=8",
    "training.batch_size=2",
)

PICTURES = Case("VGG-16 on CIFAR-10", ("model=resnet20", "dataset=digits"), "ResNet-20 on digits instead")


def as_published(*presets: str) -> Plan:
    """The plan at scale ``paper``: presets of ``experiment=`` on real workers, who are started by Slurm."""
    cases = tuple(Case(preset, (f"experiment={preset}",), "as published") for preset in presets)
    return Plan(cases, (), SEEDS, "for a cluster of GPUs", cluster="process_group")
