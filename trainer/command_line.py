"""The command line of train.py: checks before Hydra reads it, one-line messages and exit codes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from spardl.basics.errors import ConfigError
from spardl.vector.kernels import compiled
from trainer.build import CONFIGURATIONS
from trainer.targets import nearest

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "INTERRUPTED",
    "STOPPED",
    "Asked",
    "check_plugins",
    "check_words",
    "complain",
    "describe",
    "say",
]

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
# Stopped on request with everything saved: EX_TEMPFAIL of sysexits.h, after which a scheduler tries again.
STOPPED = 75

# The options of hydra.main, see https://hydra.cc/docs/advanced/hydra-command-line-flags.
_SWITCHES = (
    *(("--help", "-h"), ("--hydra-help",), ("--resolve",), ("--run", "-r"), ("--multirun", "-m")),
    ("--shell-completion", "-sc"),
)
_VALUES = (
    *(("--package", "-p"), ("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")),
    ("--experimental-rerun",),
)
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        misplaced = words[0] != message.split(maxsplit=1)[0] and not words[0].startswith("-")
        # argparse takes positional words in one piece only, in Hydra's parser as in this one.
        advice = "type options before all settings" if misplaced else "see train.py --help"
        raise ConfigError(f"{message}; {advice}")


def _options() -> argparse.ArgumentParser:
    # Hydra's own parser prints its usage and exits when it finds an error, and it is not public.
    parser = _Parser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--version", action="version", version=f"Hydra {hydra.__version__}")
    for names in _SWITCHES:
        parser.add_argument(*names, action="store_true")
    for names in _VALUES:
        parser.add_argument(*names)
    parser.add_argument("--cfg", "-c", choices=_CFG)
    parser.add_argument("--list", metavar="GROUP")  # ours, not Hydra's
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFO)
    return parser


class Asked(NamedTuple):
    """What a command line requests instead of a run: the help, or a list of choices.

    Attributes:
        help: Whether to print the help.
        choices: Configuration group whose choices to print; ``None`` if no list is requested.
        folder: Folder with further choices, from ``--config-dir``; ``None`` if not given.
    """

    help: bool
    choices: str | None
    folder: str | None


def check_words(words: Sequence[str]) -> Asked:
    """Checks a command line before Hydra reads it.

    Rejects words for which Hydra would print its usage message or a traceback, or would execute code.

    Args:
        words: Words of the command line, without the program's name.

    Returns:
        What the words request instead of a run.

    Raises:
        ConfigError: If an option is unknown, a sweep has no runs, or a part of Hydra would be replaced, either by a
            word or by a file of an added configuration folder.
    """
    options = _options().parse_args(words)
    compiled(torch.empty(0))  # refuses unknown values of SPARDL_KERNELS before a run folder exists
    _check_sweep([word for word in words if not word.startswith("-")])
    for word in words:
        if word.lstrip("+~").startswith("hydra") and "_target_" in word:
            raise ConfigError(f"{word} cannot be used: parts of Hydra cannot be replaced; remove it")
    for folder in _added_folders(options):
        _check_folder(folder)
    return Asked(options.help, options.list, options.config_dir)


def _added_folders(options: argparse.Namespace) -> Iterator[Path]:
    yield from (Path(folder) for folder in (options.config_dir, options.config_path) if folder)
    for word in options.overrides:
        if word.lstrip("+").startswith("hydra.searchpath="):
            with suppress(HydraException):
                found = OverridesParser.create().parse_override(word).value()
                for path in found if isinstance(found, list) else ():
                    yield Path(str(path).removeprefix("file://"))


def _check_folder(folder: Path) -> None:
    """Rejects configuration files that set a part of Hydra, and thus could run callbacks, launchers or log handlers."""
    for path in sorted(folder.rglob("*.yaml")):
        if path.resolve().is_relative_to(CONFIGURATIONS) or not _sets_hydra(path, path.relative_to(folder)):
            continue
        raise ConfigError(
            f"{path} cannot be used: it changes settings of Hydra itself (hydra.*); remove them from the file, and "
            "pass them on the command line as hydra.KEY=VALUE"
        )


def _sets_hydra(path: Path, place: Path) -> bool:
    # Hydra merges a file into the node that its folder, a comment, its defaults list or its keys name.
    if "hydra" in place.with_suffix("").parts:
        return True
    try:
        text = path.read_text()
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return False  # Hydra cannot read the file either, and reports it if it is chosen
    headers = [line for line in text.splitlines() if line.startswith("#") and "@package" in line]
    keys, defaults = (content, content.get("defaults")) if isinstance(content, dict) else ((), None)
    return any(re.search(r"(?<!\w)hydra(?!\w)", str(named)) for named in (*headers, *keys, defaults))


def check_plugins(plugins: Any, words: Sequence[str]) -> None:
    """Checks that the setting ``plugins`` is from the command line, because only the user may allow further code.

    Args:
        plugins: Value of the setting in the composed configuration.
        words: Overrides (``KEY=VALUE``) of the command line.

    Raises:
        ConfigError: If a configuration file sets packages.
    """
    typed = any(OverridesParser.create().parse_override(word).key_or_group == "plugins" for word in words)
    if plugins and not typed:
        named = ",".join(map(str, plugins)) if not isinstance(plugins, str) else plugins
        raise ConfigError(f"a configuration file cannot allow plugins; type plugins=[{named}] if you trust that code")


def _check_sweep(words: Sequence[str]) -> None:
    for word in words:
        empty = False
        # Hydra itself reports words that cannot be parsed.
        with suppress(HydraException, ValueError):
            override = OverridesParser.create().parse_override(word)
            empty = override.is_sweep_override() and next(override.sweep_iterator(), None) is None
        if empty:
            raise ConfigError(f"{word} has no values, so the sweep has no runs; range(A,B) excludes B")


def describe(error: Exception) -> Exception | str:
    """Replaces unclear error messages of Hydra.

    For a wrong or misspelt override, Hydra shows its grammar, or suggests to append the override as a new setting.

    Args:
        error: Exception that Hydra or the program raised.

    Returns:
        A clear message, or the exception itself if its own message is clear.
    """
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _with_suggestion(error, cause)
    if isinstance(error, MissingConfigException):
        return _with_choice(error)
    if not isinstance(error, OverrideParseException):
        return error
    return f"{error.override!r} cannot be read: write GROUP=CHOICE or KEY=VALUE, and unusual values as KEY='\"VALUE\"'"


def _with_suggestion(error: Exception, cause: ConfigAttributeError | ConfigKeyError) -> Exception | str:
    node: Any = OmegaConf.to_container(cause.parent_node, resolve=False) if cause.parent_node is not None else None
    close = nearest(str(cause.key), node) if isinstance(node, Mapping) else None
    if close is None:
        return error
    path = str(cause.full_key).rpartition(".")[0]
    meant = f"{path}.{close}" if path else close
    return f"{str(error).splitlines()[0].rstrip('.')}; did you mean {meant}?"


def _with_choice(error: MissingConfigException) -> Exception | str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    close = get_close_matches(name, error.options or (), n=1)
    if not close:
        return error
    found = str(error).splitlines()[0].rstrip(".")
    hint = f" (all: python train.py --list {group})" if (CONFIGURATIONS / group).is_dir() else ""
    return f"{found}; did you mean {group}={close[0]}?{hint}"


def complain(error: BaseException | str, code: int) -> int:
    """Prints an error on one line of stderr.

    Args:
        error: Exception or message; line breaks become spaces.
        code: Exit code of the process.

    Returns:
        ``code``, for the caller to return.
    """
    # Hydra appends the directories that it searched, one per line.
    return say("error: " + " ".join(str(error).split("Config search path")[0].split()), code)


def say(text: str, code: int) -> int:
    """Prints a line on stderr.

    Args:
        text: Line to print, without its end.
        code: Exit code of the process.

    Returns:
        ``code``, for the caller to return.
    """
    print(text, file=sys.stderr, flush=True)
    return code
