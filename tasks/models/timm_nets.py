"""ImageNet models from timm that torchvision lacks."""

from __future__ import annotations

from torch import nn

from spardl.basics.errors import ConfigError

__all__ = ["inception_v4"]

SMALLEST_IMAGE = 75


def inception_v4(num_classes: int, in_channels: int = 3, image_size: int = 299) -> nn.Module:
    """Builds timm's Inception-v4 with new random weights.

    With three channels and 1,000 classes it has 42,679,816 parameters in 449 tensors.

    Args:
        num_classes: Number of classes: length of the output.
        in_channels: Number of channels of an image.
        image_size: Height and width of an image in pixels, at least 75; 299 in the paper.

    Returns:
        A module that maps float images (batch, in_channels, height, width) to logits (batch, num_classes).

    Raises:
        ConfigError: If images are smaller than 75x75, which the network would reduce to nothing.

    Source: Szegedy, Ioffe, Vanhoucke, Alemi: Inception-v4, Inception-ResNet and the Impact of Residual
    Connections on Learning, AAAI 2017.
    """
    if image_size < SMALLEST_IMAGE:
        raise ConfigError(
            f"Inception-v4 needs images of at least 75x75 pixels, got {image_size}x{image_size}; use "
            "dataset=synthetic_images, or model=resnet20"
        )
    # Imported late: it takes seconds, and only this model needs it.
    import timm  # noqa: PLC0415

    model: nn.Module = timm.create_model("inception_v4", num_classes=num_classes, in_chans=in_channels)
    return model
