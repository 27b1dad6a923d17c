from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.models.resnet_cifar import CifarResNet


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Published: 0.27M, 0.46M, 0.66M, 0.85M, 1.7M (He et al. 2016, table 6); exact counts with option A.
@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_parameter_count(depth, parameters):
    assert count(CifarResNet(depth, num_classes=10)) == parameters


def test_depth_counts_the_weighted_layers():
    layers = [m for m in CifarResNet(32, 10).modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 32


@pytest.mark.parametrize(("channels", "size", "classes"), [(3, 32, 100), (1, 8, 10), (1, 5, 2)])
def test_shapes(channels, size, classes):
    model = CifarResNet(20, num_classes=classes, in_channels=channels, image_size=size)
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


def test_shortcut_subsamples_and_pads_with_zero_channels():
    block = CifarResNet(8, 10).stages[1][0]
    x = torch.randn(1, 16, 6, 6)
    shortcut = block._shortcut(x)
    assert torch.equal(shortcut[:, 8:24], x[:, :, ::2, ::2])
    assert shortcut[:, :8].abs().sum() == 0
    assert shortcut[:, 24:].abs().sum() == 0


@pytest.mark.parametrize("depth", [0, 2, 18, 21])
def test_other_depths_are_refused(depth):
    with pytest.raises(ConfigError, match="6n\\+2"):
        CifarResNet(depth, 10)


def test_images_too_small_to_halve_are_refused():
    with pytest.raises(ConfigError, match="4x4"):
        CifarResNet(20, 10, image_size=3)
