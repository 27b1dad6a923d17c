"""Batches made ahead are the batches made in time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.basics.errors import DataError
from spardl.protocol.programs import Worker
from tests.support.harness import dense
from tests.trainer.toy import Points, ToyTask, plan, trainer
from trainer.sampler import Batches, ShuffledSampler
from trainer.task import Batch


class Slow(Points):
    """Records the threads that ask; can fail at one example."""

    slow = True

    def __init__(self, count: int, seed: int, bad: int | None = None) -> None:
        super().__init__(count, seed)
        self.bad = bad
        self.threads: list[bool] = []

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> Batch:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if self.bad in indices.tolist():
            raise DataError("file 7 is no picture")
        return super().batch(indices, generator)


def batches(split: Any, total: int = 6) -> Batches:
    return Batches(split, ShuffledSampler(len(split), Worker(1, 2), 4, seed=1), size=2, total_steps=total)


def test_the_same_batches_one_step_ahead() -> None:
    slow = Slow(20, 1)
    ahead, in_time = batches(slow), batches(Points(20, 1))
    for step in range(6):
        for found, expected in zip(ahead.of(step), in_time.of(step), strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert slow.threads[:2] == [True, True]
    assert slow.threads[2:] == [False] * 10  # nothing beyond the last step


def test_skipping_steps_loads_the_right_batches() -> None:
    ahead, in_time = batches(Slow(20, 1)), batches(Points(20, 1))
    for step in (0, 3, 1):
        found, expected = list(ahead.of(step)), list(in_time.of(step))
        assert torch.equal(found[1]["points"], expected[1]["points"])


def test_errors_ahead_are_raised_at_their_step() -> None:
    sampler = ShuffledSampler(20, Worker(1, 2), 4, seed=1)
    ahead = batches(Slow(20, 1, bad=int(sampler.indices(1)[3])))
    assert len(list(ahead.of(0))) == 2
    with pytest.raises(DataError, match="file 7"):
        list(ahead.of(1))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_whole_run_is_the_same(accumulation: int, tmp_path: Path) -> None:
    found = []
    for name, split in (("slow", Slow(96, 1)), ("quick", Points(96, 1))):
        task = ToyTask()
        task.train = split
        made = plan(dense(), task, max_steps=7, accumulation=accumulation, batch_size=4)
        found.append(trainer(made, tmp_path / name).fit()["weights_sha256"])
    assert found[0] == found[1]
    assert threading.active_count() == 1
