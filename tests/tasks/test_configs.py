"""Every file of conf/model and conf/dataset names what exists, fits together and builds."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf

from spardl.basics.errors import ConfigError
from tasks.datasets.base import Dataset
from tests.support.driver import composed
from tests.support.quick import some_quick
from trainer.build import CONFIGURATIONS, build_dataset, build_plan, stand_ins
from trainer.task import Task

MODELS = sorted(path.stem for path in (CONFIGURATIONS / "model").glob("*.yaml"))
DATASETS = sorted([*(path.stem for path in (CONFIGURATIONS / "dataset").glob("*.yaml")), *stand_ins()])
OPTIMIZERS = sorted(path.stem for path in (CONFIGURATIONS / "optimizer").glob("*.yaml"))
REAL = [name for name in DATASETS if f"synthetic_{name}" in DATASETS]
SMALL = [
    "bert_tiny",
    "gpt_chars",
    "gpt_pieces",
    "lstm",
    "lstm_an4_small",
    "lstm_imdb",
    "resnet18",
    "resnet20",
    "vgg11_house",
]


@cache
def dataset_of(node: str) -> Dataset:
    dataset: Dataset = build_dataset({"dataset": json.loads(node)})
    return dataset


def task_of(*words: str) -> Task:
    plain = composed("scale.stand_in=true", *words)
    return build_plan(plain, dataset_of(json.dumps(plain["dataset"]))).task


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARDL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_all_files_are_there() -> None:
    assert {
        "bert",
        "bert_tiny",
        "gpt_chars",
        "gpt_pieces",
        "lstm",
        "resnet20",
        "resnet110",
        "resnet50",
        "vgg11",
        "vgg16",
        "vgg19",
    } <= set(MODELS)
    assert {
        "cifar10",
        "cifar100",
        "imagenet",
        "houses",
        "ptb",
        "wikitext2",
        "wikitext2_chars",
        "wikipedia",
        "imdb",
        "an4",
    } <= set(REAL)
    embedded = {"digits", "rotated_digits", "pydocs", "pydocs_chars", "docstrings"}
    assert embedded <= set(DATASETS) - set(REAL)


@pytest.mark.parametrize("name", some_quick(MODELS, 2))
def test_a_model_file_makes_a_task_and_its_model(name: str) -> None:
    task = task_of(f"model={name}")
    assert isinstance(task, Task)
    assert size(task) > 0


@pytest.mark.parametrize("name", SMALL)
def test_the_model_takes_the_data(name: str) -> None:
    task = task_of(f"model={name}")
    torch.manual_seed(0)
    model = task.build_model().eval()
    batch = task.test.batch(torch.tensor([0, 1]), None)
    assert task.loss(model, batch).isfinite()
    figures = task.summarize(dict(zip(task.sums, task.measure(model, batch).tolist(), strict=True)))
    assert {"loss", task.metric} <= set(figures)


@pytest.mark.parametrize(("name", "parameters"), [("gpt_chars", 210_304), ("gpt_pieces", 1_313_536)])
def test_a_gpt_has_its_documented_size(name: str, parameters: int) -> None:
    assert size(task_of(f"model={name}")) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_sets_only_what_it_may(name: str) -> None:
    config = OmegaConf.load(CONFIGURATIONS / "model" / f"{name}.yaml")
    assert set(config) <= {"defaults", "task", "model", "presets", "training"}
    assert set(config.training) <= {"batch_size", "eval_batch_size", "eval_examples", "epochs", "clip_norm"}
    assert (CONFIGURATIONS / "model" / f"{name}.yaml").read_text().startswith("# @package _global_\n")
    assert config.model._partial_ is True


# Muon does not apply to models without matrices.
FOR_ALL_MODELS = [name for name in OPTIMIZERS if name != "muon"]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_values_for_each_optimizer(model: str) -> None:
    presets = OmegaConf.load(CONFIGURATIONS / "model" / f"{model}.yaml").presets
    assert set(FOR_ALL_MODELS) <= set(presets) <= set(OPTIMIZERS)
    assert all(set(preset) == {"lr", "weight_decay"} for preset in presets.values())


@pytest.mark.parametrize(("model", "optimizer"), some_quick(zip(MODELS, cycle(FOR_ALL_MODELS), strict=False), 3))
def test_an_optimizer_uses_the_values_of_the_model(model: str, optimizer: str) -> None:
    """Each model and each optimizer; a model's file sets nothing of an optimizer but these values."""
    preset = OmegaConf.load(CONFIGURATIONS / "model" / f"{model}.yaml").presets[optimizer]
    used = composed(f"model={model}", f"optimizer={optimizer}")["optimizer"]
    assert {name: used[name] for name in preset} == preset


def test_muon_uses_the_preset_of_a_model_that_has_one() -> None:
    preset = {"lr": 0.02, "weight_decay": 0.01}
    assert OmegaConf.load(CONFIGURATIONS / "model" / "gpt_chars.yaml").presets.muon == preset
    used = composed("model=gpt_chars", "optimizer=muon")["optimizer"]
    assert {name: used[name] for name in preset} == preset


@pytest.mark.parametrize("path", sorted((CONFIGURATIONS / "experiment").rglob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_says_for_which_optimizer_its_values_are(path: Any) -> None:
    config = OmegaConf.load(path)
    assert not {"lr", "weight_decay"} & set(config.get("optimizer", {}))


def test_only_what_sets_several_groups_is_global() -> None:
    """As the first lines of conf/train.yaml say."""
    texts = {path.relative_to(CONFIGURATIONS): path.read_text() for path in CONFIGURATIONS.rglob("*.yaml")}
    found = {path for path, text in texts.items() if "# @package _global_" in text}
    always = {path for path in texts if path.parts[0] in ("model", "experiment")}
    rest = {"momentum": {"local", "corrected"}, "compressor": {f"oktopk_{name}" for name in ("vgg", "lstm", "bert")}}
    assert always <= found
    assert found - always == {Path(group, f"{name}.yaml") for group, names in rest.items() for name in names} | {
        Path("scale", "smoke.yaml")
    }
    for path in found - always:
        assert len(set(OmegaConf.load(CONFIGURATIONS / path)) - {"defaults"}) > 1 or path.parts[0] == "momentum"


@pytest.mark.parametrize("path", sorted((CONFIGURATIONS / "scale").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_scaled_model_is_smaller_or_sees_less(path: Any) -> None:
    config = OmegaConf.load(path)
    assert set(config) <= {"model", "task", "training"}
    small, full = (size(task_of(f"model={path.stem}", f"scale={scale}")) for scale in ("smoke", "full"))
    assert small < full or (small == full and "training" in config)


def size(task: Task) -> int:
    # Shapes without weights: BERT-base alone would take half a gigabyte.
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in task.build_model().parameters())


@pytest.mark.parametrize("name", some_quick(DATASETS, 2))
def test_a_dataset_file_names_a_loader(name: str) -> None:
    assert callable(get_object(composed(f"dataset={name}")["dataset"]["_target_"]))


@pytest.mark.parametrize("name", REAL)
def test_real_data_are_never_fetched_unasked(name: str) -> None:
    config = OmegaConf.load(CONFIGURATIONS / "dataset" / f"{name}.yaml")
    plain = OmegaConf.to_container(config)
    assert plain["root"] == "${data_dir}"
    assert plain["stand_in"] == "${scale.stand_in}"
    assert plain.get("cache", "${cache_dir}") == "${cache_dir}"
    assert plain["download"] is False


@pytest.mark.parametrize("name", REAL)
def test_missing_data_error_is_one_line(name: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build_dataset(composed(f"dataset={name}", f"data_dir={tmp_path}"))
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(rf"missing.*{tmp_path}", message), message
    assert "SPARDL_DATA" in message or "data_dir" in message, message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", REAL)
def test_a_stand_in_says_that_it_is_one(name: str, tmp_path: Any) -> None:
    plain = composed(f"dataset=synthetic_{name}", f"data_dir={tmp_path}")
    dataset = dataset_of(json.dumps(plain["dataset"]))
    assert dataset.caveat
    assert "\n" not in dataset.caveat
    assert name in dataset.caveat


@pytest.mark.parametrize("model", ["bert", "bert_tiny", "gpt_chars", "gpt_pieces", "lstm"])
def test_text_models_refuse_digits_whatever_else_their_file_sets(model: str) -> None:
    with pytest.raises(ConfigError, match="needs a data set of text, but dataset=digits"):
        task_of(f"model={model}", "dataset=digits")
