"""Every file of conf/model and conf/dataset names what exists and builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from spardl.errors import ConfigError
from spardl.training.task import Task
from tasks.datasets.base import Dataset, ImageDataset, ImageSplit

CONF = Path(__file__).parents[2] / "conf"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
DATASETS = sorted(path.stem for path in (CONF / "dataset").glob("*.yaml"))
ON_DISK = {"cifar10": 10, "cifar100": 100}


def load(group: str, name: str):
    return OmegaConf.load(CONF / group / f"{name}.yaml")


def dataset_named(name: str) -> Dataset:
    if name not in ON_DISK:
        return instantiate(load("dataset", name))
    images = ImageSplit(
        torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2).long(), torch.zeros(3), torch.ones(3), 255.0
    )
    return ImageDataset(name, images, images, num_classes=ON_DISK[name], in_channels=3, image_size=32)


def chosen_dataset(config) -> str:
    """What the model's file overrides the data set to, else the default of the primary configuration."""
    overrides = {key: value for entry in config.get("defaults", []) for key, value in entry.items()}
    return overrides.get("override /dataset", "digits")


def test_all_files_are_there():
    assert {"bert", "bert_tiny", "lstm", "resnet20", "resnet110", "resnet50", "vgg11", "vgg16", "vgg19"} <= set(MODELS)
    assert DATASETS == ["cifar10", "cifar100", "digits", "pydocs"]


def task_named(name: str) -> Task:
    config = load("model", name)
    dataset = dataset_named(chosen_dataset(config))
    return instantiate(config.task, model=instantiate(config.model), dataset=dataset)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_makes_a_task_and_its_model(name):
    task = task_named(name)
    assert isinstance(task, Task)
    # Shapes without weights: BERT-base alone would take half a gigabyte.
    with torch.device("meta"):
        assert len(list(task.build_model().parameters())) > 0


@pytest.mark.parametrize("name", ["bert_tiny", "lstm", "resnet18", "resnet20", "vgg11"])
def test_the_model_takes_the_data(name):
    task = task_named(name)
    model = task.build_model().eval()
    batch = task.test.batch(torch.tensor([0, 1]), None)
    assert task.loss(model, batch).isfinite()
    figures = task.summarize(dict(zip(task.sums, task.measure(model, batch).tolist(), strict=True)))
    assert {"loss", task.metric} <= set(figures)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_sets_only_what_it_may(name):
    config = load("model", name)
    assert set(config) <= {"defaults", "task", "model", "optimizer", "training"}
    assert set(config.training) <= {"batch_size", "eval_batch_size", "epochs"}
    assert set(config.get("optimizer", {})) <= {"lr", "weight_decay"}
    assert (CONF / "model" / f"{name}.yaml").read_text().startswith("# @package _global_\n")
    assert config.model._partial_ is True


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_file_names_a_loader(name):
    config = load("dataset", name)
    assert callable(get_object(config._target_))
    if name in ON_DISK:
        assert OmegaConf.to_container(config)["root"] == "${data_dir}"
        assert config.download is False
    else:
        assert instantiate(config).name == name


@pytest.mark.parametrize("name", sorted(ON_DISK))
def test_a_missing_folder_reaches_the_user_as_one_line(name, tmp_path):
    config = OmegaConf.merge({"data_dir": str(tmp_path)}, {"dataset": load("dataset", name)})
    with pytest.raises(InstantiationException) as caught:
        instantiate(config.dataset)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert f"{name} is missing" in str(caught.value.__cause__)


@pytest.mark.parametrize("model", ["bert", "bert_tiny", "lstm"])
def test_text_models_refuse_digits_whatever_else_their_file_sets(model, digits):
    config = load("model", model)
    with pytest.raises(InstantiationException) as caught:
        instantiate(config.task, model=instantiate(config.model), dataset=digits)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "use dataset=pydocs" in str(caught.value.__cause__)
