from __future__ import annotations

import pytest
import torch

from spardl.basics.errors import ConfigError
from tasks.models.timm_nets import inception_v4


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


def test_small_images_are_refused_in_one_line_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        inception_v4(num_classes=10, image_size=74)
    assert "at least 75x75 pixels, got 74x74" in str(caught.value)
    assert "dataset=synthetic_images" in str(caught.value)
    assert "\n" not in str(caught.value)
