from __future__ import annotations

from functools import partial

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.datasets.rotated_digits import _turn, rotated_digits
from tasks.image_regression import image_regression
from tasks.models.resnet_cifar import CifarResNet
from tasks.models.vgg_cifar import CifarVgg


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def dataset():
    return rotated_digits()


def test_sizes(dataset):
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    batch = dataset.train.batch(torch.arange(5), seeded(0))
    assert batch["images"].shape == (5, 1, 32, 32)
    assert batch["labels"].shape == (5,)
    assert batch["labels"].dtype == torch.float32
    assert dataset.caveat is None


def test_rotation_is_counter_clockwise():
    picture = torch.rand(1, 2, 8, 8)
    assert torch.allclose(_turn(picture, torch.tensor([0.0]), 8), picture, atol=1e-5)
    assert torch.allclose(_turn(picture, torch.tensor([90.0]), 8), picture.rot90(1, (2, 3)), atol=1e-5)


def test_each_picture_takes_its_own_angle():
    pictures = torch.rand(1, 1, 8, 8).expand(3, 1, 8, 8)
    turned = _turn(pictures, torch.tensor([0.0, 90.0, 180.0]), 8)
    for quarter in range(3):
        assert torch.allclose(turned[quarter], pictures[0].rot90(quarter, (1, 2)), atol=1e-5)


def test_evaluation_angles_are_fixed_and_spread(dataset):
    labels = dataset.test.batch(torch.arange(359), None)["labels"]
    assert torch.equal(labels, rotated_digits().test.batch(torch.arange(359), None)["labels"])
    assert labels.abs().max() <= 60
    assert labels.min() < -50
    assert labels.max() > 50
    assert abs(labels.mean().item()) < 10


def test_training_angles_come_from_the_generator_only(dataset):
    before = torch.get_rng_state()
    indices = torch.arange(30)
    first = dataset.train.batch(indices, seeded(1))
    again = dataset.train.batch(indices, seeded(1))
    assert torch.equal(first["images"], again["images"])
    assert torch.equal(first["labels"], again["labels"])
    assert not torch.equal(first["labels"], dataset.train.batch(indices, seeded(2))["labels"])
    assert first["labels"].abs().max() <= 60
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_judged_in_degrees(dataset):
    task = image_regression(partial(CifarVgg, depth=11), dataset)
    assert task.metric == "mae"
    assert task.center == pytest.approx(0.0, abs=1e-9)
    assert task.spread == pytest.approx(60 / 3**0.5, rel=1e-2)
    assert task.build_model()(dataset.train.batch(torch.arange(2), seeded(0))["images"]).shape == (2, 1)


def test_a_small_network_learns_the_angle():
    dataset = rotated_digits(image_size=16)
    task = image_regression(partial(CifarResNet, depth=8), dataset)
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = seeded(0)
    for _ in range(40):
        indices = torch.randint(len(task.train), (48,), generator=generator)
        optimizer.zero_grad()
        task.loss(model, task.train.batch(indices, generator)).backward()
        optimizer.step()
    model.eval()
    sums = task.measure(model, task.test.batch(torch.arange(len(task.test)), None))
    figures = task.summarize(dict(zip(task.sums, sums.tolist(), strict=True)))
    assert figures["mae"] < 20  # always guessing 0 is wrong by 30


@pytest.mark.parametrize("options", [{"image_size": 7}, {"largest_angle": 0.0}, {"largest_angle": 181.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        rotated_digits(**options)
