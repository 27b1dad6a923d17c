from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from spardl.basics.errors import ConfigError
from tests.support.harness import dense, spardl
from tests.trainer.toy import ToyTask, plan, simulated
from trainer.learner import Learner, digest
from trainer.lr import LinearDecay

CPU = torch.device("cpu")


def plain_task() -> ToyTask:
    """Without noise, so that batches can be cut and joined."""
    task = ToyTask(fancy=False)
    batch = task.train.batch
    task.train.batch = lambda indices, generator: batch(indices, None)  # type: ignore[method-assign]
    return task


def weights_after(steps: int, **changes: Any) -> torch.Tensor:
    learner = Learner(plan(dense(), plain_task(), **changes), simulated(2), CPU)
    for step in range(steps):
        learner.step(step)
    return torch.cat([parameter.detach().view(-1) for parameter in learner.model.parameters()])


def test_accumulation_is_a_larger_batch() -> None:
    once = weights_after(5, batch_size=12)
    four_times = weights_after(5, batch_size=3, accumulation=4)
    assert torch.allclose(once, four_times, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(once, weights_after(5, batch_size=3), rtol=1e-3)


def test_the_loss_of_a_step_is_the_mean_over_its_parts() -> None:
    def losses(**changes: Any) -> list[float]:
        return Learner(plan(dense(), plain_task(), **changes), simulated(2), CPU).step(0)[0]

    assert losses(batch_size=3, accumulation=4) == pytest.approx(losses(batch_size=12))


def test_clipping_bounds_the_norm() -> None:
    def norm_of_update(clip_norm: float | None) -> float:
        learner = Learner(plan(dense(), plain_task(), lr=1.0, clip_norm=clip_norm), simulated(2), CPU)
        before = [parameter.detach().clone() for parameter in learner.model.parameters()]
        learner.step(0)
        change = [(a - b).view(-1) for a, b in zip(before, learner.model.parameters(), strict=True)]
        return float(torch.cat(change).detach().norm())

    free = norm_of_update(None)
    assert norm_of_update(free / 10) == pytest.approx(free / 10, rel=1e-4)
    assert norm_of_update(free * 10) == pytest.approx(free, rel=1e-12)


def test_the_learning_rate_follows_its_schedule() -> None:
    learner = Learner(plan(dense(), lr=0.2, lr_schedule=LinearDecay(), max_steps=4), simulated(4), CPU)
    rates = []
    for step in range(4):
        learner.step(step)
        rates.append(learner.rate)
    assert rates == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_weights_depend_on_the_seed_alone() -> None:
    def fresh(workers: int, seed: int) -> torch.Tensor:
        torch.rand(workers)
        return Learner(plan(dense(), seed=seed), simulated(workers), CPU).digest()

    assert torch.equal(fresh(1, 5), fresh(4, 5))
    assert not torch.equal(fresh(1, 5), fresh(1, 6))


def test_digest_sees_every_bit() -> None:
    tensor = torch.zeros(3)
    other = torch.tensor([0.0, -0.0, 0.0])
    assert torch.equal(digest([tensor]), digest([tensor.clone()]))
    assert not torch.equal(digest([tensor]), digest([other]))
    assert digest([torch.zeros(0)]).shape == (4,)


@pytest.mark.parametrize("lr", ["abc", -1.0, None])
def test_an_optimizer_that_cannot_be_made(lr: Any) -> None:
    with pytest.raises(ConfigError, match=f"optimizer cannot be created with lr={lr}, momentum=0.9: "):
        plan(dense(), lr=lr).check(2)


def test_a_plan_that_does_not_fit_the_workers() -> None:
    plan(dense()).check(2)
    with pytest.raises(ConfigError, match="does not divide 3 workers"):
        plan(spardl(0.1, teams=2)).check(3)
    with pytest.raises(ConfigError, match="more than the 96 training examples"):
        plan(dense(), batch_size=50).check(2)


def test_an_optimizer_without_keywords() -> None:
    made = plan(dense())
    with pytest.raises(ConfigError, match="optimizer cannot be created with : TypeError"):
        type(made)(**{**vars(made), "optimizer": partial(lambda: None)}).check(2)
