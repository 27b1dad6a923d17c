"""Names of methods as users type them: the choice of ``compressor=`` that a resolved configuration belongs to."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import yaml

from trainer.build import CONFIGURATIONS

__all__ = ["choice_of", "method_name"]

TARGET = "_target_"
GROUPS = ("communicator", "residual")


class _Choice(NamedTuple):
    """A file of conf/compressor/.

    Attributes:
        values: Settings of the compressor.
        groups: Choices of the other groups.
    """

    values: Mapping[str, Any]
    groups: Mapping[str, str]


def method_name(config: Mapping[str, Any], command: str | None = None) -> str:
    """The choice of ``compressor=``, with the communicator and the residual if they are not those of the choice.

    Args:
        config: Resolved configuration of a run.
        command: Command line of the run, if known.
    """
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in shlex.split(command or "")}
    given = {group: choice_of(group, config[group][TARGET]) for group in GROUPS}
    name = typed.get("compressor") or _nearest(config["compressor"], given)
    own = _choices()[name].groups if name in _choices() else given
    return ", ".join([name, *(f"{group}={choice}" for group, choice in given.items() if own.get(group) != choice)])


def choice_of(group: str, target: str) -> str:
    """Choice of a group of conf/ with a ``_target_``, or the bare class name if no choice has it.

    Args:
        group: Name of the group.
        target: Dotted name of a class or function.
    """
    last = target.rpartition(".")[2]
    return _targets(group).get(last, last)


@cache
def _targets(group: str) -> Mapping[str, str]:
    """Choices by class name; of several choices of a class the shortest name."""
    found: dict[str, str] = {}
    for path in sorted((CONFIGURATIONS / group).glob("*.yaml"), key=lambda path: (-len(path.stem), path.stem)):
        target = (yaml.safe_load(path.read_text()) or {}).get(TARGET)
        if target:
            found[target.rpartition(".")[2]] = path.stem
    return found


@cache
def _choices() -> Mapping[str, _Choice]:
    paths = sorted((CONFIGURATIONS / "compressor").glob("*.yaml"))
    return {path.stem: _read(path.stem) for path in paths}


def _read(name: str) -> _Choice:
    """A choice, with everything that it takes over from other files of the group."""
    content = yaml.safe_load((CONFIGURATIONS / "compressor" / f"{name}.yaml").read_text()) or {}
    values: dict[str, Any] = {}
    groups: dict[str, str] = {}
    for entry in content.pop("defaults", ()):
        if isinstance(entry, str):
            if entry != "_self_":
                other = _read(entry.partition("@")[0])
                values.update(other.values)
                groups.update(other.groups)
        else:
            ((key, choice),) = entry.items()
            groups[key.removeprefix("override ").partition("@")[0].strip("/")] = choice
    return _Choice({**values, **content}, groups)


def _nearest(compressor: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """The choice of this class with the fewest deviations; the class name if no choice has it."""

    def deviations(name: str) -> tuple[int, int, int, str]:
        choice = _choices()[name]
        groups = sum(choice.groups.get(group) != own for group, own in given.items())
        values = sum(compressor.get(key) != value for key, value in choice.values.items() if key != TARGET)
        return groups, values, len(name), name

    last = compressor[TARGET].rpartition(".")[2]
    same = [name for name, each in _choices().items() if each.values.get(TARGET, "").rpartition(".")[2] == last]
    return min(same, key=deviations) if same else last
