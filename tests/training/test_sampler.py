from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.errors import ConfigError
from spardl.programs import Worker
from spardl.training.sampler import Sampler


def samplers(examples: int, workers: int, batch_size: int, seed: int = 1) -> list[Sampler]:
    return [Sampler(examples, Worker(rank, workers), batch_size, seed) for rank in range(workers)]


@given(
    workers=st.integers(1, 9),
    batch_size=st.integers(1, 5),
    spare=st.integers(0, 40),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_shards_are_disjoint_and_of_equal_size(
    workers: int, batch_size: int, spare: int, seed: int, epoch: int
) -> None:
    examples = workers * batch_size + spare
    everyone = samplers(examples, workers, batch_size, seed)
    (steps,) = {sampler.steps_per_epoch for sampler in everyone}
    assert steps == examples // workers // batch_size >= 1
    batches = [sampler.indices(epoch * steps + step) for sampler in everyone for step in range(steps)]
    assert all(len(batch) == batch_size for batch in batches)
    seen = torch.cat(batches)
    assert len(seen.unique()) == len(seen) == workers * steps * batch_size
    assert 0 <= int(seen.min()) <= int(seen.max()) < examples
    assert examples - len(seen) < workers * (batch_size + 1)


def test_a_step_does_not_depend_on_what_was_asked_before() -> None:
    one = samplers(50, 3, 4)[1]
    forward = [one.indices(step) for step in range(12)]
    for step in (7, 0, 11, 3, 3):
        assert torch.equal(samplers(50, 3, 4)[1].indices(step), forward[step])
        assert torch.equal(one.indices(step), forward[step])


def test_epochs_seeds_and_numbers_of_workers_have_orders_of_their_own() -> None:
    sampler = samplers(60, 2, 30)[0]
    assert not torch.equal(sampler.indices(0), sampler.indices(1))
    assert not torch.equal(sampler.indices(0), samplers(60, 2, 30, seed=2)[0].indices(0))
    assert not torch.equal(sampler.indices(0), samplers(60, 1, 30)[0].indices(0))


def test_random_choices_follow_from_seed_step_and_rank() -> None:
    def draw(rank: int, step: int, seed: int) -> float:
        return torch.rand(1, generator=samplers(50, 3, 4, seed)[rank].generator(step)).item()

    assert draw(1, 5, 1) == draw(1, 5, 1)
    assert len({draw(1, 5, 1), draw(2, 5, 1), draw(1, 6, 1), draw(1, 5, 2)}) == 4


def test_too_few_examples() -> None:
    assert samplers(12, 3, 4)[0].steps_per_epoch == 1
    with pytest.raises(ConfigError, match="= 4 on 3 workers needs more than the 11 training examples"):
        samplers(11, 3, 4)
