"""The names of the library's methods, as a type that editors complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["MODULE", "module"]

MODULE = Path("spardl") / "method" / "names.py"
_HEAD = '''"""The names of the library's methods, for editors to complete. Written by scripts/api_reference.py."""

from typing import Literal, TypeAlias

__all__ = ["MethodName"]

MethodName: TypeAlias = Literal[
'''
_TAIL = '''"""A method of this library, by name. Those of other packages are in ``method_names()``, but not here."""
'''


def module(names: Iterable[str]) -> str:
    """The text of the module.

    Args:
        names: of the methods.
    """
    return _HEAD + "".join(f'    "{name}",\n' for name in sorted(names)) + "]\n" + _TAIL
