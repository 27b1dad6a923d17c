"""Words that should never have been typed: things to be run, other scripts' signs, half an override, wrong kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driver import command, here
from tests.trainer.test_bad_input import one_line

# Refused before anything is composed.
UNREADABLE = (
    "compressor",
    "compressor==topka",
    "compressor=topka=1",
    "compressor=topka,",
    "compressor=[",
    "compressor._target_=spärdl.TopK",
    "compressor=スパース",
    "compressor=topka\u200b",
    "compressor=\udcff",
    "compressor.density=½",
    "compressor.density=\u22121",
    "seed=\uff11\uff12",
    "seed=[1",
    "seed='1",
    'seed="',
    "seed=${",
    "seed.=1",
    "seed..x=1",
    ".seed=1",
    "ключ=1",
    "logger.mode=a\nb",
    "output_dir=\udcff",
    "$(id)",
    "{",
    "+",
    "++",
)
REFUSED = {
    "--nonsense": "unrecognized arguments: --nonsense",
    "-x": "unrecognized arguments: -x",
    "--info=foo": "argument --info/-i: invalid choice: 'foo'",
    "--cfg=foo": "argument --cfg/-c: invalid choice: 'foo'",
    "+hydra.callbacks.x._target_=os.system": "parts of Hydra cannot be replaced; remove it",
    "+hydra.callbacks={x:{_target_:os.system}}": "parts of Hydra cannot be replaced; remove it",
    "-m hydra.launcher._target_=os.getcwd seed=1,2": "parts of Hydra cannot be replaced; remove it",
    "=1": "Config group override must be a string or a list. Got int",
    "++=1": "force-add of config groups is not supported: '++=1'",
    "wire=null": "Config group override must be a string or a list. Got NoneType",
    "compressor=../../etc/passwd": "Could not find 'compressor/../../etc/passwd'",
}
RUN = "+compressor.command=touch\\{tmp}/executed"
COMPOSED = {
    f"compressor._target_=os.system {RUN}": "compressor._target_=os.system cannot be used: it must be from spardl",
    f"logger._target_=trainer.observers.os.system {RUN.replace('compressor', 'logger')}": "not a subclass of Logger",
    "compressor._target_=builtins.eval": "it must be from spardl; choose one with compressor=NAME",
    "compressor._target_=[]": "compressor._target_=[] cannot be used",
    "model._target_=torch.nn.Linear": "it must be from tasks; add plugins=[torch] to allow its package",
    "task._target_=os.system": "it must be from tasks; choose one with task=NAME",
    "task=5": "this configuration has no task",
    "optimizer._target_=torch.load": "it must be from torch.optim or trainer; choose one with optimizer=NAME",
    "optimizer._partial_=false": "optimizer._partial_ must be true",
    "cluster._target_=spardl.clusters.workers.processes.leave": "it must be from trainer",
    "logger._target_=logging.getLogger": "it must be from trainer",
    "schedule._target_=spardl.momentum.OptimizerMomentum": "it is not a subclass of Schedule from spardl",
    "dataset._target_=tasks.datasets.nowhere.f": "module 'tasks.datasets' has no attribute 'nowhere'",
    "warmup.communicator._target_=os.getcwd": "warmup.communicator._target_=os.getcwd cannot be used",
    "+compressor._args_=[1]": "compressor._args_ has no effect here",
    "+compressor._partial_=true": "compressor._partial_ must be false",
    "+compressor._convert_=foo": "compressor._convert_ has no effect here",
    "compressor.density={_target_:os.getcwd}": "compressor.density._target_ has no effect here",
    "cluster.throttle={_target_:os.getcwd}": "cluster.throttle._target_ has no effect here",
    "cluster.workers=1000": "16 on 1000 workers needs more than the 1438 training examples",
    "cluster.workers=1e3": "cluster.workers must be an integer, at least 1, got 1000.0",
    "cluster.workers={a:1}": "cluster.workers must be an integer, at least 1, got {'a': 1}",
    "cluster.workers=true": "cluster.workers must be an integer, at least 1, got True",
    "cluster.throttle=foo": "cluster.throttle=foo is not a network",
    "cluster.interface=nowhere0": "cluster.interface=nowhere0 is not on",
    "compressor@foo=topka": "Could not override 'compressor@foo'",
    "compressor.density=0,01": "Ambiguous value for argument 'compressor.density=0,01'",
    "compressor.density=[0.1]": "compressor.density must be above 0 and at most 1, got [0.1]",
    "compressor=powersgd compressor.rank=abc": "compressor.rank must be an integer, at least 1, got 'abc'",
    "dataset.crop_padding=-1": "dataset.crop_padding must be an integer, at least 0, got -1",
    "dataset.crop_padding=abc": "dataset.crop_padding must be an integer, at least 0, got 'abc'",
    "force=maybe": "force must be true or false, got 'maybe'",
    "hydra/launcher=foo": "Could not find 'hydra/launcher/foo'",
    "model.depth=1e9": "model.depth must be 6n+2",
    "optimizer.lr=[1]": "optimizer cannot be created with lr=[1]",
    "output_dir=[a]": "output_dir must name a folder, got ['a']",
    "output_dir=true": "output_dir must name a folder, got True",
    "schedule=wfbp schedule.bucket_mb=nan": "schedule.bucket_mb must be a number of megabytes, at least 0",
    "seed=${seed}": "Recursive interpolation detected",
    "seed=${oc.env:NOWHERE}": "Environment variable 'NOWHERE' not found",
    "seed=1e400": "training.seed must be an integer, got inf",
    "seed=???": "Missing mandatory value: seed",
    "training=[]": "Error merging override training=[]",
    "training.batch_size=1e400": "training.batch_size must be an integer, at least 1, got inf",
    "training.elastic=maybe": "training.elastic must be true or false, got 'maybe'",
    "training.max_steps=0": "training.max_steps must be an integer, at least 1, or null, got 0",
    "training.max_steps=1.5": "training.max_steps must be an integer, at least 1, or null, got 1.5",
    "~nonsense": "Could not delete from config. 'nonsense' does not exist.",
}
QUICK = ("compressor._target_=builtins.eval", "+compressor._partial_=true", "force=maybe", "output_dir=[a]", "task=5")


def refused(typed: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a command line gets: nothing is printed besides, and nothing is left of it."""
    words = [word.replace("{tmp}", str(folder)).replace("\\", " ") for word in typed.split(" ")]
    if "output_dir" not in typed:
        words.insert(words[0] == "-m", f"output_dir={folder / 'out'}")
    assert here(*words) == 2
    output = capfd.readouterr()
    assert all(line.startswith("plan: ") for line in output.out.splitlines())
    assert not [path for path in folder.rglob("[!.]*") if ".sweep" not in path.parts]
    return one_line(output.err)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that should not be made must not be made here, either."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("typed", UNREADABLE, ids=ascii)
def test_unreadable_words(typed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refused(typed, tmp_path, capfd)
    assert f"error: {typed!r} cannot be read: write GROUP=CHOICE or KEY=VALUE, " in line


@pytest.mark.parametrize(
    "typed",
    [*REFUSED, *(pytest.param(typed, marks=[] if typed in QUICK else pytest.mark.slow) for typed in COMPOSED)],
)
def test_refused_words(typed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert {**REFUSED, **COMPOSED}[typed] in refused(typed, tmp_path, capfd)


def test_at_least_sixty_words_are_tested() -> None:
    assert len(UNREADABLE) + len(REFUSED) + len(COMPOSED) >= 60
    assert set(QUICK) <= set(COMPOSED)


@pytest.mark.slow
def test_a_subprocess_executes_no_code(tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    words = ("compressor._target_=os.system", f'+compressor.command="touch {executed}"', f"output_dir={tmp_path}/out")
    done = command(*words)
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("error: compressor._target_=os.system cannot be used: ")
    assert all(line.startswith("plan: ") for line in done.stdout.splitlines())
    assert not list(tmp_path.iterdir())
