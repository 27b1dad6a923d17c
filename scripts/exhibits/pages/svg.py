"""Inline SVG figures: compact, with the colours and fonts of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from types import MappingProxyType

from markupsafe import escape

from scripts.exhibits.base import Draw
from scripts.exhibits.charts import axes, palette

__all__ = ["inline"]

# CSS variables that replace the colours of matplotlib.
_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"#000000": "currentColor", "#ffffff": "var(--paper)", **palette.variables()}
)
_COLOURS = re.compile("|".join(_VARIABLES))
# What a page does not need: the style sheet, rotations by nothing, and ids of groups, which repeat in every figure.
_LEFT_OUT = re.compile(r'<style.*?</style>| id="[\w.]*[A-Za-z]_\d+"| transform="rotate\(-0 [^"]*"', re.DOTALL)
_LETTERS = re.compile(r"(font-family: |(?<=px) )'[^;\"]*")  # of the property font, in older versions
# Attributes that hold coordinates. They are rounded to 0.1 points, a difference that is not visible.
_PLACES = re.compile(r'(?<= )(?:d|x|y|width|height|points|transform)="[^"]*"')
_DECIMAL = re.compile(r"-?\d+\.\d+")


def inline(draw: Draw, key: Mapping[str, palette.Look], ident: str, title: str) -> str:
    """Draws a figure as an ``svg`` element.

    Args:
        draw: Function that draws into a matplotlib figure.
        key: Look of each name in the legend; empty for no legend.
        ident: Name of the figure, unique on the page.
        title: Description for screen readers.

    Returns:
        An ``svg`` element for use in HTML. It contains text as text, and has an aspect ratio but no fixed size.
    """
    out = io.BytesIO()
    # Salted hashes make the ids of markers and clip paths unique on the page.
    with axes.drawing(svg_fonttype="none", svg_hashsalt=ident, path_simplify_threshold=0.3):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        axes.drawn(draw, key).savefig(out, format="svg", transparent=True, metadata=nothing)
    head, _, body = out.getvalue().decode().partition("<svg ")[2].partition(">")
    (box,) = re.findall('viewBox="[^"]*"', head)
    text = _PLACES.sub(lambda found: _DECIMAL.sub(_short, " ".join(found[0].split())), _LEFT_OUT.sub("", body))
    text = _COLOURS.sub(lambda found: _VARIABLES[found[0]], _LETTERS.sub(r"\1var(--sans)", text))
    label = f'<svg class="plot" role="img" aria-labelledby="{ident}-title" {box}>\n<title id="{ident}-title">'
    return re.sub(r"\n\s*", "\n", f"{label}{escape(title)}</title>{text.replace('xlink:href', 'href')}")


def _short(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"  # + 0.0 turns -0.0 into 0.0
