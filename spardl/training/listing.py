"""What ``train.py --help`` lists, listed quickly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType

__all__ = ["groups_listed_at_once"]


@contextmanager
def groups_listed_at_once() -> Iterator[None]:
    """Lets Hydra list groups without a copy of all it knows for each of them, which takes a second for ``--help``."""
    slowly = ConfigLoaderImpl.get_group_options

    def listed(
        loader: ConfigLoaderImpl, group_name: str, results_filter: Any = ObjectType.CONFIG, *more: Any, **others: Any
    ) -> list[str]:
        if more or others:
            return slowly(loader, group_name, results_filter, *more, **others)
        return loader.repository.get_group_options(group_name, results_filter)

    setattr(ConfigLoaderImpl, slowly.__name__, listed)
    try:
        yield
    finally:
        setattr(ConfigLoaderImpl, slowly.__name__, slowly)
