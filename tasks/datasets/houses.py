"""Data set of houses, for regression of the price from four pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from spardl.basics.errors import ConfigError, DataError
from spardl.basics.files import TEXT_BYTES, read_regular
from tasks.datasets.cache import cached, fingerprint
from tasks.datasets.images import ImageSplit
from tasks.datasets.measured_images import MeasuredImageDataset
from tasks.datasets.synthetic_images import HALF, draw_pictures, patterns, stand_in_notice

__all__ = ["houses"]

NAME = "houses"
FOLDERS = ("houses", "Houses Dataset", "houses-64")
SHRUNK = "houses-64"
TABLE = "HousesInfo.txt"
COLUMNS = "bedrooms, bathrooms, area, zip code, price"
ROOMS = ("bathroom", "bedroom", "frontal", "kitchen")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
ORIGIN = "github.com/emanhamed/Houses-dataset"
LARGEST_VALUE = 255.0
TEST_FRACTION = 0.25
RECIPE = 1  # raise it when montages are made differently, so that no old ones are read from the cache
STAND_IN_HOUSES = 535


def houses(
    root: str,
    download: bool = False,
    cache: str = "~/.cache/spardl",
    image_size: int = 64,
    crop_padding: int = 4,
    flip: bool = True,
    split_seed: int = 0,
    stand_in: bool = False,
) -> MeasuredImageDataset:
    """Loads 535 houses, each with its price and a montage of four pictures: bathroom, bedroom, front and kitchen.

    Three quarters (401 houses) are for training, one quarter (134) for tests.

    Args:
        root: Data folder that contains ``houses``, ``Houses Dataset`` (as published) or ``houses-64`` (shrunk copies).
        download: Not supported; the error message states where to get the data.
        cache: Folder in which the montages are cached, because making them takes seconds.
        image_size: Height and width of a montage, in pixels, an even number.
        crop_padding: Number of pixels by which a training montage may be shifted each way.
        flip: Whether to mirror every second training montage, on average.
        split_seed: Seed of the random split, which is the same in every run.
        stand_in: Whether to generate placeholder data instead: pictures whose colors depend on the price.

    Returns:
        Data set of montages, normalized by mean and standard deviation of the training montages, and prices in dollars.

    Raises:
        ConfigError: If the image size is odd.
        DataError: If files are missing or damaged, or ``download`` is set.

    Source: Ahmed, Moustafa: House Price Estimation from Visual and Textual Features, IJCCI 2016.
    """
    if image_size < 2 or image_size % 2:
        raise ConfigError(
            f"dataset.image_size must be an even number, at least 2, because images are 2x2 montages, got {image_size}"
        )
    if stand_in:
        pictures, prices = _generate(image_size)
        notice: str | None = stand_in_notice(NAME, "generated pictures and prices")
    else:
        folder = _find(Path(root).expanduser(), download)
        pictures, prices = _montages(folder, cache, image_size)
        notice = _notice(folder)
    chosen = torch.randperm(len(prices), generator=torch.Generator().manual_seed(split_seed))
    test, train = chosen.tensor_split([round(TEST_FRACTION * len(chosen))])
    scaled = pictures[train].float() / LARGEST_VALUE
    mean, std = scaled.mean(dim=(0, 2, 3)), scaled.std(dim=(0, 2, 3))
    labels = prices.float()
    return MeasuredImageDataset(
        NAME,
        ImageSplit(pictures[train], labels[train], mean, std, LARGEST_VALUE, crop_padding, flip),
        ImageSplit(pictures[test], labels[test], mean, std, LARGEST_VALUE),
        typical=prices[train],
        in_channels=3,
        image_size=image_size,
        caveat=notice,
    )


def _find(root: Path, download: bool) -> Path:
    for name in FOLDERS:
        if (root / name / TABLE).exists():
            return root / name
    found = [root / name for name in FOLDERS if (root / name).exists()]
    if found:
        raise DataError(f"{NAME} is damaged: {found[0] / TABLE} is missing; download it again from {ORIGIN}")
    refused = ", and dataset.download=true cannot fetch it (no checksum is published)" if download else ""
    raise DataError(
        f"{NAME} is missing: {(root / FOLDERS[0]).absolute()} does not exist{refused}; put the pictures and {TABLE} "
        f"from {ORIGIN} there, or set SPARDL_DATA (data_dir) to its parent folder"
    )


def _notice(folder: Path) -> str | None:
    if folder.name != SHRUNK:
        return None
    return f"dataset={NAME}: the pictures of {SHRUNK} are copies shrunk to 64x64, not the published ones"


def _montages(folder: Path, cache: str, size: int) -> tuple[Tensor, Tensor]:
    """Returns pictures, uint8, shape (houses, 3, size, size), and prices, float64, shape (houses,)."""
    prices = _read_prices(folder / TABLE)
    files = [[_picture(folder, house, room) for room in ROOMS] for house in range(1, len(prices) + 1)]
    _check_nothing_is_left(folder, len(prices))
    key = {
        "recipe": RECIPE,
        "folder": str(folder.absolute()),
        "size": size,
        "files": fingerprint([folder / TABLE, *(path for four in files for path in four)]),
    }
    prepared = cached(cache, NAME, key, lambda: {"pictures": torch.stack([_montage(four, size) for four in files])})
    return prepared["pictures"], torch.tensor(prices, dtype=torch.float64)


def _read_prices(table: Path) -> list[float]:
    try:
        rows = [line.split() for line in read_regular(table, TEXT_BYTES).decode("ascii").splitlines()]
    except (OSError, ValueError) as fault:
        raise DataError(
            f"{NAME} is damaged: {table} cannot be read ({fault}); download it again from {ORIGIN}"
        ) from fault
    if not rows:
        raise DataError(f"{NAME} is damaged: {table} is empty; download it again from {ORIGIN}")
    return [_price(row, f"{table}, line {number}") for number, row in enumerate(rows, 1)]


def _price(row: Sequence[str], where: str) -> float:
    try:
        *_, price = (float(word) for word in row)
    except ValueError:
        price = 0.0
    if len(row) != len(COLUMNS.split(",")) or not 0 < price < float("inf"):
        raise DataError(
            f"{NAME} is damaged: {where} must contain the numbers {COLUMNS}, with a price above 0; download it again "
            f"from {ORIGIN}"
        )
    return price


def _picture(folder: Path, house: int, room: str) -> Path:
    for suffix in SUFFIXES:
        path = folder / f"{house}_{room}{suffix}"
        if path.exists():
            return path
    raise DataError(f"{NAME} is damaged: {folder / f'{house}_{room}.jpg'} is missing; download it again from {ORIGIN}")


def _check_nothing_is_left(folder: Path, rows: int) -> None:
    """Checks that all pictures belong to a listed house; otherwise the table of prices was truncated."""
    for path in folder.glob(f"{rows + 1}_*"):
        raise DataError(
            f"{NAME} is damaged: {folder / TABLE} has {rows} lines, but {path.name} belongs to line {rows + 1}; "
            f"download it again from {ORIGIN}"
        )


def _montage(files: Sequence[Path], size: int) -> Tensor:
    four = [_read_picture(path, size // 2) for path in files]
    return torch.cat([torch.cat(four[:2], dim=2), torch.cat(four[2:], dim=2)], dim=1)


def _read_picture(path: Path, side: int) -> Tensor:
    """Returns a picture as uint8, shape (3, side, side); other aspect ratios are distorted."""
    from PIL import Image  # noqa: PLC0415
    from torchvision.transforms.v2.functional import pil_to_tensor  # noqa: PLC0415

    try:
        with Image.open(path) as picture:
            small = picture.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError) as fault:
        reason = " ".join(str(fault).split())
        raise DataError(
            f"{NAME} is damaged: {path} cannot be decoded ({reason}); download it again from {ORIGIN}"
        ) from fault
    pixels: Tensor = pil_to_tensor(small)
    return pixels


def _generate(size: int) -> tuple[Tensor, Tensor]:
    """Generates mixtures of two patterns; the share of the second one grows with the price."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(STAND_IN_HOUSES, generator=generator, dtype=torch.float64)
    prices = 20_000 * 300**share  # 20,000 to 6,000,000 dollars, as the real ones
    cheap, dear = patterns(2, channels=3).double()
    mixed = cheap + share.view(-1, 1, 1, 1) * (dear - cheap)
    coarse = mixed.round().clamp(0, HALF - 1).to(torch.uint8)
    return draw_pictures(coarse, size, seed=0, indices=torch.arange(STAND_IN_HOUSES)), prices.round()
