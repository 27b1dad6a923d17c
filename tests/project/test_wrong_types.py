"""A value of a wrong type is refused with one line, wherever somebody can give one."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import Network, ProcessGroupCluster, SimulatedCluster
from spardl.clusters.profile import Profile
from spardl.method import Warmup, registry
from spardl.method.recipes import recipes
from spardl.schedules.engine import Schedule
from spardl.vector import Wire
from tests.support.harness import run_workers

# Of each plain type, values that are not of it; what is no number of any kind is last.
WRONG: Mapping[type, tuple[Any, ...]] = {
    bool: (0, 1, "true", 2.5),
    int: (True, 2.5, "3", math.nan),
    float: (True, "0.5", 1j),
    str: (5, True, 0.5, b"model"),
}
ANYWHERE: tuple[Any, ...] = ([], {}, object(), torch.ones(2))


class Place(NamedTuple):
    """A parameter of something public, and how to give it a value."""

    name: str
    kinds: frozenset[type]
    make: Callable[[Any], Any]

    def wrong(self) -> Iterator[Any]:
        """Values of other types than the parameter may have."""
        some = [value for kind in self.kinds & WRONG.keys() for value in WRONG[kind]]
        fitting = tuple(kind for kind in self.kinds if kind is not float) + (
            (int, float) if float in self.kinds else ()
        )
        yield from (
            value for value in some if not isinstance(value, fitting) or (type(value) is bool) > (bool in fitting)
        )
        yield from ANYWHERE
        if type(None) not in self.kinds:
            yield None


def kinds_of(annotation: Any) -> frozenset[type]:
    if get_origin(annotation) in (Union, types.UnionType):
        return frozenset().union(*map(kinds_of, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return frozenset(map(type, get_args(annotation)))
    return frozenset([get_origin(annotation) or annotation])


def places(target: Callable[..., Any], name: str, **needed: Any) -> Iterator[Place]:
    """Of each parameter that a function, or a class, names; others get what they need."""
    function = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]
    hints = get_type_hints(function, localns={"Profile": Profile})
    for each in inspect.signature(target).parameters.values():
        if each.kind is not each.VAR_KEYWORD:

            def make(value: Any, key: str = each.name) -> Any:
                return target(**{**needed, key: value})

            yield Place(f"{name}.{each.name}", kinds_of(hints[each.name]), make)


def parts() -> Iterator[type]:
    for found in (registry.compressors, registry.communicators, registry.residual_rules, registry.momentum_rules):
        yield from found().values()  # type: ignore[operator]
    yield Wire
    yield Warmup
    yield from (
        each for each in vars(spardl.schedules).values() if inspect.isclass(each) and issubclass(each, Schedule)
    )


def all_places() -> Iterator[Place]:
    for part in parts():
        if not inspect.isabstract(part):
            yield from places(part, part.__name__)
    yield from places(Network, "Network", alpha=1e-4, gbit=1)
    network = {"workers": 2, "network": Network(alpha=1e-4, gbit=1)}
    simulated = places(SimulatedCluster, "SimulatedCluster", **network)
    yield from (place for place in simulated if place.name.split(".")[1] in {*network, "count_local"})
    yield from places(spardl.Method, "Method", **vars(spardl.make_method("spardl")))
    yield from places(recipes()["dgc"].__call__, "Recipe")
    for name in ("spardl", "oktopk", "powersgd"):
        for option in spardl.method_options(name):
            if option.part != "method":
                kinds = kinds_of(eval(option.type))
                yield Place(
                    f"{name}({option.name})", kinds, lambda v, n=name, o=option.name: spardl.make_method(n, **{o: v})
                )


@pytest.mark.parametrize("place", list(all_places()), ids=lambda place: place.name)
def test_a_wrong_type_is_refused(place: Place) -> None:
    for value in place.wrong():
        try:
            made = place.make(value)
        except ConfigError as error:
            assert "\n" not in str(error), value
        else:
            pytest.fail(f"{value!r} is taken: {made}")


def _refused_by_handles(cluster: ProcessGroupCluster) -> list[tuple[str, str]]:
    """What one option of a handle, or of a cluster of processes, is, and what is said of it."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    attached = places(spardl.attach, "attach", ddp=model)
    own = {"parameters": list(model.parameters())}
    alone = places(spardl.Synchronizer, "Synchronizer", **own)
    outer = places(spardl.Outer, "Outer", **own, optimizer=torch.optim.SGD(model.parameters()), method="none")
    called = places(spardl.all_reduce, "all_reduce", tensor=torch.ones(3))
    copied = places(spardl.WeightSync, "WeightSync", parameters=own["parameters"])
    processes = places(ProcessGroupCluster, "ProcessGroupCluster")
    reported = []
    for place in (*attached, *alone, *outer, *called, *copied, *processes):
        # Any tensor, any group, and any device that torch knows, will do; torch's own words are enough for others.
        for value in place.wrong() if place.name.split(".")[1] not in ("group", "device", "tensor") else ():
            try:
                place.make(value)
                reported.append((place.name, f"takes {value!r}"))
            except ConfigError as error:
                reported.append((place.name, str(error)))
    for make in (ProcessGroupCluster, partial(spardl.Synchronizer, own["parameters"])):
        with pytest.raises(ConfigError, match="group must be a ProcessGroup or None, got 'gloo'"):
            make(group="gloo")
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match="optimizer updates no item of parameters"):
        spardl.Outer(model.parameters(), other, "none")
    return reported


def test_handles_and_clusters_of_processes_refuse_wrong_types() -> None:
    (reported,) = run_workers(1, _refused_by_handles)
    common = ("method", "bucket_mb", "timeout", "scaler", "schedule", "optimizer", "clip_norm", "ranks_per_node")
    counts = ("every", "lr", "momentum", "fragments", "delay", "mixing")
    wanted: dict[str, tuple[str, ...]] = {
        "attach": ("ddp", *common),
        "Synchronizer": ("parameters", "find_unused", *common),
        "Outer": ("parameters", "optimizer", "method", *counts, "bucket_mb", "timeout"),
        "all_reduce": ("method", "step", "compare"),
        "WeightSync": ("parameters", "source"),
        "ProcessGroupCluster": ("timeout", "throttle", "streams"),
    }
    assert {name for name, _ in reported} == {f"{of}.{name}" for of, names in wanted.items() for name in names}
    assert not [line for line in reported if line[1].startswith("takes") or "\n" in line[1]]
