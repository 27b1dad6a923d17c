"""Values read from YAML: the notation, errors that name file, line and exhibit, and the list of published trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts import reproduce
from scripts.exhibits import catalogue, declared
from scripts.exhibits.base import Results
from scripts.exhibits.claims import catalogue as claims_catalogue
from scripts.exhibits.kinds import trainings
from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile

PAPER = """\
paper: A paper
definitions:
  task: {name: Digits, words: model=resnet8 $short, what: digits, known: {value: 0.9, source: a book}}
  short: training.max_steps=2
  sparse: {SparDL: compressor=spardl}
exhibits:
  x.one:
    kind: trainings
    title: One
    source: nowhere
    shows: nothing
    methods: [$sparse, {dense: compressor=none}]
    plans:
      smoke & laptop & paper: {cases: [$task], words: cluster.workers=2, seeds: [1], cost: seconds}
"""


def load(folder: Path, text: str = PAPER, shared: str = "") -> catalogue.Paper:
    (folder / "paper.yaml").write_text(text)
    (folder / "shared.yaml").write_text(shared)
    found = declared.entries(declared.parse(folder / "shared.yaml"), "shared") if shared else {}
    return catalogue.load(folder / "paper.yaml", found)


def test_an_exhibit_is_read_from_its_file(tmp_path: Path) -> None:
    paper = load(tmp_path)
    exhibit: Any = paper.exhibits[0]
    case = trainings.Case("Digits", ("model=resnet8", "training.max_steps=2"), "digits")
    plan = trainings.Plan((case,), ("cluster.workers=2",), (1,), "seconds")
    assert (paper.title, exhibit.name, exhibit.title) == ("A paper", "x.one", "One")
    assert exhibit.methods == {"SparDL": ("compressor=spardl",), "dense": trainings.DENSE}
    assert list(exhibit.methods) == ["SparDL", "dense"]
    (read,) = exhibit.plans["laptop"].cases
    assert read.known == trainings.Known(0.9, "a book")
    assert exhibit.plans["smoke"] == exhibit.plans["laptop"]
    assert replace(exhibit.plans["smoke"], cases=(replace(read, known=None),)) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: One", "titel: One", "paper.yaml:9: x.one: unknown key 'titel'; did you mean title?"),
        ("    title: One\n", "", "paper.yaml:8: x.one: 'title' is missing"),
        ("title: One", "title: 1", "paper.yaml:9: x.one, title: expected text, got '1'; put it in quotes"),
        ("kind: trainings", "kind: training", "x.one, kind: 'training' does not exist; did you mean trainings?"),
        ("    kind: trainings\n", "", "paper.yaml:8: x.one: 'kind' is missing; choose from trainings, "),
        ("seeds: [1]", "seeds: [one]", "x.one, plans, smoke, seeds: expected an integer, got 'one'"),
        ("seeds: [1]", "seeds: 1", "x.one, plans, smoke, seeds: expected a list, got '1'"),
        ("cases: [$task]", "cases: [$tasks]", "cases: $tasks is not defined; did you mean task?"),
        ("words: cluster.workers=2", "words: $shor a=1", "x.one, plans, smoke, words: $shor is not defined; did you"),
        ("value: 0.9", "value: high", "paper.yaml:3: x.one, plans, smoke, cases, known, value: expected a number, got"),
        ("    shows: nothing", "    shows: nothing\n    title: Two", "paper.yaml:12: x.one: 'title' is given twice"),
        ("    shows: nothing", "    leads: 1\n    shows: x", "x.one, leads: expected true or false, got '1'"),
        ("    shows: nothing", "    shows: nothing: at all", "paper.yaml:11: not valid YAML: mapping values are not"),
        ("smoke & ", "", "paper.yaml:14: x.one, plans: 'smoke' is missing"),
        ("kind: trainings", "kind: [trainings]", "x.one, kind: expected a name, got a list; choose from trainings, "),
        ("short: training", "short: $short training", "paper.yaml:4: short: refers to itself: short -> short; break"),
        ("value: 0.9", "value: !high 1", "known, value: expected a value, got '1'"),
        ("words: cluster.workers=2", "words: '\"a b'", "'\"a b' cannot be split into words: No closing quotation"),
        ("words: cluster.workers=2", "words: null", "plans, smoke, words: expected text, got 'null'; remove the key"),
        ("title: One", "? [title]\n    : One", "paper.yaml:9: x.one: expected a name as key, got a list"),
        ("title: One", "title: \a", "paper.yaml: not valid YAML: unacceptable character #x0007"),
    ],
)
def test_errors_name_the_line_and_the_way_out(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PAPER
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, PAPER.replace(old, new, 1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^paper.yaml is empty; restore it$"):
        load(tmp_path, "# Nothing yet.\n")


def test_an_exhibit_of_two_papers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(PAPER)
    (tmp_path / "shared.yaml").write_text("{}")
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    monkeypatch.setattr(catalogue, "FILES", ("one", "two"))
    with pytest.raises(ConfigError, match=r"^one.yaml and two.yaml both have an exhibit 'x.one'; rename one$"):
        catalogue.load_all.__wrapped__()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x.one", "x.on", "claims.yaml:3: X: small: exhibit 'x.on' does not exist; did you mean x.one?"),
        ("{method: a, baseline: b}", "{method: a}", "arguments do not fit to find: missing a required argument: 'ba"),
        ("kind: at_most", "kind: at_mots", "X: small, rule, kind: 'at_mots' does not exist; did you mean at_most?"),
        ("{kind: at_most, published: 5}", "at_most", "X: small, rule: expected keys and values with 'kind', got 'at_m"),
        ("[lab]", "[[lab]]", "X: small, limits: expected a name, got a list; choose from stand_ins, "),
        ("states:", "sates:", "claims.yaml:3: X: small: unknown key 'sates'; did you mean states?"),
    ],
)
def test_errors_in_claims(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = """\
claims:
  'X: small':
    states: It is small.
    published: ['5', low]
    exhibit: x.one
    also: [x.two]
    find: figures.metrics
    arguments: {method: a, baseline: b}
    rule: {kind: at_most, published: 5}
    measure: halves
    limits: [lab]
"""
    path, names = tmp_path / "claims.yaml", ("x.one", "x.two")
    path.write_text(text)
    assert [claim.name for claim in claims_catalogue.load(path, names)] == ["X: small"]
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        claims_catalogue.load(path, names)
    assert message in str(caught.value)


def test_errors_in_shared_definitions_name_their_file(tmp_path: Path) -> None:
    text = PAPER.replace("cases: [$task]", "cases: [$other]")
    with pytest.raises(ConfigError, match=r"^shared.yaml:2: x.one, .*unknown key 'wrods'; did you mean words\?$"):
        load(tmp_path, text, "# Tasks.\nother: {name: Digits, wrods: a=1, what: digits}\n")


class Point(NamedTuple):
    x: float
    name: str = ""


@dataclass(frozen=True)
class Base:
    points: tuple[Point, ...]
    pairs: tuple[tuple[str, int], ...] = ()
    limit: int | None = None
    function: Any = None


def read(folder: Path, text: str, kind: Any = Base, definitions: str = "{}") -> Any:
    for name, content in (("value", text), ("definitions", definitions)):
        (folder / f"{name}.yaml").write_text(content)
    found = declared.entries(declared.parse(folder / "definitions.yaml"), "definitions")
    reader = declared.Reader(found, {}, "scripts.exhibits.kinds")
    return reader.read(kind, declared.parse(folder / "value.yaml"), "value")


def test_short_forms_of_named_tuples(tmp_path: Path) -> None:
    one, two = Point(0.001), Point(2.0, "two")
    assert read(tmp_path, "points: [1e-3, [2, two], {x: 2, name: two}]").points == (one, two, two)
    with pytest.raises(ConfigError, match=r"value.yaml:1: value, points: expected x, name, got a list$"):
        read(tmp_path, "points: [[1, two, three]]")


def test_definitions_are_spliced_and_extended(tmp_path: Path) -> None:
    definitions = "some: [[1, a], [2, b]]\nbase: {points: $some, limit: 3, pairs: {a: 1}}"
    assert read(tmp_path, "points: [0, $some]", definitions=definitions).points == (
        Point(0.0),
        Point(1, "a"),
        Point(2, "b"),
    )
    found = read(tmp_path, "{from: $base, limit: null, pairs: {b: 2, a: 1}}", definitions=definitions)
    assert found == Base((Point(1, "a"), Point(2, "b")), (("b", 2), ("a", 1)))


def test_plain_values_are_hashable(tmp_path: Path) -> None:
    found = read(tmp_path, "[1, 0.5, a b, !words '--x $y', [true, null]]", Any, "y: 'one two'")
    assert found == (1, 0.5, "a b", ("--x", "one", "two"), (True, None))
    with pytest.raises(ConfigError, match="expected a value or a list, got a mapping"):
        read(tmp_path, "{a: 1}", Any)


def test_functions_are_named_by_module(tmp_path: Path) -> None:
    kind = Callable[..., Any]
    assert read(tmp_path, "lab.schedules", kind).__name__ == "schedules"
    with pytest.raises(ConfigError, match=r"lab has no function 'schedule'; did you mean schedules\?"):
        read(tmp_path, "lab.schedule", kind)
    for wrong in ("nowhere.x", "schedules"):
        with pytest.raises(ConfigError, match=f"expected module.function, got '{wrong}'"):
            read(tmp_path, wrong, kind)


def test_every_file_has_a_title_and_exhibits_of_its_own() -> None:
    names = [exhibit.name for paper in catalogue.load_all() for exhibit in paper.exhibits]
    assert len(names) == len(set(names))
    assert {path.stem for path in catalogue.FOLDER.glob("*.yaml")} == {*catalogue.FILES, catalogue.SHARED}


@pytest.mark.usefixtures("composing")
def test_the_time_of_a_training_by_hand() -> None:
    row, seconds = catalogue.published()[0].row(catalogue.catalogue()["spardl.convergence"])
    profile = Profile.read(catalogue.PROFILES / "vgg16.json")
    steps = 121 * (50000 // (14 * 16))
    one = steps * 14 * (16 * (profile.forward + profile.backward) / 16 + 14_728_266 * profile.update)
    assert row.name == "SparDL: VGG-16 on CIFAR-10"
    assert row.cells[1].text == f"{steps:,} steps of 14 workers with 16 examples each"
    assert row.cells[3].value == pytest.approx(one / 3600)
    assert len(row.jobs) == row.cells[4].value == 18  # six methods, three seeds
    assert seconds == pytest.approx(18 * one)


@pytest.mark.usefixtures("composing")
def test_steps_of_the_preset_and_longer_examples() -> None:
    bert = next(each for each in catalogue.published() if each.preset == "oktopk/bert")
    row, _ = bert.row(catalogue.catalogue()["oktopk.convergence"])
    profile = Profile.read(catalogue.PROFILES / "bert_base.json")
    assert row.cells[1].text.startswith("1,024 steps of 32 workers with 8 examples")
    work = 8 * 2 * profile.compute / profile.batch + sum(profile.entries) * profile.update
    assert row.cells[3].value == pytest.approx(1024 * 32 * work / 3600)


@pytest.mark.usefixtures("composing")
def test_the_list_is_once_on_the_page(tmp_path: Path) -> None:
    table = catalogue.published_table(catalogue.catalogue())
    assert table is not None
    assert catalogue.published_table({}) is None
    text = reproduce.report([], "smoke", Results(tmp_path, {}), tmp_path, unrun=[table]).read_text()
    for name in ("VGG-16", "VGG-19", "ResNet-50", "BERT", "ResNet-18", "LSTM", "DeAR: DenseNet-201"):
        assert name in text
    assert text.count('id="unrun-1"') == 1
    assert len({each.task for each in catalogue.published()}) == len(catalogue.published())


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {task: a, exhibit: no.such, preset: spardl/vgg16_cifar10, profile: vgg16}", "'no.such' does not exist"),
        ("- {task: a, exhibit: dear.speed, preset: spardl/vgg16_cifar10, profile: vgg16}", "state `examples`"),
        ("- {task: a, exhibit: dear.speed, profile: vgg16}", "published.yaml:1"),
    ],
)
def test_a_wrong_row_is_an_error(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "published.yaml").write_text(text)
    monkeypatch.setattr(catalogue, "PUBLISHED", tmp_path / "published.yaml")
    with pytest.raises(ConfigError, match=words):
        catalogue.published_table(catalogue.catalogue())
