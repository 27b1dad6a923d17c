"""The API reference: it lists every public name, docstrings are complete, and their examples run."""

from __future__ import annotations

import ast
import doctest
import io
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # DDP would import it first thing: here, processes that are forked have it

import spardl
from spardl.clusters import ProcessGroupCluster
from tests.project.test_add_a_method import files_of_the_page
from tests.support.docstrings import Docs, Library, bases_of, docs_of, members_of, own_docs, parameters_of, read
from tests.support.harness import run_workers

ROOT = Path(__file__).resolve().parents[2]
# Where one algorithm, or one rule, is documented with where it was published.
SOURCED = ("Compressors", "Communicators", "Residuals and momentum", "Schedules")
SOURCE = re.compile(r"Source: |\b(19|20)\d\d\b")
# A number that is none of these has no unit, and stands in the list below.
UNIT = re.compile(
    r"\b(seconds|MB|megabytes|bytes|bits|Gbit/s|shares?|multiple|factor|k / n|probability|magnitude"
    r"|words?|entries|steps?|synchronizations|rounds|exchanges|messages|gradients|examples|passes|parameters"
    r"|workers|nodes|P|ranks?|teams|peers|members|threads|regions|layers?|columns|rows"
    r"|number|how (many|often)|count|length|sizes|positions?|places?)\b",
    re.IGNORECASE,
)
# What users begin with.
EXEMPLIFIED = {
    "spardl.attach",
    "spardl.Synchronizer",
    "spardl.all_reduce",
    "spardl.WeightSync",
    "spardl.make_method",
    "spardl.method_names",
    "spardl.Method",
    "spardl.advise",
    "spardl.clusters.SimulatedCluster",
    "spardl.vector.FlatGradient",
    "spardl.schedules.Training",
    "spardl.clusters.Network",
    "spardl.compressors.Budget",
}
DIMENSIONLESS = {"eps", "seed", "levels", "decay", "clip_norm", "gradient_norm"}


class Named(NamedTuple):
    """A class, function or attribute of the reference."""

    path: str
    target: Any
    docs: Docs

    @property
    def parameters(self) -> list[Any]:
        return parameters_of(self.target)

    @property
    def returns(self) -> str:
        """What is returned, or what an attribute is, as annotated."""
        target = self.target
        return str(target.annotation if target.is_attribute else getattr(target, "returns", None))


@pytest.fixture(scope="module")
def library() -> Library:
    return read(ROOT)


@pytest.fixture(scope="module")
def names(library: Library) -> list[Named]:
    """All entries, and the public methods and properties of those that are classes."""
    found = []
    for entry in library.entries:
        found.append(Named(entry.path, entry.target, docs_of(entry.target)))
        members = members_of(entry.target) if entry.target.is_class else []
        found += [Named(f"{entry.path}.{member.name}", member, docs_of(member)) for member in members]
    return found


# --- the pages


def test_every_documented_name_exists(library: Library) -> None:
    public = {f"spardl.{name}" for name in library.package.exports if name != "__version__"}
    assert public <= {entry.path for entry in library.entries}
    reported = {path for page in _documented_pages() for path in _imported(page)}
    assert len(reported) > 3
    known = library.by_target.keys()
    assert not [path for path in reported if _is_ours(path) and _defined(library, path) not in known]


def _is_ours(path: str) -> bool:
    """Not from a file that a page tells its readers to write."""
    place = path.rpartition(".")[0].replace(".", "/")
    return path.startswith("spardl.") and f"{place}.py" not in files_of_the_page()


def _documented_pages() -> Iterator[str]:
    """The Python code of docs and examples."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        yield from re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from (path.read_text() for path in (ROOT / "examples").glob("*.py"))


def _imported(code: str) -> Iterator[str]:
    """What code imports from the library, or names as its attribute."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spardl":
            yield f"spardl.{node.attr}"


def _defined(library: Library, path: str) -> str:
    found = library.package[path.partition(".")[2]]
    return str(found.final_target.path if found.is_alias else found.path)


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [*words, "docs", str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "spardl.attach" in (tmp_path / "html" / "generated" / "spardl.attach.html").read_text()


# --- docstrings


def test_every_name_has_a_docstring(names: list[Named]) -> None:
    assert not [name.path for name in names if not name.docs.summary]


def test_every_parameter_is_described(names: list[Named]) -> None:
    assert not [f"{name.path}({each.name})" for name in names for each in name.parameters if not _described(name, each)]


def _described(name: Named, parameter: Any) -> str:
    """In a section, or by name in a sentence that does without sections; here, or of what a method stands in for."""
    all_docs = [own_docs(each) for each in (name.target, *bases_of(name.target))]
    sentences = (docs.summary for docs in all_docs if f"``{parameter.name}``" in docs.summary)
    return name.docs.described.get(parameter.name, next(sentences, ""))


def test_no_parameter_is_described_that_is_not_there(names: list[Named]) -> None:
    for name in names:
        if name.target.is_function:
            assert own_docs(name.target).described.keys() <= {each.name for each in name.parameters}, name.path


def test_every_attribute_is_described(names: list[Named]) -> None:
    undescribed = [
        f"{name.path}.{attribute}"
        for name in names
        if name.target.is_class and "Enum" not in map(str, name.target.bases)
        for attribute, member in name.target.members.items()
        if member.is_attribute and not attribute.startswith("_") and not member.docstring
        if attribute not in {*name.docs.described, *(each.name for each in name.parameters)}
    ]
    assert not undescribed


def test_every_result_is_described(names: list[Named]) -> None:
    """Without a section for parameters the sentence itself says what the result is."""
    silent = [
        name.path
        for name in names
        if name.target.is_function and name.returns not in ("None", "Iterator[None]")
        if name.docs.described and not name.docs.returns
    ]
    assert not silent


def test_tensors_have_shapes(library: Library) -> None:
    """Here of all modules, those that only the library itself uses included."""
    said = [each for module in _modules(library.package) for each in _said(_named_in(module))]
    tensors = [(path, text) for path, kind, text in said if "Tensor" in kind]
    assert len(tensors) > 150
    shaped = re.compile(r"\bshapes?\b|\bscalar\b", re.IGNORECASE)
    assert not [path for path, text in tensors if not shaped.search(text)]


def _modules(package: Any) -> Iterator[Any]:
    yield package
    for member in package.members.values():
        if not member.is_alias and member.is_module:
            yield from _modules(member)


def _named_in(module: Any) -> list[Named]:
    """What a module defines; without functions whose parameters the docstring of the module describes."""
    text = module.docstring.value if module.docstring else ""
    members = [each for each in module.members.values() if not each.is_alias and not each.name.startswith("_")]
    found = [each for each in members if each.is_class or each.is_function]
    found += [method for each in found if each.is_class for method in members_of(each)]
    named = [Named(each.path, each, docs_of(each)) for each in found]
    return [each for each in named if not any(f"``{one.name}`` has shape" in text for one in each.parameters)]


def test_numbers_have_units(names: list[Named]) -> None:
    numbers = [(path, text) for path, kind, text in _said(names) if {"int", "float"} & set(kind.split(" | "))]
    assert len(numbers) > 100
    without = [(path, text) for path, text in numbers if not UNIT.search(text)]
    assert {re.split(r"[.(]", path.rstrip(")"))[-1] for path, _ in without} == DIMENSIONLESS, without


def _said(names: list[Named]) -> Iterator[tuple[str, str, str]]:
    """Of everything that has a type: where it is, the type, and what is said of it."""
    for name in names:
        for each in name.parameters:
            yield f"{name.path}({each.name})", str(each.annotation), _described(name, each)
        if name.target.is_class:
            for attribute, text in name.docs.described.items():
                member = name.target.all_members.get(attribute)
                yield f"{name.path}.{attribute}", str(getattr(member, "annotation", None)), text
        else:
            yield name.path, name.returns, f"{name.docs.summary} {name.docs.returns}"


def test_parts_name_their_source(library: Library) -> None:
    parts = [entry for topic in library.topics if topic.title in SOURCED for entry in topic.entries]
    parts = [entry.target for entry in parts if "name" in entry.target.members and entry.target.members["name"].value]
    assert len(parts) > 30
    silent = [part.path for part in parts if not any(SOURCE.search(text) for text in _texts(part))]
    assert not silent


def _texts(part: Any) -> list[str]:
    return [each.docstring.value for each in (part, part.module) if each.docstring]


def test_errors_are_described(names: list[Named]) -> None:
    missing = {}
    for name in names:
        documented = {_base(kind) for kind, _ in name.docs.raises}
        if undescribed := {_base(kind) for kind in _raised(name.target)} - documented:
            missing[name.path] = undescribed
    assert not missing


def _base(kind: str) -> str:
    return {"DataError": "ConfigError", "CheckpointError": "ConfigError"}.get(kind, kind)


def _raised(target: Any) -> set[str]:
    """The errors that a call raises by itself, or in a helper of the same file."""
    if target.is_class:
        made = [target.members[name] for name in ("__init__", "__post_init__") if name in target.members]
        return {kind for each in made for kind in _raised(each)}
    if not target.is_function or not target.lineno:
        return set()
    found: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(target.source))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found.add(node.exc.func.id)
        if isinstance(node, ast.Call):
            found |= _raised_in_helper(target, node.func)
    # ``contact`` turns RuntimeErrors into PeerErrors.
    unseen = {"AssertionError", "NotImplementedError"} | ({"RuntimeError"} if "PeerError" in found else set())
    return found - unseen


def _raised_in_helper(target: Any, called: ast.expr) -> set[str]:
    if isinstance(called, ast.Name):
        place, name = target.module, called.id
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
        place, name = target.parent, called.attr
    else:
        return set()
    helper = place.members.get(name)
    known = helper is not None and not helper.is_alias and helper is not target
    return _raised(helper) if known and helper.is_function else set()


# --- examples


def _examples(cluster: ProcessGroupCluster) -> tuple[list[str], str]:
    """Runs the examples of all docstrings, in the process group of one worker: their names, and what went wrong."""
    names = {"spardl": spardl, "torch": torch, "nn": torch.nn}
    runner, report = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE), io.StringIO()
    ran = []
    for module in [module for name, module in sorted(sys.modules.items()) if name.startswith("spardl.")]:
        for test in doctest.DocTestFinder().find(module, globs=names):
            if test.examples:
                torch.manual_seed(0)
                runner.run(test, out=report.write)
                ran.append(test.name)
    return ran, report.getvalue()


def test_examples_run_and_are_in_the_reference(library: Library) -> None:
    ((ran, report),) = run_workers(1, _examples)
    assert not report, report
    assert {library.by_target[name].path for name in ran} >= EXEMPLIFIED
