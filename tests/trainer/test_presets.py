"""Every experiment of the papers: it composes, has the published size, runs, and continues bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.driver import composed, here, only_run, results, summary
from tests.support.quick import some_quick
from trainer.build import CONFIGURATIONS, build_dataset, build_plan

FOLDER = CONFIGURATIONS / "experiment"
PRESETS = sorted(f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.yaml") if path.parent.name != "base")
PUBLISHED = {
    "spardl/vgg16_cifar10": 14_728_266,
    "spardl/vgg19_cifar100": 20_086_692,
    "spardl/resnet50_imagenet": 25_557_032,
    "spardl/lstm_imdb": 2_561_052,
    "spardl/lstm_ptb": 66_034_000,
    "spardl/bert_wikipedia": 133_547_324,
    "oktopk/vgg16_cifar10": 14_728_266,
    "oktopk/lstm_an4": 27_569_568,
    "oktopk/bert": 133_547_324,
    "dear/resnet50": 25_557_032,
    "dear/densenet201": 20_013_928,
    "dear/inception_v4": 42_679_816,
    "dear/bert_base": 110_111_042,
    "dear/bert_large": 336_232_258,
}
# Folders of SPARDL_DATA that the real data of a preset need. Other presets need none, or their data are not available.
FOLDERS = {
    "spardl/vgg16_cifar10": ("cifar-10-batches-py",),
    "spardl/vgg11_house": ("houses-64",),
    "spardl/lstm_imdb": ("aclImdb",),
    "spardl/lstm_ptb": ("ptb",),
    "oktopk/vgg16_cifar10": ("cifar-10-batches-py",),
    "oktopk/lstm_an4": ("an4",),
    "study/resnet_cifar10": ("cifar-10-batches-py",),
    "study/lstm_lm": ("wikitext-2",),
    "sketch_fusion/resnet20_cifar10": ("cifar-10-batches-py",),
    "sketch_fusion/vgg16_cifar10": ("cifar-10-batches-py",),
}
# Wikipedia itself is not available; some of its articles are.
ARTICLES = ("dataset=wikitext2_articles",)
INSTEAD = {"spardl/bert_wikipedia": ARTICLES, "oktopk/bert": ARTICLES}
FOLDERS |= dict.fromkeys(INSTEAD, ("wikitext-2", "bert-base-uncased"))

# The time of these networks is that of their pictures: the sizes of their layers do not depend on the pictures.
SMALLER = {"dear/inception_v4": "dataset.image_size=128", "dear/densenet201": "dataset.image_size=64"}
# These differ from another preset only in the number of layers or classes, so only the other one is resumed.
TWINS = {
    "dear/bert_large": "dear/bert_base",
    "spardl/vgg19_cifar100": "spardl/vgg16_cifar10",
    "sketch_fusion/vgg19_cifar100": "sketch_fusion/vgg16_cifar10",
    "sketch_fusion/resnet110_cifar100": "sketch_fusion/resnet20_cifar10",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARDL_CACHE", str(tmp_path / "cache"))


def test_every_paper_has_its_presets() -> None:
    papers = {preset.split("/")[0] for preset in PRESETS}
    assert papers == {"spardl", "oktopk", "dear", "study", "sketch_fusion"}
    assert set(PUBLISHED) | set(FOLDERS) | set(TWINS) | set(TWINS.values()) <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_says_what_it_is_and_what_is_uncertain(preset: str) -> None:
    text = (FOLDER / f"{preset}.yaml").read_text()
    bases = re.findall(r"/experiment/(base/\w+)", text)
    sources = text + "".join((FOLDER / f"{base}.yaml").read_text() for base in bases)
    assert "judged by" in text
    words = " ".join(sources.replace("#", " ").split())
    assert "Uncertain" in words or "released code" in words


@pytest.mark.parametrize("preset", some_quick(PRESETS, 4))
def test_the_model_has_the_published_size(preset: str) -> None:
    """On stand-in data, which have the shapes of the real ones."""
    plain = composed(f"experiment={preset}", "scale.stand_in=true")
    plan = build_plan(plain, build_dataset(plain))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in plan.task.build_model().parameters())
    assert size == PUBLISHED.get(preset, size)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_runs_on_stand_in_data_and_continues(
    preset: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a checkpoint in the middle of an epoch, with what a killed run leaves; twins only run."""
    outputs = tmp_path / "out"
    words = (f"experiment={preset}", "scale=smoke", "training.checkpoint_every=2", "data_dir=/nowhere")
    if preset in SMALLER:
        words += (SMALLER[preset],)
    assert here(*words, f"output_dir={outputs}") == 0
    check_run(outputs)
    run = only_run(outputs)
    undisturbed, expected = summary(run), results(run)
    (caveat,) = undisturbed["caveats"]
    out, err = capfd.readouterr()
    assert f"warning: {caveat}\n" in err
    assert f"beware: {caveat}\n" in out

    if preset in TWINS:
        return
    assert undisturbed["epochs"] % 1
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    (run / "summary.json").write_text(json.dumps({"id": undisturbed["id"], "status": "running"}))
    assert here(*words, f"output_dir={outputs}", "resume=auto") == 0
    assert "training: step 2 of 3" in capfd.readouterr().out
    assert results(only_run(outputs)) == expected


@pytest.mark.data
@pytest.mark.parametrize("preset", sorted(FOLDERS))
def test_a_preset_runs_on_real_data(preset: str, tmp_path: Path) -> None:
    root = Path(os.environ.get("SPARDL_DATA", "nowhere"))
    missing = [name for name in FOLDERS[preset] if not (root / name).is_dir()]
    if missing:
        pytest.skip(f"set SPARDL_DATA to a folder that holds {', '.join(missing)}")
    words = (*INSTEAD.get(preset, ()), "scale=smoke", "scale.stand_in=false", f"data_dir={root}")
    assert here(f"experiment={preset}", *words, f"output_dir={tmp_path / 'out'}") == 0
    check_run(tmp_path / "out")
    caveats = summary(only_run(tmp_path / "out"))["caveats"]
    assert all("shrunk" in caveat for caveat in caveats)  # the copies of the Houses pictures


def check_run(outputs: Path) -> None:
    found = summary(only_run(outputs))
    assert found["status"] == "finished"
    assert found["steps"] == 3
    assert found["metric"] in found["final"]
    assert all(value == value for value in found["final"].values())  # noqa: PLR0124 - NaN
