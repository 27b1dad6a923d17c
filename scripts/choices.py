"""The methods that ``compressor=NAME`` can choose, built as the command line would build them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from spardl.basics.errors import ConfigError
from spardl.method.method import Method
from train import CONFIGURATIONS, build_method

__all__ = ["build", "composed", "composing", "names"]


def names() -> list[str]:
    """All choices of the group ``compressor``, in alphabetical order."""
    return sorted(path.stem for path in (CONFIGURATIONS / "compressor").glob("*.yaml"))


@contextmanager
def composing() -> Iterator[None]:
    """Inside, configurations can be composed."""
    with initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        yield


def composed(*words: str) -> dict[str, Any]:
    """The resolved configuration of a command line of train.py, as plain data; see :func:`composing`."""
    plain: dict[str, Any] = OmegaConf.to_container(compose("train", list(words)), resolve=True)  # type: ignore[assignment]
    return plain


def build(name: str, *overrides: str) -> Method:
    """The method of a choice, with overrides as on the command line.

    Raises:
        ConfigError: if there is no such choice, or the parts do not fit together.
    """
    if name not in names():
        raise ConfigError(f"there is no compressor={name}; choose one of {', '.join(names())}")
    return build_method(composed(f"compressor={name}", *overrides))
