from __future__ import annotations

import pytest
import torch
from PIL import Image

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.image_folder import Crop, _box, _cut, draw_crops, imagenet

CLASSES = ("n01", "n02", "n03")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_picture(path, seed: int, size=(40, 30), mode="RGB") -> None:
    width, height = size
    noise = torch.randint(256, (height, width, 3), generator=seeded(seed)).to(torch.uint8)
    Image.fromarray(noise.numpy()).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    """The layout of ImageNet: three classes, two training pictures and one test picture each."""
    root = tmp_path / "data" / "imagenet"
    for part, count in (("train", 2), ("val", 1)):
        for number, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for picture in range(count):
                write_picture(root / part / name / f"{picture}.JPEG", 10 * number + picture)
    return root


def load(folder, **options):
    root = folder.parent
    return imagenet(str(root), cache=str(root.parent / "cache"), **{"image_size": 16, "threads": 2, **options})


def complaint(folder, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_the_usual_layout(folder):
    dataset = load(folder)
    assert (len(dataset.train), len(dataset.test), dataset.num_classes, dataset.image_size) == (6, 3, 3, 16)
    assert dataset.caveat is None
    batch = dataset.train.batch(torch.tensor([5, 0, 2]), seeded(0))
    assert batch["images"].shape == (3, 3, 16, 16)
    assert batch["images"].dtype == torch.float32
    assert batch["labels"].tolist() == [2, 0, 1]
    assert [dataset.train.path(index) for index in (0, 1, 4)] == [
        folder / "train" / name for name in ("n01/0.JPEG", "n01/1.JPEG", "n03/0.JPEG")
    ]


def test_evaluation_takes_the_middle_of_the_shrunk_picture(folder):
    Image.new("RGB", (64, 32), (0, 0, 0)).save(folder / "val" / "n01" / "0.JPEG")
    path = folder / "val" / "n02" / "0.JPEG"
    path.unlink()
    wide = torch.zeros(16, 64, 3, dtype=torch.uint8)
    wide[:, 24:40] = 255  # shrunk to 18 x 72, whose middle 16 x 16 is white
    Image.fromarray(wide.numpy()).save(path.with_suffix(".png"))
    images = load(folder).test.batch(torch.tensor([0, 1]), None)["images"]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(images[0], ((0 - mean) / std).view(3, 1, 1).expand(3, 16, 16), atol=0.03)
    assert torch.allclose(images[1], ((1 - mean) / std).view(3, 1, 1).expand(3, 16, 16), atol=0.03)


def test_a_batch_is_a_function_of_indices_and_generator(folder):
    split = load(folder).train
    before = torch.get_rng_state()
    indices = torch.arange(6)
    first = split.batch(indices, seeded(1))["images"]
    assert torch.equal(first, split.batch(indices, seeded(1))["images"])
    assert not torch.equal(first, split.batch(indices, seeded(2))["images"])
    assert torch.equal(split.batch(indices, None)["images"][3:], split.batch(indices[3:], None)["images"])
    assert torch.equal(before, torch.get_rng_state())


def test_the_number_of_threads_changes_nothing(folder):
    one, many = (load(folder, threads=threads).train.batch(torch.arange(6), seeded(1)) for threads in (1, 5))
    assert torch.equal(one["images"], many["images"])


def test_pictures_of_other_modes_become_rgb(folder):
    write_picture(folder / "train" / "n01" / "0.JPEG", 1, mode="L")
    write_picture(folder / "train" / "n01" / "1.JPEG", 1, mode="CMYK")
    assert load(folder).train.batch(torch.arange(2), None)["images"].shape == (2, 3, 16, 16)


def test_crops_fit_into_the_picture_and_vary():
    for width, height in ((40, 30), (30, 40), (500, 20), (1, 1), (3, 900)):
        boxes = [_box(crop, width, height) for crop in draw_crops(200, seeded(3))]
        for top, left, high, wide in boxes:
            assert high > 0 < wide
            assert top >= 0 <= left
            assert top + high <= height
            assert left + wide <= width
    areas = [high * wide / 1200 for *_, high, wide in (_box(crop, 40, 30) for crop in draw_crops(400, seeded(3)))]
    assert min(areas) < 0.15
    assert max(areas) > 0.85


def test_a_crop_by_hand():
    # 25 x 16 is a third of the area; 100 x 4 does not fit and is passed over.
    crop = Crop(areas=[1 / 3, 1 / 3], ratios=[25.0, 25 / 16], left=1.0, top=0.5, mirrored=False)
    assert _box(crop, 40, 30) == (7, 15, 16, 25)
    assert _box(crop._replace(areas=[9.0], ratios=[1.0]), 90, 30) == (0, 25, 30, 40)


def test_evaluation_cuts_off_a_margin():
    framed = torch.zeros(18, 18, 3, dtype=torch.uint8)
    framed[1:17, 1:17] = 255
    assert _cut(Image.fromarray(framed.numpy()), None, 16).min() == 255


def test_a_mirrored_crop_is_the_crop_mirrored():
    noise = Image.fromarray(torch.randint(256, (20, 30, 3), dtype=torch.uint8).numpy())
    crop = Crop(areas=[0.5], ratios=[1.0], left=0.3, top=0.6, mirrored=False)
    assert torch.equal(_cut(noise, crop._replace(mirrored=True), 16), _cut(noise, crop, 16).flip(2))


def test_half_of_the_crops_are_mirrored():
    assert 150 < sum(crop.mirrored for crop in draw_crops(400, seeded(3))) < 250


def test_the_list_of_files_is_kept_until_a_folder_changes(folder):
    load(folder)
    cache = folder.parent.parent / "cache"
    stamps = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.safetensors")}
    assert len(stamps) == 2
    load(folder)
    assert stamps == {path.name: path.stat().st_mtime_ns for path in cache.glob("*.safetensors")}
    write_picture(folder / "train" / "n02" / "new.JPEG", 7)
    assert len(load(folder).train) == 7


def test_a_missing_folder_and_a_download_say_where_to_get_it(tmp_path):
    for options, words in (({}, "imagenet is missing"), ({"download": True}, "cannot fetch it")):
        message = complaint(tmp_path / "data" / "imagenet", **options)
        assert words in message
        assert "image-net.org" in message
        assert str(tmp_path / "data" / "imagenet" / "train") in message
        assert "SPARDL_DATA" in message


def test_a_missing_part_and_a_missing_class(folder):
    (folder / "val" / "n03" / "0.JPEG").unlink()
    assert "n03" in complaint(folder)
    (folder / "val" / "n03").rmdir()
    assert "have different class folders" in complaint(folder)
    (folder / "val").rename(folder / "elsewhere")
    assert "imagenet is missing" in complaint(folder)


@pytest.mark.parametrize("keep", [0, 200])
def test_a_corrupt_picture_is_named(folder, keep):
    path = folder / "train" / "n02" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:keep])
    split = load(folder).train
    with pytest.raises(DataError) as caught:
        split.batch(torch.arange(6), seeded(0))
    assert f"{path} cannot be decoded" in str(caught.value)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(DataError, match=r"1\.JPEG cannot be decoded"):
        split.batch(torch.arange(6), seeded(0))


@pytest.mark.parametrize("option", ["image_size", "threads"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=f"dataset.{option} must be at least 1, got 0"):
        imagenet("/nowhere", **{option: 0})


def test_placeholder_data_has_original_shapes():
    dataset = imagenet("/nowhere", stand_in=True)
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (1_281_167, 50_000, 1000)
    assert dataset.test.batch(torch.tensor([49_999]), None)["images"].shape == (1, 3, 224, 224)
    assert "dataset=imagenet" in dataset.caveat
