"""The list of published trainings that no size of the report runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import reproduce
from scripts.exhibits import catalogue as published
from scripts.exhibits.base import Results
from scripts.exhibits.catalogue import catalogue
from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile

pytestmark = pytest.mark.usefixtures("composing")


def test_the_time_of_a_training_by_hand() -> None:
    row, seconds = published.published()[0].row(catalogue()["spardl.convergence"])
    profile = Profile.read(published.PROFILES / "vgg16.json")
    steps = 121 * (50000 // (14 * 16))
    one = steps * 14 * (16 * (profile.forward + profile.backward) / 16 + 14_728_266 * profile.update)
    assert row.name == "SparDL: VGG-16 on CIFAR-10"
    assert row.cells[1].text == f"{steps:,} steps of 14 workers with 16 examples each"
    assert row.cells[3].value == pytest.approx(one / 3600)
    assert len(row.jobs) == row.cells[4].value == 18  # six methods, three seeds
    assert seconds == pytest.approx(18 * one)


def test_steps_of_the_preset_and_longer_examples() -> None:
    bert = next(each for each in published.published() if each.preset == "oktopk/bert")
    row, _ = bert.row(catalogue()["oktopk.convergence"])
    profile = Profile.read(published.PROFILES / "bert_base.json")
    assert row.cells[1].text.startswith("1,024 steps of 32 workers with 8 examples")
    work = 8 * 2 * profile.compute / profile.batch + sum(profile.entries) * profile.update
    assert row.cells[3].value == pytest.approx(1024 * 32 * work / 3600)


def test_the_list_is_once_on_the_page(tmp_path: Path) -> None:
    table = published.published_table(catalogue())
    assert table is not None
    assert published.published_table({}) is None
    text = reproduce.report([], "smoke", Results(tmp_path, {}), tmp_path, unrun=[table]).read_text()
    for name in ("VGG-16", "VGG-19", "ResNet-50", "BERT", "ResNet-18", "LSTM", "DeAR: DenseNet-201"):
        assert name in text
    assert text.count('id="unrun-1"') == 1
    assert len({each.task for each in published.published()}) == len(published.published())


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
    monkeypatch.setattr(published, "PUBLISHED", tmp_path / "published.yaml")
    with pytest.raises(ConfigError, match=words):
        published.published_table(catalogue())
