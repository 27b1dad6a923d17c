"""ResNets and DenseNets from torchvision, with a stem that fits the image size."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import nn
from torchvision.models import (
    densenet121,
    densenet161,
    densenet169,
    densenet201,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
)

from spardl.basics.errors import ConfigError

__all__ = ["densenet", "resnet"]

RESNETS: Final = MappingProxyType({18: resnet18, 34: resnet34, 50: resnet50, 101: resnet101, 152: resnet152})
DENSENETS: Final = MappingProxyType({121: densenet121, 161: densenet161, 169: densenet169, 201: densenet201})
SMALL_IMAGE = 64
SMALLEST_IMAGE = 8


def resnet(depth: int, num_classes: int, in_channels: int = 3, image_size: int = 224) -> nn.Module:
    """Builds torchvision's ResNet with new random weights.

    For images below 64 pixels, the stem (first layers) is a 3x3 convolution of stride 1 without pooling, as usual for
    small images; the stem for ImageNet would reduce them to one pixel.

    Args:
        depth: Number of layers: 18, 34, 50, 101 or 152.
        num_classes: Number of classes: length of the output.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image, in pixels.

    Returns:
        A module that maps float images (batch, in_channels, height, width) to logits (batch, num_classes).

    Raises:
        ConfigError: If the depth is unknown.

    Source: He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, table 1.
    """
    model: Any = _build(RESNETS, depth, num_classes)
    model.conv1 = _fit_stem(model.conv1, in_channels, image_size)
    if image_size < SMALL_IMAGE:
        model.maxpool = nn.Identity()
    built: nn.Module = model
    return built


def densenet(depth: int, num_classes: int, in_channels: int = 3, image_size: int = 224) -> nn.Module:
    """Builds torchvision's DenseNet with new random weights; the stem for small images is that of :func:`resnet`.

    DenseNet-201 with 1,000 classes has 20,013,928 parameters in 604 tensors.

    Args:
        depth: Number of layers: 121, 161, 169 or 201.
        num_classes: Number of classes: length of the output.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels, at least 8.

    Returns:
        A module that maps float images (batch, in_channels, height, width) to logits (batch, num_classes).

    Raises:
        ConfigError: If the depth is unknown, or images are smaller than 8x8.

    Source: Huang, Liu, van der Maaten, Weinberger: Densely Connected Convolutional Networks, CVPR 2017, table 1.
    """
    if image_size < SMALLEST_IMAGE:
        raise ConfigError(
            f"a DenseNet needs images of at least 8x8 pixels, got {image_size}x{image_size}; use larger images"
        )
    model: Any = _build(DENSENETS, depth, num_classes)
    model.features.conv0 = _fit_stem(model.features.conv0, in_channels, image_size)
    if image_size < SMALL_IMAGE:
        model.features.pool0 = nn.Identity()
    built: nn.Module = model
    return built


def _build(builders: Mapping[int, Any], depth: int, num_classes: int) -> Any:
    if depth not in builders:
        raise ConfigError(f"model.depth must be one of {', '.join(map(str, builders))}, got {depth}")
    return builders[depth](weights=None, num_classes=num_classes)


def _fit_stem(stem: nn.Conv2d, in_channels: int, image_size: int) -> nn.Conv2d:
    """Returns the first convolution, replaced if it does not suit the images."""
    if image_size >= SMALL_IMAGE and in_channels == stem.in_channels:
        return stem
    kernel, stride = (3, 1) if image_size < SMALL_IMAGE else (7, 2)
    fitting = nn.Conv2d(in_channels, stem.out_channels, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(fitting.weight, mode="fan_out", nonlinearity="relu")
    return fitting
