"""ResNet and VGG for CIFAR, models of timm and torchvision."""

from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.models.resnet_cifar import CifarResNet
from tasks.models.timm_nets import inception_v4
from tasks.models.torchvision_nets import densenet, resnet
from tasks.models.vgg_cifar import CifarVgg


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


@pytest.mark.parametrize(
    ("depth", "classes", "parameters"), [(11, 10, 9_231_114), (16, 10, 14_728_266), (19, 100, 20_086_692)]
)
def test_published_parameter_counts(depth, classes, parameters):
    with torch.device("meta"):
        model = CifarVgg(depth, num_classes=classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 40), (3, 64)])
def test_vgg_cifar_shapes(channels, size):
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


def test_published_parameter_count_and_shape():
    with torch.device("meta"):
        model = inception_v4(num_classes=1000)
        assert model(torch.empty(2, 3, 299, 299)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 42_679_816
    assert len(list(model.parameters())) == 449


def test_the_smallest_images_and_one_channel():
    with torch.device("meta"):
        model = inception_v4(num_classes=5, in_channels=1, image_size=75)
        assert model(torch.empty(2, 1, 75, 75)).shape == (2, 5)


def test_timm_nets_small_images_are_refused_in_one_line_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        inception_v4(num_classes=10, image_size=74)
    assert "at least 75x75 pixels, got 74x74" in str(caught.value)
    assert "dataset=synthetic_images" in str(caught.value)
    assert "\n" not in str(caught.value)


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
def test_torchvision_nets_shapes(build, depth, channels, size):
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
def test_torchvision_nets_unknown_depth_is_refused(build, depths):
    with pytest.raises(ConfigError, match=depths):
        build(20, num_classes=10)


def test_images_too_small_for_a_densenet_are_refused():
    with pytest.raises(ConfigError, match="at least 8x8 pixels, got 7x7"):
        densenet(121, num_classes=10, image_size=7)
