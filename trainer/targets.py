"""What configurations name, by public names; and where the first edition (0.1.0) kept it.

A run's id was made from these places. So that a run keeps its id wherever its parts move, ids are still made from them.
What came later has its public name only, and needs no line here.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from spardl.basics.checks import check_choice
from spardl.basics.errors import ConfigError, first_line
from spardl.compressors.budget import AUTO, Budget
from spardl.method import registry
from spardl.method.momentum import AutoMomentum, OptimizerMomentum
from spardl.method.recipes import RECIPES
from spardl.schedules.outer import OuterSteps
from trainer.runs import flat

__all__ = [
    "Kind",
    "allowed_packages",
    "check_arguments",
    "editions",
    "first_edition",
    "nearest",
    "public",
    "scoped",
    "settled",
    "whole",
]


_TARGET = "_target_"
_PLACES: Mapping[str, str] = MappingProxyType(
    {
        "spardl.AfterBackward": "spardl.schedules.after_backward.AfterBackward",
        "spardl.AllGather": "spardl.communicators.allgather.AllGather",
        "spardl.AllGatherCodes": "spardl.communicators.allgather_codes.AllGatherCodes",
        "spardl.AllGatherDense": "spardl.communicators.allgather_dense.AllGatherDense",
        "spardl.Backend": "spardl.communicators.backend.Backend",
        "spardl.Cast": "spardl.compressors.cast.Cast",
        "spardl.CorrectedMomentum": "spardl.momentum.CorrectedMomentum",
        "spardl.CountSketch": "spardl.compressors.count_sketch.CountSketch",
        "spardl.Dear": "spardl.schedules.dear.Dear",
        "spardl.Dense": "spardl.communicators.dense.Dense",
        "spardl.GTopk": "spardl.communicators.gtopk.GTopk",
        "spardl.GaussianK": "spardl.compressors.gaussiank.GaussianK",
        "spardl.GlobalResidual": "spardl.residuals.GlobalResidual",
        "spardl.LayerFusion": "spardl.schedules.layer_fusion.LayerFusion",
        "spardl.LocalMomentum": "spardl.momentum.LocalMomentum",
        "spardl.LocalResidual": "spardl.residuals.LocalResidual",
        "spardl.MgWfbp": "spardl.schedules.mg_wfbp.MgWfbp",
        "spardl.NoCompression": "spardl.compressors.none.NoCompression",
        "spardl.NoResidual": "spardl.residuals.NoResidual",
        "spardl.OkTopk": "spardl.communicators.oktopk.OkTopk",
        "spardl.OptimizerMomentum": "spardl.momentum.OptimizerMomentum",
        "spardl.PartialResidual": "spardl.residuals.PartialResidual",
        "spardl.PowerSGD": "spardl.compressors.powersgd.PowerSGD",
        "spardl.QSGD": "spardl.compressors.qsgd.QSGD",
        "spardl.RandomBlock": "spardl.compressors.random_block.RandomBlock",
        "spardl.RandomK": "spardl.compressors.random_k.RandomK",
        "spardl.RescaledResidual": "spardl.residuals.RescaledResidual",
        "spardl.ReusedThreshold": "spardl.compressors.reused_threshold.ReusedThreshold",
        "spardl.SampledTopK": "spardl.compressors.dgc.SampledTopK",
        "spardl.SignSGD": "spardl.compressors.signsgd.SignSGD",
        "spardl.SparDL": "spardl.communicators.spardl.SparDL",
        "spardl.TernGrad": "spardl.compressors.terngrad.TernGrad",
        "spardl.Threshold": "spardl.compressors.threshold.Threshold",
        "spardl.TopK": "spardl.compressors.topk.TopK",
        "spardl.TopkDSA": "spardl.communicators.topkdsa.TopkDSA",
        "spardl.Warmup": "spardl.warmup.Warmup",
        "spardl.Wfbp": "spardl.schedules.wfbp.Wfbp",
        "spardl.Wire": "spardl.wire.Wire",
        "trainer.Constant": "spardl.training.lr.Constant",
        "trainer.Cosine": "spardl.training.lr.Cosine",
        "trainer.Exponential": "spardl.training.lr.Exponential",
        "trainer.LinearDecay": "spardl.training.lr.LinearDecay",
        "trainer.MultiStep": "spardl.training.lr.MultiStep",
        "trainer.NoLogger": "spardl.training.loggers.NoLogger",
        "trainer.ProcessGroup": "spardl.training.launch.ProcessGroup",
        "trainer.Simulated": "spardl.training.launch.Simulated",
        "trainer.Wandb": "spardl.training.loggers.Wandb",
    }
)
# The trainer's parts, which were in the library's folder once, by the names that older configurations have.
_FORMER: Mapping[str, str] = MappingProxyType(
    {name.replace("trainer.", "spardl.training.", 1): name for name in _PLACES if name.startswith("trainer.")}
)
_NAMES: Mapping[str, str] = MappingProxyType({**_FORMER, **{place: name for name, place in _PLACES.items()}})


def first_edition(config: Any) -> Any:
    """A configuration whose targets are the places that ids are made from.

    Args:
        config: plain data.
    """
    return _renamed(config, lambda name: _PLACES.get(_FORMER.get(name, name), name))


def public(config: Any) -> Any:
    """A configuration whose targets have their public names, also where it was written for the first edition.

    Args:
        config: plain data.
    """
    return _renamed(config, lambda name: _NAMES.get(name, name))


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: rename(each) if _names(key, each) else _renamed(each, rename) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, rename) for each in value]
    return value


def _names(key: Any, value: Any) -> bool:
    return key == _TARGET and isinstance(value, str)


# Which edition of its parts a run has, where a part once gave other results for the same configuration.
#
# A run's id says what was asked for. Where code changes on purpose what comes of it, the part's edition is raised
# here, so that results of before are told from those of today without giving every run another id. A test does small
# work anew and fails where results changed and no edition did (tests/exhibits/test_versions.py).


_RAISED: Mapping[str, int] = MappingProxyType(
    {
        # Measuring layers no longer draws from the random numbers that dropout uses.
        "spardl.LayerFusion": 2,
        "spardl.MgWfbp": 2,
    }
)


def editions(config: Mapping[str, Any]) -> dict[str, int]:
    """The editions of a resolved configuration's parts, by public name; without those that have only had one."""
    return {name: _RAISED[name] for name in sorted(set(_named_targets(public(config)))) if name in _RAISED}


def _named_targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(name := node.get("_target_"), str):
            yield name
        for value in node.values():
            yield from _named_targets(value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for value in node:
            yield from _named_targets(value)


# Which classes and functions a configuration may name: those of this project that make the part in question.


_NEEDED = ("training", "resume", "output_dir")  # beside the nodes of which something is made
_OTHERS = ("cache_dir", "data_dir", "force", "plugins", "presets", "recipe", "scale", "seed", "start_from", "study")
_TARGET_KEY, _PARTIAL = "_target_", "_partial_"


@dataclass(frozen=True)
class Kind:
    """What one node of a configuration may be made of.

    Attributes:
        base: class that a ``_target_`` must be derived from. A function has none: its package has to do.
        packages: that the ``_target_`` must be from.
        functions: whether it may be a function, too.
        partial: whether arguments are still to come when the node is read (``_partial_: true``).
        extensible: whether the packages of ``plugins=[PACKAGE]`` are allowed, too.
        inside: what its own nodes may be made of, by name; others are plain values.
    """

    base: type
    packages: tuple[str, ...] = ("spardl",)
    functions: bool = False
    partial: bool = False
    extensible: bool = False
    inside: Mapping[str, Kind] = field(default_factory=dict)

    def check(self, name: str, node: Any, plugins: Collection[str] = ()) -> None:
        """Accepts a node; runs nothing that it names, and imports nothing from other packages.

        Args:
            name: of the node.
            node: its content, as plain data.
            plugins: packages of the user that it may name, see :func:`allowed_packages`.

        Raises:
            ConfigError: if the node names something else, or says in an unknown way how it is made.
        """
        if not isinstance(node, Mapping) or _TARGET_KEY not in node:
            raise ConfigError(f"this configuration has no {name}; choose one with {name}=NAME")
        for key, value in node.items():
            if key in self.inside:
                self.inside[key].check(f"{name}.{key}", value, plugins)
            elif place := next(_targets(value, f"{name}.{key}"), None):
                raise ConfigError(f"{place} has no effect here; remove it")
            if re.fullmatch("_.*_", str(key)) and key not in (_TARGET_KEY, _PARTIAL):
                raise ConfigError(f"{name}.{key} has no effect here; remove it")
        if node.get(_PARTIAL, False) is not self.partial:
            raise ConfigError(f"{name}.{_PARTIAL} must be {str(self.partial).lower()}; remove the override")
        self._check_target(name, node[_TARGET_KEY], plugins if self.extensible else ())

    def _check_target(self, name: str, target: Any, plugins: Collection[str]) -> None:
        refusal = f"{name}.{_TARGET}={target} cannot be used: "
        way_out = f"; choose one with {name}=NAME"
        packages = (*self.packages, *plugins)
        if not isinstance(target, str) or not _is_from(target, packages):
            if self.extensible and (package := _package_of(target)):
                way_out = f"; add plugins=[{package}] to allow its package"
            raise ConfigError(f"{refusal}it must be from {' or '.join(packages)}{way_out}")
        try:
            found = _find(target)
        except (ImportError, AttributeError) as error:
            if _is_from(target, plugins):
                way_out = "; install its package, or add the package's folder to PYTHONPATH"
            raise ConfigError(f"{refusal}{error}{way_out}") from error
        except Exception as error:  # the code of a plugin may raise anything
            raise ConfigError(f"{refusal}its import failed with {type(error).__name__}: {first_line(error)}") from error
        # Modules import others: tasks.models.bert.os.system is not a model of ours.
        if not _is_from(f"{getattr(found, '__module__', '')}.", packages) or not self._makes(found):
            kind = f"a subclass of {self.base.__name__}" + (", or a function that returns one," * self.functions)
            raise ConfigError(f"{refusal}it is not {kind} from {' or '.join(packages)}{way_out}")

    def _makes(self, found: Any) -> bool:
        return issubclass(found, self.base) if inspect.isclass(found) else self.functions and callable(found)


def allowed_packages(plugins: Any) -> tuple[str, ...]:
    """Checks the packages of the setting ``plugins``, whose classes a configuration may name.

    Args:
        plugins: value of the setting; ``None`` for an empty list.

    Returns:
        The names of the packages.

    Raises:
        ConfigError: if it is not a list of names, or names a package of Python itself.
    """
    names = [] if plugins is None else plugins
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(map(_is_dotted_name, names)):
        raise ConfigError(f"plugins must be a list of packages, such as plugins=[mymodel], got {plugins!r}")
    for name in names:
        if name.split(".")[0] in sys.stdlib_module_names:
            raise ConfigError(f"plugins={plugins} cannot be used: {name} is a part of Python; remove it")
    return tuple(names)


def _is_dotted_name(name: Any) -> bool:
    return isinstance(name, str) and all(map(str.isidentifier, name.split(".")))


def _package_of(target: Any) -> str | None:
    """The package of a target that a user could allow."""
    if not _is_dotted_name(target) or "." not in target:
        return None
    package: str = target.split(".")[0]
    return None if package in (*sys.stdlib_module_names, "spardl", "tasks", "trainer") else package


def _is_from(target: str, packages: Iterable[str]) -> bool:
    return any(target.startswith(f"{package}.") for package in packages)


def nearest(name: str, node: Mapping[Any, Any]) -> str | None:
    """The setting of a configuration that was probably meant, next to a misspelt name or in a node below.

    Args:
        name: without the path of its node.
        node: in which it was looked for, as plain data.

    Returns:
        Its name, relative to the node; ``None`` if none is similar.
    """
    if close := get_close_matches(name, map(str, node), n=1):
        return close[0]
    below = {path.rpartition(".")[2]: path for path, _ in flat(node, ("hydra", "presets"))}
    close = get_close_matches(name, below, n=1)
    return below[close[0]] if close else None


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
        known_nodes = {key: value for key, value in config.items() if key not in unknown}
        close = nearest(unknown[0], {**dict.fromkeys(known), **known_nodes})
        hint = f"; did you mean {close}?" if close else "; remove it"
        raise ConfigError(f"{unknown[0]}={config[unknown[0]]} is not a setting of this program{hint}")
    for name in _NEEDED:
        if name not in config:
            raise ConfigError(f"this configuration has no {name}; remove ~{name}")
    return config


def check_arguments(name: str, node: Mapping[str, Any]) -> None:
    """Refuses settings that the target of a node does not take, and values other than true and false for switches.

    Args:
        name: of the node.
        node: its content, as plain data, resolved, that its kind has accepted.

    Raises:
        ConfigError: if a setting or a value is refused.
    """
    try:
        wanted = inspect.signature(_find(node[_TARGET_KEY])).parameters
    except ValueError:  # a class that is written in C
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values())
    for key, value in node.items():
        if key not in wanted and not takes_any and not re.fullmatch("_.*_", key):
            close = get_close_matches(key, wanted, n=1)
            if name == "optimizer" and not close:
                continue  # a method's preset may set it, and the plan explains which optimizers fit
            hint = f"did you mean {close[0]}?" if close else "remove it"
            raise ConfigError(f"{name}.{key}={value} is not an argument of {node[_TARGET_KEY]}; {hint}")
        # Python would take any word for true.
        if key in wanted and wanted[key].annotation in (bool, "bool") and not isinstance(value, bool):
            raise ConfigError(f"{name}.{key} must be true or false, got {value!r}")


def _targets(value: Any, place: str) -> Iterator[str]:
    """Where a value names something to be made."""
    if isinstance(value, Mapping):
        if _TARGET_KEY in value:
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


# What a configuration leaves open, and what that comes to: ``recipe=``, and ``scope=auto`` of a compressor.


_AUTO, _OPTIMIZER, _OUTER = (f"spardl.{kind.__name__}" for kind in (AutoMomentum, OptimizerMomentum, OuterSteps))
_ADAM = tuple(
    f"{module}.{kind.__name__}"
    for kind in (torch.optim.Adam, torch.optim.AdamW)
    for module in ("torch.optim", kind.__module__)
)


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which everything is said that its recipe stands for, and so needs none.

    Args:
        config: plain data.

    Raises:
        ConfigError: if there is no such recipe.
    """
    plain = dict(config)
    recipe = plain.pop("recipe", RECIPES[0])
    check_choice("recipe", recipe, RECIPES)
    if recipe == "published" and _target(plain, "momentum") == _AUTO:
        plain["momentum"] = {"_target_": _OPTIMIZER}
    return plain


def scoped(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose compressor's scope is ``auto`` only where that is chunks; see ``spardl.method.moving``.

    So a run in which it is the whole model has the id that it had before there was such a choice.

    Args:
        config: plain data, settled.
    """
    compressor = config.get("compressor") or {}
    if compressor.get("scope") != AUTO or (_moves_adam(config) and _takes_chunks(compressor)):
        return dict(config)
    return {**config, "compressor": {**compressor, "scope": "model"}}


def _target(plain: Mapping[str, Any], node: str) -> Any:
    return (plain.get(node) or {}).get("_target_")


def _moves_adam(plain: Mapping[str, Any]) -> bool:
    moves = _target(plain, "momentum") == _AUTO and _target(plain, "schedule") != _OUTER
    return moves and _target(plain, "optimizer") in _ADAM


def _takes_chunks(compressor: Mapping[str, Any]) -> bool:
    kinds = {f"spardl.{kind.__name__}": kind for kind in registry.compressors().values() if issubclass(kind, Budget)}
    kind = kinds.get(compressor["_target_"])
    return kind is not None and kind.takes_chunks(compressor["scope"], compressor.get("density"))
