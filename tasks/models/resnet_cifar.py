"""ResNets for CIFAR, as in He et al. (2016), section 4.2."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from spardl.basics.errors import ConfigError

__all__ = ["CifarResNet"]

WIDTHS = (16, 32, 64)


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


class _Block(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters (option A of the paper)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def _shortcut(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        below = self.new_channels // 2
        return F.pad(x, (0, 0, 0, 0, below, self.new_channels - below))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self._shortcut(x))


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (_Block(out_channels, out_channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(_Block(in_channels, out_channels, stride), *rest)


class CifarResNet(nn.Module):
    """A CIFAR ResNet: three stages of 16, 32 and 64 channels, ``depth = 6n + 2`` layers.

    ResNet-20 for three channels and ten classes has 269,722 parameters, ResNet-110 has 1,727,962.

    Args:
        depth: Number of weighted layers: 20, 32, 44, 56 or 110 in the paper; any ``6n + 2`` works.
        num_classes: Number of classes: length of the output.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels, at least 4; any size works, because the last layer averages
            over the remaining positions.

    Raises:
        ConfigError: If ``depth`` is not ``6n + 2``, or the image is too small to halve twice.

    Source: He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016.
    """

    def __init__(self, depth: int, num_classes: int, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        blocks, remainder = divmod(depth - 2, 6)
        if remainder or blocks < 1:
            raise ConfigError(f"model.depth must be 6n+2, such as 20, 32, 44, 56 or 110, got {depth}")
        if image_size < 4:
            raise ConfigError(
                f"a CIFAR ResNet needs images of at least 4x4 pixels, got {image_size}x{image_size}; use larger images"
            )
        self.stem = nn.Sequential(_conv3x3(in_channels, WIDTHS[0]), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU())
        self.stages = nn.Sequential(
            _stage(WIDTHS[0], WIDTHS[0], blocks, stride=1),
            _stage(WIDTHS[0], WIDTHS[1], blocks, stride=2),
            _stage(WIDTHS[1], WIDTHS[2], blocks, stride=2),
        )
        self.classifier = nn.Linear(WIDTHS[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Computes the logits of the classes.

        Args:
            images: Batch of images: float, shape (batch, in_channels, height, width).

        Returns:
            Logits, shape (batch, num_classes).
        """
        features: Tensor = self.stages(self.stem(images))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits
