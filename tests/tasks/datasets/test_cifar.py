from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
import torchvision

from spardl.basics.errors import DataError
from tasks.datasets.cifar import cifar10, cifar100


def write_pickle(path: Path, content: dict) -> list[str]:
    path.write_bytes(pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes()).hexdigest()]


def images(count: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3072), generator=generator).to(torch.uint8).numpy()


@pytest.fixture
def small_cifar10(tmp_path, monkeypatch):
    """A folder in the layout of the original with seven images; torchvision is told its checksums."""
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
def test_missing_data_are_told_in_one_line(load, name, folder, tmp_path):
    with pytest.raises(DataError) as caught:
        load(str(tmp_path))
    message = str(caught.value)
    assert "\n" not in message
    assert f"{name} is missing" in message
    assert str(tmp_path / folder) in message
    assert f"python train.py dataset={name} dataset.download=true" in message
    assert "SPARDL_DATA" in message


def test_a_changed_file_is_told_as_damage(small_cifar10):
    (small_cifar10 / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"short")
    with pytest.raises(DataError, match="cifar10 is damaged"):
        cifar10(str(small_cifar10))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"labels": [1]}), pickle.dumps([1])[:-1]])
def test_unreadable_files_are_told_as_damage(small_cifar10, monkeypatch, content):
    path = small_cifar10 / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(content)
    listed = [[path.name, hashlib.md5(content).hexdigest()]]
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", listed)
    with pytest.raises(DataError, match="cifar10 is damaged"):
        cifar10(str(small_cifar10))


def test_a_failed_download_is_told_in_one_line(tmp_path, monkeypatch):
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
