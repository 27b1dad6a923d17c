"""Saved states: whether an engine can continue from them, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spardl.protocol.state import described
from spardl.schedules.carried import Carried
from spardl.schedules.fusion import Range
from spardl.schedules.partition import is_partition, within
from spardl.schedules.scaling import Scaling
from spardl.schedules.trials import Trials
from spardl.vector.storage import Storage

__all__ = ["check_saved"]


def check_saved(
    values: Mapping[str, Any], gradient: Storage, carried: Carried, scaling: Scaling, trials: Trials | None, fixed: bool
) -> None:
    """Accepts values that an engine can continue from; changes nothing.

    Args:
        values: as saved by the engine's ``state_dict``.
        gradient: of the engine, as are the next four.
        carried: what lasts from step to step.
        scaling: of gradients.
        trials: of other sizes of groups, if there are some.
        fixed: whether the groups stay as they were in the beginning.

    Raises:
        KeyError: if something is missing.
        ValueError: if something is of another kind or shape, or there are other groups.
        ConfigError: if settings do not allow a value.
    """
    partition = values.get("partition", carried.partition)
    if not is_partition(partition, len(gradient.layers)):
        raise ValueError(f"partition does not hold each of {len(gradient.layers)} layers once, in order")
    partition = [(start, stop) for start, stop in partition]
    if fixed and partition != carried.partition:
        raise ValueError(f"there are groups {partition}, expected {carried.partition}")
    _check_groups(values["groups"], partition, gradient, carried)
    usage, kept, tried = values.get("usage", True), values.get("kept", 0), values.get("trials")
    if type(usage) is not bool:
        raise ValueError(f"usage is {described(usage)}, expected True or False")
    if type(kept) is not int or kept < 0:
        raise ValueError(f"kept is {described(kept)}, expected a whole number, at least 0")
    scaling.check(values, [sum(gradient.entries[start:stop]) for start, stop in partition])
    if tried is not None and not isinstance(tried, Mapping):
        raise ValueError(f"trials is {described(tried)}, expected a dict or None")
    if trials and tried is not None:
        trials.check_state(tried)


def _check_groups(
    groups: Sequence[Mapping[str, Any]], partition: Sequence[Range], gradient: Storage, carried: Carried
) -> None:
    found = list(within(gradient.runs, partition))
    if len(found) != len(groups):
        raise ValueError(f"there are {len(groups)} groups, expected {len(found)}")
    for number, (layers, saved) in enumerate(zip(found, groups, strict=True)):
        try:
            carried.like(layers).check(saved, finite=carried.remembers)
        except (KeyError, ValueError) as error:
            raise ValueError(f"group {number}: {error.args[0]}") from error
