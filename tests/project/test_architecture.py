"""The rules of the architecture that a program can check."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spardl", "trainer", "tasks", "scripts")
SOURCES = [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]


MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_CLASS_LINES = 300
MAX_CLASS_METHODS = 25


@pytest.mark.parametrize("path", [*SOURCES, ROOT / "train.py"], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_classes_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name
        elif isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= MAX_CLASS_LINES, node.name
            assert sum(isinstance(item, ast.FunctionDef) for item in node.body) <= MAX_CLASS_METHODS, node.name


# From the lowest to the highest: a package imports only itself and those before it.
PACKAGES = (
    *("basics", "vector", "protocol", "compressors", "communicators", "method", "clusters", "schedules"),
    *("hooks", "diagnostics"),
)


def imports() -> dict[str, set[str]]:
    """What each module of spardl imports of spardl, whenever it does so."""
    places = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "spardl").rglob("*.py")}
    modules = {".".join(place.parts).removesuffix(".__init__"): place for place in places}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, place in modules.items():
        for node in ast.walk(ast.parse((ROOT / place).with_suffix(".py").read_text())):
            if isinstance(node, ast.ImportFrom):
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name] |= {each if each in modules else node.module or "" for each in inside}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
        found[name] &= modules.keys()
    return found


def test_the_library_has_few_packages_each_with_a_docstring() -> None:
    entries = {path.name for path in (ROOT / "spardl").iterdir() if path.name != "__pycache__"}
    assert entries == {*PACKAGES, "__init__.py", "py.typed"}
    assert len(entries) <= 13
    for package in PACKAGES:
        assert ast.get_docstring(ast.parse((ROOT / "spardl" / package / "__init__.py").read_text())), package


def test_a_package_imports_only_lower_ones() -> None:
    for module, known in imports().items():
        for other in known if module != "spardl" else ():
            assert other != "spardl", module
            here, there = (PACKAGES.index(name.split(".")[1]) for name in (module, other))
            assert there <= here, f"{module} imports {other}"


def test_no_circle_of_imports() -> None:
    known, seen = imports(), dict[str, bool]()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if not seen.get(module):
            for other in known[module]:
                visit(other, (*way, module))
            seen[module] = True

    for module in known:
        visit(module, ())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_knowledge_goes_one_way(path: Path) -> None:
    """spardl knows neither tasks nor conf, and communicators know no cluster."""
    imported = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    place = path.relative_to(ROOT).parts
    if place[0] == "spardl":
        assert not any(name.split(".")[0] in ("tasks", "trainer", "hydra", "omegaconf", "train") for name in imported)
    if place[:2] in (("spardl", "communicators"), ("spardl", "compressors")):
        assert not any("clusters" in name or "distributed" in name or name == "time" for name in imported)


@pytest.mark.parametrize("group", ["compressor", "communicator", "schedule"])
def test_one_algorithm_is_one_file_one_test_one_yaml(group: str) -> None:
    package = ROOT / "spardl" / f"{group}s"
    for path in package.glob("*.py"):
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        named = [
            item.value.value
            for node in classes
            for item in node.body
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) and item.targets[0].id == "name"
            if isinstance(item.value, ast.Constant)
        ]
        # Schedules that share most of their code share a module.
        assert group == "schedule" or named in ([], [path.stem])
        for name in named:
            assert (ROOT / "conf" / group / f"{name}.yaml").exists()
            assert (ROOT / "tests" / f"{group}s" / f"test_{name}.py").exists()


def test_every_yaml_says_what_it_is_for() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        if path.parent.name in ("compressor", "communicator", "residual", "schedule", "cluster", "experiment"):
            assert any(line.startswith("# ") and "@package" not in line for line in path.read_text().splitlines()), path
        OmegaConf.load(path)


@pytest.mark.parametrize(
    "path",
    [path for folder in ("scripts", "tests") for path in sorted((ROOT / folder).rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_scripts_are_imported_by_their_whole_names(path: Path) -> None:
    """An editable install, or PYTHONPATH, finds them; no file puts folders on Python's path by itself."""
    own = {each.stem for each in (ROOT / "scripts").iterdir()} - {"__init__", "docs"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not own & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert (node.module or "").split(".")[0] not in own
        elif isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "sys.path"


FRONT = {"conf", "docs", "examples", "scripts", "slurm", "spardl", "tasks", "tests", "trainer", ".ci"}


def test_no_run_s_folder_was_committed() -> None:
    command = ["git", "ls-files", "--", "*/*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        pytest.skip("needs a git checkout")
    assert {line.partition("/")[0] for line in done.stdout.splitlines()} <= FRONT
