"""Text from Jinja2 templates: HTML from those in ``templates/``, which escape values, and Markdown pages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).with_name("templates")


@cache
def _environment(folder: Path, escape: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: object) -> Markup:
    """Renders HTML from the template of this name; text is escaped, unless it is :class:`~markupsafe.Markup`."""
    return Markup(_environment(FOLDER, escape=True).get_template(f"{template}.html").render(values))


def render_page(template: Path, **values: object) -> str:
    """Renders Markdown from a template file (``*.md.j2``); values are not escaped."""
    return _environment(template.parent, escape=False).get_template(template.name).render(values)
