"""Output of ``train.py --help`` and ``train.py --list GROUP``, read from the configuration files."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf
from rich.table import Table

from spardl.basics.errors import ConfigError, SpardlError
from trainer.build import CONFIGURATIONS, build_dataset, build_plan, stand_ins
from trainer.display import show_activity, table_console
from trainer.targets import importable, nearest

__all__ = ["groups", "help_text", "print_list"]

# Other names of groups for --list.
_GROUPS: Mapping[str, str] = MappingProxyType(
    {"models": "model", "datasets": "dataset", "methods": "compressor", "experiments": "experiment"}
)
# Folders whose files other files build upon; they are no choices.
_BASE = "base"
_ROOT = CONFIGURATIONS.parent
# Sources of the methods, and records of earlier runs.
_METHODS, _RECORDS = _ROOT / "scripts" / "pages" / "methods.yaml", _ROOT / "docs" / "results"
_WIDTH = 140  # of a pipe, whose lines are not wrapped by a terminal
_PAPER = re.compile(r"\(([A-Z][^()]*?(?:19|20)\d\d)\b[^()]*\)")
# First author, and venue and year, of the first source in a docstring.
_SOURCE = re.compile(r"Source: ([\w-]+).*?((?:[A-Z][\w-]+ )?(?:19|20)\d\d)\b")

_HELP = """\
Trains a model on several workers that exchange sparse gradients.

usage: python train.py [OPTION ...] [GROUP=CHOICE ...] [KEY=VALUE ...]
  python train.py compressor=spardl model=bert_tiny cluster.workers=2
  python train.py -m compressor=none,topka,spardl seed=1,2              a sweep: one run per combination
  python train.py compressor=spardl resume=auto                         continues after an interruption

groups (default; number of choices):
{groups}

settings (default):
{settings}
  training.KEY  epochs, max_steps, batch_size, precision, early_stopping.patience, profile, ...

options, before all settings:
  --list models|datasets|methods|experiments|GROUP   all choices as a table
  --cfg job     the whole configuration of a command, without running it
  -m            a sweep; --config-dir DIR: your own choices; --hydra-help: all options
"""


def groups() -> dict[str, tuple[str, str]]:
    """Maps each configuration group to its default choice and description, in the order of ``conf/train.yaml``."""
    return dict(_commented(r"  - (\w+): (\w+) # (.+)"))


def _commented(pattern: str) -> Iterator[tuple[str, tuple[str, str]]]:
    for line in (CONFIGURATIONS / "train.yaml").read_text().splitlines():
        if found := re.fullmatch(pattern, line):
            name, default, text = found.groups()
            yield name, (default, text)


def help_text() -> str:
    """Returns the help of ``train.py``: one line per group and per top-level setting, from ``conf/train.yaml``."""
    rows = []
    for name, (default, text) in groups().items():
        choice = "" if "; set by " in text else f"{default}; "
        rows.append(f"  {name:<13} {text} ({choice}{len(_choices(name, [CONFIGURATIONS]))})")
    settings = _commented(r"(\w+): (\S+) # (.+)")
    shown = [f"  {name:<13} {text}" + _default(default) for name, (default, text) in settings]
    return _HELP.format(groups="\n".join(rows), settings="\n".join(shown))


def _default(value: str) -> str:
    return "" if value in ("null", "[]") or value.startswith("${") else f" ({value})"


def _choices(group: str, folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the files of a group by the name of the choice; that of a placeholder is the file of its data set."""
    found = {
        path.relative_to(folder / group).with_suffix("").as_posix(): path
        for folder in folders
        for path in sorted((folder / group).rglob("*.yaml"))
    }
    if group == "dataset":
        found |= {name: found[dataset] for name, (dataset, _) in stand_ins().items()}
    # Only experiments are in folders; conf/scale/smoke has changes of single models.
    nested = group == "experiment"
    return {name: path for name, path in found.items() if "/" not in name or (nested and _BASE not in name.split("/"))}


def print_list(wanted: str, folder: str | None = None) -> None:
    """Prints the choices of a group as a table.

    Args:
        wanted: Name of a group, or ``models``, ``datasets``, ``methods`` or ``experiments``.
        folder: Folder with further choices, from ``--config-dir``; ``None`` if not given.

    Raises:
        ConfigError: If there is no such group.
    """
    group, known = _GROUPS.get(wanted, wanted), groups()
    if group not in known:
        close = nearest(wanted, dict.fromkeys([*_GROUPS, *known]))
        hint = f"did you mean {close}?" if close else f"choose one of {', '.join([*_GROUPS, *known])}"
        raise ConfigError(f"--list {wanted} is not a group; {hint}")
    files = _choices(group, [CONFIGURATIONS, *([Path(folder)] if folder else [])])
    columns: Mapping[str, Callable[[Mapping[str, Path]], tuple[Sequence[str], dict[str, Sequence[str]]]]] = {
        "model": _models,
        "compressor": _methods,
        "experiment": _experiments,
    }
    header, rows = columns.get(group, _described)(files)
    table = Table("name", *header, box=None, pad_edge=False, title=f"{group}=NAME", title_justify="left")
    if "minutes*" in header:
        table.caption, table.caption_justify = _MEASURED, "left"
    for name, cells in rows.items():
        table.add_row(name, *cells)
    table_console(_WIDTH).print(table)


def _described(files: Mapping[str, Path]) -> tuple[Sequence[str], dict[str, Sequence[str]]]:
    placeholders = {name: f"Placeholder for {dataset}: {words}." for name, (dataset, words) in stand_ins().items()}
    return ("description",), {name: [placeholders.get(name) or _description(path)] for name, path in files.items()}


def _description(path: Path) -> str:
    """Returns the comment at the head of a file, or, of a file that this program brings, its target's docstring."""
    words = _head(path)
    return f"{words.split('. ')[0].rstrip('.')}." if words else _documentation(path)


def _documentation(path: Path) -> str:
    first = _docstring(path).split("\n\n")[0]
    return re.sub(r"(?::\w+:)?`+(?:[\w.]*\.)?([^`]+)`+", r"\1", " ".join(first.split()))


def _source(path: Path) -> str:
    """Returns the paper of a model: first author, venue and year."""
    found = _SOURCE.search(" ".join(_docstring(path).split()))
    return f"{found[1]} et al., {found[2]}" if found else "-"


def _docstring(path: Path) -> str:
    if not _is_shipped(path):  # an import would run code that no plugins= has allowed
        return ""
    content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    # A target that cannot be imported is reported by the run that chooses it.
    with suppress(Exception):
        return inspect.getdoc(get_object(importable(content.get("model", content))["_target_"])) or ""
    return ""


def _is_shipped(path: Path) -> bool:
    return path.is_relative_to(CONFIGURATIONS)


def _head(path: Path) -> str:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("# @package")]
    heading = []
    for line in lines:
        if not line.startswith("# "):
            break
        heading.append(line[2:].strip())
    return " ".join(heading)


def _models(files: Mapping[str, Path]) -> tuple[Sequence[str], dict[str, Sequence[str]]]:
    minutes = _recorded("model", "resnet20")
    rows: dict[str, Sequence[str]] = {}
    with show_activity("building every model to count its parameters"), _composing():
        for name, path in files.items():
            shipped = _is_shipped(path)
            plain = _composed(f"model={name}", "scale.stand_in=true") if shipped else {}
            parameters = f"{_parameters(plain):,}" if shipped else "-"
            dataset = _composed_choice("dataset", f"model={name}") if shipped else "-"
            about = _documentation(path) if shipped else _description(path)
            rows[name] = (parameters, dataset, minutes.get(name, "-"), _source(path), about)
    return ("parameters", "data set", "minutes*", "paper", "description"), rows


def _methods(files: Mapping[str, Path]) -> tuple[Sequence[str], dict[str, Sequence[str]]]:
    prose = _prose()
    rows: dict[str, Sequence[str]] = {
        name: (prose[name]["source"], prose[name]["use"])
        if name in prose
        else (_paper(_head(path)), _description(path))
        for name, path in files.items()
    }
    return ("paper", "when to use"), rows


def _prose() -> Mapping[str, Mapping[str, str]]:
    found: Mapping[str, Mapping[str, str]] = yaml.safe_load(_METHODS.read_text()) if _METHODS.is_file() else {}
    return found


def _experiments(files: Mapping[str, Path]) -> tuple[Sequence[str], dict[str, Sequence[str]]]:
    minutes, rows = _recorded("experiment", None), dict[str, Sequence[str]]()
    with _composing():
        for name, path in files.items():
            config = compose("train", [f"experiment={name}"], return_hydra_config=True)
            chosen = [str(config.hydra.runtime.choices[group]) for group in ("model", "dataset", "compressor")]
            workers = str(config.cluster.workers or "-")
            rows[name] = (*chosen, workers, minutes.get(name, "-"), _paper_of(name, path))
    header = ("model", "data set", "method", "workers", "minutes*", "paper")
    return header, rows


def _paper_of(name: str, path: Path) -> str:
    """Returns the paper of an experiment: from its file, from the common file of its folder, or of its method."""
    folder = name.split("/", maxsplit=1)[0]
    common = CONFIGURATIONS / "experiment" / _BASE / f"{folder}.yaml"
    named = _paper(" ".join(_head(file) for file in (path, common) if file.is_file()))
    return named if named != "-" else _prose().get(folder, {}).get("source", "-")


def _paper(words: str) -> str:
    return found[1] if (found := _PAPER.search(words)) else "-"


_MEASURED = "* on 2 cores: the median of the runs of any length recorded in docs/results"


def _recorded(group: str, default: str | None) -> dict[str, str]:
    """Returns the minutes of the recorded runs of each choice."""
    seconds: dict[str, list[float]] = {}
    for file in sorted(_RECORDS.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            words = str(record.get("command", "")).split()
            if words[:2] != ["python", "train.py"] or not record.get("wall_seconds"):
                continue
            chosen = dict(word.split("=", 1) for word in words if "=" in word)
            if name := chosen.get(group, default if "experiment" not in chosen else None):
                seconds.setdefault(name, []).append(record["wall_seconds"])
    return {name: f"{median(values) / 60:.1f}" for name, values in seconds.items()}


def _composing() -> Any:
    return initialize_config_dir(str(CONFIGURATIONS), version_base="1.3")


def _composed(*words: str) -> dict[str, Any]:
    plain: dict[str, Any] = OmegaConf.to_container(compose("train", list(words)), resolve=True)  # type: ignore[assignment]
    return plain


def _composed_choice(group: str, *words: str) -> str:
    return str(compose("train", list(words), return_hydra_config=True).hydra.runtime.choices[group])


def _parameters(plain: Mapping[str, Any]) -> int:
    try:
        return build_plan(plain, build_dataset(plain)).parameters()
    except SpardlError as error:
        raise ConfigError(f"--list models cannot build a model: {error}") from error
