from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.models.torchvision_nets import densenet, resnet

COUNTS = {
    # torchvision's documentation gives these counts for ImageNet.
    (resnet, 18): 11_689_512,
    (resnet, 34): 21_797_672,
    (resnet, 50): 25_557_032,
    (resnet, 101): 44_549_160,
    (densenet, 121): 7_978_856,
    (densenet, 201): 20_013_928,
}


@pytest.mark.parametrize(("build", "depth"), COUNTS)
def test_imagenet_parameter_counts(build, depth):
    with torch.device("meta"):
        model = build(depth, num_classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[build, depth]


@pytest.mark.parametrize(("build", "depth"), [(resnet, 18), (densenet, 121)])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (1, 64), (3, 64)])
def test_shapes(build, depth, channels, size):
    with torch.device("meta"):
        model = build(depth, num_classes=5, in_channels=channels, image_size=size)
        assert model(torch.empty(2, channels, size, size)).shape == (2, 5)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(32, 3, 1), (63, 3, 1), (64, 7, 2), (224, 7, 2)])
def test_stem_follows_the_image_size(size, kernel, stride):
    with torch.device("meta"):
        model, dense = resnet(18, num_classes=5, image_size=size), densenet(121, num_classes=5, image_size=size)
    for stem, pooling in ((model.conv1, model.maxpool), (dense.features.conv0, dense.features.pool0)):
        assert stem.kernel_size == (kernel, kernel)
        assert stem.stride == (stride, stride)
        assert isinstance(pooling, torch.nn.Identity) == (size < 64)


@pytest.mark.parametrize(("build", "depths"), [(resnet, "18, 34, 50, 101"), (densenet, "121, 161, 169, 201")])
def test_unknown_depth_is_refused(build, depths):
    with pytest.raises(ConfigError, match=depths):
        build(20, num_classes=10)


def test_images_too_small_for_a_densenet_are_refused():
    with pytest.raises(ConfigError, match="at least 8x8 pixels, got 7x7"):
        densenet(121, num_classes=10, image_size=7)
