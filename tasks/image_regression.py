"""Task: regression of a number from an image, such as a price or an angle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from tasks.datasets.base import Dataset, require
from tasks.datasets.measured_images import MeasuredImageDataset
from tasks.placement import place
from trainer.task import Batch, Task

__all__ = ["ImageRegression", "RatioRegression", "image_regression"]

SMALLEST_SPREAD = 1e-6


class ImageRegression(Task):
    """Minimizes the squared error of the standardized number; evaluated by the mean absolute error (MAE).

    The model learns numbers that are scaled to mean 0 and standard deviation 1 over the training images.

    Args:
        model: Function that builds the network from ``num_classes=1``, ``in_channels`` and ``image_size``.
        dataset: Data set of images with numbers.

    Raises:
        ConfigError: If the data set holds no images with numbers.
    """

    metric: ClassVar[str] = "mae"
    higher_is_better: ClassVar[bool] = False
    sums: ClassVar[tuple[str, ...]] = ("loss", "absolute", "count")

    def __init__(self, model: Callable[..., nn.Module], dataset: Dataset) -> None:
        self.dataset = require(dataset, MeasuredImageDataset, "image regression")
        self.model = model
        self.train = self.dataset.train
        self.test = self.dataset.test
        typical = self.dataset.typical.double()
        scaled, weights = self.to_scale(typical), self.weigh(typical)
        self.total = weights.mean().item()
        self.center = (weights * scaled).mean().item() / self.total
        variance = (weights * (scaled - self.center).square()).mean().item() / self.total
        # Numbers that are all equal have no spread to divide by.
        self.spread = max(math.sqrt(variance), SMALLEST_SPREAD)

    def weigh(self, numbers: Tensor) -> Tensor:
        """Returns the weight of each number's squared error, up to a common factor: same shape as ``numbers``."""
        return torch.ones_like(numbers)

    def to_scale(self, numbers: Tensor) -> Tensor:
        """Converts numbers, of any shape, to the scale on which the model learns them; here, it is the same scale."""
        return numbers

    def from_scale(self, scaled: Tensor) -> Tensor:
        """Converts numbers, of any shape, back from the scale of :meth:`to_scale`."""
        return scaled

    def build_model(self) -> nn.Module:
        """Builds the network, with one output, for the data set's images.

        Raises:
            ConfigError: If the network cannot take images of that size.
        """
        return self.model(num_classes=1, in_channels=self.dataset.in_channels, image_size=self.dataset.image_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the weighted mean squared error of the standardized numbers: a scalar."""
        placed = place(batch, model)
        return self._squares(model(placed["images"]).squeeze(1), placed["labels"]).mean()

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the sums named by ``sums``: float64, shape (len(sums),), on the model's device."""
        placed = place(batch, model)
        outputs, numbers = model(placed["images"]).squeeze(1).double(), placed["labels"].double()
        loss = self._squares(outputs, numbers).sum()
        errors = (self.predict(outputs) - numbers).abs()
        return torch.stack([loss, *self._sum_errors(errors, numbers), loss.new_tensor(len(numbers))])

    def predict(self, outputs: Tensor) -> Tensor:
        """Converts the model's outputs, of any shape, to numbers in the unit of the data set."""
        return self.from_scale(outputs * self.spread + self.center)

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns ``loss``, as in training, and ``mae``, the mean absolute error in the unit of the data set."""
        return {"loss": sums["loss"] / sums["count"], "mae": sums["absolute"] / sums["count"]}

    def _squares(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """Returns the contribution of each image to the loss: 1 on average if the model has learned nothing."""
        standardised = (self.to_scale(numbers) - self.center) / self.spread
        return (outputs - standardised).square() * (self.weigh(numbers) / self.total)

    def _sum_errors(self, errors: Tensor, numbers: Tensor) -> list[Tensor]:
        return [errors.sum()]


class RatioRegression(ImageRegression):
    """Like :class:`ImageRegression`, for positive numbers; evaluated by the mean relative error (MAPE).

    The model learns the logarithm of the number, and the squared error of a number ``y`` has the weight ``1 / y``. Both
    together minimize the MAPE: if ``log y`` has a normal distribution of mean ``m`` and variance ``v``, the prediction
    with the smallest expected ``|prediction - y| / y`` is ``exp(m - v)``, and so is the one with the smallest expected
    ``(log prediction - log y)**2 / y``. Without the weight, the prediction would be ``exp(m)``. This is too high for a
    small MAPE: the relative error of a low prediction is at most 1, but that of a high prediction has no limit.
    """

    metric: ClassVar[str] = "mape"
    sums: ClassVar[tuple[str, ...]] = ("loss", "absolute", "relative", "count")

    def weigh(self, numbers: Tensor) -> Tensor:
        """Returns the weight of each number's squared error, its reciprocal: same shape as ``numbers``."""
        return numbers.reciprocal()

    def to_scale(self, numbers: Tensor) -> Tensor:
        """Returns the natural logarithms of numbers, of any shape."""
        return numbers.log()

    def from_scale(self, scaled: Tensor) -> Tensor:
        """Returns the exponentials of scaled numbers, of any shape."""
        return scaled.exp()

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics of :class:`ImageRegression`, and ``mape``, the mean relative error, as a fraction."""
        return super().summarize(sums) | {"mape": sums["relative"] / sums["count"]}

    def _sum_errors(self, errors: Tensor, numbers: Tensor) -> list[Tensor]:
        return [errors.sum(), (errors / numbers).sum()]


def image_regression(model: Callable[..., nn.Module], dataset: Dataset) -> ImageRegression:
    """Makes the task for a data set; evaluates relative errors if all numbers are positive, otherwise absolute errors.

    Args:
        model: Function that builds the network from ``num_classes=1``, ``in_channels`` and ``image_size``.
        dataset: Data set of images with numbers.

    Returns:
        A :class:`RatioRegression` if all numbers are positive, otherwise an :class:`ImageRegression`.

    Raises:
        ConfigError: If the data set holds no images with numbers.
    """
    images = require(dataset, MeasuredImageDataset, "image regression")
    kind = RatioRegression if bool((images.typical > 0).all()) else ImageRegression
    return kind(model, images)
