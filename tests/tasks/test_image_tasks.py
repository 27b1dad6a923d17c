"""Image classification and regression."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.datasets.images import ImageSplit
from tasks.datasets.measured_images import MeasuredImageDataset
from tasks.image_classification import ImageClassification
from tasks.image_regression import ImageRegression, RatioRegression, image_regression
from tasks.models.resnet_cifar import CifarResNet
from tasks.models.vgg_cifar import CifarVgg


class Fixed(torch.nn.Module):
    """Gives the same logits whatever it is shown."""

    def __init__(self, logits, dtype=torch.float32):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=dtype))

    def forward(self, images):
        assert images.dtype == self.logits.dtype
        return self.logits[: len(images)]


def evaluate(task, model, size):
    total = sum(task.measure(model, task.test.batch(i, None)) for i in torch.arange(len(task.test)).split(size))
    assert total.dtype == torch.float64
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_sums_by_hand(tiny_images, dtype):
    task = ImageClassification(None, tiny_images)
    model = Fixed([[math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(6)]], dtype)
    batch = task.test.batch(torch.tensor([0, 1]), None)  # labels 0 and 1
    losses = [-math.log(2 / 4), -math.log(1 / 8)]
    assert task.loss(model, batch).item() == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert task.measure(model, batch).tolist() == pytest.approx([sum(losses), 1.0, 2.0, 2.0], rel=1e-6)


def test_summary_divides_by_the_count(tiny_images):
    task = ImageClassification(None, tiny_images)
    figures = task.summarize({"loss": 6.0, "correct": 3.0, "top5": 4.0, "count": 4.0})
    assert figures == {"loss": 1.5, "accuracy": 0.75}  # of three classes, five are no choice
    assert task.metric in figures
    assert task.higher_is_better


def test_top5_by_hand(digits):
    task = ImageClassification(None, digits)
    rising = [float(score) for score in range(10)]
    labels = {"labels": torch.tensor([9, 5, 4, 0]), "images": torch.zeros(4, 1, 8, 8)}  # ranks 1, 5, 6 and 10
    sums = dict(zip(task.sums, task.measure(Fixed([rising] * 4), labels).tolist(), strict=True))
    assert (sums["correct"], sums["top5"], sums["count"]) == (1.0, 2.0, 4.0)
    figures = task.summarize(sums)
    assert (figures["accuracy"], figures["top5_accuracy"]) == (0.25, 0.5)


def test_of_classes_that_tie_the_first_count_as_higher(digits):
    task = ImageClassification(None, digits)
    batch = {"labels": torch.arange(10), "images": torch.zeros(10, 1, 8, 8)}
    sums = dict(zip(task.sums, task.measure(Fixed([[0.0] * 10] * 10), batch).tolist(), strict=True))
    assert (sums["correct"], sums["top5"]) == (1.0, 5.0)


def test_what_is_no_number_is_never_right(digits):
    task = ImageClassification(None, digits)
    batch = {"labels": torch.tensor([0, 3]), "images": torch.zeros(2, 1, 8, 8)}
    sums = dict(zip(task.sums, task.measure(Fixed([[math.nan] * 10] * 2), batch).tolist(), strict=True))
    assert (sums["correct"], sums["top5"]) == (0.0, 0.0)


def test_batch_sizes_do_not_change_the_summary(digits):
    task = ImageClassification(partial(CifarResNet, depth=8), digits)
    model = task.build_model().eval()
    assert evaluate(task, model, 100) == pytest.approx(evaluate(task, model, 359), rel=1e-5)


def test_measure_needs_no_gradients(digits):
    task = ImageClassification(partial(CifarResNet, depth=8), digits)
    sums = task.measure(task.build_model(), task.test.batch(torch.arange(4), None))
    assert not sums.requires_grad


def test_the_model_is_built_for_the_data(digits):
    asked = {}
    ImageClassification(lambda **data: asked.update(data), digits).build_model()
    assert asked == {"num_classes": 10, "in_channels": 1, "image_size": 8}


def test_weights_follow_the_global_seed(digits):
    task = ImageClassification(partial(CifarResNet, depth=8), digits)
    torch.manual_seed(5)
    first = task.build_model()
    torch.manual_seed(5)
    for one, other in zip(first.parameters(), task.build_model().parameters(), strict=True):
        assert torch.equal(one, other)


def test_text_is_refused(tiny_text):
    with pytest.raises(ConfigError, match="dataset=tiny contains text; use dataset=digits"):
        ImageClassification(None, tiny_text)


def test_vgg_refuses_digits(digits):
    with pytest.raises(ConfigError, match="8x8"):
        ImageClassification(partial(CifarVgg, depth=11), digits).build_model()


def test_resnet20_learns_digits(digits):
    task = ImageClassification(partial(CifarResNet, depth=20), digits)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        indices = torch.randint(len(task.train), (64,), generator=generator)
        optimizer.zero_grad()
        task.loss(model, task.train.batch(indices, generator)).backward()
        optimizer.step()
    for _ in range(20):  # settle the running statistics, far behind after so few steps
        model(task.train.batch(torch.randint(len(task.train), (64,), generator=generator), None)["images"])
    assert evaluate(task, model.eval(), 359)["accuracy"] > 0.6


class ImageRegressionFixed(torch.nn.Module):
    """Gives the same outputs whatever it is shown."""

    def __init__(self, outputs, dtype=torch.float32):
        super().__init__()
        self.outputs = torch.nn.Parameter(torch.tensor(outputs, dtype=dtype).unsqueeze(1))

    def forward(self, images):
        assert images.dtype == self.outputs.dtype
        return self.outputs[: len(images)]


def numbered(numbers, typical=None) -> MeasuredImageDataset:
    images = torch.zeros(len(numbers), 3, 8, 8, dtype=torch.uint8)
    split = ImageSplit(images, torch.tensor(numbers), torch.zeros(3), torch.ones(3), 255.0)
    typical = torch.tensor(typical or numbers, dtype=torch.float64)
    return MeasuredImageDataset("tiny", split, split, typical, in_channels=3, image_size=8)


def figures_of(task, model, size=100):
    indices = torch.arange(len(task.test)).split(size)
    total = sum(task.measure(model, task.test.batch(part, None)) for part in indices)
    assert total.dtype == torch.float64
    return task.summarize(dict(zip(task.sums, total.tolist(), strict=True)))


def output_for(task, number) -> float:
    """What a model must say to guess that number."""
    return (task.to_scale(torch.tensor(number, dtype=torch.float64)).item() - task.center) / task.spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mape_and_mae_by_hand(dtype):
    task = image_regression(None, numbered([100.0, 200.0, 400.0]))
    model = ImageRegressionFixed([output_for(task, guess) for guess in (150.0, 100.0, 400.0)], dtype)
    figures = figures_of(task, model)
    assert figures["mape"] == pytest.approx((50 / 100 + 100 / 200 + 0) / 3, rel=1e-5)
    assert figures["mae"] == pytest.approx((50 + 100 + 0) / 3, rel=1e-5)


def test_the_loss_of_ratios_by_hand():
    task = image_regression(None, numbered([1.0, math.e]))
    # Weights 1 and 1/e: the mean of the logarithms 0 and 1 is 1 / (e + 1), their variance e / (e + 1)**2.
    assert task.center == pytest.approx(1 / (math.e + 1))
    assert task.spread == pytest.approx(math.sqrt(math.e) / (math.e + 1))
    model = ImageRegressionFixed([output_for(task, 1.0), output_for(task, 1.0)])
    batch = task.train.batch(torch.arange(2), None)
    mean_weight = (1 + 1 / math.e) / 2
    expected = (0 + 1 / task.spread**2 * (1 / math.e) / mean_weight) / 2
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    assert figures_of(task, model)["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_differences_by_hand():
    task = image_regression(None, numbered([-10.0, 30.0]))
    assert (task.center, task.spread) == (10.0, 20.0)
    model = ImageRegressionFixed([0.5, 0.5])  # guesses 20
    batch = task.train.batch(torch.arange(2), None)
    assert task.loss(model, batch).item() == pytest.approx((1.5**2 + 0.5**2) / 2)
    assert figures_of(task, model) == pytest.approx({"loss": (1.5**2 + 0.5**2) / 2, "mae": (30 + 10) / 2})


@pytest.mark.parametrize("numbers", [[2.0, 30.0, 700.0], [-2.0, 30.0, 700.0]])
def test_a_model_that_knows_nothing_has_loss_one(numbers):
    task = image_regression(None, numbered(numbers))
    assert figures_of(task, ImageRegressionFixed([0.0, 0.0, 0.0]))["loss"] == pytest.approx(1.0, rel=1e-5)


def test_weighted_loss_approximates_mape():
    numbers = torch.randn(4000, dtype=torch.float64).mul(0.8).exp()
    task = image_regression(None, numbered([1.0], numbers.tolist()))
    by_mape = min(numbers.tolist()[:400], key=lambda guess: ((guess - numbers).abs() / numbers).mean())
    assert task.predict(torch.zeros(1)).item() == pytest.approx(by_mape, rel=0.1)
    assert task.predict(torch.zeros(1)).item() == pytest.approx(math.exp(-(0.8**2)), rel=0.1)


def test_positive_numbers_compare_by_ratio():
    by_ratio, by_difference = image_regression(None, numbered([1.0, 2.0])), image_regression(None, numbered([0.0, 2.0]))
    assert type(by_ratio) is RatioRegression
    assert type(by_difference) is ImageRegression
    assert (by_ratio.metric, by_difference.metric) == ("mape", "mae")
    assert not by_ratio.higher_is_better
    assert not by_difference.higher_is_better


def test_predictions_undo_the_scale():
    for task in (image_regression(None, numbered([3.0, 50.0])), image_regression(None, numbered([-3.0, 50.0]))):
        outputs = torch.tensor([output_for(task, 7.0)], dtype=torch.float64)
        assert task.predict(outputs).item() == pytest.approx(7.0)


def test_equal_numbers_are_no_division_by_zero():
    task = image_regression(None, numbered([5.0, 5.0]))
    assert task.loss(ImageRegressionFixed([0.0, 0.0]), task.train.batch(torch.arange(2), None)).isfinite()


def test_batch_sizes_do_not_change_the_figures():
    task = image_regression(partial(CifarResNet, depth=8), numbered([1.0, 5.0, 9.0, 30.0]))
    model = task.build_model().eval()
    assert figures_of(task, model, 1) == pytest.approx(figures_of(task, model, 4), rel=1e-5)


def test_the_model_is_built_for_the_data_with_one_output():
    asked = {}
    image_regression(lambda **data: asked.update(data), numbered([1.0])).build_model()
    assert asked == {"num_classes": 1, "in_channels": 3, "image_size": 8}


def test_classes_are_refused_in_one_line(digits):
    with pytest.raises(ConfigError) as caught:
        image_regression(None, digits)
    assert str(caught.value) == (
        "image regression needs a data set of images with numbers, but dataset=digits contains images; "
        "use dataset=rotated_digits or houses"
    )
