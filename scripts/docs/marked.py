"""Pages of which some sections are written by scripts, between marks."""

from __future__ import annotations

import re

from spardl.basics.errors import ConfigError

__all__ = ["replace"]


def replace(text: str, section: str, content: str) -> str:
    """Puts content between the marks of a section.

    Raises:
        ConfigError: if the text has no such section.
    """
    pattern = rf"(<!-- {section}: .*? -->\n).*?(<!-- end of {section} -->)"
    changed, count = re.subn(pattern, lambda marks: f"{marks[1]}{content}\n{marks[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ConfigError(f"a page must have one section '<!-- {section}: ... -->', got {count}; add or remove one")
    return changed
