"""The command ``spardl``: what is known before a training, from the command line."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import NoReturn

import click
import torch

from spardl.basics.errors import SpardlError
from spardl.basics.version import __version__
from spardl.clusters.workers.processes import leave
from spardl.diagnostics.commands.advise import advise
from spardl.diagnostics.commands.doctor import doctor
from spardl.diagnostics.commands.precompile import precompile
from spardl.diagnostics.commands.profile import profile
from spardl.diagnostics.commands.timeline import timeline

__all__ = ["main", "run"]

_BAD_INPUT, _INTERRUPTED = 2, 130
_EXAMPLES = """\b
Examples:
  spardl doctor --out network.yaml                        is this cluster well, and how fast is it
  spardl profile training:make --out model.json           how long the layers of your model take
  spardl advise model.json --network network.yaml         which method and schedule to train it with
  spardl timeline model.json --workers 64                 what a step takes under every schedule
  spardl precompile                                       compile all kernels on this machine
"""


@click.group(invoke_without_command=True, epilog=_EXAMPLES)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def front(context: click.Context) -> None:
    """Sparse gradient communication for distributed training: will it pay, and is the cluster well?"""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@front.command()
def version() -> None:
    """Print the versions of spardl, torch and Python."""
    click.echo(f"spardl {__version__}, torch {torch.__version__}, Python {platform.python_version()}")


for command in (doctor, profile, advise, timeline, precompile):
    front.add_command(command)


def run(command: click.Command, words: Sequence[str], name: str) -> int:
    """Runs a command; what is wrong with its input is one line.

    Args:
        command: which.
        words: of its command line, without its name.
        name: of the command, as it was typed.

    Returns:
        The exit code: 2 for bad input, 130 if interrupted.
    """
    try:
        code = command.main(args=list(words), prog_name=name, standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else name
        return _refuse(f"{error.format_message().rstrip('.').replace('. Did', '; did')}; see {path} --help")
    except click.Abort:
        _refuse("interrupted")
        return _INTERRUPTED
    except (click.ClickException, SpardlError, OSError) as error:
        return _refuse(str(error))
    return int(code or 0)


def _refuse(reason: str) -> int:
    print(f"error: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return _BAD_INPUT


def main() -> NoReturn:
    """What ``spardl`` runs. It ends at once: torch may abort in the interpreter's shutdown when a peer was lost."""
    leave(run(front, sys.argv[1:], "spardl"))


if __name__ == "__main__":
    main()
