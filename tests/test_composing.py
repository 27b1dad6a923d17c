"""Hydra's loader as train.py uses it: the same in less time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal import config_loader_impl
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf

from tests.driver import command, here, only_run, summary
from train import CONFIGURATIONS, _quick

WORDS = (
    [],
    ["compressor=topka", "cluster=simulated", "seed=7"],
    ["experiment=spardl/vgg16_cifar10", "scale=smoke"],
    ["hydra.job.chdir=false", "+hydra.job.env_set.A=b"],
)


def loader() -> ConfigLoader:
    return GlobalHydra.instance().config_loader()


def listed() -> list[list[str]]:
    with initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        groups = loader().get_group_options("", ObjectType.GROUP)
        return [groups, *(loader().get_group_options(group) for group in groups)]


def composed(words: list[str], multirun: bool = False) -> Any:
    """What Hydra's main does: compose to learn the mode, and then again."""
    with initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        load = loader().load_configuration
        mode = load("train", words, RunMode.MULTIRUN, validate_sweep_overrides=False).hydra.mode
        if mode is None:
            mode = RunMode.MULTIRUN if multirun else RunMode.RUN
            words = [*words, f"hydra.mode={mode.name}"]
        return OmegaConf.to_container(load("train", words, mode))


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The words of each composition."""
    done: list[tuple[str, ...]] = []
    real = config_loader_impl.ConfigLoaderImpl._load_configuration_impl

    def counted(self: Any, **given: Any) -> Any:
        done.append(tuple(given["overrides"]))
        return real(self, **given)

    monkeypatch.setattr(config_loader_impl.ConfigLoaderImpl, "_load_configuration_impl", counted)
    return done


def test_the_same_is_listed_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly, before = listed(), GlobalHydra.instance()
    monkeypatch.setattr(config_loader_impl, "CachingConfigRepository", None)
    with _quick():
        assert listed() == slowly
    assert GlobalHydra.instance() is before
    with pytest.raises(TypeError):
        listed()


def completed(line: str) -> str:
    """What Hydra's shell completion prints."""
    environment = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    return str(command("--shell-completion", "query=bash", env=environment).stdout)


def test_the_shell_completes() -> None:
    found = completed("python train.py compressor=topk").split()
    assert found == ["compressor=topk", "compressor=topka", "compressor=topkdsa"]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_the_same_is_composed_in_one_go(words: list[str], compositions: list[Any]) -> None:
    slowly = composed(words)
    assert len(compositions) == 2
    with _quick():
        assert composed(words) == slowly
    assert len(compositions) == 3


def test_a_run_is_composed_once(tmp_path: Path, compositions: list[Any]) -> None:
    words = ("cluster=simulated", "cluster.workers=1", "training.max_steps=1", f"output_dir={tmp_path}")
    assert here(*words) == 0
    assert len(compositions) == 1
    assert summary(only_run(tmp_path))["status"] == "finished"


def test_what_is_kept_serves_the_same_words_once(compositions: list[Any]) -> None:
    with _quick(), initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        loader().load_configuration("train", ["seed=1"], RunMode.MULTIRUN, validate_sweep_overrides=False)
        other = loader().load_configuration("train", ["seed=2", "hydra.mode=RUN"], RunMode.RUN)
        again = loader().load_configuration("train", ["seed=1", "hydra.mode=RUN"], RunMode.RUN)
    assert (other.seed, again.seed) == (2, 1)
    assert len(compositions) == 3


def test_words_of_a_sweep_are_refused_without_one() -> None:
    with _quick(), pytest.raises(ConfigCompositionException, match="To sweep over it, add --multirun"):
        composed(["seed=1,2"])


def test_a_sweep_is_composed_as_hydra_does() -> None:
    words = ["compressor=none,topk", "seed=1,2"]
    slowly = composed(words, multirun=True)
    with _quick():
        assert composed(words, multirun=True) == slowly


@pytest.mark.parametrize("word", ["hydra.mode=RUN", "experiment=sparse_communication_study"])
def test_a_mode_of_the_configuration_s_own(word: str) -> None:
    slowly = composed([word])
    with _quick():
        assert composed([word]) == slowly
