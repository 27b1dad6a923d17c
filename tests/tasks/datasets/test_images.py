"""Data sets of images."""

from __future__ import annotations

import hashlib
import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image

from spardl.basics.errors import ConfigError, DataError
from tasks.datasets.cifar import cifar10, cifar100
from tasks.datasets.digits import load_digits
from tasks.datasets.image_folder import Crop, _box, _cut, draw_crops, imagenet
from tasks.datasets.rotated_digits import _turn, rotated_digits
from tasks.image_regression import image_regression
from tasks.models.resnet_cifar import CifarResNet
from tasks.models.vgg_cifar import CifarVgg


def write_pickle(path: Path, content: dict) -> list[str]:
    path.write_bytes(pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes()).hexdigest()]


def images(count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3072), generator=generator).to(torch.uint8).numpy()


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """A folder in the layout of the original with seven images; torchvision gets its checksums."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    kind = torchvision.datasets.CIFAR10
    train = [
        write_pickle(folder / "data_batch_1", {"data": images(2, 1), "labels": [3, 9]}),
        write_pickle(folder / "data_batch_2", {"data": images(3, 2), "labels": [0, 1, 2]}),
    ]
    test = [write_pickle(folder / "test_batch", {"data": images(2, 3), "labels": [5, 6]})]
    name, md5 = write_pickle(folder / "batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(kind, "train_list", train)
    monkeypatch.setattr(kind, "test_list", test)
    monkeypatch.setattr(kind, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return tmp_path


def test_reads_the_layout_of_the_original(small_cifar10):
    dataset = cifar10(str(small_cifar10))
    assert (len(dataset.train), len(dataset.test)) == (5, 2)
    assert dataset.train.labels.tolist() == [3, 9, 0, 1, 2]
    assert dataset.train.images.dtype == torch.uint8
    # Rows are stored channel by channel, so a plain reshape is the picture.
    assert torch.equal(dataset.train.images[2:].flatten(1), torch.from_numpy(images(3, 2)))
    assert dataset.test.padding == 0
    assert not dataset.test.flip


def test_normalises_by_channel(small_cifar10):
    dataset = cifar10(str(small_cifar10))
    batch = dataset.test.batch(torch.tensor([1]), None)["images"]
    expected = (dataset.test.images[1, 2, 7, 9].item() / 255 - 0.447) / 0.262
    assert batch[0, 2, 7, 9].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("load", "name", "folder"),
    [(cifar10, "cifar10", "cifar-10-batches-py"), (cifar100, "cifar100", "cifar-100-python")],
)
def test_missing_data_are_reported_in_one_line(load, name, folder, tmp_path):
    with pytest.raises(DataError) as caught:
        load(str(tmp_path))
    message = str(caught.value)
    assert "\n" not in message
    assert f"{name} is missing" in message
    assert str(tmp_path / folder) in message
    assert f"python train.py dataset={name} dataset.download=true" in message
    assert "SPARDL_DATA" in message


def test_a_changed_file_is_reported_as_damage(small_cifar10):
    (small_cifar10 / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"short")
    with pytest.raises(DataError, match="cifar10 is damaged"):
        cifar10(str(small_cifar10))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"labels": [1]}), pickle.dumps([1])[:-1]])
def test_unreadable_files_are_reported_as_damage(small_cifar10, monkeypatch, content):
    path = small_cifar10 / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(content)
    listed = [[path.name, hashlib.md5(content).hexdigest()]]
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", listed)
    with pytest.raises(DataError, match="cifar10 is damaged"):
        cifar10(str(small_cifar10))


def test_a_failed_download_is_reported_in_one_line(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("no route\nto host")

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", fail)
    with pytest.raises(DataError) as caught:
        cifar10(str(tmp_path), download=True)
    assert "no route to host" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("load", "name", "classes"), [(cifar10, "cifar10", 10), (cifar100, "cifar100", 100)])
def test_placeholder_data_has_original_shapes(load, name, classes):
    dataset = load("/nowhere", stand_in=True)
    assert (len(dataset.train), len(dataset.test)) == (50_000, 10_000)
    assert (dataset.name, dataset.num_classes, dataset.in_channels, dataset.image_size) == (name, classes, 3, 32)
    assert f"dataset={name}" in dataset.caveat
    assert (dataset.train.padding, dataset.train.flip) == (4, True)
    assert (dataset.test.padding, dataset.test.flip) == (0, False)
    batch = dataset.train.batch(torch.tensor([49_999, 0]), None)
    assert batch["images"].shape == (2, 3, 32, 32)
    assert batch["labels"].tolist() == [classes - 1, 0]


def test_real_data_are_no_stand_in(small_cifar10):
    assert cifar10(str(small_cifar10)).caveat is None


@pytest.mark.data
def test_the_real_cifar10():
    root = os.environ.get("SPARDL_DATA")
    if root is None:
        pytest.skip("set SPARDL_DATA to a folder that holds cifar-10-batches-py")
    dataset = cifar10(root)
    assert (len(dataset.train), len(dataset.test)) == (50_000, 10_000)
    assert dataset.train.labels.bincount().tolist() == [5000] * 10
    assert dataset.test.labels[:4].tolist() == [3, 8, 8, 0]
    normalised = dataset.train.batch(torch.arange(50_000), None)["images"]
    assert normalised.mean(dim=(0, 2, 3)).abs().max() < 0.01
    assert (normalised.std(dim=(0, 2, 3)) - 1).abs().max() < 0.01


def rows(split) -> set[bytes]:
    return {bytes(image.to(torch.uint8).flatten().tolist()) for image in split.images}


def test_sizes_and_values(digits):
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.train.images.shape[1:] == (1, 8, 8)
    assert digits.train.images.max() == 16
    assert (digits.in_channels, digits.image_size, digits.num_classes) == (1, 8, 10)


def test_splits_are_disjoint_and_complete(digits):
    assert len(rows(digits.train) | rows(digits.test)) == 1797
    assert not rows(digits.train) & rows(digits.test)


def test_classes_are_split_evenly(digits):
    whole = digits.train.labels.bincount() + digits.test.labels.bincount()
    assert (digits.test.labels.bincount() / whole - 0.2).abs().max() < 0.005


def test_the_split_is_the_same_every_time_and_follows_the_seed(digits):
    assert torch.equal(load_digits().test.images, digits.test.images)
    assert rows(load_digits(split_seed=1).test) != rows(digits.test)


def test_training_images_are_normalised(digits):
    images = digits.train.batch(torch.arange(len(digits.train)), None)["images"]
    assert abs(images.mean().item()) < 1e-4
    assert abs(images.std().item() - 1) < 1e-4


def test_only_training_images_are_shifted(digits):
    indices = torch.arange(20)
    generator = torch.Generator().manual_seed(0)
    plain = digits.test.batch(indices, None)["images"]
    assert torch.equal(digits.test.batch(indices, generator)["images"], plain)
    assert not torch.equal(
        digits.train.batch(indices, generator)["images"], digits.train.batch(indices, None)["images"]
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def dataset():
    return rotated_digits()


def test_sizes(dataset):
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    batch = dataset.train.batch(torch.arange(5), seeded(0))
    assert batch["images"].shape == (5, 1, 32, 32)
    assert batch["labels"].shape == (5,)
    assert batch["labels"].dtype == torch.float32
    assert dataset.caveat is None


def test_rotation_is_counter_clockwise():
    picture = torch.rand(1, 2, 8, 8)
    assert torch.allclose(_turn(picture, torch.tensor([0.0]), 8), picture, atol=1e-5)
    assert torch.allclose(_turn(picture, torch.tensor([90.0]), 8), picture.rot90(1, (2, 3)), atol=1e-5)


def test_each_picture_takes_its_own_angle():
    pictures = torch.rand(1, 1, 8, 8).expand(3, 1, 8, 8)
    turned = _turn(pictures, torch.tensor([0.0, 90.0, 180.0]), 8)
    for quarter in range(3):
        assert torch.allclose(turned[quarter], pictures[0].rot90(quarter, (1, 2)), atol=1e-5)


def test_evaluation_angles_are_fixed_and_spread(dataset):
    labels = dataset.test.batch(torch.arange(359), None)["labels"]
    assert torch.equal(labels, rotated_digits().test.batch(torch.arange(359), None)["labels"])
    assert labels.abs().max() <= 60
    assert labels.min() < -50
    assert labels.max() > 50
    assert abs(labels.mean().item()) < 10


def test_training_angles_come_from_the_generator_only(dataset):
    before = torch.get_rng_state()
    indices = torch.arange(30)
    first = dataset.train.batch(indices, seeded(1))
    again = dataset.train.batch(indices, seeded(1))
    assert torch.equal(first["images"], again["images"])
    assert torch.equal(first["labels"], again["labels"])
    assert not torch.equal(first["labels"], dataset.train.batch(indices, seeded(2))["labels"])
    assert first["labels"].abs().max() <= 60
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_judged_in_degrees(dataset):
    task = image_regression(partial(CifarVgg, depth=11), dataset)
    assert task.metric == "mae"
    assert task.center == pytest.approx(0.0, abs=1e-9)
    assert task.spread == pytest.approx(60 / 3**0.5, rel=1e-2)
    assert task.build_model()(dataset.train.batch(torch.arange(2), seeded(0))["images"]).shape == (2, 1)


def test_a_small_network_learns_the_angle():
    dataset = rotated_digits(image_size=16)
    task = image_regression(partial(CifarResNet, depth=8), dataset)
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = seeded(0)
    for _ in range(40):
        indices = torch.randint(len(task.train), (48,), generator=generator)
        optimizer.zero_grad()
        task.loss(model, task.train.batch(indices, generator)).backward()
        optimizer.step()
    model.eval()
    sums = task.measure(model, task.test.batch(torch.arange(len(task.test)), None))
    figures = task.summarize(dict(zip(task.sums, sums.tolist(), strict=True)))
    assert figures["mae"] < 20  # always guessing 0 is wrong by 30


@pytest.mark.parametrize("options", [{"image_size": 7}, {"largest_angle": 0.0}, {"largest_angle": 181.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        rotated_digits(**options)


CLASSES = ("n01", "n02", "n03")


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
def test_image_folder_options_out_of_range_are_refused(option):
    with pytest.raises(ConfigError, match=f"dataset.{option} must be at least 1, got 0"):
        imagenet("/nowhere", **{option: 0})


def test_image_folder_placeholder_data_has_original_shapes():
    dataset = imagenet("/nowhere", stand_in=True)
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (1_281_167, 50_000, 1000)
    assert dataset.test.batch(torch.tensor([49_999]), None)["images"].shape == (1, 3, 224, 224)
    assert "dataset=imagenet" in dataset.caveat
