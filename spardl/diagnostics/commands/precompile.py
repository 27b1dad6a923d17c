"""``spardl precompile``: compiles the kernels once on a machine, before a training does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import click
import torch

from spardl.basics.errors import ConfigError
from spardl.clusters.precompile import prepare
from spardl.method.method import Method
from spardl.method.recipes import make_method, method_names
from spardl.vector.kernels import compiled

__all__ = ["precompile"]

_EXAMPLES = """\b
Examples:
  spardl precompile                              all methods, for gradients of float32
  spardl precompile spardl int8 --dtype bfloat16 these methods, for gradients of bfloat16
"""
_DTYPES = ("float32", "float64", "bfloat16", "float16")


@click.command(epilog=_EXAMPLES)
@click.argument("methods", nargs=-1, metavar="[METHOD]...")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Of the gradients.")
@click.option("--workers", type=int, default=4, show_default=True, help="How many will train.")
def precompile(methods: tuple[str, ...], dtype: str, workers: int) -> None:
    """Compile the kernels of methods on this machine.

    The first attach on a machine does the same, while training waits. Compiled kernels are in numba's cache: next to
    the installation, or, if that is read-only, in the user's cache directory.
    """
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    gradient = torch.empty(0, dtype=getattr(torch, dtype))
    if not compiled(gradient):
        raise ConfigError(
            "there are no kernels to compile: numba is missing, or SPARDL_KERNELS=portable turns them off"
        )
    torch.set_num_threads(1)
    for name, method in [*_made(methods or tuple(method_names()), must=bool(methods))]:
        click.echo(f"{name} ... ", nl=False)
        began = time.perf_counter()
        try:
            prepare(method, workers, [gradient], tells=False)
        except ConfigError as error:
            if methods:
                raise
            click.echo(f"skipped: {error}")
            continue
        click.echo(f"{time.perf_counter() - began:.1f} s")


def _made(names: tuple[str, ...], must: bool) -> Iterator[tuple[str, Method]]:
    for name in names:
        try:
            yield name, make_method(name)
        except ConfigError as error:
            if must:
                raise
            click.echo(f"{name} ... skipped: {error}")
