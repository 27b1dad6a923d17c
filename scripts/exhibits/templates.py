"""Renders the HTML templates in ``templates/`` with automatic escaping."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["render"]

FOLDER = Path(__file__).with_name("templates")


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: object) -> Markup:
    """Renders a template.

    Args:
        template: Name of the file without its suffix.
        values: Variables of the template; text is escaped unless it is :class:`~markupsafe.Markup`.
    """
    return Markup(_environment().get_template(f"{template}.html").render(values))
