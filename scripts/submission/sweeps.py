"""Expands command lines into runs, and checks them before submission."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from scripts.submission.submissions import ADDED
from spardl.basics.errors import ConfigError
from trainer.build import KINDS, build_method
from trainer.command_line import check_plugins
from trainer.experiment import experiment_id
from trainer.launch import Launcher, Simulated

__all__ = ["Planned", "expand", "plan"]


@dataclass(frozen=True)
class Planned:
    """One run to start.

    Attributes:
        words: Arguments of train.py.
        id: Run id.
        tasks: Number of processes to start; 1 for a simulation with any number of workers.
        cluster: Choice of ``cluster=``.
        outputs: Absolute path of the folder of all runs.
        force: Whether to repeat a finished run.
    """

    words: tuple[str, ...]
    id: str
    tasks: int
    cluster: str
    outputs: Path
    force: bool


def expand(words: Sequence[str], multirun: bool) -> list[tuple[str, ...]]:
    """Expands a sweep into the arguments of its runs, in the order of ``python train.py -m``.

    Call it inside :func:`scripts.choices.composing`.

    Raises:
        ConfigError: If a sweep is continuous, which Hydra's default sweeper does not support either.
        HydraException: If an argument cannot be parsed.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    typed = parser.parse_overrides(list(words))
    fixed = [str(override.input_line) for override in typed if not override.is_sweep_override()]
    hydra = compose("train", fixed, return_hydra_config=True).hydra
    if not multirun and hydra.mode != RunMode.MULTIRUN:
        return [tuple(words)]
    configured = parser.parse_overrides([f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()])
    # A later override of a key replaces an earlier one at its place, as in Hydra's default sweeper.
    values = {override.get_key_element(): _values(override) for override in (*configured, *typed)}
    return list(itertools.product(*values.values()))


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: a sweep needs discrete values, such as {key}=1,2,3 or {key}=range(1,4)"
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def plan(words: Sequence[str]) -> Planned:
    """Composes and checks one run without loading data; call it inside :func:`scripts.choices.composing`.

    Raises:
        ConfigError: If its parts are incompatible, or a value is out of range.
        HydraException: If a choice does not exist.
    """
    resume, mode = ADDED
    config = compose("train", [*words, mode], return_hydra_config=True)
    cluster = config.hydra.runtime.choices["cluster"]
    plain = _without_hydra(config)
    check_plugins(plain.get("plugins"), words)
    build_method(plain)
    launcher: Launcher = _launcher(plain)
    outputs = Path(str(plain["output_dir"] or "")).absolute()
    tasks = 1 if isinstance(launcher, Simulated) else launcher.workers
    completed = tuple(words) if _named(words, "resume") else (*words, resume)
    identity = experiment_id(plain, launcher.workers)
    return Planned((*completed, mode), identity, tasks, cluster, outputs, bool(plain["force"]))


def _without_hydra(config: DictConfig) -> dict[str, Any]:
    with open_dict(config):
        del config["hydra"]
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return plain


def _launcher(plain: Mapping[str, Any]) -> Launcher:
    KINDS["cluster"].check("cluster", plain["cluster"])
    try:
        made: Launcher = instantiate(plain["cluster"], _convert_="all")
    except Exception as error:  # Hydra wraps all exceptions of constructors
        cause = error.__cause__ or error
        raise cause if isinstance(cause, ConfigError) else ConfigError(f"cluster: {cause}") from error
    return made


def _named(words: Sequence[str], key: str) -> bool:
    return any(word.lstrip("+").partition("=")[0] == key for word in words)
