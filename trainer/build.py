"""Builds an experiment from a configuration, and defines which classes a configuration may name.

A configuration is resolved if all its interpolations (``${...}``) are replaced by values. As plain data, it consists of
dicts, lists, strings, numbers, booleans and ``None``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError

from spardl.basics.errors import ConfigError, DataError, SpardlError
from spardl.basics.files import read_yaml
from spardl.clusters.workers.membership import leads
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor
from spardl.method.method import Method
from spardl.method.momentum import AutoMomentum, Momentum
from spardl.method.moving import resolve_momentum
from spardl.method.muon import MuonMomentum
from spardl.method.residuals import Residual
from spardl.method.warmup import Warmup
from spardl.schedules.engine import Schedule
from spardl.vector.wire import Wire
from tasks.datasets.base import Dataset
from trainer.display import show_activity
from trainer.early_stopping import EarlyStopping
from trainer.experiment import Experiment
from trainer.launch import Launcher
from trainer.learner import Plan, Settings, sample_optimizer
from trainer.loggers import Several
from trainer.lr import LrSchedule
from trainer.observers import Logger
from trainer.optimizers import MuonAdamW, optimizer_parts
from trainer.targets import (
    Kind,
    allowed_packages,
    check_arguments,
    check_names,
    importable,
    nearest,
    public_targets,
    resolve_recipe,
)
from trainer.task import Task

__all__ = ["CONFIGURATIONS", "KINDS", "build", "build_dataset", "build_method", "build_plan", "stand_ins"]

CONFIGURATIONS = Path(__file__).resolve().parents[1] / "conf"
# An allowlist: neither a configuration nor a command line can import or call anything else.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "cluster": Kind(Launcher, ("trainer",)),
        "communicator": Kind(Communicator, extensible=True),
        "compressor": Kind(Compressor, extensible=True),
        "dataset": Kind(Dataset, ("tasks",), functions=True, extensible=True),
        "logger": Kind(
            Logger,
            ("trainer",),
            extensible=True,
            inside={each.name: Kind(Logger, ("trainer",)) for each in fields(Several) if each.name != "of"},
        ),
        "lr_schedule": Kind(LrSchedule, ("trainer",), extensible=True),
        "model": Kind(nn.Module, ("tasks",), functions=True, partial=True, extensible=True),
        "momentum": Kind(Momentum),
        "optimizer": Kind(torch.optim.Optimizer, ("torch.optim", "trainer"), partial=True),
        "residual": Kind(Residual),
        "schedule": Kind(Schedule, extensible=True),
        "task": Kind(Task, ("tasks",), functions=True, extensible=True),
        "warmup": Kind(Warmup, inside={"communicator": Kind(Communicator, extensible=True)}),
        "wire": Kind(Wire),
    }
)


_PLACEHOLDER = re.compile(r"^stand_in: \$\{scale\.stand_in\} # placeholder: (.+)$", re.MULTILINE)


def stand_ins() -> dict[str, tuple[str, str]]:
    """Maps the name of each placeholder of a data set to the name of the data set and a description of the data."""
    texts = {path.stem: path.read_text() for path in sorted((CONFIGURATIONS / "dataset").glob("*.yaml"))}
    found = {name: _PLACEHOLDER.search(text) for name, text in texts.items()}
    return {f"synthetic_{name}": (name, each[1]) for name, each in found.items() if each}


def _offer_choices() -> None:
    # The choices of Hydra's group `point` and placeholders of data sets are too small for a file each.
    store = ConfigStore.instance()
    for name, point in OmegaConf.load(CONFIGURATIONS / "points.yaml").items():
        store.store(str(name), point, group="point", package="_global_", provider="points.yaml")
    for name, (dataset, _) in stand_ins().items():
        store.store(name, {"defaults": [dataset], "stand_in": True}, group="dataset", provider=f"{dataset}.yaml")


_offer_choices()


def build(config: DictConfig, label: str) -> Experiment:
    """Builds the parts that a configuration names, and checks that they can be combined.

    Args:
        config: Configuration composed by Hydra, without the node ``hydra``.
        label: Beginning of the run folder's name, such as ``topka-resnet20-cifar10``; the run's id follows.

    Returns:
        The experiment, which is not started yet.

    Raises:
        ConfigError: If the parts cannot be combined, or a value is out of range.
    """
    # Configurations of earlier versions name classes by module paths that no longer exist.
    plain: dict[str, Any] = check_names(public_targets(OmegaConf.to_container(config, resolve=True)), KINDS)
    quiet = not leads(os.environ)
    with show_activity("preparing the data", quiet=quiet):
        dataset = build_dataset(plain)
    with show_activity("checking that the parts fit together", quiet=quiet):
        parts = build_plan(plain, dataset), _make(plain, "cluster"), _make(plain, "logger")
        return Experiment(plain, label, *parts, tuple(filter(None, [getattr(dataset, "caveat", None)])), _recall)


def _recall(folder: Path) -> dict[str, Any]:
    """Reads the resolved configuration of another run from its folder."""
    file = folder / "config.yaml"
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(StringIO(read_yaml(file))))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"start_from cannot be used: its run's configuration {file} cannot be read ({error}); choose a checkpoint "
            "of another run"
        ) from error
    return plain if isinstance(plain, dict) else {}


def build_plan(plain: Mapping[str, Any], dataset: Any) -> Plan:
    """Builds the training plan of a configuration: task, method, optimizer, schedules and settings.

    Args:
        plain: Resolved configuration, as plain data.
        dataset: Data set that :func:`build_dataset` returned.

    Raises:
        ConfigError: If the parts cannot be combined, or a value is out of range.
    """
    make = partial(_make, plain)
    task, method = make("task", model=make("model"), dataset=dataset), build_method(plain)
    optimizer, schedule = make("optimizer"), make("schedule")
    # momentum=auto depends on the optimizer, except where each worker applies its own optimizer.
    if isinstance(method.momentum, AutoMomentum):
        method = resolve_momentum(method, None if schedule.alone else optimizer_parts(sample_optimizer(optimizer)))
    # Without matrices it would update all parameters as Adam does.
    if isinstance(method.momentum, MuonMomentum) and not isinstance(sample_optimizer(optimizer), MuonAdamW):
        raise ConfigError("momentum=muon needs the matrices of optimizer=muon; use optimizer=muon with momentum=auto")
    return Plan(task, method, optimizer, make("lr_schedule"), schedule, _settings(plain["training"]))


def build_dataset(plain: Mapping[str, Any]) -> Any:
    """Reads or generates the data set that a configuration names.

    Args:
        plain: Resolved configuration, as plain data.

    Returns:
        The data set, normally a :class:`tasks.datasets.base.Dataset`.

    Raises:
        DataError: If the data set is missing or invalid.
        ConfigError: If a value is out of range.
    """
    try:
        return _make(plain, "dataset")
    except DataError as error:
        # Only data sets with files have placeholder data.
        if "stand_in" not in plain["dataset"]:
            raise
        raise DataError(f"{error}; scale.stand_in=true trains on placeholder data of the same shapes") from error


def build_method(plain: Mapping[str, Any]) -> Method:
    """Builds the method of a configuration: compressor, communicator, residual, momentum, warm-up and wire format.

    Args:
        plain: Resolved configuration, as plain data.

    Raises:
        ConfigError: If the parts cannot be combined, or a value is out of range.
    """
    plain = resolve_recipe(plain)
    return Method(
        *(_make(plain, part) for part in ("compressor", "communicator", "residual", "momentum", "warmup", "wire"))
    )


def _make(plain: Mapping[str, Any], name: str, **extra: Any) -> Any:
    """Instantiates one node; any failure becomes a one-line error that names the node."""
    node = plain.get(name) or {}
    KINDS[name].check(name, node, allowed_packages(plain.get("plugins")))
    check_arguments(name, node)
    try:
        return instantiate(importable(node), **extra, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        # Errors of the library already name the setting.
        if isinstance(cause, SpardlError):
            raise cause from None
        given = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
        raise ConfigError(f"{name} cannot be created with {given}: {type(cause).__name__}: {cause}") from cause


def _early_stopping(node: Any) -> EarlyStopping:
    if node is None:  # a configuration of an earlier version
        return EarlyStopping()
    known = [field.name for field in fields(EarlyStopping)]
    if not isinstance(node, Mapping) or set(node) - set(known):
        raise ConfigError(f"training.early_stopping must have the settings {', '.join(known)}, got {node!r}")
    return EarlyStopping(**node)


def _settings(node: Mapping[str, Any]) -> Settings:
    known = [field.name for field in fields(Settings)]
    if unknown := [key for key in node if key not in known]:
        close = nearest(unknown[0], dict.fromkeys(known))
        hint = f"did you mean training.{close}?" if close else "remove it"
        raise ConfigError(f"training.{unknown[0]}={node[unknown[0]]} is not a setting of this program; {hint}")
    try:
        return Settings(**{**node, "early_stopping": _early_stopping(node.get("early_stopping"))})
    except TypeError as error:
        raise ConfigError(f"training: {error}") from error
