"""Image regression, such as a price or an angle."""

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
    """Squared error of the standardised number, judged by the mean absolute error (MAE) of the number itself.

    The model learns numbers of mean 0 and deviation 1 over the training images.

    Args:
        model: builds the network from ``num_classes=1``, ``in_channels`` and ``image_size``.
        dataset: images with numbers.

    Raises:
        ConfigError: the data set holds no images with numbers.
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
        """What the squared error of a number counts, up to a common factor."""
        return torch.ones_like(numbers)

    def to_scale(self, numbers: Tensor) -> Tensor:
        """The scale on which the model is to be right."""
        return numbers

    def from_scale(self, scaled: Tensor) -> Tensor:
        """Undoes :meth:`to_scale`."""
        return scaled

    def build_model(self) -> nn.Module:
        """Builds the network, with one output, for the data set's images.

        Raises:
            ConfigError: the network cannot take images of that size.
        """
        return self.model(num_classes=1, in_channels=self.dataset.in_channels, image_size=self.dataset.image_size)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean squared error of the standardised numbers."""
        placed = place(batch, model)
        return self._squares(model(placed["images"]).squeeze(1), placed["labels"]).mean()

    @torch.no_grad()
    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """Summed errors as ``sums`` names them, and images: float64, on the model's device."""
        placed = place(batch, model)
        outputs, numbers = model(placed["images"]).squeeze(1).double(), placed["labels"].double()
        loss = self._squares(outputs, numbers).sum()
        errors = (self.predict(outputs) - numbers).abs()
        return torch.stack([loss, *self._sum_errors(errors, numbers), loss.new_tensor(len(numbers))])

    def predict(self, outputs: Tensor) -> Tensor:
        """Turns the model's outputs into numbers as the data set has them."""
        return self.from_scale(outputs * self.spread + self.center)

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """``loss``: mean squared error of the standardised number; ``mae``: in the data set's unit."""
        return {"loss": sums["loss"] / sums["count"], "mae": sums["absolute"] / sums["count"]}

    def _squares(self, outputs: Tensor, numbers: Tensor) -> Tensor:
        """What each image adds to the loss: 1 on average where the model has learned nothing."""
        standardised = (self.to_scale(numbers) - self.center) / self.spread
        return (outputs - standardised).square() * (self.weigh(numbers) / self.total)

    def _sum_errors(self, errors: Tensor, numbers: Tensor) -> list[Tensor]:
        return [errors.sum()]


class RatioRegression(ImageRegression):
    """Like :class:`ImageRegression` for positive numbers, judged by the mean error relative to the number (MAPE).

    The model learns the number's logarithm, on which an error is a ratio, and the squared error of a number
    ``y`` counts ``1 / y``. Both together ask for what makes the MAPE small: if ``log y`` has a normal distribution
    of mean ``m`` and variance ``v``, the guess that minimises the expected ``|guess - y| / y`` is ``exp(m - v)``, and
    so is the one that minimises the expected ``(log guess - log y)**2 / y``. Unweighted, it would be ``exp(m)``, which
    is far too dear where little can be known: a guess can be several times too dear, but only once too cheap.
    """

    metric: ClassVar[str] = "mape"
    sums: ClassVar[tuple[str, ...]] = ("loss", "absolute", "relative", "count")

    def weigh(self, numbers: Tensor) -> Tensor:
        """The reciprocal."""
        return numbers.reciprocal()

    def to_scale(self, numbers: Tensor) -> Tensor:
        """The natural logarithm."""
        return numbers.log()

    def from_scale(self, scaled: Tensor) -> Tensor:
        """The exponential."""
        return scaled.exp()

    def summarize(self, sums: Mapping[str, float]) -> dict[str, float]:
        """As in :class:`ImageRegression`, and ``mape``: a fraction, 0.5 when wrong by half the number."""
        return super().summarize(sums) | {"mape": sums["relative"] / sums["count"]}

    def _sum_errors(self, errors: Tensor, numbers: Tensor) -> list[Tensor]:
        return [errors.sum(), (errors / numbers).sum()]


def image_regression(model: Callable[..., nn.Module], dataset: Dataset) -> ImageRegression:
    """Makes the regression that fits the numbers: on ratios if all are positive, else on differences.

    Args:
        model: builds the network from ``num_classes=1``, ``in_channels`` and ``image_size``.
        dataset: images with numbers.

    Raises:
        ConfigError: the data set holds no images with numbers.
    """
    images = require(dataset, MeasuredImageDataset, "image regression")
    kind = RatioRegression if bool((images.typical > 0).all()) else ImageRegression
    return kind(model, images)
