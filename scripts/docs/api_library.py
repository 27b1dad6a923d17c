"""What the reference is about: names, what they stand for, and what their docstrings say."""

from __future__ import annotations

import builtins
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import griffe
import yaml

from spardl.basics.errors import ConfigError

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
        page: stem of the page's file.
        anchor: of its heading, as GitHub makes it.
    """

    path: str
    target: Thing
    page: str
    anchor: str

    @property
    def name(self) -> str:
        """Without its module."""
        return self.path.rpartition(".")[2]


class Topic(NamedTuple):
    """A page.

    Attributes:
        page: stem of its file.
        title: heading.
        about: what it is for, in Markdown.
        entries: in order.
    """

    page: str
    title: str
    about: str
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

    def find(self, text: str, near: Thing) -> Entry | None:
        """The entry that a piece of code in a docstring names, if it names one.

        Args:
            text: as it stands there, with or without ``spardl.`` and parentheses.
            near: whose docstring it is.

        Returns:
            What the name means in that file; else the only entry of that name, if it is a class or marked as a call.
        """
        name = text.removeprefix("spardl.").removesuffix("()")
        if not name.replace(".", "").isidentifier():
            return None
        try:
            meant = self.by_target.get(_final(self.package, near.resolve(name)).path)
        except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
            meant = None
        alike = [entry for entry in self.entries if entry.path == f"spardl.{name}"]
        alike = alike or [entry for entry in self.entries if entry.name == name]
        distinct = len(alike) == 1 and (name[0].isupper() or text != name)
        return meant or (alike[0] if distinct else None)


def read(root: Path, topics: Path) -> Library:
    """Reads the library and the list of topics.

    Args:
        root: the repository.
        topics: the list, in YAML.

    Returns:
        What is to be documented.

    Raises:
        ConfigError: if a listed name does not exist.
    """
    logging.getLogger("griffe").setLevel(logging.ERROR)
    package = griffe.load(
        "spardl",
        search_paths=[root],
        docstring_parser="google",
        docstring_options={"returns_named_value": False, "returns_multiple_items": False},
        allow_inspection=False,
    )
    rows = yaml.safe_load(topics.read_text())
    found = [Topic(row["page"], row["title"], row["about"], list(_entries(package, row, topics.name))) for row in rows]
    return Library(package, found)


def _entries(package: Thing, row: Mapping[str, Any], where: str) -> Iterator[Entry]:
    seen: Counter[str] = Counter()
    for path in row["names"]:
        anchor = path.replace(".", "").lower()
        number = f"-{seen[anchor]}" if seen[anchor] else ""
        seen[anchor] += 1
        try:
            yield Entry(path, _final(package, path), row["page"], anchor + number)
        except (KeyError, griffe.AliasResolutionError) as error:
            raise ConfigError(f"{where}: there is no {path}; take it out, or name it as users import it") from error


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
