"""ImageNet's residual networks, from torchvision, with a stem that fits the images."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from torch import nn
from torchvision.models import resnet18, resnet34, resnet50

from spardl.errors import ConfigError

__all__ = ["resnet"]

BUILDERS: Final = MappingProxyType({18: resnet18, 34: resnet34, 50: resnet50})
SMALL_IMAGE = 64


def resnet(depth: int, num_classes: int, in_channels: int = 3, image_size: int = 224) -> nn.Module:
    """Builds torchvision's ResNet with fresh weights.

    Images under 64 pixels get the stem that is usual for small images, a 3x3 convolution of stride 1
    and no pooling; ImageNet's own would leave one pixel of them.

    Args:
        depth: 18, 34 or 50.
        num_classes: length of the output.
        in_channels: channels of an image.
        image_size: side of an image in pixels.

    Returns:
        A module that maps float images (batch, in_channels, height, width) to logits (batch, num_classes).

    Raises:
        ConfigError: an unknown depth.

    Source: He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, table 1.
    """
    if depth not in BUILDERS:
        raise ConfigError(f"model.depth={depth}: use one of {', '.join(map(str, BUILDERS))}")
    model: nn.Module = BUILDERS[depth](weights=None, num_classes=num_classes)
    if image_size < SMALL_IMAGE:
        _replace_stem(model, nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False))
        model.maxpool = nn.Identity()
    elif in_channels != 3:
        _replace_stem(model, nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False))
    return model


def _replace_stem(model: nn.Module, stem: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = stem
