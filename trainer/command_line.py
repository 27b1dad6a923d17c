"""The command line of train.py: checks before Hydra reads it, one-line messages and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import hydra
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException

from spardl.basics.errors import ConfigError
from spardl.vector.kernels import compiled

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "STOPPED", "check_words", "complain", "describe", "say"]

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
        raise ConfigError(f"{message}; train.py --help lists what there is")


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
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFO)
    return parser


def check_words(words: Sequence[str]) -> None:
    """Refuses words that Hydra would answer with its usage or a traceback, or would execute.

    Args:
        words: the command line without the program's name.

    Raises:
        ConfigError: if an option is unknown, a sweep has no runs, or a word replaces a part of Hydra.
    """
    _options().parse_args(words)
    compiled(torch.empty(0))  # refuses unknown values of SPARDL_KERNELS before a run folder exists
    _check_sweep([word for word in words if not word.startswith("-")])
    for word in words:
        if word.lstrip("+~").startswith("hydra") and "_target_" in word:
            raise ConfigError(f"{word} cannot be used: what Hydra itself is made of stays as it is")


def _check_sweep(words: Sequence[str]) -> None:
    for word in words:
        empty = False
        # Hydra itself reports words that cannot be parsed.
        with suppress(HydraException, ValueError):
            override = OverridesParser.create().parse_override(word)
            empty = override.is_sweep_override() and next(override.sweep_iterator(), None) is None
        if empty:
            raise ConfigError(f"{word} has no values, so the sweep has no runs; range(A,B) leaves B out")


def describe(error: Exception) -> Exception | str:
    """Replaces the message of an override that Hydra cannot parse: Hydra shows its own grammar.

    Args:
        error: any exception.

    Returns:
        The message, or the exception itself where its own message does.
    """
    if not isinstance(error, OverrideParseException):
        return error
    return f"{error.override!r} cannot be read: write GROUP=CHOICE or KEY=VALUE, and unusual values as KEY='\"VALUE\"'"


def complain(error: BaseException | str, code: int) -> int:
    """Prints an error on one line of stderr.

    Args:
        error: exception or message; line breaks become spaces.
        code: exit code of the process.

    Returns:
        The exit code.
    """
    # Hydra appends the directories that it searched, one per line.
    return say("error: " + " ".join(str(error).split("Config search path")[0].split()), code)


def say(text: str, code: int) -> int:
    """Prints a line on stderr.

    Args:
        text: the line without its end.
        code: exit code of the process.

    Returns:
        The exit code.
    """
    print(text, file=sys.stderr, flush=True)
    return code
