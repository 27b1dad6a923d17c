"""Groups that one run chose, reused by other runs for equal bits."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spardl.basics.errors import ConfigError
from spardl.clusters import Cluster
from spardl.schedules import LayerFusion, MgWfbp, Wfbp
from spardl.schedules.measured import Groups, Measuring
from tests.schedules.loops import Loop
from tests.schedules.test_measured import ENTRIES
from tests.support.driver import background_run, composed, here, results, steps_logged, summary, wait_until
from tests.support.harness import run_workers, spardl
from tests.trainer.toy import plan, trainer
from trainer.experiment import experiment_id

RUN = ("cluster=simulated", "cluster.workers=2", "training.max_steps=9", "training.eval_examples=16")
SPARSE = (*RUN, "training.batch_size=4", "training.checkpoint_every=3", "compressor.density=0.05")


# Megabytes for the last two of the toy's three layers, with 51 and 32 entries, but not the first one as well.
ONE_AND_TWO = 100 * 8 / 2**20


def run_of(outputs: Path) -> Path:
    (folder,) = outputs.glob("[!.]*")
    return folder


def write(file: Path, ranges: list[tuple[int, int]], entries: list[int] = ENTRIES) -> str:
    file.write_text(Groups(entries, ranges).text())
    return str(file)


@pytest.mark.parametrize("kind", [LayerFusion, MgWfbp])
def test_a_training_writes_its_groups_and_others_use_them(kind: type[Measuring], tmp_path: Path) -> None:
    def weights(name: str, schedule: Measuring) -> str:
        made = replace(plan(spardl(0.1), max_steps=8), schedule=schedule)
        (tmp_path / name).mkdir()
        found: str = trainer(made, tmp_path / name).fit()["weights_sha256"]
        return found

    weights("a", kind())
    file = tmp_path / "a" / "groups.json"
    assert len(Groups.read(file).entries) == 3
    file.write_text(Groups(Groups.read(file).entries, [(0, 1), (1, 3)]).text())  # whatever was chosen
    assert weights("b", kind(str(file))) == weights("c", kind(str(file))) == weights("wfbp", Wfbp(ONE_AND_TWO))
    assert not (tmp_path / "b" / "groups.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer_fusion", "mg_wfbp"])
def test_a_run_writes_its_groups_and_others_use_them(name: str, tmp_path: Path) -> None:
    words = (*SPARSE, f"schedule={name}")
    assert here(*words, f"output_dir={tmp_path / 'a'}") == 0
    file = run_of(tmp_path / "a") / "groups.json"
    found = Groups.read(file)
    assert sum(found.entries) == summary(file.parent)["parameters"]
    words = (*words, f"schedule.groups={file}")
    for outputs in ("b", "c"):
        assert here(*words, f"output_dir={tmp_path / outputs}") == 0
    assert results(run_of(tmp_path / "b")) == results(run_of(tmp_path / "c"))
    assert not (run_of(tmp_path / "b") / "groups.json").exists()
    # An interruption does not matter either: a run that measures would measure again.
    again = (*words, f"output_dir={tmp_path / 'd'}", "resume=auto")
    with background_run(*again, folder=tmp_path / "log") as run:
        wait_until(lambda: run.ended() or ((tmp_path / "d").exists() and steps_logged(tmp_path / "d") >= 4))
        run.kill()
        run.wait()
    assert here(*again) == 0
    assert results(run_of(tmp_path / "d")) == results(run_of(tmp_path / "b"))


def test_the_groups_of_the_file_are_used_from_the_first_step_on(tmp_path: Path) -> None:
    file = write(tmp_path / "groups.json", [(0, 3), (3, 4), (4, 7)])

    def work(cluster: Cluster) -> list[Any]:
        loops = [Loop(kind(file), cluster, method=spardl(0.2)) for kind in (LayerFusion, MgWfbp)]
        return [[loop.synchronizer.partition, loop.run().tolist(), loop.synchronizer.partition] for loop in loops]

    one, other = run_workers(2, work)
    assert one == other
    assert one[0] == one[1]
    assert one[0][0] == one[0][2] == [(0, 3), (3, 4), (4, 7)]


BAD: dict[str, tuple[str | None, str]] = {
    "missing": (None, "cannot be read: No such file or directory; pass RUN/groups.json of another run"),
    "not JSON": ("{", "contains no groups of layers; pass RUN/groups.json of another run"),
    "not an object": ("[]", "contains no groups of layers"),
    "not a range": ('{"entries": [1, 2], "groups": [1]}', "contains no groups of layers"),
    "too short": ('{"entries": [1, 2], "groups": [[0, 1]]}', "must contain each of its 2 layers exactly once"),
    "gap": ('{"entries": [1, 2, 3], "groups": [[0, 1], [2, 3]]}', "must contain each of its 3 layers exactly once"),
    "disordered": ('{"entries": [1, 2, 3], "groups": [[1, 3], [0, 1]]}', "must contain each of its 3 layers"),
    "empty range": ('{"entries": [1, 2, 3], "groups": [[0, 0], [0, 3]]}', "must contain each of its 3 layers"),
    "text": ('{"entries": [1, 2], "groups": [[0, "2"]]}', "must contain each of its 2 layers"),
    "too long": ('{"entries": [1, 2], "groups": [[0, 3]]}', "must contain each of its 2 layers"),
    "no group": ('{"entries": [1, 2], "groups": []}', "must contain each of its 2 layers"),
}


@pytest.mark.parametrize("fault", BAD)
def test_files_without_valid_groups(fault: str, tmp_path: Path) -> None:
    file, (content, message) = tmp_path / "groups.json", BAD[fault]
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"schedule.groups={file}.*{message}"):
        LayerFusion(str(file))


def test_binary_and_foreign_values(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(random.Random(1).randbytes(500))
    for value in (str(tmp_path / "x"), str(tmp_path), 5):
        with pytest.raises(ConfigError, match=r"schedule\.groups="):
            MgWfbp(value)  # type: ignore[arg-type]


def test_groups_of_another_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "groups.json", [(0, 7)])
    words = ("schedule=layer_fusion", f"schedule.groups={file}", f"output_dir={tmp_path / 'out'}")
    assert here(*RUN, *words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"schedule.groups={file} belongs to another model with 7 layers and {sum(ENTRIES):,} entries, " in line


def test_workers_that_read_different_groups(tmp_path: Path) -> None:
    files = [write(tmp_path / "0", [(0, 7)]), write(tmp_path / "1", [(0, 3), (3, 7)])]

    def work(cluster: Cluster) -> str:
        (rank,) = cluster.local_ranks
        shutil.copy(files[rank], tmp_path / f"groups-{rank}.json")
        with pytest.raises(ConfigError) as error:
            Loop(LayerFusion(str(tmp_path / f"groups-{rank}.json")), cluster)
        return str(error.value)

    for said in run_workers(2, work):
        assert "differs on ranks [1] from rank 0; copy the same file to all nodes" in said


def test_ids_are_those_of_the_time_before_it(tmp_path: Path) -> None:
    file = write(tmp_path / "groups.json", [(0, 7)])
    for name, identity in {"layer_fusion": "63c0e42d5f", "mg_wfbp": "affd698b57"}.items():
        assert experiment_id(composed("recipe=published", f"schedule={name}"), 4) == identity
        assert experiment_id(composed("recipe=published", f"schedule={name}", f"schedule.groups={file}"), 4) != identity


def test_the_text_is_read_as_it_was() -> None:
    assert json.loads(Groups([3, 4, 5], [(0, 1), (1, 3)]).text()) == {"entries": [3, 4, 5], "groups": [[0, 1], [1, 3]]}
