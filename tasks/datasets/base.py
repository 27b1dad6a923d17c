"""What a data set is to a task: images with labels, or text as numbered tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from spardl.errors import ConfigError

__all__ = ["Corpus", "Dataset", "ImageDataset", "ImageSplit", "SpecialTokens", "TextDataset", "require"]


class Dataset:
    """A data set of some kind.

    No dataclass, on purpose: hydra's ``instantiate`` turns a dataclass among its arguments into a
    configuration.

    Attributes:
        kind: what it holds; which tasks it fits follows from that.
        examples: configurations of this kind, for error messages.
        name: its name in the configuration.
    """

    kind: ClassVar[str]
    examples: ClassVar[str]

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Labelled images in memory, normalised, and augmented where a generator is given.

    Attributes:
        images: uint8 or float, shape (count, channels, height, width), values in ``[0, scale]``.
        labels: int64, shape (count,).
        mean: per-channel mean of the images divided by ``scale``, shape (channels,).
        std: per-channel standard deviation of the same, shape (channels,).
        scale: the largest value of a pixel.
        padding: black pixels around an image before a crop of its own size is taken at random.
        flip: whether every second image, on average, is mirrored.
    """

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    scale: float
    padding: int = 0
    flip: bool = False

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Collects images and labels.

        Args:
            indices: int64, shape (batch,).
            generator: source of the crops and flips; ``None`` leaves the images as they are.

        Returns:
            ``images``, float32, shape (batch, channels, height, width), and ``labels``, int64, shape (batch,).
        """
        pixels = self.images[indices]
        if generator is not None:
            pixels = _mirror_and_crop(pixels, self.padding, self.flip, generator)
        shape = (1, -1, 1, 1)
        images = (pixels.float() / self.scale - self.mean.view(shape)) / self.std.view(shape)
        return {"images": images, "labels": self.labels[indices]}


def _mirror_and_crop(pixels: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    count, channels, height, width = pixels.shape
    padded = torch.nn.functional.pad(pixels, (padding,) * 4)
    corner = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    rows = corner[0] + torch.arange(height)
    columns = corner[1] + torch.arange(width)
    if flip:
        mirrored = torch.randint(2, (count, 1), generator=generator).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    # One gather instead of a loop over images: index (image, channel, row, column), broadcast.
    image = torch.arange(count).view(-1, 1, 1, 1)
    channel = torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows.view(count, 1, height, 1), columns.view(count, 1, 1, width)]


class ImageDataset(Dataset):
    """Images with labels.

    Args:
        name: its name in the configuration.
        train: the training images.
        test: the held-out images.
        num_classes: labels are in ``[0, num_classes)``.
        in_channels: channels of an image.
        image_size: height and width of an image, in pixels.
    """

    kind: ClassVar[str] = "images"
    examples: ClassVar[str] = "dataset=digits, cifar10 or cifar100"

    def __init__(
        self,
        name: str,
        train: ImageSplit,
        test: ImageSplit,
        num_classes: int,
        in_channels: int,
        image_size: int,
    ) -> None:
        super().__init__(name)
        self.train, self.test = train, test
        self.num_classes, self.in_channels, self.image_size = num_classes, in_channels, image_size


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that BERT's input format adds to words; all are below every word's id."""

    pad: int = 0
    unk: int = 1
    cls: int = 2
    sep: int = 3
    mask: int = 4

    NAMES: ClassVar[tuple[str, ...]] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised text with its sentences and documents, stored flat.

    Attributes:
        tokens: int64, shape (tokens,): every sentence's ids, without special tokens.
        sentences: int64, shape (sentences + 1,): where each sentence begins in ``tokens``, and the end.
        documents: int64, shape (documents + 1,): where each document begins in ``sentences``, and the end.
    """

    tokens: Tensor
    sentences: Tensor
    documents: Tensor

    @classmethod
    def from_documents(cls, documents: Iterable[Sequence[Sequence[int]]]) -> Corpus:
        """Stores documents, given as sentences of token ids; empty sentences and documents are left out."""
        kept = [[sentence for sentence in document if sentence] for document in documents]
        kept = [document for document in kept if document]
        sentences = [sentence for document in kept for sentence in document]
        return cls(
            tokens=torch.tensor([token for sentence in sentences for token in sentence], dtype=torch.int64),
            sentences=_offsets(len(sentence) for sentence in sentences),
            documents=_offsets(len(document) for document in kept),
        )


def _offsets(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


class TextDataset(Dataset):
    """Text as token ids.

    Args:
        name: its name in the configuration.
        train: the training documents.
        test: the held-out documents.
        vocab_size: token ids are in ``[0, vocab_size)``.
        special: the ids of the special tokens.
    """

    kind: ClassVar[str] = "text"
    examples: ClassVar[str] = "dataset=pydocs"

    def __init__(self, name: str, train: Corpus, test: Corpus, vocab_size: int, special: SpecialTokens) -> None:
        super().__init__(name)
        self.train, self.test = train, test
        self.vocab_size, self.special = vocab_size, special


AnyDataset = TypeVar("AnyDataset", bound=Dataset)


def require(dataset: Dataset, wanted: type[AnyDataset], task: str) -> AnyDataset:
    """Checks that a data set fits a task.

    Args:
        dataset: what the configuration chose.
        wanted: the kind that the task can use.
        task: the task's name, for the message.

    Returns:
        ``dataset``, known to be of that kind.

    Raises:
        ConfigError: it is of another kind.
    """
    if isinstance(dataset, wanted):
        return dataset
    raise ConfigError(
        f"{task} needs a data set of {wanted.kind}; dataset={dataset.name} holds {dataset.kind}; use {wanted.examples}"
    )
