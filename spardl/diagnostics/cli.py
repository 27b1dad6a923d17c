"""The command ``spardl`` and its subcommand ``precompile``."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import click
import torch

from spardl.basics.errors import ConfigError, SpardlError
from spardl.basics.version import __version__
from spardl.clusters.precompile import prepare
from spardl.clusters.workers.processes import exit_now
from spardl.diagnostics.commands.advise import advise
from spardl.diagnostics.commands.doctor import doctor
from spardl.diagnostics.commands.profile import profile
from spardl.diagnostics.commands.timeline import timeline
from spardl.method.method import Method
from spardl.method.recipes import make_method, method_names
from spardl.vector.kernels import compiled

__all__ = ["main", "precompile", "run"]


# ``spardl precompile``


_PRECOMPILE_EXAMPLES = """\b
Examples:
  spardl precompile                              all methods, for float32 gradients
  spardl precompile spardl int8 --dtype bfloat16 these methods, for bfloat16 gradients
"""
_DTYPES = ("float32", "float64", "bfloat16", "float16")


@click.command(epilog=_PRECOMPILE_EXAMPLES)
@click.argument("methods", nargs=-1, metavar="[METHOD]...")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Dtype of the gradients."
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Number of workers of the training."
)
def precompile(methods: tuple[str, ...], dtype: str, workers: int) -> None:
    """Compile the kernels of methods on this machine.

    The first training on a machine does the same, but delays its first step. Compiled kernels are stored in numba's
    cache: next to the installation or, if that is read-only, in the user's cache directory.
    """
    gradient = torch.empty(0, dtype=getattr(torch, dtype))  # only its dtype and device matter
    if not compiled(gradient):
        raise ConfigError(
            "compiled kernels are not available: numba is missing, or SPARDL_KERNELS=portable disables them; install "
            "spardl[fast], or unset SPARDL_KERNELS"
        )
    torch.set_num_threads(1)
    # Without names, methods that do not apply are skipped; a method that the user named must compile.
    for name, method in [*_made(methods or tuple(method_names()), required=bool(methods))]:
        click.echo(f"{name} ... ", nl=False)
        began = time.perf_counter()
        try:
            prepare(method, workers, [gradient], logs=False)
        except ConfigError as error:
            if methods:
                raise
            click.echo(f"skipped: {error}")
            continue
        click.echo(f"{time.perf_counter() - began:.1f} s")


def _made(names: tuple[str, ...], required: bool) -> Iterator[tuple[str, Method]]:
    for name in names:
        try:
            yield name, make_method(name)
        except ConfigError as error:
            if required:
                raise
            click.echo(f"{name} ... skipped: {error}")


_BAD_INPUT, _INTERRUPTED = 2, 130
_EXAMPLES = """\b
Examples:
  spardl doctor --out network.yaml                        check the cluster and measure its network
  spardl profile training:make --out model.json           measure the layers of your model
  spardl advise model.json --network network.yaml         recommend a method and a schedule
  spardl timeline model.json --workers 64                 predict the step time of each schedule
  spardl precompile                                       compile all kernels on this machine
"""


@click.group(invoke_without_command=True, epilog=_EXAMPLES)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def front(context: click.Context) -> None:
    """Sparse gradient communication for distributed training: check a cluster and predict the speedup."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@front.command()
def version() -> None:
    """Print the versions of spardl, torch and Python."""
    click.echo(f"spardl {__version__}, torch {torch.__version__}, Python {platform.python_version()}")


for command in (doctor, profile, advise, timeline, precompile):
    front.add_command(command)


def run(command: click.Command, words: Sequence[str], name: str) -> int:
    """Runs a command, and prints errors in the input as one line.

    Args:
        command: Command of the click library to run.
        words: Command-line arguments, without the program name.
        name: Program name as the user typed it.

    Returns:
        The exit code: 2 for bad input, 130 if interrupted.
    """
    try:
        # Not standalone, because click would otherwise print errors in its own format and exit.
        code = command.main(args=list(words), prog_name=name, standalone_mode=False)
    except click.UsageError as error:
        # Click prints usage and error on several lines; scripts expect one.
        path = error.ctx.command_path if error.ctx else name
        return _print_error(f"{error.format_message().rstrip('.').replace('. Did', '; did')}; see {path} --help")
    except click.Abort:  # Ctrl-C
        _print_error("interrupted")
        return _INTERRUPTED
    except (click.ClickException, SpardlError, OSError) as error:
        return _print_error(str(error))
    return int(code or 0)


def _print_error(reason: str) -> int:
    print(f"error: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return _BAD_INPUT


def main() -> NoReturn:
    """Runs ``spardl``, and exits without interpreter shutdown, in which torch may abort after a peer was lost."""
    exit_now(run(front, sys.argv[1:], "spardl"))


if __name__ == "__main__":
    main()
