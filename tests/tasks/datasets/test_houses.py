from __future__ import annotations

import os

import pytest
import torch
from PIL import Image

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.houses import ROOMS, houses

PRICES = [100_000, 250_000, 480_000, 999_999]
COLOURS = {"bathroom": (250, 0, 0), "bedroom": (0, 250, 0), "frontal": (0, 0, 250), "kitchen": (250, 250, 250)}


def write_table(folder, prices) -> None:
    (folder / "HousesInfo.txt").write_text("".join(f"3 2.5 2000 85255 {price}\n" for price in prices))


def write_houses(folder, prices=PRICES, suffix=".png"):
    """Pictures of one colour for each room, a little darker for each further house."""
    folder.mkdir(parents=True)
    write_table(folder, prices)
    for number in range(1, len(prices) + 1):
        for room, colour in COLOURS.items():
            shade = tuple(max(value - number, 0) for value in colour)
            Image.new("RGB", (20, 14), shade).save(folder / f"{number}_{room}{suffix}")
    return folder


@pytest.fixture
def published(tmp_path):
    return write_houses(tmp_path / "data" / "houses")


def load(folder, **options):
    root = folder.parent
    return houses(str(root), cache=str(root.parent / "cache"), **{"image_size": 8, **options})


def by_price(dataset):
    """Price of each house to its montage, from both splits."""
    splits = (dataset.train, dataset.test)
    return {
        price: picture for split in splits for price, picture in zip(split.labels.tolist(), split.images, strict=True)
    }


def complaint(folder, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("houses ")
    return message


def test_a_montage_shows_the_four_rooms_of_its_house(published):
    found = by_price(load(published))
    assert sorted(found) == PRICES
    for number, price in enumerate(PRICES, 1):
        montage = found[price]
        assert montage.shape == (3, 8, 8)
        assert montage.dtype == torch.uint8
        corners = {"bathroom": montage[:, 0, 0], "bedroom": montage[:, 0, 7]}
        corners |= {"frontal": montage[:, 7, 0], "kitchen": montage[:, 7, 7]}
        for room in ROOMS:
            assert corners[room].tolist() == [max(value - number, 0) for value in COLOURS[room]]


def test_a_quarter_is_to_test_and_the_split_follows_its_seed(published):
    dataset = load(published)
    assert (len(dataset.train), len(dataset.test)) == (3, 1)
    assert sorted(dataset.typical.tolist()) == sorted(dataset.train.labels.tolist())
    assert load(published).test.labels.tolist() == dataset.test.labels.tolist()
    assert len({load(published, split_seed=seed).test.labels.item() for seed in range(8)}) > 1


def test_only_training_pictures_are_augmented(published):
    dataset = load(published)
    images = dataset.train.batch(torch.arange(3), None)["images"]
    assert images.mean(dim=(0, 2, 3)).abs().max() < 1e-4
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-4
    assert (dataset.train.padding, dataset.train.flip) == (4, True)
    assert (dataset.test.padding, dataset.test.flip) == (0, False)


def test_a_batch_is_a_function_of_indices_and_generator(published):
    dataset = load(published)
    before = torch.get_rng_state()
    indices = torch.tensor([2, 0, 2])
    first = dataset.train.batch(indices, torch.Generator().manual_seed(1))
    again = dataset.train.batch(indices, torch.Generator().manual_seed(1))
    assert torch.equal(first["images"], again["images"])
    assert first["labels"].tolist() == dataset.train.labels[indices].tolist()
    assert first["labels"].dtype == torch.float32
    assert torch.equal(before, torch.get_rng_state())


def test_montages_come_from_the_cache_until_a_picture_changes(published):
    first = by_price(load(published))
    (kept,) = (published.parent.parent / "cache").glob("*.safetensors")
    stamp = kept.stat().st_mtime_ns
    assert torch.equal(by_price(load(published))[PRICES[0]], first[PRICES[0]])
    assert kept.stat().st_mtime_ns == stamp
    Image.new("RGB", (50, 50), (9, 9, 9)).save(published / "1_frontal.png")
    assert by_price(load(published))[PRICES[0]][:, 7, 0].tolist() == [9, 9, 9]


def test_published_and_shrunk_folder_names(tmp_path):
    shrunk = write_houses(tmp_path / "data" / "houses-64", suffix=".webp")
    assert "shrunk to 64x64" in load(shrunk).caveat
    assert load(write_houses(tmp_path / "data" / "Houses Dataset", suffix=".jpg")).caveat is None


def test_a_missing_folder(tmp_path):
    message = complaint(tmp_path / "data" / "houses")
    assert "houses is missing" in message
    assert str(tmp_path / "data" / "houses") in message
    assert "github.com/emanhamed/Houses-dataset" in message
    assert "SPARDL_DATA" in message


def test_a_download_says_where_to_get_it(tmp_path):
    message = complaint(tmp_path / "data" / "houses", download=True)
    assert "download=true cannot fetch it" in message
    assert "github.com/emanhamed/Houses-dataset" in message


def test_a_missing_table(published):
    (published / "HousesInfo.txt").unlink()
    assert "HousesInfo.txt is missing" in complaint(published)


def test_a_missing_picture(published):
    (published / "3_kitchen.png").unlink()
    assert "3_kitchen.jpg is missing" in complaint(published)


def test_a_table_cut_short_between_lines(published):
    write_table(published, PRICES[:2])
    message = complaint(published)
    assert "HousesInfo.txt has 2 lines, but 3_" in message


@pytest.mark.parametrize(
    "row", ["3 2.5 2000 85255", "3 2.5 2000 85255 0", "3 2.5 2000 85255 nan", "3 2 x 85255 100", ""]
)
def test_a_bad_row(published, row):
    lines = (published / "HousesInfo.txt").read_text().splitlines()
    lines[1] = row
    (published / "HousesInfo.txt").write_text("\n".join(lines))
    assert "HousesInfo.txt, line 2 must contain the numbers bedrooms" in complaint(published)


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"\xff\xfe\x00", "cannot be read")])
def test_a_table_that_is_none(published, content, words):
    (published / "HousesInfo.txt").write_bytes(content)
    assert words in complaint(published)


@pytest.mark.parametrize("keep", [0, 40])
def test_a_picture_cut_short_leaves_nothing_in_the_cache(published, keep):
    noise = torch.randint(256, (30, 30, 3), dtype=torch.uint8).numpy()
    path = published / "2_bedroom.png"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "2_bedroom.png cannot be decoded" in complaint(published)
    assert not list((published.parent.parent / "cache").glob("*.safetensors"))


@pytest.mark.parametrize("size", [0, 7])
def test_sizes_that_cannot_be_halved_are_refused(size):
    with pytest.raises(ConfigError, match=f"image_size must be an even number, .*, got {size}"):
        houses("/nowhere", image_size=size, stand_in=True)


def test_placeholder_data_has_original_shapes():
    dataset = houses("/nowhere", stand_in=True)
    assert (len(dataset.train), len(dataset.test)) == (401, 134)
    assert dataset.train.images.shape == (401, 3, 64, 64)
    assert "dataset=houses" in dataset.caveat
    assert torch.equal(dataset.train.images, houses("/nowhere", stand_in=True).train.images)


def test_the_stand_in_determines_the_price():
    dataset = houses("/nowhere", image_size=16, stand_in=True)
    coarse = [
        torch.nn.functional.avg_pool2d(part.images.double(), 4).flatten(1) for part in (dataset.train, dataset.test)
    ]
    seen, asked = (torch.cat([part, torch.ones(len(part), 1)], dim=1) for part in coarse)
    solved = torch.linalg.lstsq(seen, dataset.train.labels.double().log().unsqueeze(1)).solution
    wrong = (asked @ solved).squeeze(1).exp() / dataset.test.labels.double() - 1
    assert wrong.abs().mean() < 0.2


@pytest.mark.data
def test_the_real_houses(tmp_path):
    root = os.environ.get("SPARDL_DATA")
    if root is None:
        pytest.skip("set SPARDL_DATA to a folder that holds houses or houses-64")
    dataset = houses(root, cache=str(tmp_path))
    assert (len(dataset.train), len(dataset.test)) == (401, 134)
    prices = torch.cat([dataset.train.labels, dataset.test.labels])
    assert (prices.min().item(), prices.max().item()) == (22_000, 5_858_000)
    assert dataset.train.batch(torch.arange(4), None)["images"].shape == (4, 3, 64, 64)
