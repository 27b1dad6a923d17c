"""Expands command lines into runs, and checks them before submission."""

from __future__ import annotations

import itertools
import shlex
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
from spardl.basics.files import RECORD_BYTES, read_text
from trainer.build import KINDS, build_method
from trainer.command_line import check_plugins
from trainer.experiment import experiment_id
from trainer.launch import Launcher, Simulated

__all__ = ["Planned", "expand", "plan", "read_commands"]


@dataclass(frozen=True)
class Planned:
    """One run to start.

    Attributes:
        words: for train.py.
        id: the run's id.
        tasks: processes that somebody else is to start; a simulation is one, however many workers it has.
        cluster: choice of ``cluster=``.
        outputs: folder of all runs; absolute.
        force: whether it runs again if it is finished.
    """

    words: tuple[str, ...]
    id: str
    tasks: int
    cluster: str
    outputs: Path
    force: bool


def expand(words: Sequence[str], multirun: bool) -> list[tuple[str, ...]]:
    """Words of every run of a sweep, in the order of ``python train.py -m``; see :func:`scripts.choices.composing`.

    Args:
        words: as typed.
        multirun: whether ``-m`` was among them.

    Raises:
        ConfigError: if a kind of sweep is asked for that Hydra's own sweeper refuses, too.
        HydraException: if a word cannot be understood.
    """
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    typed = parser.parse_overrides(list(words))
    fixed = [str(override.input_line) for override in typed if not override.is_sweep_override()]
    hydra = compose("train", fixed, return_hydra_config=True).hydra
    if not multirun and hydra.mode != RunMode.MULTIRUN:
        return [tuple(words)]
    configured = parser.parse_overrides([f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()])
    values: dict[str, list[str]] = {}
    for override in (*configured, *typed):
        values[override.get_key_element()] = _values(override)
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
    """Composes and checks one run without loading data; see :func:`scripts.choices.composing`.

    Raises:
        ConfigError: if its parts do not fit together, or a value is out of range.
        HydraException: if a choice does not exist.
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
    except Exception as error:  # Hydra wraps whatever a constructor raises
        cause = error.__cause__ or error
        raise cause if isinstance(cause, ConfigError) else ConfigError(f"cluster: {cause}") from error
    return made


def _named(words: Sequence[str], key: str) -> bool:
    return any(word.lstrip("+").partition("=")[0] == key for word in words)


def read_commands(file: Path) -> list[tuple[str, ...]]:
    """Words of every run in a file of lines ``python train.py ...``, as scripts/reproduce.py writes them.

    Raises:
        ConfigError: if it cannot be read, or a line is something else.
    """
    try:
        lines = read_text(file, RECORD_BYTES).splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read --file {file}: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"cannot read --file {file}: {error}") from error
    found = [_words(line, f"line {number} of {file}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--file {file} contains no runs; add lines 'python train.py ...'")
    return found


def _words(line: str, where: str) -> tuple[str, ...]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if words[:2] != ["python", "train.py"]:
        raise ConfigError(f"{where} must begin with: python train.py")
    return tuple(words[2:])
