from __future__ import annotations

import pytest
import torch

from spardl.errors import ConfigError
from tasks.models.torchvision_nets import resnet


# torchvision's documentation gives these counts for ImageNet.
@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_imagenet_parameter_counts(depth, parameters):
    with torch.device("meta"):
        model = resnet(depth, num_classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (1, 64), (3, 64)])
def test_shapes(channels, size):
    model = resnet(18, num_classes=5, in_channels=channels, image_size=size)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 5)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(32, 3, 1), (63, 3, 1), (64, 7, 2), (224, 7, 2)])
def test_stem_follows_the_image_size(size, kernel, stride):
    with torch.device("meta"):
        model = resnet(18, num_classes=5, image_size=size)
    assert model.conv1.kernel_size == (kernel, kernel)
    assert model.conv1.stride == (stride, stride)
    assert isinstance(model.maxpool, torch.nn.Identity) == (size < 64)


def test_unknown_depth_is_refused():
    with pytest.raises(ConfigError, match="18, 34, 50"):
        resnet(20, num_classes=10)
