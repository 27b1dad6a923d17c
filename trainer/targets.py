"""Checks configurations and renames their targets: the classes and functions that ``_target_`` names.

The id of a run is a hash of its configuration. For the hash, each target gets the module path that it had in version
0.1.0 (``_PLACES``), so that a run keeps its id when a class moves to another module. Classes that were added later are
hashed by their public names and need no entry.
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
    "check_names",
    "editions",
    "hashed_targets",
    "importable",
    "nearest",
    "public_targets",
    "resolve_recipe",
    "resolve_scope",
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
# Names in configurations of versions in which the trainer was a part of the library.
_FORMER: Mapping[str, str] = MappingProxyType(
    {name.replace("trainer.", "spardl.training.", 1): name for name in _PLACES if name.startswith("trainer.")}
)
_NAMES: Mapping[str, str] = MappingProxyType({**_FORMER, **{place: name for name, place in _PLACES.items()}})


def hashed_targets(config: Any) -> Any:
    """Returns a copy of a configuration in which each target has the path from which run ids are computed.

    Args:
        config: Configuration, as plain data.
    """
    return _renamed(config, lambda name: _PLACES.get(_FORMER.get(name, name), name))


def public_targets(config: Any) -> Any:
    """Returns a copy of a configuration in which each target has its public name, such as ``spardl.TopK``.

    Args:
        config: Configuration, as plain data; may contain module paths of earlier versions.
    """
    return _renamed(config, lambda name: _NAMES.get(name, name))


# Packages of the parts that configurations name as ``spardl.NAME``.
_PACKAGES = ("compressors", "communicators", "method", "schedules", "vector", "clusters")


def importable(config: Any) -> Any:
    """Returns a copy of a configuration in which each target can be imported by Hydra.

    Args:
        config: Configuration, as plain data; may contain short public names, such as ``spardl.TopK``.
    """
    return _renamed(config, _import_path)


def _import_path(target: str) -> str:
    # Short names outlive their deprecated counterparts in ``spardl``, because ids and saved configurations have them.
    package, _, name = target.rpartition(".")
    if package == "spardl":
        for place in _PACKAGES:
            if name in import_module(f"spardl.{place}").__all__:
                return f"spardl.{place}.{name}"
    return target


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: rename(each) if _names(key, each) else _renamed(each, rename) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, rename) for each in value]
    return value


def _names(key: Any, value: Any) -> bool:
    return key == _TARGET and isinstance(value, str)


# Editions of classes whose results changed for the same configuration. An id identifies the configuration; the edition
# distinguishes results from before and after an intended change without changing ids. tests/exhibits/test_versions.py
# fails if results change and the edition does not.
_RAISED: Mapping[str, int] = MappingProxyType(
    {
        # Measuring layers no longer advances the random state that dropout uses.
        "spardl.LayerFusion": 2,
        "spardl.MgWfbp": 2,
    }
)


def editions(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the editions above 1 of the classes in a configuration, by public name.

    The edition of a class starts at 1 and increases when the class gives other results for the same configuration.
    """
    return {name: _RAISED[name] for name in sorted(set(_named_targets(public_targets(config)))) if name in _RAISED}


def _named_targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(name := node.get("_target_"), str):
            yield name
        for value in node.values():
            yield from _named_targets(value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for value in node:
            yield from _named_targets(value)


# Top-level settings other than the nodes with a target: mandatory ones, and optional ones.
_NEEDED = ("training", "resume", "output_dir")
_OTHERS = ("cache_dir", "data_dir", "force", "plugins", "presets", "recipe", "scale", "seed", "start_from", "study")
_TARGET_KEY, _PARTIAL = "_target_", "_partial_"


@dataclass(frozen=True)
class Kind:
    """Allowed targets of one node of a configuration.

    Attributes:
        base: Base class of the target; functions are checked by package only.
        packages: Packages that the target may come from.
        functions: Whether the target may be a function.
        partial: Whether the node builds a function to which arguments are added later (``_partial_: true``).
        extensible: Whether ``plugins=[PACKAGE]`` allows further packages.
        inside: Allowed targets of nested nodes, by name; all other values must be plain data.
    """

    base: type
    packages: tuple[str, ...] = ("spardl",)
    functions: bool = False
    partial: bool = False
    extensible: bool = False
    inside: Mapping[str, Kind] = field(default_factory=dict)

    def check(self, name: str, node: Any, plugins: Collection[str] = ()) -> None:
        """Checks that a node's target is allowed. Calls no target, and imports only from allowed packages.

        Args:
            name: Dotted name of the node.
            node: Content of the node, as plain data.
            plugins: Packages that the user allows, from :func:`allowed_packages`.

        Raises:
            ConfigError: If the target is not allowed, or the node has unknown special keys.
        """
        if not isinstance(node, Mapping) or _TARGET_KEY not in node:
            raise ConfigError(f"this configuration has no {name}; choose one with {name}=NAME")
        for key, value in node.items():
            if key in self.inside:
                self.inside[key].check(f"{name}.{key}", value, plugins)
            elif place := next(_targets(value, f"{name}.{key}"), None):
                raise ConfigError(f"{place} has no effect here; remove it")
            # Other special keys of Hydra, such as _args_ and _recursive_, would bypass the checks.
            if re.fullmatch("_.*_", str(key)) and key not in (_TARGET_KEY, _PARTIAL):
                raise ConfigError(f"{name}.{key} has no effect here; remove it")
        # A wrong value would call a factory too early, or never.
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
        plugins: Value of the setting; ``None`` for an empty list.

    Returns:
        The names of the packages.

    Raises:
        ConfigError: If the value is not a list of names, or names a package of Python itself.
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
    """Returns the package of a target that ``plugins`` could allow."""
    if not _is_dotted_name(target) or "." not in target:
        return None
    package: str = target.split(".")[0]
    return None if package in (*sys.stdlib_module_names, "spardl", "tasks", "trainer") else package


def _is_from(target: str, packages: Iterable[str]) -> bool:
    return any(target.startswith(f"{package}.") for package in packages)


def nearest(name: str, node: Mapping[Any, Any]) -> str | None:
    """Suggests a setting for a misspelt name, from the same node or from nested ones.

    Args:
        name: Misspelt name, without the path of its node.
        node: Node that lacks the name, as plain data.

    Returns:
        Dotted name relative to the node; ``None`` if no name is similar.
    """
    if close := get_close_matches(name, map(str, node), n=1):
        return close[0]
    below = {path.rpartition(".")[2]: path for path, _ in flat(node, ("hydra", "presets"))}
    close = get_close_matches(name, below, n=1)
    return below[close[0]] if close else None


def check_names(config: dict[str, Any], nodes: Iterable[str] | None = None) -> dict[str, Any]:
    """Checks the top-level names of a configuration.

    Args:
        config: Resolved configuration, as plain data.
        nodes: Names of the nodes with a target; ``None`` accepts unknown names.

    Returns:
        The configuration, unchanged.

    Raises:
        ConfigError: If a mandatory setting is missing, or a name is unknown.
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
    """Checks the settings of a node against the arguments of its target.

    Args:
        name: Name of the node.
        node: Content of the node, as resolved plain data that :meth:`Kind.check` has accepted.

    Raises:
        ConfigError: If the target has no such argument, or a boolean argument is neither true nor false.
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
        # In Python, any non-empty string is true.
        if key in wanted and wanted[key].annotation in (bool, "bool") and not isinstance(value, bool):
            raise ConfigError(f"{name}.{key} must be true or false, got {value!r}")


def _targets(value: Any, place: str) -> Iterator[str]:
    """Yields the dotted names of all targets in a value."""
    if isinstance(value, Mapping):
        if _TARGET_KEY in value:
            yield f"{place}.{_TARGET}"
        for key, part in value.items():
            yield from _targets(part, f"{place}.{key}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _targets(part, f"{place}.{number}")


def _find(target: str) -> Any:
    """Imports the object of a dotted name."""
    module, _, rest = _import_path(target).rpartition(".")
    names = [rest]
    while True:
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            # Raised for an attribute of a module, but also for a missing dependency of the module.
            if error.name != module or "." not in module:
                raise
            module, _, rest = module.rpartition(".")
            names.insert(0, rest)
        else:
            break
    for name in names:
        found = getattr(found, name)
    return found


_AUTO, _OPTIMIZER, _OUTER = (f"spardl.{kind.__name__}" for kind in (AutoMomentum, OptimizerMomentum, OuterSteps))
# Optimizers whose updates are compressed by chunk with scope=auto.
_BY_CHUNK = (
    *(
        f"{module}.{kind.__name__}"
        for kind in (torch.optim.Adam, torch.optim.AdamW)
        for module in ("torch.optim", kind.__module__)
    ),
    "trainer.MuonAdamW",
)


def resolve_recipe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the setting ``recipe`` by the settings that it stands for.

    Args:
        config: Configuration, as plain data.

    Returns:
        A new configuration without ``recipe``.

    Raises:
        ConfigError: If the recipe is unknown.
    """
    plain = dict(config)
    recipe = plain.pop("recipe", RECIPES[0])
    check_choice("recipe", recipe, RECIPES)
    if recipe == "published" and _target(plain, "momentum") == _AUTO:
        plain["momentum"] = {"_target_": _OPTIMIZER}
    return plain


def resolve_scope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces ``scope=auto`` of the compressor by ``model``, unless ``auto`` means chunks for this configuration.

    Runs for which ``auto`` means the whole model thus keep the id that they had before ``auto`` was introduced.

    Args:
        config: Configuration as plain data, returned by :func:`resolve_recipe`.

    Returns:
        A new configuration.
    """
    compressor = config.get("compressor") or {}
    if compressor.get("scope") != AUTO or (_compresses_by_chunk(config) and _takes_chunks(compressor)):
        return dict(config)
    return {**config, "compressor": {**compressor, "scope": "model"}}


def _target(plain: Mapping[str, Any], node: str) -> Any:
    return (plain.get(node) or {}).get("_target_")


def _compresses_by_chunk(plain: Mapping[str, Any]) -> bool:
    moves = _target(plain, "momentum") == _AUTO and _target(plain, "schedule") != _OUTER
    return moves and _target(plain, "optimizer") in _BY_CHUNK


def _takes_chunks(compressor: Mapping[str, Any]) -> bool:
    kinds = {f"spardl.{kind.__name__}": kind for kind in registry.compressors().values() if issubclass(kind, Budget)}
    kind = kinds.get(compressor["_target_"])
    return kind is not None and kind.takes_chunks(compressor["scope"], compressor.get("density"))
