"""The commands of the README, as typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from spardl.basics.version import __version__
from tests.support.driver import (
    ROOT,
    STARTED_BY,
    background_ranks,
    background_run,
    command,
    events,
    free_port,
    here,
    only_run,
    processes,
    results,
    summary,
)
from trainer.command_line import _options

TINY = ("training.max_steps=2", "cluster.workers=2")
FIGURES = {"metric", "final", "best", "steps", "epochs", "workers", "parameters", "density", "replica_checks"}
FIGURES |= {"wall_seconds", "cluster_seconds", "evaluation_seconds", "step_seconds", "step_seconds_beside"}
FIGURES |= {"peak_memory_bytes"}
FIGURES |= {"step_rounds", "step_words", "step_bytes", "step_bytes_dense", "break_even_gbit", "weights_sha256"}


def check_folder(folder: Path, steps: int = 2) -> None:
    """Everything that a finished run leaves is there."""
    text = (folder / "config.yaml").read_text()
    assert "${" not in text
    assert yaml.safe_load(text)["training"]["max_steps"] == steps
    typed = (folder / "command.txt").read_text()
    assert typed.startswith("python train.py ")
    assert f" training.max_steps={steps}" in typed
    found = summary(folder)
    assert found["status"] == "finished"
    assert set(found) >= FIGURES
    assert found["id"] in folder.name
    assert found["steps"] == steps
    assert found["final"][found["metric"]] >= 0
    assert len(found["weights_sha256"]) == 64
    assert set(found["environment"]) == {"spardl", "python", "torch", "commit", "machine", "cpu"}
    assert found["environment"]["spardl"] == __version__
    assert found["environment"]["torch"] == torch.__version__
    kinds = [(event["kind"], event["step"]) for event in events(folder)]
    assert ("train", steps) in kinds
    assert kinds[-1] == ("eval", steps)
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{steps:08d}"
    hidden = {path.name for path in folder.rglob(".*")}
    assert hidden == {".lock"}


def test_the_main_job_logs_offline_without_a_question(tmp_path: Path) -> None:
    """With W&B's defaults, without a login and without a terminal."""
    (tmp_path / "home").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py", *TINY, f"output_dir={tmp_path / 'out'}"],
        cwd=ROOT,
        env={**environment, "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = only_run(tmp_path / "out")
    (logged,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert logged.stat().st_size > 1000
    assert not [path for path in (tmp_path / "home").iterdir() if path.name == "wandb"]
    first = f"run {summary(folder)['id']}: {folder}; W&B: offline, nothing is uploaded"
    assert done.stdout.startswith(
        "plan: spardl on resnet20 with digits; 2 workers (process_group) x 16 examples a step; "
    )
    assert done.stdout.splitlines()[1] == first
    assert done.stdout.splitlines()[-1] == f"results: {folder}"
    assert not any(ord(character) < 32 and character != "\n" for character in done.stdout)


@pytest.mark.parametrize(
    "typed",
    [
        "compressor=spardl communicator.teams=2 communicator.gather=bruck residual=partial cluster.workers=4",
        "compressor=topk communicator=allgather",
        "compressor=none",
        "compressor=none communicator=backend",
        "cluster=simulated cluster.workers=14 cluster.network=ethernet_1g",
        "cluster.workers=1",
        "training.precision=bf16 training.clip_norm=1 training.accumulation=2 optimizer=adamw lr_schedule=linear",
    ],
)
def test_as_typed(typed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here(*TINY, *typed.split(), f"output_dir={tmp_path}") == 0
    check_folder(only_run(tmp_path))
    assert capfd.readouterr().err == ""


def test_every_run_gets_a_new_folder(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        assert here(*TINY, "cluster=simulated", f"output_dir={tmp_path}") == 0
        assert len(list(tmp_path.iterdir())) == count
    found = [results(folder) for folder in tmp_path.iterdir()]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (">&-", "error: standard output is closed; redirect it to a file or to /dev/null\n"),
        ("2>&-", "error: standard error is closed; redirect it to a file or to /dev/null\n"),
        (">&- 2>&-", ""),
        ("1000000", "error: ulimit -v allows 976 MiB, too few to load torch; use ulimit -v unlimited\n"),
    ],
)
def test_closed_streams_and_low_memory_limits(limits: str, expected: str, tmp_path: Path) -> None:
    begins = f"exec {limits}" if "&" in limits else f"ulimit -v {limits}"
    line = f'{begins}; exec "$0" train.py "output_dir=$1"'
    done = command(sys.executable, str(tmp_path / "out"), program=("sh", "-c", line))
    assert (done.returncode, done.stdout + done.stderr) == (2, expected)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("-m", "compressor=none,topka", "seed=1,2", *TINY, f"output_dir={tmp_path}")
    with background_run(*words, folder=tmp_path / ".log") as run:
        assert run.wait() == 0, run.stderr
    folders = sorted(tmp_path.glob("[!.]*"))
    assert len(folders) == 4
    for folder in folders:
        check_folder(folder)
    assert len({summary(folder)["weights_sha256"] for folder in folders}) == 4

    assert here(*words) == 0
    assert capfd.readouterr().out.count("is finished (force=true runs it again)\n") == 4
    assert sorted(tmp_path.glob("[!.]*")) == folders

    assert here("-m", "compressor=topka", "seed=2", "force=true", *TINY, f"output_dir={tmp_path}") == 0
    (new,) = set(tmp_path.glob("[!.]*")) - set(folders)
    check_folder(new)


def test_a_sweep_goes_on_after_failures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("compressor=none", "cluster=simulated", "training.max_steps=8", f"output_dir={tmp_path}")
    assert here("-m", "optimizer.lr=1e30,-1,0.05", *words) == 1
    first, second, of_hydra, last = capfd.readouterr().err.splitlines()
    assert first.startswith("error: optimizer.lr=1e+30: ")
    assert "lower optimizer.lr or set training.clip_norm" in first
    assert second.startswith("error: optimizer.lr=-1: ")
    assert of_hydra.startswith("Error executing job with overrides: ['logger=none'")
    assert last == "error: 2 of the sweep's 3 runs failed, see above"
    found = [summary(folder) for folder in tmp_path.glob("[!.]*")]
    assert sorted(content["status"] for content in found) == ["failed", "finished"]
    assert any("the loss is nan" in content.get("reason", "") for content in found)


TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--standalone", "--local-addr", "127.0.0.1")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    words = ("training.max_steps=2", "logger=none", "training.log_every=1")
    started = (*TORCHRUN, "--nproc-per-node", "2", "train.py")
    done = command(*words, f"output_dir={tmp_path / 'torchrun'}", program=started)
    assert done.returncode == 0, done.stderr
    check_folder(only_run(tmp_path / "torchrun"))
    assert done.stdout.count("results: ") == 1
    assert here("training.max_steps=2", "cluster.workers=2", f"output_dir={tmp_path / 'forked'}") == 0
    assert results(only_run(tmp_path / "torchrun")) == results(only_run(tmp_path / "forked"))


def tasks_of_slurm() -> list[dict[str, str]]:
    """The variables that two tasks of ``srun`` get, on one host."""
    step = {"SLURM_STEP_NODELIST": "here", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
    step |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [{**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


def refused_by_srun(words: tuple[str, ...], folder: Path, *of_rank_1: str) -> list[str]:
    """What both tasks print to standard error that refuse a command line; rank 1 may be given more."""
    with background_ranks([words, (*words, *of_rank_1)], tasks_of_slurm(), folder) as runs:
        assert [run.wait() for run in runs] == [2, 2]
        return [run.stderr for run in runs]


@pytest.mark.slow
def test_srun(tmp_path: Path) -> None:
    """As typed, in fresh interpreters."""
    environment = {name: value for name, value in os.environ.items() if name not in STARTED_BY}
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", "training.max_steps=2", "logger=none", f"output_dir={tmp_path}"],
            cwd=ROOT,
            env={**environment, **task},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in tasks_of_slurm()
    ]
    ended = [(process, *process.communicate(timeout=120)) for process in started]
    first, second = (subprocess.CompletedProcess([], process.returncode, out, err) for process, out, err in ended)
    assert first.returncode == second.returncode == 0, (first.stderr, second.stderr)
    check_folder(only_run(tmp_path))
    assert "results: " in first.stdout
    assert second.stdout == first.stderr == second.stderr == ""


@pytest.mark.slow
def test_srun_with_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """Rank 0 finds out, and all ranks say so at once."""
    (tmp_path / "file").touch()
    for said in refused_by_srun(("training.max_steps=2", f"output_dir={tmp_path / 'file'}"), tmp_path):
        assert said.count("\n") == 1
        assert said.startswith("error: ")


@pytest.mark.slow
def test_srun_with_another_command_on_another_node(tmp_path: Path) -> None:
    """All say so at once, and no folder is left."""
    words = ("training.log_every=2", f"output_dir={tmp_path / 'out'}")
    expected = "rank 1 has training.log_every=3, rank 0 has training.log_every=2; all workers need the same value"
    assert refused_by_srun(words, tmp_path, "training.log_every=3") == [f"error: {expected}\n"] * 2
    assert not (tmp_path / "out").exists()


def test_no_sweep_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert here("-m", "seed=1", f"output_dir={tmp_path}") == 2
    assert "a sweep (-m) starts its workers itself" in capfd.readouterr().err


def test_imports_of_a_run(tmp_path: Path) -> None:
    """Nothing that the run does not need; and what takes its time once, before the workers are forked."""
    words = ("logger=none", "training.max_steps=1", "cluster.workers=8", f"output_dir={tmp_path}")
    done = command(*words, program=(sys.executable, "-X", "importtime", "train.py"))
    assert done.returncode == 0
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert not {"torchvision", "transformers", "tokenizers", "wandb"} & set(imported)
    assert imported.count("torch._dynamo") == 1  # by torch's optimizers


def completed(line: str) -> str:
    """What Hydra's shell completion prints."""
    environment = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    return str(command("--shell-completion", "query=bash", env=environment).stdout)


def test_the_shell_completes() -> None:
    found = completed("python train.py compressor=topk").split()
    assert found == ["compressor=topk", "compressor=topka", "compressor=topkdsa"]


def test_options_are_those_of_hydra() -> None:
    """The parser of train.py knows each option that Hydra documents, and one more."""
    lines = re.findall(r"^(--\S+) : ", command("--hydra-help").stdout, re.MULTILINE)
    listed = {name for line in lines for name in line.split(",")}
    known = {name for action in _options()._actions for name in action.option_strings}
    assert known == listed | {"--list"}


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    with background_run(*TINY, f"output_dir={tmp_path / 'out'}", folder=tmp_path / "log") as run:
        assert run.wait() == 0
        assert run.stderr == ""
        assert not run.members()
    assert not [pid for pid, fields in processes().items() if fields[3] == str(os.getpid()) and fields[2] == "Z"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_no_library_of_models_delays_the_plan() -> None:
    """Their imports take seconds, and the plan appears before them."""
    program = "import sys, train; print({'transformers', 'torchvision', 'timm', 'sklearn', 'wandb'} & {*sys.modules})"
    done = command("-c", program, program=(sys.executable,))
    assert done.stdout == "set()\n", done.stderr
