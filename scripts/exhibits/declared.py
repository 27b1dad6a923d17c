"""Reads typed values from YAML: dataclasses, named tuples and their parts, with errors that name file and line.

The annotations of a class are its schema. In addition to plain YAML:

- ``$name`` stands for a definition, also as a part of command words, and as an item for all items of a list.
- A key ``one & other`` gives both keys the same value.
- ``from: $name`` in a mapping takes the keys of a definition that the mapping does not set itself.
- Where a mapping of any names is expected, a list of mappings is their union in this order; names must differ.
- Command words (``tuple[str, ...]``) are one text or a list; ``!words`` marks words where any value is allowed.
- A named tuple can be a list of its fields, or the value of its first field if that is the only one without a default.
"""

from __future__ import annotations

import dataclasses
import shlex
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeAlias, Union, get_args, get_origin, get_type_hints

import yaml

from spardl.basics.errors import ConfigError, first_line

Node: TypeAlias = Any  # yaml.Node; PyYAML is not typed
Definitions: TypeAlias = Mapping[str, Node]
# Classes by the value of ``kind:``, for abstract classes.
Variants: TypeAlias = Mapping[type, Mapping[str, type]]

MARK, AND, FROM, KIND, WORDS, NULL = "$", " & ", "from", "kind", "!words", "tag:yaml.org,2002:null"
NAMED: Mapping[type, str] = types.MappingProxyType(
    {str: "text", int: "an integer", float: "a number", bool: "true or false"}
)


class Keys(NamedTuple):
    """Keys that a mapping must and can have, in ``Annotated[Mapping[str, T], Keys(...)]``."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


def parse(path: Path) -> Node:
    """Returns the root node of a YAML file.

    Raises:
        ConfigError: If the file is not valid YAML, or empty.
    """
    with path.open("rb") as file:
        try:
            node = yaml.compose(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{path.name}:{line}: not valid YAML: {error.problem}") from error
        except yaml.YAMLError as error:  # such as a control character
            raise ConfigError(f"{path.name}: not valid YAML: {first_line(error)}") from error
    if node is None:
        raise ConfigError(f"{path.name} is empty; restore it")
    return node


def entries(node: Node, where: str, keys: Keys | None = None) -> dict[str, Node]:
    """Nodes by key of a mapping, which ``where`` describes in errors.

    Raises:
        ConfigError: If the node is no mapping, or a key is repeated, missing or not one of ``keys``.
    """
    if not isinstance(node, yaml.MappingNode):
        fail(node, where, f"expected keys and values, got {_shown(node)}")
    found: dict[str, Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            fail(key, where, f"expected a name as key, got {_shown(key)}")
        for name in key.value.split(AND):
            if name in found:
                fail(key, where, f"{name!r} is given twice; remove one")
            found[name] = value
    if keys:
        _check_keys(found, keys, node, where)
    return found


def _check_keys(found: Mapping[str, Node], keys: Keys, node: Node, where: str) -> None:
    known = tuple(dict.fromkeys((*keys.optional, *keys.required)))
    for name, value in found.items():
        if name not in known:
            fail(value, where, f"unknown key {name!r}; {meant(name, known)}")
    for name in keys.required:
        if name not in found:
            fail(node, where, f"{name!r} is missing")


def fail(node: Node, where: str, words: str) -> NoReturn:
    """Raises a ConfigError with file and line of a node, the declaration that contains it, and the way out."""
    mark = node.start_mark
    raise ConfigError(f"{Path(mark.name).name}:{mark.line + 1}: {where}: {words}")


def _shown(node: Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def meant(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Returns a suggestion for an unknown name, from the names that exist."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


def _value(node: Node, where: str) -> Any:
    """Returns the value of a scalar by the rules of YAML."""
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except yaml.YAMLError:  # such as an unknown tag
        fail(node, where, f"expected a value, got {_shown(node)}")


def _named(node: Node) -> Iterator[str]:
    """Names after ``$`` in a node and its parts."""
    if isinstance(node, yaml.ScalarNode):
        yield from (word.removeprefix(MARK) for word in node.value.split() if word.startswith(MARK))
    for each in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in each if isinstance(each, tuple) else (each,):
            yield from _named(part)


def _check_circles(definitions: Definitions) -> None:
    """Raises if a definition leads back to itself: reading it would not end."""
    uses = {name: [each for each in _named(node) if each in definitions] for name, node in definitions.items()}
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        circle = error.args[1]
        fail(definitions[circle[0]], circle[0], f"refers to itself: {' -> '.join(reversed(circle))}; break the circle")


@cache
def _schema(cls: type) -> dict[str, tuple[Any, bool]]:
    """Type of each field of a dataclass or a named tuple, and whether it is required."""
    hints = get_type_hints(cls, include_extras=True)
    if dataclasses.is_dataclass(cls):
        fields, missing = [each for each in dataclasses.fields(cls) if each.init], dataclasses.MISSING
        optional = {each.name for each in fields if (each.default, each.default_factory) != (missing, missing)}
        names = tuple(each.name for each in fields)
    else:
        names, optional = getattr(cls, "_fields", ()), set(getattr(cls, "_field_defaults", ()))
    return {name: (hints[name], name not in optional) for name in names}


class Reader:
    """Reads typed values from nodes.

    Args:
        definitions: Nodes that ``$name`` stands for.
        variants: Classes that ``kind:`` chooses from.
        functions: Package whose functions a value can name as ``module.function``.
    """

    def __init__(self, definitions: Definitions, variants: Variants, functions: str) -> None:
        _check_circles(definitions)
        self._definitions = definitions
        self._variants = variants
        self._functions = functions

    def read(self, kind: Any, node: Node, where: str, **given: Any) -> Any:
        """Reads a value of a class or type annotation; ``given`` are fields of the class that are not in the file.

        Raises:
            ConfigError: If the node does not fit to the type; the message begins with ``where``.
        """
        node = self._followed(node, where)
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            (kind,) = (each for each in get_args(kind) if each is not type(None))
            return None if node.tag == NULL else self.read(kind, node, where, **given)
        if origin is None and kind is not Any:
            if kind in NAMED:
                return self._scalar(kind, node, where)
            if issubclass(kind, Enum):
                return self._chosen({each.name.lower(): each for each in kind}, node, where)
            return self._record(kind, node, where, given)
        return self._generic(kind, node, where)

    def _generic(self, kind: Any, node: Node, where: str) -> Any:
        """Reads a value of a class with parameters, or any value."""
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            _check_keys(self._union(node, where), args[1], node, where)
            return self.read(args[0], node, where)
        if origin in (tuple, Sequence):
            return self._tuple(args if origin is tuple else (args[0], ...), node, where)
        if origin is Mapping:
            return {key: self.read(args[1], each, f"{where}, {key}") for key, each in self._union(node, where).items()}
        return self._function(node, where) if origin is Callable else self._any(node, where)

    def _followed(self, node: Node, where: str) -> Node:
        """Returns the node, or the definition that it names."""
        while isinstance(node, yaml.ScalarNode) and node.value.startswith(MARK) and " " not in node.value:
            name = node.value.removeprefix(MARK)
            if name not in self._definitions:
                fail(node, where, f"{node.value} is not defined; {meant(name, self._definitions)}")
            node = self._definitions[name]
        return node

    def _any(self, node: Node, where: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._words(node, where) if node.tag == WORDS else _value(node, where)
        if isinstance(node, yaml.SequenceNode):
            return tuple(self._any(each, where) for each in self._items(node, where))
        fail(node, where, "expected a value or a list, got a mapping")

    def _tuple(self, kinds: tuple[Any, ...], node: Node, where: str) -> tuple[Any, ...]:
        if kinds[-1] is not Ellipsis:
            nodes = list(self._items(node, where))
            if len(nodes) != len(kinds):
                fail(node, where, f"expected {len(kinds)} values, got {len(nodes)}")
            return tuple(self.read(kind, each, where) for kind, each in zip(kinds, nodes, strict=True))
        kind = kinds[0]
        if get_origin(kind) is tuple and isinstance(node, yaml.MappingNode):
            value = get_args(kind)[1]
            found = self._complete(node, where)
            return tuple((key, self.read(value, each, f"{where}, {key}")) for key, each in found.items())
        if kind is str and isinstance(node, yaml.ScalarNode):
            return self._words(node, where)
        return tuple(self.read(kind, each, where) for each in self._items(node, where))

    def _items(self, node: Node, where: str) -> Iterator[Node]:
        """Items of a list; an item that names a list stands for its items."""
        if not isinstance(node, yaml.SequenceNode):
            fail(node, where, f"expected a list, got {_shown(node)}")
        for each in node.value:
            found = self._followed(each, where)
            if found is not each and isinstance(found, yaml.SequenceNode):
                yield from self._items(found, where)
            else:
                yield found

    def _words(self, node: Node, where: str) -> tuple[str, ...]:
        """Returns the words of a text, with those that its definitions stand for."""
        found: list[str] = []
        if node.tag == NULL:
            fail(node, where, f"expected text, got {_shown(node)}; remove the key")
        try:
            words = shlex.split(node.value)
        except ValueError as error:
            fail(node, where, f"{_shown(node)} cannot be split into words: {error}")
        for word in words:
            if word.startswith(MARK):
                named = self._followed(yaml.ScalarNode(node.tag, word, node.start_mark), where)
                found += self.read(tuple[str, ...], named, where)
            else:
                found.append(word)
        return tuple(found)

    def _union(self, node: Node, where: str) -> dict[str, Node]:
        """Entries of a mapping, or of all mappings of a list."""
        if not isinstance(node, yaml.SequenceNode):
            return entries(node, where)
        found: dict[str, Node] = {}
        for each in node.value:
            for name, value in self._union(self._followed(each, where), where).items():
                if name in found:
                    fail(each, where, f"{name!r} is given twice; remove one")
                found[name] = value
        return found

    def _function(self, node: Node, where: str) -> Any:
        module, _, name = str(node.value).rpartition(".")
        try:
            home = import_module(f"{self._functions}.{module}")
        except (ModuleNotFoundError, ValueError):
            fail(node, where, f"expected module.function, got {_shown(node)}")
        own = (value for value in vars(home).values() if isfunction(value) and value.__module__ == home.__name__)
        public = {each.__name__: each for each in own if not each.__name__.startswith("_")}
        if name not in public:
            fail(node, where, f"{module} has no function {name!r}; {meant(name, public)}")
        return public[name]

    def _scalar(self, kind: type, node: Node, where: str) -> Any:
        wrong = f"expected {NAMED[kind]}, got {_shown(node)}"
        if not isinstance(node, yaml.ScalarNode):
            fail(node, where, wrong)
        value = _value(node, where)
        if kind is float and not isinstance(value, bool):
            try:
                return float(value)  # YAML takes 1e-3 for text
            except (TypeError, ValueError):
                fail(node, where, wrong)
        if type(value) is not kind:
            fail(node, where, f"{wrong}; put it in quotes" if kind is str else wrong)
        return value

    def _chosen(self, names: Mapping[str, Any], node: Node, where: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            fail(node, where, f"expected a name, got {_shown(node)}; choose from {', '.join(names)}")
        if node.value not in names:
            fail(node, where, f"{_shown(node)} does not exist; {meant(str(node.value), names)}")
        return names[node.value]

    def _record(self, cls: type, node: Node, where: str, given: Mapping[str, Any]) -> Any:
        """Reads an instance of a class with fields."""
        if not isinstance(node, yaml.MappingNode):
            return self._short(cls, node, where)
        found = self._complete(node, where)
        if cls in self._variants:
            if KIND not in found:
                fail(node, where, f"{KIND!r} is missing; choose from {', '.join(self._variants[cls])}")
            cls = self._chosen(self._variants[cls], found.pop(KIND), f"{where}, {KIND}")
        schema = _schema(cls)
        open_fields = {name: required for name, (_, required) in schema.items() if name not in given}
        required = tuple(name for name, needed in open_fields.items() if needed)
        _check_keys(found, Keys(required, tuple(open_fields)), node, where)
        values = {name: self.read(schema[name][0], each, f"{where}, {name}") for name, each in found.items()}
        return cls(**given, **values)

    def _complete(self, node: Node, where: str) -> dict[str, Node]:
        """Entries of a mapping and of the definition that it starts from."""
        found = entries(node, where)
        if FROM not in found:
            return found
        base = self._followed(found.pop(FROM), where)
        return {**self._complete(base, where), **found}

    def _short(self, cls: type, node: Node, where: str) -> Any:
        """Reads a named tuple from a list of its fields, or from the value of its first field."""
        if cls in self._variants:
            fail(node, where, f"expected keys and values with {KIND!r}, got {_shown(node)}")
        schema = _schema(cls)
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        required = sum(needed for _, needed in schema.values())
        if not issubclass(cls, tuple) or not required <= len(nodes) <= len(schema):
            fail(node, where, f"expected {', '.join(schema)}, got {_shown(node)}")
        fields = zip(schema.items(), nodes, strict=False)
        return cls(*(self.read(kind, own, f"{where}, {name}") for (name, (kind, _)), own in fields))
