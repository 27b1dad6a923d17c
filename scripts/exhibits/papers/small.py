"""Common parts of the trainings at sizes other than those of the papers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from scripts.exhibits.base import Basis
from scripts.exhibits.kinds.trainings import Case, Known, Plan

__all__ = [
    "KNOWN",
    "ONE_SEED",
    "ON_DIGITS",
    "ON_DIGITS_8",
    "PICTURES",
    "SEEDS",
    "SMALL",
    "TINY",
    "VIRTUAL",
    "as_published",
]

VIRTUAL = Basis(
    simulated="seconds: measured local work, plus counted rounds and bytes on a modelled network",
    measured="training: gradients, selections, messages and updates of every worker are real",
    assumed="latency and bandwidth of the network; that workers do not slow each other down",
)
SEEDS = (1, 2, 3)
ONE_SEED = SEEDS[:1]  # for smoke tests of two steps, which learn nothing
SMALL = ("training.eval_batch_size=512", "training.log_every=100", "training.check_every=1000")
TINY = (
    *SMALL,
    "logger.mode=disabled",
    "cluster.workers=14",
    "training.max_steps=2",
    "training.eval_examples=8",
    "training.batch_size=2",
)

# One point below the results of single seeds, so that other seeds and lengths pass and diverged trainings fail.
ON_DIGITS = Known(
    0.985, "a point below ResNet-20 in 30 epochs on 4 workers, docs/configuration.md: 0.9944 and 0.9972", 0.0005
)
ON_DIGITS_8 = Known(0.985, "a point below ResNet-8 in 440 steps, docs/reproducing-papers.md: 0.9972", 0.0005)
PICTURES = Case("VGG-16 on CIFAR-10", ("model=resnet20", "dataset=digits"), "ResNet-20 on digits", known=ON_DIGITS)
# References from memory, by preset; accuracy is not judged for presets without one.
KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "sketch_fusion/resnet20_cifar10": Known(0.91, "He et al. 2016: 91.25%", 0.005),
        "spardl/vgg16_cifar10": Known(0.92, "with batch normalization about 92.6%", 0.005),
        "oktopk/vgg16_cifar10": Known(0.92, "with batch normalization about 92.6%", 0.005),
        "spardl/lstm_imdb": Known(0.84, "a little below linear models, which reach 88%, Maas et al. 2011", 0.005),
        "spardl/lstm_ptb": Known(82.2, "the large network of Zaremba et al. 2014: 82.2, on test data 78.4", 0.05),
    }
)


def as_published(*presets: str) -> Plan:
    """Plan of the size ``paper``: presets of ``experiment=`` on real workers, started by Slurm."""
    cases = tuple(
        Case(preset, (f"experiment={preset}",), "as published", known=KNOWN.get(preset)) for preset in presets
    )
    return Plan(cases, (), SEEDS, "for a cluster of GPUs", cluster="process_group")
