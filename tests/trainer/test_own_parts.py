"""A user's own parts, from a folder outside the clone: ``plugins=[PACKAGE]`` and ``--config-dir DIR``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.project.test_docs import blocks
from tests.support.driver import ROOT, STARTED_BY, composed, here, only_run, results, summary
from tests.trainer.test_bad_input import one_line
from trainer.experiment import experiment_id

EXAMPLES = ROOT / "examples" / "own_model"
SMALL = ("cluster=simulated", "cluster.workers=2", "training.batch_size=4", "training.max_steps=2", "logger=none")
QUICK = ("training.eval_examples=16", *SMALL)


def train(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs train.py from another folder, whose modules can be imported."""
    environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY}
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def make_pictures(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
            (folder / split / name).mkdir(parents=True)
            for number in range(8):
                image.new("RGB", (40 + number, 36), colour).save(folder / split / name / f"{number}.png")


def make_texts(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "test"):
        lines = [f"{'good fine' if number % 2 else 'bad poor'} film {number},{number % 2}" for number in range(16)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n")


def make_weights(folder: Path) -> None:
    """The texts, and a folder ``bert`` like those that ``hf download`` writes."""
    transformers = pytest.importorskip("transformers")
    make_texts(folder)
    vocabulary = folder.parent / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "fine", "bad", "film"]))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 8)
    config = transformers.BertConfig(vocab_size=9, num_hidden_layers=1, num_attention_heads=2, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(folder.parent / "bert")
    transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder.parent / "bert")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"), [("pictures", make_pictures), ("texts", make_texts), ("pretrained", make_weights)]
)
def test_an_example_trains_from_another_folder(name: str, make, tmp_path: Path) -> None:
    pytest.importorskip("torchvision" if name == "pictures" else "transformers")
    mine = tmp_path / "mine"
    shutil.copytree(EXAMPLES, mine)
    make(mine / ("PICTURES" if name == "pictures" else "TEXTS"))
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 40
    (typed,) = (shlex.split(line) for line in lines if line.startswith("PYTHONPATH=. python "))
    done = train(*typed[3:], *SMALL, folder=mine)
    assert (done.returncode, done.stderr) == (0, "")
    run = only_run(mine / "outputs")
    assert summary(run)["steps"] == 2
    if name == "pretrained":  # two small steps from the weights that it was given
        name_of = "bert.embeddings.word_embeddings.weight"
        saved = torch.load(run / "checkpoints" / "step-00000002" / "shared.pt")["model"][f"net.{name_of}"]
        given = pytest.importorskip("safetensors.torch").load_file(mine / "bert" / "model.safetensors")[name_of]
        torch.testing.assert_close(saved, given, atol=3e-4, rtol=0)
    # The recorded command finds the folder again.
    shutil.move(mine / "outputs", tmp_path / "first")
    recorded = shlex.split((only_run(tmp_path / "first") / "command.txt").read_text())
    assert recorded[:3] == ["python", "train.py", "--config-dir"]
    again = train(*recorded[2:], folder=mine)
    assert (again.returncode, again.stderr) == (0, "")
    assert results(only_run(mine / "outputs")) == results(only_run(tmp_path / "first"))


def write_model(folder: Path) -> Path:
    """A model that notes when it is imported."""
    (folder / "mymodel.py").write_text(
        f"open({str(folder / 'imported')!r}, 'w').close()\n"
        "from tasks.models.resnet_cifar import CifarResNet\n"
        "class MyMLP(CifarResNet): pass\n"
    )
    return folder / "imported"


def refused(folder: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert here(*QUICK, f"output_dir={folder / 'out'}", *words) == 2
    assert not list((folder / "out").glob("[!.]*"))
    return one_line(capfd.readouterr().err)


def test_a_model_is_allowed_by_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    imported = write_model(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = "it must be from tasks; add plugins=[mymodel] to allow its package"
    line = refused(tmp_path, capfd, "model._target_=mymodel.MyMLP")
    assert line == f"error: model._target_=mymodel.MyMLP cannot be used: {reason}\n"
    assert not imported.exists()
    words = ("plugins=[mymodel]", "model._target_=mymodel.MyMLP", *QUICK, f"output_dir={tmp_path / 'out'}")
    assert here(*words) == 0
    assert imported.exists()
    assert yaml.safe_load((only_run(tmp_path / "out") / "config.yaml").read_text())["plugins"] == ["mymodel"]


def test_a_package_does_not_allow_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "myparts.py").write_text("import os\nfrom spardl.compressors import TopK\n")
    (tmp_path / "mybroken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = refused(tmp_path, capfd, "plugins=[myparts]", "model._target_=myparts.os.system")
    assert "it is not a subclass of Module, or a function that returns one, from tasks or myparts" in line
    line = refused(tmp_path, capfd, "plugins=[myparts]", "compressor._target_=myparts.Absent")
    assert "module 'myparts' has no attribute 'Absent'" in line
    line = refused(tmp_path, capfd, "plugins=[mybroken]", "model._target_=mybroken.Net")
    assert "its import failed with ZeroDivisionError: division by zero" in line


def test_plugins_do_not_change_a_run_s_id() -> None:
    plain = composed()
    assert plain["plugins"] == []
    without = {key: value for key, value in plain.items() if key != "plugins"}
    ids = {experiment_id(config, 4) for config in (plain, without, composed("plugins=[mymodel]"))}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("experiment/theirs.yaml", "# @package _global_\nplugins: [mymodel]\nmodel: {_target_: mymodel.MyMLP}\n"),
        ("experiment/theirs.yaml", "# @package _global_\nhydra: {callbacks: {x: {_target_: mymodel.MyMLP}}}\n"),
        ("experiment/theirs.yaml", "# @package hydra.callbacks\nx: {_target_: mymodel.MyMLP}\n"),
        ("experiment/theirs.yaml", "defaults: [/other@hydra.callbacks.x: evil]\n"),
        ("experiment/theirs.yaml", "# @package _global_\ndefaults: [override /hydra/job_logging: evil]\n"),
        ("hydra/callbacks/theirs.yaml", "x: {_target_: mymodel.MyMLP}\n"),
    ],
)
@pytest.mark.parametrize("option", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_a_file_can_neither_allow_plugins_nor_set_hydra(
    name: str, text: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    imported = write_model(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "conf" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    chosen = "+hydra/callbacks=theirs" if name.startswith("hydra") else "experiment=theirs"
    line = refused(tmp_path, capfd, chosen, option.format(tmp_path / "conf"))
    if "plugins" in text:
        assert "a configuration file cannot allow plugins; type plugins=[mymodel] if you trust that code" in line
    else:
        assert f"{path} cannot be used: it changes settings of Hydra itself" in line
    assert not imported.exists()


def test_a_config_dir_adds_groups_and_must_exist(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    option = f"--config-dir={tmp_path / 'conf'}"
    assert here("experiment=mine", *QUICK, f"output_dir={tmp_path / 'out'}", option) == 0
    assert yaml.safe_load((only_run(tmp_path / "out") / "config.yaml").read_text())["seed"] == 7
    capfd.readouterr()
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\ntraining: {max_step: 5}\n")
    line = refused(tmp_path / "two", capfd, "experiment=mine", option)
    assert "training.max_step=5 is not a setting of this program; did you mean training.max_steps?" in line
    line = refused(tmp_path / "two", capfd, f"--config-dir={tmp_path / 'nowhere'}")
    assert f"Additional config directory '{tmp_path / 'nowhere'}' not found" in line


def test_own_compressors_and_schedules_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ownparts.py").write_text(
        "from dataclasses import dataclass\n"
        "import trainer\n"
        "from spardl.compressors import TopK\n"
        "from spardl.schedules import Wfbp\n"
        "@dataclass(frozen=True)\n"
        "class MyTopK(TopK): pass\n"
        "class MyWfbp(Wfbp): pass\n"
        "class MyRate(trainer.Constant): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = (
        "compressor=topk",
        "compressor._target_=ownparts.MyTopK",
        "schedule=wfbp",
        "schedule._target_=ownparts.MyWfbp",
    )
    words += ("lr_schedule=constant", "lr_schedule._target_=ownparts.MyRate", "plugins=[ownparts]")
    assert here(*words, *QUICK, f"output_dir={tmp_path / 'out'}") == 0
    found = summary(only_run(tmp_path / "out"))
    assert found["status"] == "finished"
    assert torch.tensor(found["final"]["loss"]).isfinite()


def test_own_tasks_loggers_and_communicators_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task has its own loss and metric, and the logger gets both."""
    (tmp_path / "ownmore.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from spardl.communicators import AllGather\n"
        "from tasks.image_classification import ImageClassification\n"
        "from trainer.observers import Logger, Observer\n"
        "class Margin(ImageClassification):\n"
        "    metric, higher_is_better, sums = 'error_rate', False, ('wrong', 'count')\n"
        "    def loss(self, model, batch):\n"
        "        return torch.nn.functional.multi_margin_loss(model(batch['images']), batch['labels'])\n"
        "    def measure(self, model, batch):\n"
        "        wrong = model(batch['images']).argmax(1) != batch['labels']\n"
        "        return torch.stack([wrong.sum(), torch.tensor(len(wrong))]).double()\n"
        "    def summarize(self, sums):\n"
        "        return {'loss': 0.5, 'error_rate': sums['wrong'] / sums['count']}\n"
        "class Lines(Logger):\n"
        "    def open(self, run, config): return _Lines(run.folder / 'lines.txt')\n"
        "class _Lines(Observer):\n"
        "    def __init__(self, path): self.path = path\n"
        "    def metrics(self, kind, step, values):\n"
        "        with self.path.open('a') as file: print(kind, step, *values, file=file)\n"
        "@dataclass(frozen=True)\n"
        "class MyGather(AllGather): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "conf" / "logger").mkdir(parents=True)
    (tmp_path / "conf" / "logger" / "lines.yaml").write_text("_target_: ownmore.Lines\n")
    words = ("compressor=topka", "task._target_=ownmore.Margin", "communicator._target_=ownmore.MyGather")
    words += ("plugins=[ownmore]", *QUICK, "logger=lines", f"output_dir={tmp_path / 'out'}")
    assert here(*words, f"--config-dir={tmp_path / 'conf'}") == 0
    run = only_run(tmp_path / "out")
    found = summary(run)
    assert found["metric"] == "error_rate"
    assert 0 <= found["final"]["error_rate"] <= 1
    kinds = [line.split() for line in (run / "lines.txt").read_text().splitlines()]
    assert [line[:2] for line in kinds] == [["train", "1"], ["train", "2"], ["eval", "2"]]
    assert "error_rate" in kinds[-1]


def test_a_model_may_read_values_while_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as pretrained weights, which the meta device does not have."""
    (tmp_path / "ownvalues.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, num_classes, in_channels, image_size, rates=3):\n"
        "        drops = [torch.nn.Dropout(rate) for rate in torch.linspace(0, 0.1, rates).tolist()]\n"
        "        super().__init__(torch.nn.Flatten(), *drops, torch.nn.Linear(64, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("plugins=[ownvalues]", "model._target_=ownvalues.Net", "~model.depth")
    assert here(*words, *QUICK, f"output_dir={tmp_path / 'out'}") == 0
    assert summary(only_run(tmp_path / "out"))["status"] == "finished"
    capfd.readouterr()
    line = refused(tmp_path / "bad", capfd, *words, "+model.rates=-1")
    assert line.startswith("error: model cannot be created: RuntimeError: number of steps must be non-negative")


def test_the_parts_of_the_tutorial_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "configuration.md"
    dataset, model = (text for text in blocks(page, "yaml") if "_target_: mine." in text)
    (code,) = (text for text in blocks(page, "python") if "ImageDataset" in text)
    (typed,) = (shlex.split(text) for text in blocks(page, "text") if "--config-dir" in text)
    for name, text in {"mine.py": code, "conf/dataset/mine.yaml": dataset, "conf/model/mine.yaml": model}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    option, folder, *words = typed[3:]
    short = ("cluster=simulated", "cluster.workers=2", "training.max_steps=40")
    assert here(*words, *short, f"output_dir={tmp_path / 'out'}", f"{option}={tmp_path / folder}") == 0
    run = only_run(tmp_path / "out")
    assert run.name.startswith("spardl-mine-mine-")
    assert summary(run)["final"]["accuracy"] > 0.65
    capsys.readouterr()
    assert here("--list", "datasets", f"--config-dir={tmp_path / folder}") == 0
    assert "Random numbers; the class is the sign of their mean." in capsys.readouterr().out
