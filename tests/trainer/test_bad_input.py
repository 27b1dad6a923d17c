"""Bad input is one line on stderr and exit code 2, before anything was trained."""

from __future__ import annotations

import json
import shutil
import socket
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from tests.support.driver import ROOT, command, events, free_port, here, only_run, results, summary
from tests.support.quick import some_quick

# What is typed, and what the line must say.
CASES = {
    "compressor.density=0": "compressor.density must be above 0 and at most 1, got 0",
    "compressor.density=-1": "compressor.density must be above 0 and at most 1, got -1",
    "compressor.density=2": "compressor.density must be above 0 and at most 1, got 2",
    "compressor.density=nan": "compressor.density must be above 0 and at most 1, got nan",
    "compressor.density=abc": "compressor.density must be above 0 and at most 1, got 'abc'",
    "communicator.teams=3": "communicator.teams=3 does not divide 4 workers; use one of 1, 2, 4",
    "communicator.teams=0": "communicator.teams must be an integer, at least 1, got 0",
    "communicator.teams=abc": "communicator.teams must be an integer, at least 1, got 'abc'",
    "communicator.gather=recursive communicator.teams=3 cluster.workers=6": "use gather=bruck",
    "communicator.gather=foo": "communicator.gather must be one of bruck, recursive",
    "cluster.workers=0": "cluster.workers must be an integer, at least 1, got 0",
    "cluster.workers=abc": "cluster.workers must be an integer, at least 1, got 'abc'",
    "cluster=simulated cluster.workers=0": "cluster.workers must be an integer, at least 1, got 0",
    "cluster=simulated cluster.network=foo": "use ethernet_1g, ethernet_10g",
    "cluster=simulated cluster.network={alpha:1}": "={'alpha': 1} is not a network; use a preset",
    "cluster=simulated cluster.network=5": "cluster.network=5 is not a network; use a preset",
    "cluster.timeout=0": "cluster.timeout must be above 0 seconds",
    "cluster.timeout=nan": "cluster.timeout must be above 0 seconds, and at most 1000000, got nan",
    "cluster.timeout=inf": "cluster.timeout must be above 0 seconds, and at most 1000000, got inf",
    "cluster.timeout=1e20": "cluster.timeout must be above 0 seconds, and at most 1000000, got 1e+20",
    "cluster.threads=1000000000": "cluster.threads must be an integer, at least 1 and at most 1024, got 1000000000",
    "cluster=simulated cluster.count_local=no_thanks": "cluster.count_local must be true or false, got 'no_thanks'",
    "dataset=cifar10 scale.stand_in=[1]": "dataset.stand_in must be true or false, got [1]",
    "dataset=cifar10 dataset.flip=1": "dataset.flip must be true or false, got 1",
    "dataset=cifar10 dataset.download=null": "dataset.download must be true or false, got None",
    "model=lstm model.tied=a": "model.tied must be true or false, got 'a'",
    "dataset.crop_padding=[1]": "dataset.crop_padding must be an integer, at least 0, got [1]",
    "force=1": "force must be true or false, got 1",
    "cluster=simulated cluster.threads=1025": "cluster.threads must be an integer, at least 1 and at most 1024",
    "cluster.backend=nccl cluster.device=cpu": "cluster.backend=nccl needs a GPU for each worker",
    "cluster.device=cuda cluster.workers=50": "cluster.device=cuda needs 50 GPU(s) on this machine",
    "cluster.port=abc": "cluster.port must be a port number",
    "cluster.port=99999": "cluster.port must be a port number",
    "cluster.backend=mpi": "cluster.backend must be auto, gloo or nccl",
    "cluster.device=tpu": "cluster.device must be auto, cpu or cuda",
    "compressor=foo": "Available options in 'compressor': arc_topk arc_topk_ef21 bf16",
    "compressor=spardel": "did you mean compressor=spardl? (all: python train.py --list compressor)",
    "model=foo": "Available options in 'model': bert",
    "dataset=foo": "Available options in 'dataset': an4",
    "logger=foo": "Available options in 'logger': csv none several tensorboard wandb",
    "compressor=null": "must be a string or a list",
    "~optimizer": "this configuration has no optimizer; choose one with optimizer=NAME",
    "~training": "this configuration has no training; remove ~training",
    "~output_dir": "this configuration has no output_dir; remove ~output_dir",
    "compressor=int4 compressor.block=99999999999999999999": "at least 1 and at most 16777216, got 9999999",
    "start_from=": "start_from must be a checkpoint, RUN/checkpoints/step-NUMBER, or null, got ''",
    "+foo=1": "foo=1 is not a setting of this program; remove it",
    "+start_frm=x": "did you mean start_from?",
    "-m seed=range(1,1)": "seed=range(1,1) has no values, so the sweep has no runs",
    "schedule=dear compressor=powersgd communicator=dense": "runs several sums in sequence",
    "nonsense=1": "Could not override 'nonsense'",
    "compressor.nonsense=1": "Could not override 'compressor.nonsense'",
    "+compressor.nonsense=1": "compressor.nonsense=1 is not an argument of spardl.TopK; remove it",
    "+training.nonsense=1": "training.nonsense=1 is not a setting of this program; remove it",
    "+training.max_step=5": "training.max_step=5 is not a setting of this program; did you mean training.max_steps?",
    "+compressor.densty=1": "compressor.densty=1 is not an argument of spardl.TopK; did you mean density?",
    "+warmup.communicator.nonsense=1": "unexpected keyword argument 'nonsense'",
    "training.max_step=5": "Could not override 'training.max_step'; did you mean training.max_steps?",
    "max_step=5": "Could not override 'max_step'; did you mean training.max_steps?",
    "+max_step=5": "max_step=5 is not a setting of this program; did you mean training.max_steps?",
    "compresor=topk": "Could not override 'compresor'; did you mean compressor?",
    "compressor.densty=0.1": "Could not override 'compressor.densty'; did you mean compressor.density?",
    "plugins=mymodel": "plugins must be a list of packages, such as plugins=[mymodel], got 'mymodel'",
    "plugins=[1]": "plugins must be a list of packages, such as plugins=[mymodel], got [1]",
    "plugins=[os]": "plugins=['os'] cannot be used: os is a part of Python; remove it",
    "plugins=[no_such] model._target_=no_such.Net": "No module named 'no_such'; install its package",
    "plugins=[torch] optimizer._target_=torch.nn.Linear": "it must be from torch.optim or trainer; choose one with",
    "compressor=none communicator=spardl": "use communicator=allgather_dense or backend or dense",
    "compressor=topk communicator=dense": "use communicator=allgather or gtopk or oktopk or spardl or topkdsa",
    "compressor=none residual=global": "use residual=none",
    "compressor=random_block communicator=allgather": "use communicator=allgather_dense or backend or dense",
    "compressor=count_sketch communicator=gtopk": "use communicator=allgather_dense or backend or dense",
    "compressor=gaussiank communicator=spardl": "use communicator=allgather or oktopk or topkdsa",
    "compressor=qsgd communicator=dense": "use communicator=allgather_codes or allreduce_codes",
    "compressor=powersgd residual=global": "use residual=local or none",
    "compressor=threshold residual=rescaled": "does not fit compressor=threshold",
    "compressor=powersgd momentum=corrected": "use momentum=local or momentum=optimizer",
    "compressor=dgc optimizer.momentum=0.9": "use optimizer.momentum=0, or momentum=optimizer",
    "compressor=dgc model=bert_tiny dataset=pydocs": "use optimizer=sgd, or momentum=optimizer",
    "compressor.scope=tensor": "compressor.scope must be one of auto, model, layer, bucket, chunk, got",
    "compressor=qsgd compressor.bits=3": "compressor.bits must be",
    "compressor=gtopk communicator.variant=ring": "communicator.variant must be one of tree, doubling",
    "cluster.streams=0": "cluster.streams must be an integer, at least 1, got 0",
    "cluster=simulated cluster.streams=2": "cluster.streams requires cluster=process_group",
    "wire=bfloat16 compressor=powersgd": "use wire.values=exact",
    "wire.values=int16": "wire.values must be one of exact, float32, bfloat16, float16, int8, int4, int2, got 'int16'",
    "wire=int8 compressor=oktopk": "use wire.values=bfloat16 or communicator=spardl",
    "warmup.steps=-1": "warmup.steps must be an integer, at least 0, got -1",
    "schedule=foo": "Available options in 'schedule': after_backward dear diloco layer_fusion local_sgd mg_wfbp outer",
    "schedule=outer momentum=sgd": "momentum=sgd would be applied in addition to the momentum of the outer SGD",
    "schedule=outer schedule.every=0": "every must be an integer, at least 1, got 0",
    "schedule=outer schedule.lr=-1": "lr must be a number above 0, got -1",
    "schedule=outer training.precision=fp16": "use training.precision=bf16, or fp32",
    "compressor=compute_visible schedule=wfbp training.precision=fp16": "uses a fixed threshold, which does not work",
    "compressor=compute_visible schedule=wfbp optimizer.momentum=0": "but schedule=wfbp averages gradients; use attach",
    "schedule=wfbp schedule.bucket_mb=-1": "schedule.bucket_mb must be a number of megabytes, at least 0",
    "schedule=dear compressor=topka": "an all-gather; use communicator=allreduce_codes or dense",
    "schedule=dear compressor=none communicator=backend": "cannot be split into a reduce-scatter and an all-gather",
    "schedule=dear communicator=backend communicator.halves=2 compressor=none": "halves must be true or false, got 2",
    "schedule=dear compressor=random_k residual=rescaled training.clip_norm=1": "use training.clip_norm=null",
    "schedule=dear schedule.trials=5 schedule.layers=2": "use schedule.layers=null, or schedule.trials=0",
    "schedule=dear schedule.trials=5 schedule.low_mb=30": "start from low to high, got low=30",
    "cluster=simulated cluster.profile={tmp}/missing.json": "create one with spardl profile",
    "cluster=simulated cluster.profile={tmp}/file": "is not a profile",
    "dataset=cifar10 data_dir={tmp}": "dataset.download=true",
    "experiment=spardl/lstm_ptb data_dir={tmp}": "scale.stand_in=true",
    "experiment=oktopk/nothing": "oktopk/nothing",
    "scale=huge": "Available options in 'scale': full smoke",
    "model=bert dataset=digits": "use dataset=pydocs",
    "model=gpt_chars task.lanes=16": "use task.lanes=null",
    "model=resnet20 dataset=pydocs": "use dataset=digits, cifar10 or cifar100",
    "model=vgg16 dataset=digits": "use model=resnet20, or dataset=cifar10",
    "+model.nonsense=1": "model.nonsense=1 is not an argument of tasks.models.resnet_cifar.CifarResNet; remove it",
    "resume={tmp}": "is not the folder of a run",
    "output_dir={tmp}/file": "is not a folder; name another with output_dir=FOLDER",
    "output_dir={tmp}/file/below": "cannot write to output_dir=",
    "output_dir=/proc/nothing": "cannot write to output_dir=/proc/nothing",
    "output_dir=null": "output_dir must name a folder",
    "training.batch_size=100000": "lower the batch size or the number of workers",
    "training.batch_size=abc": "training.batch_size must be an integer, at least 1, got 'abc'",
    "training.epochs=abc": "training.epochs must be a number above 0, got 'abc'",
    "training.precision=fp8": "training.precision must be one of fp32, fp64, bf16, fp16, got 'fp8'",
    "optimizer.lr=abc": "optimizer cannot be created with lr=abc",
    "optimizer.lr=-1": "Invalid learning rate: -1",
    "optimizer.lr=nan": "optimizer.lr must be a finite number, got nan",
    "optimizer.lr=inf": "optimizer.lr must be a finite number, got inf",
    "optimizer.lr=1e999": "optimizer.lr must be a finite number, got inf",
    "optimizer=adamw optimizer.lr=inf": "optimizer.lr must be a finite number, got inf",
    "optimizer.momentum=nan": "optimizer.momentum must be at least 0 and below 1, got nan",
    "lr_schedule.warmup_epochs=abc": "lr_schedule.warmup_epochs must be at least 0",
    "lr_schedule.warmup_epochs=nan": "lr_schedule.warmup_epochs must be at least 0",
    "lr_schedule=multistep lr_schedule.milestones=5": "lr_schedule.milestones must be a list of epochs",
    "lr_schedule=multistep lr_schedule.gamma=nan": "lr_schedule.milestones must be a list of epochs",
    "seed=abc": "training.seed must be an integer, got 'abc'",
    "seed=18446744073709551616": "training.seed must be from -2^63 to 2^64 - 1, got 18446744073709551616",
    "seed=-9223372036854775809": "training.seed must be from -2^63 to 2^64 - 1, got -9223372036854775809",
    "optimizer.momentum=2": "optimizer.momentum must be at least 0 and below 1, got 2",
    "optimizer.momentum=-0.1": "optimizer.momentum must be at least 0 and below 1, got -0.1",
    "resume=": "resume must be auto, a run's folder, or null to start a new run, got ''",
    "resume=false": "resume must be auto, a run's folder, or null to start a new run, got False",
    "logger=wandb logger.timeout=nan": "logger.timeout must be above 0 seconds, and at most 1000000, got nan",
    "logger=wandb logger.mode=foo": "logger.mode must be auto, online, offline or disabled, got 'foo'",
    "-m compressor=none,foo": "Available options in 'compressor'",
}


def one_line(err: str) -> str:
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("typed", some_quick(CASES, 4))
def test_one_line_and_exit_code_2(typed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = typed.replace("{tmp}", str(tmp_path)).split()
    if "output_dir" not in typed:
        words.append(f"output_dir={tmp_path / 'out'}")
    assert here(*words) == 2
    output = capfd.readouterr()
    assert CASES[typed] in one_line(output.err)
    assert all(line.startswith("plan: ") for line in output.out.splitlines())
    assert not list((tmp_path / "out").glob("[!.]*"))


@pytest.mark.parametrize("text", ["seed: 1\n  model: a", "seed: 1\nseed: 2"])
def test_invalid_yaml_files(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    place = f"hydra.searchpath=[file://{tmp_path}]"
    assert here(place, "+experiment=mine", f"output_dir={tmp_path / 'out'}") == 2
    assert "mine.yaml" in one_line(capfd.readouterr().err)


def test_unknown_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARDL_KERNELS", "fast")
    assert here(f"output_dir={tmp_path / 'out'}") == 2
    assert "SPARDL_KERNELS must be compiled or portable, got 'fast'" in one_line(capfd.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_port_in_use(address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server((address, 0))) as server:
        port = server.getsockname()[1]
        assert here(f"cluster.port={port}", f"output_dir={tmp_path}") == 2
    assert f"cluster.port={port} cannot be used" in one_line(capfd.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_errors_that_only_a_worker_finds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here("model.depth=21", f"output_dir={tmp_path}") == 2
    assert "such as 20, 32, 44, 56 or 110" in one_line(capfd.readouterr().err)


def test_a_profile_of_another_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = ROOT / "scripts" / "profiles" / "resnet50.json"
    assert here("cluster=simulated", f"cluster.profile={profile}", f"output_dir={tmp_path}") == 2
    assert "create one for this model with spardl profile" in one_line(capfd.readouterr().err)


def test_a_chosen_port(tmp_path: Path) -> None:
    port = free_port()
    assert here(f"cluster.port={port}", "cluster.workers=2", "training.max_steps=1", f"output_dir={tmp_path}") == 0


@pytest.mark.slow
def test_as_typed(tmp_path: Path) -> None:
    done = command("compressor.density=2", "logger=none", f"output_dir={tmp_path}")
    assert done.returncode == 2
    assert one_line(done.stderr).startswith("error: compressor.density must be")
    assert all(line.startswith("plan: ") for line in done.stdout.splitlines())


@pytest.mark.slow
def test_a_list_shows_the_choices() -> None:
    done = command("--list", "communicator")
    assert done.returncode == 0
    for path in (ROOT / "conf" / "communicator").glob("*.yaml"):
        assert f"\n{path.stem} " in done.stdout


class Corrupt:
    """A run that was interrupted, with three checkpoints."""

    words = ("training.max_steps=6", "training.checkpoint_every=2", "training.keep_checkpoints=3", "cluster=simulated")

    def __init__(self, folder: Path) -> None:
        self.outputs = folder
        self.run = only_run(folder)
        self.checkpoints = sorted((self.run / "checkpoints").iterdir())
        content = summary(self.run)
        (self.run / "summary.json").write_text(json.dumps({"id": content["id"], "status": "running"}))

    def resume(self, where: str) -> int:
        return here(*self.words, f"output_dir={self.outputs}", f"resume={where}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("finished")
    assert here(*Corrupt.words, f"output_dir={outputs}") == 0
    return outputs


@pytest.fixture
def corrupt(finished: Path, tmp_path: Path) -> Corrupt:
    return Corrupt(Path(shutil.copytree(finished, tmp_path / "out")))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "name"),
    some_quick(product([flip, truncate, Path.unlink], ["shared.pt", "rank-3.pt", "manifest.json"]), 8),
)
def test_the_newest_checkpoint_is_bad(
    harm, name: str, corrupt: Corrupt, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    harm(corrupt.checkpoints[-1] / name)
    assert corrupt.resume("auto") == 0
    output = capfd.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith(f"warning: checkpoint {corrupt.checkpoints[-1]} cannot be used: ")
    assert name in line or name == "manifest.json"
    assert line.endswith(f"; continuing from {corrupt.checkpoints[-2]}")
    assert "training: step 4 of 6" in output.out
    assert results(corrupt.run) == results(only_run(finished))


@pytest.mark.parametrize("where", ["auto", "folder"])
def test_all_checkpoints_are_bad(where: str, corrupt: Corrupt, capfd: pytest.CaptureFixture[str]) -> None:
    before = events(corrupt.run)
    for checkpoint in corrupt.checkpoints:
        flip(checkpoint / "rank-1.pt")
    assert corrupt.resume("auto" if where == "auto" else str(corrupt.run)) == 2
    line = one_line(capfd.readouterr().err)
    assert str(corrupt.checkpoints[-1]) in line
    assert "start again without resume" in line
    assert events(corrupt.run) == before


def test_a_run_of_another_configuration(corrupt: Corrupt, capfd: pytest.CaptureFixture[str]) -> None:
    assert here(*corrupt.words, f"resume={corrupt.run}", "seed=2", f"output_dir={corrupt.outputs}") == 2
    assert "but this configuration is that of run" in one_line(capfd.readouterr().err)


def test_a_run_without_checkpoints(corrupt: Corrupt, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(corrupt.run / "checkpoints")
    assert corrupt.resume(str(corrupt.run)) == 2
    assert "has no checkpoint yet" in one_line(capfd.readouterr().err)
