"""The interface between a data set and a task."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from spardl.basics.errors import ConfigError

__all__ = ["Dataset", "require"]


class Dataset:
    """A data set of some kind.

    No dataclass, on purpose: hydra's ``instantiate`` turns a dataclass among its arguments into a
    configuration.

    Attributes:
        kind: what it holds; which tasks it fits follows from that.
        examples: configurations of this kind, for error messages.
        name: its name in the configuration.
        caveat: what a reader of the results must know, such as that this stands in for real data.
    """

    kind: ClassVar[str]
    examples: ClassVar[str]

    def __init__(self, name: str, caveat: str | None = None) -> None:
        self.name = name
        self.caveat = caveat


AnyDataset = TypeVar("AnyDataset", bound=Dataset)


def require(dataset: Dataset, wanted: type[AnyDataset], task: str) -> AnyDataset:
    """Checks that a data set fits a task.

    Args:
        dataset: what the configuration chose.
        wanted: the kind that the task can use.
        task: the task's name, for the message.

    Returns:
        ``dataset``, known to be of that kind.

    Raises:
        ConfigError: it is of another kind.
    """
    if isinstance(dataset, wanted):
        return dataset
    raise ConfigError(
        f"{task} needs a data set of {wanted.kind}, but dataset={dataset.name} contains {dataset.kind}; use "
        f"{wanted.examples}"
    )
