"""The public names of ``docs/api.md`` and the parts of their docstrings."""

from __future__ import annotations

import builtins
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import griffe

__all__ = [
    "Docs",
    "Entry",
    "Library",
    "Topic",
    "bases_of",
    "docs_of",
    "members_of",
    "own_docs",
    "parameters_of",
    "read",
]

# A class, a function, an attribute or a module; the parser's own union of types has no attribute in common.
Thing: TypeAlias = Any
# Their members are declared as strings.
_SECTION: Any = griffe.DocstringSectionKind
_PARAMETER: Any = griffe.ParameterKind

# What is public although it begins with an underscore.
CALLED = ("__call__",)
# What is made from classes of another library has methods that are documented there.
OURS = {"spardl", *dir(builtins), *sys.stdlib_module_names}


class Entry(NamedTuple):
    """A name on a page.

    Attributes:
        path: as users import it.
        target: what it stands for.
    """

    path: str
    target: Thing

    @property
    def name(self) -> str:
        """Without its module."""
        return self.path.rpartition(".")[2]


class Topic(NamedTuple):
    """A section of the page.

    Attributes:
        title: Its heading.
        entries: Its names, in order.
    """

    title: str
    entries: list[Entry]


@dataclass(frozen=True)
class Library:
    """The documented part of the library.

    Attributes:
        package: all of it, read without importing it.
        topics: what is documented, in order.
    """

    package: Thing
    topics: Sequence[Topic]

    @cached_property
    def entries(self) -> list[Entry]:
        """Of all topics."""
        return list(chain.from_iterable(topic.entries for topic in self.topics))

    @cached_property
    def by_target(self) -> Mapping[str, Entry]:
        """The entries by the path of the module that defines them."""
        return {entry.target.path: entry for entry in self.entries}


def read(root: Path) -> Library:
    """Reads the library, without importing it, and the names in ``docs/api.md``.

    Args:
        root: Root of the repository.

    Raises:
        KeyError: a listed name does not exist.
    """
    logging.getLogger("griffe").setLevel(logging.ERROR)
    package = griffe.load(
        "spardl",
        search_paths=[root],
        docstring_parser="google",
        docstring_options={"returns_named_value": False, "returns_multiple_items": False},
        allow_inspection=False,
    )
    _, *sections = re.split(r"^## ", (root / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    topics = []
    for section in sections:
        names = re.findall(r"^   (spardl\.\S+)$", section, flags=re.MULTILINE)
        topics.append(Topic(section.partition("\n")[0], [Entry(name, _final(package, name)) for name in names]))
    return Library(package, topics)


def _final(package: Thing, path: str) -> Thing:
    """What a path leads to, in the module that defines it."""
    found = package[path.partition(".")[2]]
    return found.final_target if found.is_alias else found


# --- docstrings


@dataclass(frozen=True)
class Docs:
    """A docstring taken apart.

    Attributes:
        text: all that is in no section.
        examples: of an interpreter's session.
        described: parameters and attributes by name, without stars.
        returns: what is returned; empty if nothing is said of it.
        raises: kinds of errors, and when.
    """

    text: str
    examples: Sequence[str]
    described: Mapping[str, str]
    returns: str
    raises: Sequence[tuple[str, str]]

    @property
    def summary(self) -> str:
        """The first line."""
        return self.text.partition("\n\n")[0]


def docs_of(target: Thing) -> Docs:
    """What a docstring says, and, of what it leaves out, what those of base classes say.

    Args:
        target: a class, function or attribute.

    Returns:
        Its own text; parameters that a base class describes, too; returns and raises of the method that it stands in
        for, if it says nothing of them.
    """
    own, above = own_docs(target), [own_docs(base) for base in bases_of(target)]
    described = {name: text for docs in (*reversed(above), own) for name, text in docs.described.items()}
    heirs = [own] if target.is_class else [own, *above]
    returns = next((docs.returns for docs in heirs if docs.returns), "")
    raises = next((docs.raises for docs in heirs if docs.raises), ())
    return replace(own, described=described, returns=returns, raises=raises)


def own_docs(target: Thing) -> Docs:
    """What a docstring itself says.

    Args:
        target: a class, function, attribute or module.

    Returns:
        All of it; nothing, if there is none.
    """
    sections = target.docstring.parsed if target.docstring else []

    def items(*kinds: object) -> Iterator[Any]:
        return chain.from_iterable(section.value for section in sections if section.kind in kinds)

    return Docs(
        "\n\n".join(each.value for each in sections if each.kind is _SECTION.text),
        [str(each.value.contents) for each in sections if each.kind is _SECTION.admonition],
        {item.name.lstrip("*"): item.description for item in items(_SECTION.parameters, _SECTION.attributes)},
        " ".join(_whole(item, target) for item in items(_SECTION.returns)),
        [(str(item.annotation), item.description) for item in items(_SECTION.raises)],
    )


def _whole(item: griffe.DocstringReturn, target: Thing) -> str:
    """The parser takes what is before a colon for a type."""
    declared = str(getattr(target, "returns", None))
    return item.description if str(item.annotation) == declared else f"{item.annotation}: {item.description}"


# --- classes and functions


def bases_of(target: Thing) -> list[Thing]:
    """The classes that a class is made from, or the methods that a method stands in for.

    Args:
        target: a class, function or attribute.

    Returns:
        The nearest first; only those of this library.
    """
    if target.is_class:
        return list(target.mro())
    if target.parent is None or not target.parent.is_class:
        return []
    return [base.members[target.name] for base in target.parent.mro() if target.name in base.members]


def parameters_of(target: Thing) -> list[griffe.Parameter]:
    """What is given when a class or a function is called.

    Args:
        target: a class, function or attribute.

    Returns:
        Parameters without ``self`` and ``cls``; the fields of a named tuple.
    """
    if target.is_class and "NamedTuple" in map(str, target.bases):
        fields = [each for each in target.members.values() if each.is_attribute and "property" not in each.labels]
        kind = _PARAMETER.positional_or_keyword
        return [
            griffe.Parameter(each.name, annotation=each.annotation, default=each.value, kind=kind) for each in fields
        ]
    return [each for each in getattr(target, "parameters", []) if each.name not in ("self", "cls")]


def members_of(target: Thing) -> list[Thing]:
    """Public methods and properties that a class itself has.

    Args:
        target: a class.

    Returns:
        In the order of the file; none, if another library calls them.
    """
    if any(str(base.canonical_path).partition(".")[0] not in OURS for base in target.bases):
        return []
    return [
        member
        for name, member in target.members.items()
        if (name in CALLED or not name.startswith("_"))
        and (member.is_function or (member.is_attribute and "property" in member.labels))
    ]
