"""Inline SVG figures: compact, with the colours and fonts of the page, and with ids that are unique on it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from xml.etree import ElementTree

from scripts.exhibits.base import Draw
from scripts.exhibits.charts import axes, palette

__all__ = ["inline"]

# CSS variables that replace the colours of matplotlib.
_VARIABLES: Mapping[str, str] = MappingProxyType(
    {"#000000": "currentColor", "#ffffff": "var(--paper)", **palette.variables()}
)
_DECIMAL = re.compile(r"-?\d+\.\d+")
_LETTERS = re.compile(r"(font-family: |(?<=px) )'[^;]*")  # of the property font, in older versions
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
# Attributes that hold coordinates. They are rounded to 0.1 points, a difference that is not visible.
_PLACES = ("d", "x", "y", "width", "height", "points")


def inline(draw: Draw, key: Mapping[str, palette.Look], ident: str, title: str) -> str:
    """Draws a figure as an ``svg`` element.

    Args:
        draw: Function that draws into a matplotlib figure.
        key: Look of each name in the legend; empty for no legend.
        ident: Prefix of all ids in the figure, unique on the page.
        title: Description for screen readers.

    Returns:
        An ``svg`` element without namespaces, for use in HTML. It contains text as text, and has an aspect ratio but
        no fixed size.
    """
    root = ElementTree.fromstring(_drawn(draw, key, ident))
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items()}
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    _rename(root, ident)
    for element in root.iter():
        element.attrib = dict(_restyled(element.attrib))
    _unwrap(root)
    heading = ElementTree.Element("title", {"id": f"{ident}-title"})
    heading.text, heading.tail = title, "\n"
    root.insert(0, heading)
    root.attrib = {
        "class": "plot",
        "role": "img",
        "aria-labelledby": f"{ident}-title",
        "viewBox": root.attrib["viewBox"],
    }
    return re.sub(r"\n\s*", "\n", ElementTree.tostring(root, encoding="unicode"))


def _drawn(draw: Draw, key: Mapping[str, palette.Look], salt: str) -> bytes:
    out = io.BytesIO()
    with axes.drawing(svg_fonttype="none", svg_hashsalt=salt, path_simplify_threshold=0.3):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        axes.drawn(draw, key).savefig(out, format="svg", transparent=True, metadata=nothing)
    return out.getvalue()


def _local(name: str) -> str:
    """Name without its XML namespace."""
    return name.rpartition("}")[2]


def _rename(root: ElementTree.Element, ident: str) -> None:
    """Adds the prefix to all ids that are referenced, and removes the others."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    wanted = set(chain.from_iterable(_REFERENCE.findall(value) for value in values))
    wanted |= {value[1:] for value in values if value.startswith("#")}
    for element in root.iter():
        if element.attrib.get("id") in wanted:
            element.attrib["id"] = f"{ident}-{element.attrib['id']}"
        else:
            element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            element.attrib[key] = _REFERENCE.sub(rf"url(#{ident}-\1)", value)
        if "href" in element.attrib and element.attrib["href"].startswith("#"):
            element.attrib["href"] = f"#{ident}-{element.attrib['href'][1:]}"


def _unwrap(parent: ElementTree.Element) -> None:
    """Removes groups without attributes."""
    for child in parent:
        _unwrap(child)
    parent[:] = [kept for child in parent for kept in (child if child.tag == "g" and not child.attrib else (child,))]


def _restyled(attributes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in attributes.items():
        if key in _PLACES:
            yield key, " ".join(_DECIMAL.sub(_short, value).split())
        elif key == "transform":
            if not value.startswith("rotate(-0 "):
                yield key, _DECIMAL.sub(_short, value)
        else:
            text = _LETTERS.sub(r"\1var(--sans)", value)
            for colour, variable in _VARIABLES.items():
                text = text.replace(colour, variable)
            yield key, text


def _short(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"  # + 0.0 turns -0.0 into 0.0
