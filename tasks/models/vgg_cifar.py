"""VGG networks for CIFAR, with batch normalization and a single linear layer."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from torch import Tensor, nn
from torchvision.models.vgg import cfgs, make_layers

from spardl.basics.errors import ConfigError

__all__ = ["CifarVgg"]

LAYOUTS: Final = MappingProxyType({11: "A", 13: "B", 16: "D", 19: "E"})
FEATURES = 512
SMALLEST_IMAGE = 32


def _initialise(module: nn.Module) -> None:
    # As torchvision's own VGG does; its helper is out of reach without its 120-million-weight head.
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class CifarVgg(nn.Module):
    """VGG-11/13/16/19 with batch normalization and a single linear layer from 512 features to the classes.

    For three channels, VGG-16 with 10 classes has 14,728,266 parameters, VGG-19 with 100 classes has
    20,086,692 and VGG-11 with 10 classes 9,231,114, the counts that published experiments quote.

    Args:
        depth: Number of weighted layers of the original network: 11, 13, 16 or 19.
        num_classes: Number of classes: length of the output.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels, at least 32, because it is halved five times.

    Raises:
        ConfigError: If the depth is unknown, or images are smaller than 32x32.

    Source: Simonyan, Zisserman: Very Deep Convolutional Networks for Large-Scale Image Recognition,
    ICLR 2015; the layers are torchvision's.
    """

    def __init__(self, depth: int, num_classes: int, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        if depth not in LAYOUTS:
            raise ConfigError(f"model.depth must be one of {', '.join(map(str, LAYOUTS))}, got {depth}")
        if image_size < SMALLEST_IMAGE:
            raise ConfigError(
                f"VGG-{depth} needs images of at least 32x32 pixels, got {image_size}x{image_size}; use "
                "model=resnet20, or dataset=cifar10"
            )
        self.features = make_layers(cfgs[LAYOUTS[depth]], batch_norm=True)
        if in_channels != 3:
            self.features[0] = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1)
        self.features.apply(_initialise)
        self.classifier = nn.Linear(FEATURES, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Computes the logits of the classes.

        Args:
            images: Batch of images: float, shape (batch, in_channels, height, width).

        Returns:
            Logits, shape (batch, num_classes).
        """
        features: Tensor = self.features(images)
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits
