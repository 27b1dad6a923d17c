"""Tables of docs/methods.md, and the type of the method names (spardl/method/names.py).

The columns on error feedback, bias and worker counts come from what the parts declare, the costs from their formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from scripts import choices
from scripts.exhibits.tables import replace_section
from spardl.basics.errors import ConfigError
from spardl.compressors import Mass
from spardl.method.method import Method
from spardl.method.recipes import recipes

NAMES_TEMPLATE = '''"""The names of the library's methods, for completion in editors. Written by scripts/docs.py."""

from typing import Literal, TypeAlias

__all__ = ["MethodName"]

MethodName: TypeAlias = Literal[
{names}]
"""A method of this library, by name. ``method_names()`` also lists the methods of other packages."""
'''
PROSE = Path(__file__).with_name("methods.yaml")
WORKERS = range(1, 65)
DECLARED = (
    "method",
    "source",
    "sent",
    "rounds",
    "words per worker",
    "error feedback",
    "P",
    "biased",
    "when to use",
)
LAWS = ("method", "mass", "conserves mass", "density 1 = dense", "does not, because", "halves")

REASONS: Mapping[Mass, str] = {
    Mass.KEPT: "",
    Mass.LEFT: "",
    Mass.OWED: "momentum: a gradient counts in many steps",
    Mass.UNBIASED: "random rounding: exact on average only",
    Mass.CLIPPED: "clipping, and random rounding",
    Mass.ROUNDED: "sums are rounded to the short format on the way",
}


def documented() -> Mapping[str, Mapping[str, str]]:
    """Returns the additional descriptions of each published method, by choice of ``compressor=``."""
    found: Mapping[str, Mapping[str, str]] = yaml.safe_load(PROSE.read_text())
    return found


def declared(name: str, prose: Mapping[str, str]) -> list[str]:
    """Returns the row of a method in the table of methods."""
    method = choices.build(name)
    residual = method.residual.name if method.residual.remembers else "none"
    momentum = "" if method.momentum.name == "optimizer" else f", momentum {method.momentum.name}"
    columns = [prose[column] for column in ("source", "sent", "rounds", "words")]
    return [f"`{name}`", *columns, residual + momentum, accepted(method), biased(method), prose["use"]]


def accepted(method: Method) -> str:
    """Returns the numbers of workers that a method runs on."""
    refused = [workers for workers in WORKERS if not method.communicator.runs_on(workers)]
    return f"not {', '.join(map(str, refused))}" if refused else "any"


def biased(method: Method) -> str:
    """Whether one step's average is off on average, whatever a residual makes good later."""
    return "no" if method.compressor.own_mass in (Mass.KEPT, Mass.UNBIASED) else "yes"


def lawful(name: str) -> list[str]:
    """Returns one method's row of the table of laws."""
    method = choices.build(name)
    mass = method.compressor.own_mass
    dense = "yes" if hasattr(method.compressor, "density") or mass is Mass.KEPT else "has no density"
    keeps, reason = "yes" if conserves(method) else "no", REASONS[mass] or _loss(method)
    return [f"`{name}`", mass.value, keeps, dense, reason, _halves(method)]


def _halves(method: Method) -> str:
    try:
        method.check_split()
    except ConfigError:
        return "no"
    return "yes"


def conserves(method: Method) -> bool:
    """Whether residuals + P x average = inputs."""
    keeps = method.residual.remembers and (not method.communicator.drops or method.residual.name == "global")
    return method.compressor.mass is Mass.KEPT or (method.compressor.mass is Mass.LEFT and keeps)


def _loss(method: Method) -> str:
    if conserves(method):
        return ""
    if not method.residual.remembers:
        return "`residual=none` by default; a residual makes it so"
    return f"`residual={method.residual.name}`, as published, loses entries dropped on the way; `global` does not"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def generate(text: str) -> str:
    """Returns the page with its generated parts replaced."""
    prose = documented()
    with choices.composing():
        text = replace_section(text, "methods", markdown(DECLARED, [declared(name, prose[name]) for name in prose]))
        return replace_section(text, "laws", markdown(LAWS, [lawful(name) for name in prose]))


def names() -> str:
    """Returns the module that declares the type of the method names."""
    return NAMES_TEMPLATE.format(names="".join(f'    "{name}",\n' for name in sorted(recipes())))
