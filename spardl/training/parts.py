"""Which classes and functions a configuration may name: those of this project that make the part in question."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from spardl.basics.errors import ConfigError

__all__ = ["Kind", "check_switches", "whole"]

_NEEDED = ("training", "resume", "output_dir")  # beside the nodes of which something is made
_OTHERS = ("cache_dir", "data_dir", "force", "presets", "recipe", "scale", "seed", "start_from", "study")
_TARGET, _PARTIAL = "_target_", "_partial_"


@dataclass(frozen=True)
class Kind:
    """What one node of a configuration may be made of.

    Attributes:
        base: class that a ``_target_`` must be derived from. A function has none: its package has to do.
        packages: that the ``_target_`` must be from.
        functions: whether it may be a function, too.
        partial: whether arguments are still to come when the node is read (``_partial_: true``).
        inside: what its own nodes may be made of, by name; others are plain values.
    """

    base: type
    packages: tuple[str, ...] = ("spardl",)
    functions: bool = False
    partial: bool = False
    inside: Mapping[str, Kind] = field(default_factory=dict)

    def check(self, name: str, node: Any) -> None:
        """Accepts a node; runs nothing that it names, and imports nothing from other packages.

        Args:
            name: of the node.
            node: its content, as plain data.

        Raises:
            ConfigError: if the node names something else, or says in an unknown way how it is made.
        """
        if not isinstance(node, Mapping) or _TARGET not in node:
            raise ConfigError(f"this configuration has no {name}; choose one with {name}=NAME")
        for key, value in node.items():
            if key in self.inside:
                self.inside[key].check(f"{name}.{key}", value)
            elif place := next(_targets(value, f"{name}.{key}"), None):
                raise ConfigError(f"{place} has no meaning here; leave it away")
            if re.fullmatch("_.*_", str(key)) and key not in (_TARGET, _PARTIAL):
                raise ConfigError(f"{name}.{key} has no meaning here; leave it away")
        if node.get(_PARTIAL, False) is not self.partial:
            raise ConfigError(f"{name}.{_PARTIAL} must be {str(self.partial).lower()}; leave it as it is")
        self._check_target(name, node[_TARGET])

    def _check_target(self, name: str, target: Any) -> None:
        refusal = f"{name}.{_TARGET}={target} cannot be used: "
        way_out = f"; choose one with {name}=NAME"
        if not isinstance(target, str) or not self._has(target):
            raise ConfigError(f"{refusal}it must be from {' or '.join(self.packages)}{way_out}")
        try:
            found = _find(target)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{refusal}{error}{way_out}") from error
        # A module of ours has others' in it: tasks.models.bert.os.system.
        if not self._has(f"{getattr(found, '__module__', '')}.") or not self._makes(found):
            kind = f"{self.base.__name__}, or a function that makes one" if self.functions else self.base.__name__
            raise ConfigError(f"{refusal}it is no {kind} of {' or '.join(self.packages)}{way_out}")

    def _has(self, target: str) -> bool:
        return any(target.startswith(f"{package}.") for package in self.packages)

    def _makes(self, found: Any) -> bool:
        return issubclass(found, self.base) if inspect.isclass(found) else self.functions and callable(found)


def whole(config: dict[str, Any], nodes: Iterable[str] | None = None) -> dict[str, Any]:
    """A configuration, as it was given.

    Args:
        config: resolved, as plain data.
        nodes: names of the nodes of which something is made; ``None``: do not look for unknown names.

    Raises:
        ConfigError: if it lacks something that is no choice of a file, or has a name that nothing reads.
    """
    known = [*nodes, *_NEEDED, *_OTHERS] if nodes is not None else list(config)
    if unknown := [str(name) for name in config if name not in known]:
        close = get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; remove it"
        raise ConfigError(f"{unknown[0]}={config[unknown[0]]} is not a setting of this program{hint}")
    for name in _NEEDED:
        if name not in config:
            raise ConfigError(f"this configuration has no {name}; leave ~{name} away")
    return config


def check_switches(name: str, node: Mapping[str, Any]) -> None:
    """Refuses what is not true or false where nothing else will do: Python would take any word for true.

    Args:
        name: of the node.
        node: its content, as plain data, resolved, that its kind has accepted.

    Raises:
        ConfigError: if a value is none of the two.
    """
    wanted = inspect.signature(_find(node[_TARGET])).parameters
    for key, value in node.items():
        if key in wanted and wanted[key].annotation in (bool, "bool") and not isinstance(value, bool):
            raise ConfigError(f"{name}.{key} must be true or false, got {value!r}")


def _targets(value: Any, place: str) -> Iterator[str]:
    """Where a value names something to be made."""
    if isinstance(value, Mapping):
        if _TARGET in value:
            yield f"{place}.{_TARGET}"
        for key, part in value.items():
            yield from _targets(part, f"{place}.{key}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _targets(part, f"{place}.{number}")


def _find(target: str) -> Any:
    """What a dotted name stands for."""
    module, _, rest = target.rpartition(".")
    names = [rest]
    while True:
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            # Not a module, but a class in one; or one that needs a package that is not installed.
            if error.name != module or "." not in module:
                raise
            module, _, rest = module.rpartition(".")
            names.insert(0, rest)
        else:
            break
    for name in names:
        found = getattr(found, name)
    return found
