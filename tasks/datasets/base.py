"""The interface between a data set and a task."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from spardl.basics.errors import ConfigError

__all__ = ["Dataset", "require"]


class Dataset:
    """Base class of data sets; each subclass is one kind, such as images with labels.

    Not a dataclass, because Hydra's ``instantiate`` converts a dataclass among its arguments to a configuration.

    Attributes:
        kind: Kind of data, which determines the tasks that can use it.
        examples: Examples of settings that choose such a data set, for error messages: ``dataset=digits``.
        name: Name of the data set in the configuration.
        caveat: Note for readers of the results, such as that the data are placeholders.
    """

    kind: ClassVar[str]
    examples: ClassVar[str]

    def __init__(self, name: str, caveat: str | None = None) -> None:
        self.name = name
        self.caveat = caveat


AnyDataset = TypeVar("AnyDataset", bound=Dataset)


def require(dataset: Dataset, wanted: type[AnyDataset], task: str) -> AnyDataset:
    """Checks that a data set is of the kind that a task needs.

    Args:
        dataset: Data set that the configuration chose.
        wanted: Class of data sets that the task can use.
        task: Name of the task, for the error message.

    Returns:
        ``dataset`` itself, typed as an instance of ``wanted``.

    Raises:
        ConfigError: If the data set is of another kind.
    """
    if isinstance(dataset, wanted):
        return dataset
    raise ConfigError(
        f"{task} needs a data set of {wanted.kind}, but dataset={dataset.name} contains {dataset.kind}; use "
        f"{wanted.examples}"
    )
