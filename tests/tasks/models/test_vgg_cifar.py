from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.models.vgg_cifar import CifarVgg


@pytest.mark.parametrize(
    ("depth", "classes", "parameters"), [(11, 10, 9_231_114), (16, 10, 14_728_266), (19, 100, 20_086_692)]
)
def test_published_parameter_counts(depth, classes, parameters):
    with torch.device("meta"):
        model = CifarVgg(depth, num_classes=classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 40), (3, 64)])
def test_shapes(channels, size):
    model = CifarVgg(11, num_classes=7, in_channels=channels, image_size=size)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 7)


def test_small_images_are_refused_in_one_line_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        CifarVgg(16, num_classes=10, in_channels=1, image_size=8)
    message = str(caught.value)
    assert "\n" not in message
    assert "32x32" in message
    assert "8x8" in message
    assert "model=resnet20" in message


def test_unknown_depth_is_refused():
    with pytest.raises(ConfigError, match="11, 13, 16, 19"):
        CifarVgg(15, num_classes=10)
