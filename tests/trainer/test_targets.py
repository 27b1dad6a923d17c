"""Editions, recipes and targets of configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hydra.utils import get_class

from tests.golden.test_golden import TINY
from tests.support.driver import composed, here, only_run
from trainer.build import CONFIGURATIONS, build_method
from trainer.experiment import experiment_id
from trainer.targets import editions, hashed_targets, importable, public_targets, resolve_recipe, resolve_scope

TARGET = re.compile(r"_target_: ((?:spardl|trainer)\.\S+)")
# Not exported until its trainings are recorded; see "Publishing a part" in docs/extending.md.
UNPUBLISHED = {"spardl.compressors.compute_visible.ComputeVisible"}
NAMED = sorted({name for path in CONFIGURATIONS.rglob("*.yaml") for name in TARGET.findall(path.read_text())})


@pytest.mark.parametrize("name", NAMED)
def test_a_configuration_names_what_is_public(name: str) -> None:
    assert name in UNPUBLISHED or re.fullmatch(r"(spardl|trainer)\.[A-Z]\w+", name)
    path = importable({"_target_": name})["_target_"]
    assert get_class(path).__name__ == name.rpartition(".")[2]


def test_ids_use_the_module_paths_of_version_0_1() -> None:
    plain = composed("compressor=spardl", "schedule=wfbp", "cluster=simulated")
    old = hashed_targets(plain)
    assert old["compressor"]["_target_"] == "spardl.compressors.topk.TopK"
    assert old["warmup"]["communicator"]["_target_"] == "spardl.communicators.dense.Dense"
    assert old["cluster"]["_target_"] == "spardl.training.launch.Simulated"
    assert old["optimizer"] == plain["optimizer"]
    assert experiment_id(old, 4) == experiment_id(plain, 4)


def test_module_paths_of_version_0_1_are_accepted() -> None:
    plain = composed("compressor=oktopk")
    assert public_targets(hashed_targets(plain)) == plain
    assert {part: type(each) for part, each in vars(build_method(public_targets(hashed_targets(plain)))).items()} == {
        part: type(each) for part, each in vars(build_method(plain)).items()
    }


def test_the_trainers_former_names_are_understood() -> None:
    plain = composed("cluster=simulated", "lr_schedule=cosine")
    former = json.loads(json.dumps(plain).replace("trainer.", "spardl.training."))
    assert former["lr_schedule"]["_target_"] == "spardl.training.Cosine"
    assert public_targets(former) == plain
    assert experiment_id(former, 4) == experiment_id(plain, 4)


def test_a_new_name_stands_for_itself() -> None:
    assert hashed_targets({"a": [{"_target_": "spardl.New"}]}) == {"a": [{"_target_": "spardl.New"}]}


def test_editions_of_changed_parts() -> None:
    assert editions(composed("schedule=wfbp")) == {}
    assert editions(composed("schedule=mg_wfbp")) == {"spardl.MgWfbp": 2}
    assert editions({"parts": [{"_target_": "spardl.schedules.layer_fusion.LayerFusion"}]}) == {"spardl.LayerFusion": 2}


def test_a_run_says_which_editions_it_had(tmp_path: Path) -> None:
    assert here(*TINY, "schedule=mg_wfbp", "compressor=none", "cluster.workers=2", f"output_dir={tmp_path}") == 0
    assert json.loads((only_run(tmp_path) / "summary.json").read_text())["editions"] == {"spardl.MgWfbp": 2}


ADAM = "optimizer=adamw"


def scope(words: str) -> str:
    found = resolve_scope(resolve_recipe(composed(*words.split())))["compressor"]["scope"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("compressor=spardl", "model"),
        (f"compressor=spardl {ADAM}", "auto"),
        (f"compressor=topka {ADAM}", "auto"),
        (f"compressor=spardl {ADAM} optimizer._target_=torch.optim.Adam", "auto"),
        (f"compressor=spardl {ADAM} recipe=published", "model"),
        (f"compressor=spardl {ADAM} momentum=adam", "model"),
        (f"compressor=spardl {ADAM} schedule=diloco", "model"),
        (f"compressor=spardl {ADAM} compressor.density=0.0002", "model"),
        (f"compressor=oktopk {ADAM}", "model"),
        (f"compressor=gaussiank {ADAM}", "model"),
        (f"compressor=spardl {ADAM} compressor.scope=chunk", "chunk"),
    ],
)
def test_a_scope_stays_open_only_where_it_is_chunks(words: str, expected: str) -> None:
    assert scope(words) == expected


def test_an_open_scope_is_a_run_of_its_own_only_there() -> None:
    def run(words: str) -> str:
        return experiment_id(composed(*words.split()), 4)

    assert run("compressor=spardl") == run("compressor=spardl compressor.scope=model")
    assert run(f"compressor=spardl {ADAM}") != run(f"compressor=spardl {ADAM} compressor.scope=model")
    assert run(f"compressor=spardl {ADAM}") != run(f"compressor=spardl {ADAM} compressor.scope=chunk")
