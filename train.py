"""Trains a model with sparse gradients: composes the configuration, builds the parts, starts the workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Workers are forked from this process: no library may start threads or touch a GPU in it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Hydra would print its own traceback and exit with 1.
os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spardl.errors import ConfigError, SpardlError
from spardl.files import write_atomically
from spardl.method import Method
from spardl.training.experiment import Experiment
from spardl.training.learner import Plan
from spardl.training.runs import finished_run
from spardl.training.settings import Settings

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def build(config: DictConfig) -> Experiment:
    """Makes the parts that a configuration names, and checks that they fit together.

    Raises:
        ConfigError: if they do not, or a value is out of range.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    make = {name: lambda name=name, **extra: _make(name, plain[name], **extra) for name in plain}
    method = Method(make["compressor"](), make["communicator"](), make["residual"]())
    launcher = make["cluster"]()
    method.communicator.check_workers(launcher.workers)
    plan = Plan(
        task=make["task"](model=make["model"](), dataset=make["dataset"]()),
        method=method,
        optimizer=make["optimizer"](),
        lr_schedule=make["lr_schedule"](),
        schedule=make["schedule"](),
        settings=Settings(**plain["training"]),
    )
    return Experiment(plain, _label(), plan, launcher, make["logger"]())


def _make(name: str, node: Any, **extra: Any) -> Any:
    """Instantiates one node; what it complains of becomes one line that names the node."""
    try:
        return instantiate(node, **extra, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, SpardlError):
            raise cause from None
        raise ConfigError(f"{name}: {type(cause).__name__}: {cause}") from cause


def _label() -> str:
    choices = HydraConfig.get().runtime.choices
    return f"{choices['compressor']}-{choices['model']}-{choices['dataset']}"


def train(config: DictConfig) -> None:
    """Runs one configuration; in a sweep, not one that is finished."""
    experiment = build(config)
    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    if sweeping and not config.force:
        done = finished_run(Path(config.output_dir), experiment.id)
        if done:
            print(f"skipped: {done.folder} is finished (force=true runs it again)", flush=True)
            return
    run = experiment.launcher.share(experiment.prepare)
    if experiment.launcher.leads:
        write_atomically(run.folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True).encode())
        print(f"run {run.id}: {run.folder}", flush=True)
    experiment.perform(run)


def main() -> int:
    """Composes the configuration from the command line and trains, once or in a sweep."""
    torch.set_num_threads(1)
    failures: list[str] = []

    @hydra.main(version_base="1.3", config_path="conf", config_name="train")
    def job(config: DictConfig) -> None:
        try:
            train(config)
        except SpardlError as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                raise
            # One failed run must not end the others.
            failures.append(" ".join(HydraConfig.get().overrides.task))
            print(f"error: {failures[-1]}: {error}", file=sys.stderr, flush=True)

    try:
        job()
    except (ConfigError, HydraException, OmegaConfBaseException, OSError) as error:
        return _complain(error, BAD_INPUT)
    except SpardlError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; the same command with resume=auto continues", INTERRUPTED)
    if failures:
        return _complain(f"{len(failures)} of the sweep's runs failed: {'; '.join(failures)}", FAILED)
    return 0


def _complain(error: BaseException | str, code: int) -> int:
    text = " ".join(str(error).split("Config search path")[0].split())
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
