"""Small data shared by the task tests."""

from __future__ import annotations

import pytest
import torch

from tasks.datasets.digits import load_digits
from tasks.datasets.images import ImageDataset, ImageSplit
from tasks.datasets.pydocs import load_pydocs
from tasks.datasets.text import Corpus, SpecialTokens, TextDataset


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits() -> ImageDataset:
    return load_digits()


@pytest.fixture(scope="session")
def pydocs() -> TextDataset:
    return load_pydocs(vocab_size=2000)


@pytest.fixture(scope="session")
def tiny_text() -> TextDataset:
    """Three documents of distinct words from 10 up: any token tells its document and its place."""
    documents = [[list(range(base, base + 6)), list(range(base + 6, base + 11))] for base in (10, 30, 50)]
    corpus = Corpus.from_documents(documents)
    return TextDataset("tiny", train=corpus, test=corpus, vocab_size=70, special=SpecialTokens())


@pytest.fixture(scope="session")
def tiny_images() -> ImageDataset:
    """Six 4x4 images of distinct pixel values, three channels, three classes."""
    images = torch.arange(6 * 3 * 16).remainder(251).to(torch.uint8).view(6, 3, 4, 4)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.25, 1.0])
    train = ImageSplit(images, labels, mean, std, 255.0, padding=1, flip=True)
    test = ImageSplit(images, labels, mean, std, 255.0)
    return ImageDataset("tiny", train, test, num_classes=3, in_channels=3, image_size=4)
