from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spardl.basics.errors import ConfigError
from spardl.protocol.programs import Worker
from trainer.sampler import LaneSampler, ShuffledSampler


def samplers(examples: int, workers: int, batch_size: int, seed: int = 1) -> list[ShuffledSampler]:
    return [ShuffledSampler(examples, Worker(rank, workers), batch_size, seed) for rank in range(workers)]


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


def test_order_depends_on_epoch_seed_and_world_size() -> None:
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


def lanes_of(examples: int, workers: int, lanes: int, passes: int) -> list[LaneSampler]:
    return [LaneSampler(examples, Worker(rank, workers), lanes, passes, seed=1) for rank in range(workers)]


def test_lanes_by_hand() -> None:
    """23 examples, 2 workers, 2 rows, 2 batches a step: 2 steps along lanes of 4 consecutive examples."""
    first, second = lanes_of(23, workers=2, lanes=2, passes=2)
    assert first.steps_per_epoch == second.steps_per_epoch == 2
    assert first.indices(0).tolist() == [0, 4, 1, 5]
    assert first.indices(1).tolist() == [2, 6, 3, 7]
    assert second.indices(0).tolist() == [8, 12, 9, 13]
    assert first.indices(2).tolist() == first.indices(0).tolist()


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40))
def test_lanes_go_on_and_no_example_comes_twice(workers: int, lanes: int, passes: int, spare: int) -> None:
    samplers = lanes_of(workers * lanes * passes + spare, workers, lanes, passes)
    steps = samplers[0].steps_per_epoch
    seen = torch.stack([torch.cat([s.indices(step).view(passes, lanes) for step in range(steps)]) for s in samplers])
    assert (seen[:, 1:] - seen[:, :-1] == 1).all()
    assert seen.unique().numel() == seen.numel()


def test_lanes_need_a_whole_step() -> None:
    with pytest.raises(ConfigError, match="the 7 training examples"):
        lanes_of(7, workers=2, lanes=2, passes=2)
