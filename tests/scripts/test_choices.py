"""What scripts compose, many times over, is what Hydra composes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose
from hydra.errors import HydraException
from omegaconf import OmegaConf

from scripts import choices
from scripts.exhibits.jobs import Training
from scripts.exhibits.papers.catalogue import catalogue

LINES = (
    (),
    ("seed=7", "compressor=topka", "training.max_steps=3", "cluster=simulated"),
    ("cluster.network={alpha:1e-4,gbit:2}", "cluster=simulated", "optimizer.lr=0.1", "optimizer.lr=0.2"),
    ("+model.more=1", "~training.log_every", "data_dir=${output_dir}/data", "++training.epochs=2"),
    ("experiment=spardl/bert_wikipedia", "compressor.density=0.02", "optimizer=sgd"),
    ("model=bert_tiny", "momentum=adam", "momentum.betas=[0,0.95]", "optimizer.lr=${optimizer.weight_decay}"),
    ("+point=[signsgd,layer,local,after,allgather_codes]", "experiment=sparse_communication_study", "seed=2"),
    ("hydra.job.chdir=true", "~dataset", "+dataset=digits"),
    ("compressor.density=0.5", "compressor={density:0.1}"),
    ("compressor={density:0.1}", "compressor.density=0.5", "seed=3", "seed=3"),
)


@pytest.fixture
def _composing() -> Iterator[None]:
    with choices.composing():
        yield


def whole(*words: str) -> Any:
    return OmegaConf.to_container(compose("train", list(words)), resolve=True)


@pytest.mark.usefixtures("_composing")
@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_the_same_is_composed(words: tuple[str, ...]) -> None:
    assert choices.composed(*words) == whole(*words)


@pytest.mark.usefixtures("_composing")
def test_no_line_leaves_anything_to_the_next() -> None:
    before = choices.composed("compressor=topk")
    choices.composed("compressor=topk", "seed=9", "+model.more=1", "~training.log_every")["model"].clear()
    assert choices.composed("compressor=topk") == before == whole("compressor=topk")


@pytest.mark.usefixtures("_composing")
@pytest.mark.parametrize(
    "word", ["compressor=nothing", "nonsense=1", "seed=1,2", "compressor=topk,none", "~nonsense", "+seed=1", "a=[", "x"]
)
def test_the_same_is_refused(word: str) -> None:
    with pytest.raises(HydraException) as of_hydra:
        whole(word)
    with pytest.raises(type(of_hydra.value)) as ours:
        choices.composed(word)
    assert str(ours.value) == str(of_hydra.value)


@pytest.mark.slow
@pytest.mark.usefixtures("_composing")
def test_trainings_of_all_exhibits_are_composed_alike() -> None:
    """A sample of some hundred, of every scale."""
    scales = ("smoke", "laptop", "evening", "paper")
    exhibits = [
        (each, scale) for each in catalogue().values() for scale in scales if scale in getattr(each, "plans", ())
    ]
    jobs = [job for each, scale in exhibits for job in each.jobs(scale) if isinstance(job, Training)]
    for job in random.Random(0).sample(jobs, 120):
        assert job.config == whole(*job.words, f"cluster={job.cluster}"), job.command
