"""Groups of layers in a file: those that one run chose, for others to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.basics.files import read_json
from spardl.clusters.base import Cluster, gather_rows
from spardl.schedules.fusion import Range
from spardl.schedules.training import Training

__all__ = ["Groups", "agreed_groups"]


_WAY_OUT = "name RUN/groups.json of another run"


class Groups(NamedTuple):
    """A partition of a model's layers.

    Attributes:
        entries: of each layer, in flat order; they tell models apart.
        ranges: the groups, in flat order.
    """

    entries: Sequence[int]
    ranges: Sequence[Range]

    def text(self) -> str:
        """The content of a file that ``read`` reads."""
        return json.dumps({"entries": list(self.entries), "groups": [list(each) for each in self.ranges]}) + "\n"

    @classmethod
    def read(cls, file: Path) -> Groups:
        """Reads what ``text`` gave.

        Raises:
            ConfigError: if it cannot be read, or its groups do not hold every layer once.
        """
        where = f"schedule.groups={file}"
        try:
            content: Any = read_json(file)
            entries, ranges = list(content["entries"]), [(start, stop) for start, stop in content["groups"]]
        except OSError as error:
            raise ConfigError(
                f"{where} cannot be read: {error.strerror}; name RUN/groups.json of another run"
            ) from error
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{where} holds no groups; name RUN/groups.json of another run") from error
        ends = [0, *(stop for _, stop in ranges)]
        numbers = all(is_a(int, number) for number in (*entries, *ends))
        if not numbers or ranges != list(pairwise(ends)) or ends != sorted({*ends, len(entries)}):
            raise ConfigError(f"{where}: its groups do not hold each of {len(entries)} layers once, in order")
        return cls(entries, ranges)


def agreed_groups(file: Path, cluster: Cluster, training: Training) -> list[Range]:
    """The groups of a file, for the model at hand; all workers must call this at once.

    Raises:
        ConfigError: if the file is of another model, or workers read different groups.
    """
    found = Groups.read(file)
    entries = [layer.entries for layer in training.gradient.layers]
    if list(found.entries) != entries:
        raise ConfigError(
            f"schedule.groups={file} is of another model: {len(found.entries)} layers with {sum(found.entries):,} "
            f"entries, and this one has {len(entries)} with {sum(entries):,}"
        )
    begins = torch.zeros(len(entries), dtype=torch.int64)
    begins[[start for start, _ in found.ranges]] = 1
    rows = gather_rows(cluster, [begins for _ in cluster.local_ranks])
    odd = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if odd:
        raise ConfigError(f"schedule.groups={file} has other groups where ranks {odd} read it than for rank 0")
    return list(found.ranges)
