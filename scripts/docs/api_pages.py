"""The reference in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import griffe

from scripts.docs.api_library import (
    Entry,
    Library,
    Thing,
    Topic,
    bases_of,
    docs_of,
    members_of,
    own_docs,
    parameters_of,
)

__all__ = ["pages"]

WIDTH = 100
NOTICE = "<!-- Written by scripts/api_reference.py from docstrings: change those. -->"
PREFACE = """\
Every name that programs may use, by topic. Throughout, P is the number of workers, n the number of entries of a
gradient, k how many of them are sent; an index or a value is one *word*, and an MB has 2^20 bytes. The arguments of a
dataclass are its attributes, too. Examples begin with `import torch`, `from torch import nn` and `import spardl`; those
that need a process group have one of a single worker. A test runs them."""


def pages(library: Library) -> dict[Path, str]:
    """What every page shall hold.

    Args:
        library: what is documented.

    Returns:
        Texts by path, relative to the folder of the docs.
    """
    return {
        Path("api.md"): _index(library),
        **{Path("api") / f"{topic.page}.md": _Page(library, topic).text() for topic in library.topics},
    }


def _index(library: Library) -> str:
    """The page that leads to the others."""
    blocks = [NOTICE, "# API reference", PREFACE]
    for topic in library.topics:
        blocks.append(f"## [{topic.title}](api/{topic.page}.md)")
        blocks.append("\n".join(_index_line(entry) for entry in topic.entries))
    return "\n\n".join(blocks) + "\n"


def _index_line(entry: Entry) -> str:
    summary = _plain(docs_of(entry.target).summary).replace("``", "`").replace("\n", " ")
    return f"- [`{entry.path}`](api/{entry.page}.md#{entry.anchor}): {summary}"


@dataclass(frozen=True)
class _Page:
    """One topic."""

    known: Library
    topic: Topic

    def text(self) -> str:
        contents = "\n".join(f"- [`{entry.path}`](#{entry.anchor})" for entry in self.topic.entries)
        head = [NOTICE, f"# {self.topic.title}", self.topic.about, "All topics: [API reference](../api.md).", contents]
        return "\n\n".join([*head, *(block for entry in self.topic.entries for block in self._entry(entry))]) + "\n"

    def _entry(self, entry: Entry) -> Iterator[str]:
        yield f"## `{entry.path}`"
        yield from _call(entry.name, entry.target)
        yield from self._described(entry.target)
        if entry.target.is_class:
            yield from self._source(entry.target)
            yield from self._members(entry)

    def _described(self, target: Thing) -> Iterator[str]:
        docs = docs_of(target)
        yield self._text(docs.text, target)
        given = {each.name: "*" * _stars(each) + each.name for each in parameters_of(target)}
        arguments = [(given[name], docs.described[name]) for name in given if name in docs.described]
        yield from self._list("Arguments", arguments, target)
        others = [(name, text) for name, text in own_docs(target).described.items() if name not in given]
        yield from self._list("Attributes", others, target)
        yield from self._list("Values", _values(target), target)
        if docs.returns:
            yield f"**Returns**: {self._text(docs.returns, target)}"
        yield from self._list("Raises", docs.raises, target)
        yield from (f"**Example**\n\n```pycon\n{example}\n```" for example in docs.examples)

    def _list(self, title: str, items: Sequence[tuple[str, str]], target: Thing) -> Iterator[str]:
        if items:
            lines = [f"- {self._code(name, target)}: {_indented(self._text(text, target))}" for name, text in items]
            yield f"**{title}**\n\n" + "\n".join(lines)

    def _source(self, target: Thing) -> Iterator[str]:
        """What the file of one algorithm says of its source and its costs."""
        module = target.module
        alone = [each for each in module.classes.values() if each.path in self.known.by_target] == [target]
        if alone and module.docstring:
            _, _, body = module.docstring.value.partition("\n\n")
            if body:
                yield self._text(body, target)

    def _members(self, entry: Entry) -> Iterator[str]:
        """Properties and methods; those that stand in for ones of a documented class, in a line each."""
        alike: dict[str, list[str]] = {}
        for member in members_of(entry.target):
            above = [base.parent for base in bases_of(member) if base.parent.path in self.known.by_target]
            if above:
                alike.setdefault(above[0].name, []).append(self._line(member))
            else:
                yield from self._member(entry, member)
        for name, lines in alike.items():
            yield f"As in {self._code(name, entry.target)}:\n\n" + "\n".join(lines)

    def _member(self, entry: Entry, member: Thing) -> Iterator[str]:
        yield f"### `{entry.name}.{member.name}`"
        yield from _call(member.name, member)
        yield from self._described(member)

    def _line(self, member: Thing) -> str:
        words = ", ".join(each.name for each in parameters_of(member))
        call = member.name if member.is_attribute else f"{member.name}({words})"
        return f"- `{call}`: {_indented(self._text(docs_of(member).summary, member))}"

    # --- from docstrings to Markdown

    def _text(self, text: str, near: Thing) -> str:
        """Prose with its code and its tables."""
        paragraphs = re.split(r"\n\n(?! )", text.strip())
        return "\n\n".join(self._paragraph(paragraph, near) for paragraph in paragraphs)

    def _paragraph(self, paragraph: str, near: Thing) -> str:
        if paragraph.startswith("===="):
            return f"```text\n{paragraph}\n```"
        before, marks, after = paragraph.partition("::\n\n")
        if marks:
            return f"{self._paragraph(before, near)}:\n\n```python\n{_dedented(after)}\n```"
        return re.sub(r"``(.+?)``", lambda found: self._code(found[1], near), _plain(paragraph))

    def _code(self, text: str, near: Thing) -> str:
        """Code, with a link where it names what is documented elsewhere."""
        entry = self.known.find(text, near)
        if entry is None or entry.target.path in (near.path, near.parent.path):
            return f"`{text}`"
        page = "" if entry.page == self.topic.page else f"{entry.page}.md"
        return f"[`{text}`]({page}#{entry.anchor})"


def _call(name: str, target: Thing) -> Iterator[str]:
    """How it is called, or what it is."""
    parameters = parameters_of(target)
    if target.is_attribute:
        annotation = "" if target.annotation is None else f": {target.annotation}"
        value = "" if target.value is None else f" = {target.value}"
        yield f"```python\n{name}{annotation}{value}\n```"
    elif target.is_function or parameters or _is_a_part(target):
        yield f"```python\n{_signature(name, parameters, getattr(target, 'returns', None))}\n```"


def _is_a_part(target: Thing) -> bool:
    """Whether a class is one that methods are put together from, by its name in configurations."""
    return "name" in target.members and target.members["name"].value is not None


def _signature(name: str, parameters: Sequence[griffe.Parameter], returns: object) -> str:
    """A call as it is declared, on one line where it fits."""
    words = [_declared(each) for each in parameters]
    named = [number for number, each in enumerate(parameters) if each.kind is griffe.ParameterKind.keyword_only]
    if named and all(_stars(each) != 1 for each in parameters):
        words.insert(named[0], "*")
    end = ")" if returns is None else f") -> {returns}"
    line = f"{name}({', '.join(words)}{end}"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {word}," for word in words), end])


def _declared(parameter: griffe.Parameter) -> str:
    annotation = "" if parameter.annotation is None else f": {parameter.annotation}"
    default = "" if parameter.default is None or _stars(parameter) else f" = {parameter.default}"
    return "*" * _stars(parameter) + parameter.name + annotation + default


def _stars(parameter: griffe.Parameter) -> int:
    kinds = {griffe.ParameterKind.var_positional: 1, griffe.ParameterKind.var_keyword: 2}
    return kinds.get(parameter.kind, 0) if parameter.kind else 0


def _values(target: Thing) -> list[tuple[str, str]]:
    """Of an enumeration."""
    if not target.is_class or "Enum" not in map(str, target.bases):
        return []
    return [(name, str(each.value).strip("'\"")) for name, each in target.members.items() if each.is_attribute]


def _plain(text: str) -> str:
    """Roles of Sphinx as plain code."""
    return re.sub(r":(?:class|func|meth):`([^`]+)`", r"``\1``", text)


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())
