"""One job of train.py: trains a composed configuration, and converts the outcome to an exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spardl.basics.errors import ConfigError, SpardlError, StoppedError
from spardl.basics.files import write_atomically
from spardl.clusters.workers.membership import find_membership, leads, restart_warning
from spardl.clusters.workers.processes import StopRequestedError
from trainer.build import build
from trainer.checkpoint import list_checkpoints
from trainer.command_line import BAD_INPUT, FAILED, INTERRUPTED, STOPPED, check_plugins, complain, say
from trainer.experiment import Experiment
from trainer.launch import WORKERS
from trainer.observers import Wandb, without_run_id
from trainer.runs import Run, UnfinishedError, finished_run
from trainer.sweep import Outcome, part_of_sweep

__all__ = ["attempt", "sweeping"]

# Settings of the model that a folder's name shows at most; file systems limit its length.
_CHANGES = 4


def attempt(config: DictConfig) -> float | None:
    """Trains one configuration, and prints an error immediately, so that a sweep can continue with its next run.

    Args:
        config: Configuration composed by Hydra, without the node ``hydra``.

    Returns:
        The final value of the task's main metric, which Hydra's sweepers compare; ``None`` in processes with a rank
        above 0.

    Raises:
        UnfinishedError: If the run failed or was stopped.
    """
    with part_of_sweep() if sweeping() else nullcontext(Outcome("")) as outcome:
        try:
            return _train(config, outcome)
        except StoppedError as stopped:
            outcome.state, interrupted = "stopped", stopped.interrupted
            code = say(
                f"{stopped}; the same command with resume=auto continues", INTERRUPTED if interrupted else STOPPED
            )
        except (SpardlError, OmegaConfBaseException, OSError) as error:
            which = f"{outcome.words}: " if sweeping() else ""
            code = complain(f"{which}{error}", FAILED if _is_failure(error) else BAD_INPUT)
    raise UnfinishedError(code)


def sweeping() -> bool:
    """Returns whether the current job belongs to a sweep (``-m``)."""
    mode: bool = HydraConfig.get().mode == RunMode.MULTIRUN
    return mode


def _is_failure(error: Exception) -> bool:
    return isinstance(error, SpardlError) and not isinstance(error, ConfigError)


def _train(config: DictConfig, outcome: Outcome) -> float | None:
    if sweeping() and find_membership(os.environ):
        raise ConfigError("a sweep (-m) starts its workers itself; start it without torchrun or srun")
    check_plugins(config.get("plugins"), HydraConfig.get().overrides.task)
    if leads(os.environ):
        with suppress(OmegaConfBaseException):  # build() reports the error
            print(_plan(config), flush=True)
    experiment = build(config, _label(config))
    if not isinstance(config.force, bool):
        raise ConfigError(f"force must be true or false, got {config.force!r}")
    # A sweep that is started again, or a job that Slurm requeues, skips runs that are finished.
    if (sweeping() or os.environ.get("SLURM_RESTART_COUNT", "0") != "0") and not config.force:
        done = finished_run(Path(config.output_dir), experiment.id)
        if done:
            print(f"skipped: {done.folder} is finished (force=true runs it again)", flush=True)
            outcome.state, outcome.folder = "skipped", str(done.folder)
            return done.metric()
    _give_each_run_its_wandb_id(experiment)
    with ExitStack() as stack:
        run = experiment.launcher.share(lambda: stack.enter_context(experiment.prepare()), experiment.given)
        outcome.folder = str(run.folder)
        if run.finished:
            if not experiment.launcher.leads:
                return None
            print(f"already finished: {run.folder} (force=true trains it again)", flush=True)
            return run.metric()
        if experiment.launcher.leads:
            _begin(config, experiment, run)
        try:
            experiment.perform(run)
        except StopRequestedError:  # a KeyboardInterrupt as well, but main() reports it in other words
            raise
        except KeyboardInterrupt:
            continuing = _how_to_continue(run)
            if experiment.launcher.leads:
                run.log_end(f"error: {continuing}")
            raise KeyboardInterrupt(continuing) from None
        outcome.state = "finished"
        return run.metric() if experiment.launcher.leads else None


def _give_each_run_its_wandb_id(experiment: Experiment) -> None:
    several = sweeping() or os.environ.get("SLURM_ARRAY_TASK_COUNT", "1") != "1"
    if several and any(isinstance(part, Wandb) for part in experiment.logger.parts()):
        kept = without_run_id(os.environ, warns=experiment.launcher.leads)
        # From the environment of the process, which W&B reads itself; so a sweep warns once.
        for name in set(os.environ) - set(kept):
            del os.environ[name]


def _begin(config: DictConfig, experiment: Experiment, run: Run) -> None:
    """Records configuration and command in the run folder, and prints warnings and the folder."""
    write_atomically(run.folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True).encode())
    write_atomically(run.folder / "command.txt", _command().encode())
    restart = restart_warning(os.environ, resumes=bool(config.resume))
    notices = [*filter(None, (*experiment.caveats, *run.notices, *experiment.warnings(), restart))]
    for notice in notices:
        print(f"warning: {notice}", file=sys.stderr, flush=True)
    place = "; ".join(filter(None, (f"run {run.id}: {run.folder}", experiment.logger.place())))
    print(place, flush=True)
    run.log("\n".join([f"$ {_command().strip()}", _plan(config), *(f"warning: {text}" for text in notices), place]))


def _command() -> str:
    # The overrides of this job alone, so that a run of a sweep can be repeated alone.
    used = HydraConfig.get()
    added = [source.path for source in used.runtime.config_sources if source.provider == "command-line"]
    options = [word for path in added for word in ("--config-dir", path)]
    return shlex.join(["python", "train.py", *options, *used.overrides.task]) + "\n"


def _label(config: DictConfig) -> str:
    choices = HydraConfig.get().runtime.choices
    scale = "" if choices["scale"] == "full" else f"-{choices['scale']}"
    return f"{choices['compressor']}-{_model(config)}-{choices['dataset']}{scale}"


def _model(config: DictConfig) -> str:
    """Returns the model and its changed settings: resnet8 for model=resnet20 model.depth=8, or lstm-num_layers1."""
    used = HydraConfig.get()
    name = str(used.runtime.choices["model"])
    named, depth = re.fullmatch(r"(.*?)(\d*)", name), OmegaConf.select(config, "model.depth")
    shown = {"depth"} if named and named[2] and isinstance(depth, int) else set()
    if named and shown:
        name = f"{named[1]}{depth}"
    typed = (re.fullmatch(r"\+*model\.([a-z]\w*)=([\w.-]+)", word) for word in used.overrides.task)
    changes = [f"{found[1]}{found[2]}" for found in typed if found and found[1] not in shown]
    return "-".join([name, *changes[:_CHANGES]])


def _plan(config: DictConfig) -> str:
    """Summarizes the run in one line, before the data are read and the model is built."""
    choices = HydraConfig.get().runtime.choices
    names = ("epochs", "max_steps", "batch_size", "accumulation")
    epochs, most, batch, passes = (OmegaConf.select(config, f"training.{name}") for name in names)
    member = find_membership(os.environ)
    workers = OmegaConf.select(config, "cluster.workers")
    if workers is None:
        workers = member.size if member else WORKERS
    length = f"{epochs} epochs" if most is None else f"at most {most} steps"
    examples = f"{batch}" if passes == 1 else f"{batch} x {passes}"
    return (
        f"plan: {choices['compressor']} on {_model(config)} with {choices['dataset']}; {workers} workers "
        f"({choices['cluster']}) x {examples} examples a step; {length}; results in {config.output_dir}/"
    )


def _how_to_continue(run: Run) -> str:
    saved = list_checkpoints(run.checkpoints)
    if not saved:
        return "interrupted before the first checkpoint; the same command starts a new run"
    step = int(saved[-1].name.removeprefix("step-"))
    return f"interrupted; the same command with resume=auto continues after step {step}"
