"""Trains a model with sparse gradients: composes the configuration, builds the parts, starts the workers."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

# Workers are forked from this process: no library may start threads or touch a GPU in it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Who has lost a peer says so in one line; torch would add a stack of its own.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# Hydra would print its own traceback and exit with 1.
os.environ["HYDRA_FULL_ERROR"] = "1"

if __name__ == "__main__":
    # One that comes while the rest is imported would kill this process; main() listens.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT})
    _limit, _refused = resource.getrlimit(resource.RLIMIT_AS)[0], ""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    # The next file that is opened would get the number of a closed stream, and the output.
    if sys.stdout is None or sys.stderr is None:
        _closed = "output" if sys.stdout is None else "error"
        _refused = f"standard {_closed} is closed; redirect it to a file or to /dev/null"
    elif _limit != resource.RLIM_INFINITY and "SPARDL_LIMIT_TRIED" not in os.environ:
        # The imports below can abort a process that is short of memory, so another one tries them.
        _words, _tried = [sys.executable, __file__, "--version"], {**os.environ, "SPARDL_LIMIT_TRIED": "1"}
        if subprocess.run(_words, env=_tried, capture_output=True, check=False).returncode:
            _refused = f"ulimit -v allows {_limit >> 20} MiB, too few to load torch; use ulimit -v unlimited"
    if _refused:
        print(f"error: {_refused}", file=sys.stderr or sys.stdout, flush=True)
        os._exit(2)

import hydra
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError

from spardl.basics.errors import ConfigError, DataError, SpardlError, StoppedError
from spardl.basics.files import read_yaml, write_atomically
from spardl.clusters.workers.membership import find_membership, leads, what_a_restart_needs
from spardl.clusters.workers.processes import ASKING, AskedToStopError, leave, listening
from spardl.communicators.base import Communicator
from spardl.compressors.base import Compressor
from spardl.method.method import Method
from spardl.method.momentum import AutoMomentum, Momentum
from spardl.method.moving import definite
from spardl.method.residuals import Residual
from spardl.method.warmup import Warmup
from spardl.schedules.engine import Schedule
from spardl.vector.kernels import compiled
from spardl.vector.wire import Wire
from tasks.datasets.base import Dataset
from trainer.checkpoint import list_checkpoints
from trainer.display import announced
from trainer.experiment import Experiment
from trainer.launch import Launcher
from trainer.learner import Plan, Settings, sample_optimizer
from trainer.lr import LrSchedule
from trainer.memory import check_address_space
from trainer.observers import Logger, Wandb, without_run_id
from trainer.runs import Run, UnfinishedError, finished_run
from trainer.targets import Kind, check_switches, importable, public, settled, whole
from trainer.task import Task

CONFIGURATIONS = Path(__file__).resolve().parent / "conf"
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
# Stopped as asked, with everything saved: sysexits.h's code of a failure after which one tries again.
STOPPED = 75
# What each node may be made of: a configuration, or who types one, can have nothing else imported or called.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "cluster": Kind(Launcher, ("trainer",)),
        "communicator": Kind(Communicator),
        "compressor": Kind(Compressor),
        "dataset": Kind(Dataset, ("tasks",), functions=True),
        "logger": Kind(
            Logger, ("trainer",), inside={name: Kind(Logger, ("trainer",)) for name in ("wandb", "csv", "tensorboard")}
        ),
        "lr_schedule": Kind(LrSchedule, ("trainer",)),
        "model": Kind(nn.Module, ("tasks",), functions=True, partial=True),
        "momentum": Kind(Momentum),
        "optimizer": Kind(torch.optim.Optimizer, ("torch.optim",), partial=True),
        "residual": Kind(Residual),
        "schedule": Kind(Schedule),
        "task": Kind(Task, ("tasks",), functions=True),
        "warmup": Kind(Warmup, inside={"communicator": Kind(Communicator)}),
        "wire": Kind(Wire),
    }
)


def _offer_points() -> None:
    """Makes Hydra's group ``point`` of one file: choices too small for a file each."""
    for name, point in OmegaConf.load(CONFIGURATIONS / "points.yaml").items():
        ConfigStore.instance().store(str(name), point, group="point", package="_global_", provider="points.yaml")


_offer_points()


def build(config: DictConfig) -> Experiment:
    """Makes the parts that a configuration names, and checks that they fit together.

    Raises:
        ConfigError: if they do not, or a value is out of range.
    """
    plain: dict[str, Any] = whole(public(OmegaConf.to_container(config, resolve=True)), KINDS)
    quiet = not leads(os.environ)
    with announced("preparing the data", quiet=quiet):
        dataset = build_dataset(plain)
    with announced("checking that the parts fit together", quiet=quiet):
        parts = build_plan(plain, dataset), _make(plain, "cluster"), _make(plain, "logger")
        return Experiment(plain, _label(), *parts, tuple(filter(None, [getattr(dataset, "caveat", None)])), _recall)


def _recall(folder: Path) -> dict[str, Any]:
    """The configuration of the run in a folder, resolved, as plain data.

    Raises:
        ConfigError: if it cannot be read.
    """
    file = folder / "config.yaml"
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(StringIO(read_yaml(file))))  # train() stored it resolved
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"start_from: {file}, the configuration of its run, cannot be read ({error})") from error
    return plain if isinstance(plain, dict) else {}


def build_plan(plain: Mapping[str, Any], dataset: Any) -> Plan:
    """Makes what a resolved configuration trains on a data set, and how.

    Raises:
        ConfigError: if its parts do not fit together, or a value is out of range.
    """
    make = partial(_make, plain)
    task, method = make("task", model=make("model"), dataset=dataset), build_method(plain)
    optimizer, schedule = make("optimizer"), make("schedule")
    if isinstance(method.momentum, AutoMomentum):
        method = definite(method, None if schedule.alone else sample_optimizer(optimizer))
    return Plan(task, method, optimizer, make("lr_schedule"), schedule, _settings(plain["training"]))


def build_dataset(plain: Mapping[str, Any]) -> Any:
    """Reads, or generates, the data set that a resolved configuration names.

    Raises:
        DataError: if it is missing or not what it should be.
        ConfigError: if a value is out of range.
    """
    try:
        return _make(plain, "dataset")
    except DataError as error:
        if "stand_in" not in plain["dataset"]:
            raise
        raise DataError(f"{error}; scale.stand_in=true tries things out on data of the same shapes") from error


def build_method(plain: Mapping[str, Any]) -> Method:
    """Makes the method that a resolved configuration names.

    Raises:
        ConfigError: if its parts do not fit together, or a value is out of range.
    """
    plain = settled(plain)
    return Method(
        *(_make(plain, part) for part in ("compressor", "communicator", "residual", "momentum", "warmup", "wire"))
    )


def _make(plain: Mapping[str, Any], name: str, **extra: Any) -> Any:
    """Instantiates one node; what it complains of becomes one line that names the node."""
    node = plain.get(name) or {}
    KINDS[name].check(name, node)
    check_switches(name, node)
    try:
        return instantiate(importable(node), **extra, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, SpardlError):
            raise cause from None
        given = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
        raise ConfigError(f"{name} cannot be made with {given}: {type(cause).__name__}: {cause}") from cause


def _settings(node: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**node)
    except TypeError as error:
        raise ConfigError(f"training: {error}") from error


def _command() -> str:
    """What to type to have this run alone, after a sweep, too."""
    return shlex.join(["python", "train.py", *HydraConfig.get().overrides.task]) + "\n"


def _label() -> str:
    choices = HydraConfig.get().runtime.choices
    scale = "" if choices["scale"] == "full" else f"-{choices['scale']}"
    return f"{choices['compressor']}-{choices['model']}-{choices['dataset']}{scale}"


def train(config: DictConfig) -> float | None:
    """Runs one configuration; in a sweep, or when Slurm starts its job again, not one that is finished.

    Returns:
        The metric of the last evaluation, which Hydra's sweepers compare; ``None`` where another process leads.
    """
    if _sweeping() and find_membership(os.environ):
        raise ConfigError("a sweep (-m) starts its workers itself; start it without torchrun or srun")
    experiment = build(config)
    if not isinstance(config.force, bool):
        raise ConfigError(f"force must be true or false, got {config.force!r}")
    if (_sweeping() or os.environ.get("SLURM_RESTART_COUNT", "0") != "0") and not config.force:
        done = finished_run(Path(config.output_dir), experiment.id)
        if done:
            print(f"skipped: {done.folder} is finished (force=true runs it again)", flush=True)
            return done.metric()
    several = _sweeping() or os.environ.get("SLURM_ARRAY_TASK_COUNT", "1") != "1"
    if several and any(isinstance(part, Wandb) for part in experiment.logger.parts()):
        kept = without_run_id(os.environ, tells=experiment.launcher.leads)
        # Of the whole process, since W&B reads it itself; so a sweep warns once.
        for name in set(os.environ) - set(kept):
            del os.environ[name]
    with ExitStack() as stack:
        run = experiment.launcher.share(lambda: stack.enter_context(experiment.prepare()), experiment.given)
        if experiment.launcher.leads:
            write_atomically(run.folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True).encode())
            write_atomically(run.folder / "command.txt", _command().encode())
            restart = what_a_restart_needs(os.environ, resumes=bool(config.resume))
            for notice in filter(None, (*experiment.caveats, *run.notices, *experiment.doubts(), restart)):
                print(f"warning: {notice}", file=sys.stderr, flush=True)
            print("; ".join(filter(None, (f"run {run.id}: {run.folder}", experiment.logger.place()))), flush=True)
        try:
            experiment.perform(run)
        except AskedToStopError:
            raise
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_kept(run)) from None
        return run.metric() if experiment.launcher.leads else None


def _kept(run: Run) -> str:
    """What an interruption leaves of a run."""
    saved = list_checkpoints(run.checkpoints)
    if not saved:
        return "interrupted before the first checkpoint; the same command begins anew"
    step = int(saved[-1].name.removeprefix("step-"))
    return f"interrupted; the same command with resume=auto continues after step {step}"


def main() -> int:
    """Composes the configuration from the command line and trains, once or in a sweep.

    Returns:
        The exit code.
    """
    torch.set_num_threads(1)
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGURATIONS), config_name="train")
    def job(config: DictConfig) -> float | None:
        if stopped := [code for code in codes if code in (STOPPED, INTERRUPTED)]:
            raise UnfinishedError(stopped[0])  # what asked one run of a sweep to stop means all of them
        try:
            value = _attempt(config)
        except UnfinishedError as unfinished:
            codes.append(unfinished.code)
            if _sweeping():
                raise
            return None
        codes.append(0)
        return value

    try:
        with listening(lambda: True, _stop_early, ASKING):
            _check_words(sys.argv[1:])
            check_address_space()
            with _quick():
                job()
    except UnfinishedError as unfinished:
        if not codes:  # it ran in another process, where a launcher had put it
            codes.append(_complain("a run of the sweep failed, see above", unfinished.code))
    except (HydraException, OmegaConfBaseException, OSError, ValueError, YAMLError) as error:
        return _complain(_plainly(error), BAD_INPUT)
    except AskedToStopError:
        return _say("stopped, as asked, before training began", STOPPED)
    except KeyboardInterrupt as interrupt:
        return _complain(str(interrupt) or "interrupted before training began", INTERRUPTED)
    for code in (STOPPED, INTERRUPTED):
        if code in codes:
            return code
    if len(codes) > 1 and any(codes):
        return _complain(f"{sum(map(bool, codes))} of the sweep's {len(codes)} runs failed, see above", FAILED)
    return max(codes, default=0)


class _QuickLoader(ConfigLoaderImpl):
    """Hydra's own, without what Hydra does twice or for nothing."""

    _single = "hydra.mode=RUN"  # what Hydra adds to the words of a run that is no sweep
    _kept: Mapping[tuple[str | None, ...], DictConfig] = MappingProxyType({})

    def get_group_options(self, group_name: str, *what: Any, **more: Any) -> list[str]:
        """Without a copy of all that Hydra knows, which only overrides could change: for ``--help``, it makes many."""
        who: Any = super() if "overrides" in more else self.repository
        return list(who.get_group_options(group_name, *what, **more))

    def load_configuration(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, *shell: bool, **more: bool
    ) -> DictConfig:
        """Hydra composes to learn whether this is a sweep, and if not, once more: what it has by then, serves."""
        words, (kept, self._kept) = (config_name, *overrides), (self._kept, {})
        if more.get("validate_sweep_overrides") is False:
            with suppress(HydraException):
                composed = super().load_configuration(config_name, overrides, RunMode.RUN, *shell, **more)
                self._kept = {(*words, self._single): composed}
                return composed
        elif words in kept and kept[words].hydra.mode is None:
            self.validate_sweep_overrides_legal(OverridesParser.create().parse_overrides(overrides), run_mode, True)
            kept[words].hydra.mode = RunMode.RUN
            kept[words].hydra.overrides.hydra.append(self._single)
            return kept[words]
        return super().load_configuration(config_name, overrides, run_mode, *shell, **more)


class _QuickHydra(GlobalHydra):
    """Nothing public names the loader to use, but Hydra announces itself here before it uses its own."""

    def initialize(self, hydra: Any) -> None:
        """Gives it the quick one."""
        super().initialize(hydra)
        hydra.config_loader = _QuickLoader(hydra.config_loader.config_search_path)


@contextmanager
def _quick() -> Iterator[None]:
    before = GlobalHydra.instance()
    GlobalHydra.set_instance(type.__call__(_QuickHydra))  # a new one, though singletons are not made twice
    try:
        yield
    finally:
        GlobalHydra.set_instance(before)


def _check_words(words: Sequence[str]) -> None:
    """Refuses what Hydra would answer with its usage or a traceback, or would run itself."""
    parser: Any = get_args_parser()
    parser.error = _refuse_option
    parser.parse_args(words)
    compiled(torch.empty(0))  # refuses unknown values of SPARDL_KERNELS before there is a folder
    _check_sweep([word for word in words if not word.startswith("-")])
    for word in words:
        if word.lstrip("+~").startswith("hydra") and "_target_" in word:
            raise ConfigError(f"{word} cannot be used: what Hydra itself is made of stays as it is")


def _check_sweep(words: Sequence[str]) -> None:
    """Refuses an override that makes a sweep of no runs; Hydra reports those that cannot be parsed."""
    for word in words:
        empty = False
        with suppress(HydraException, ValueError):
            override = OverridesParser.create().parse_override(word)
            empty = override.is_sweep_override() and next(override.sweep_iterator(), None) is None
        if empty:
            raise ConfigError(f"{word} has no values, so the sweep has no runs; range(A,B) leaves B out")


def _refuse_option(message: str) -> NoReturn:
    raise ConfigError(f"{message}; train.py --help lists what there is")


def _plainly(error: Exception) -> Exception | str:
    """Says of a word that Hydra cannot read what it should look like, where Hydra tells how it was read."""
    if not isinstance(error, OverrideParseException):
        return error
    return f"{error.override!r} cannot be read: write GROUP=CHOICE or KEY=VALUE, and unusual values as KEY='\"VALUE\"'"


def _stop_early() -> NoReturn:
    raise AskedToStopError


def _attempt(config: DictConfig) -> float | None:
    """Runs one configuration, and says at once what went wrong: one failed run does not end a sweep.

    Raises:
        UnfinishedError: if it failed or was stopped.
    """
    try:
        return train(config)
    except StoppedError as stopped:
        code = _say(
            f"{stopped}; the same command with resume=auto continues", INTERRUPTED if stopped.interrupted else STOPPED
        )
    except (SpardlError, OmegaConfBaseException, OSError) as error:
        which = f"{' '.join(HydraConfig.get().overrides.task)}: " if _sweeping() else ""
        code = _complain(f"{which}{error}", FAILED if _is_failure(error) else BAD_INPUT)
    raise UnfinishedError(code)


def _is_failure(error: Exception) -> bool:
    return isinstance(error, SpardlError) and not isinstance(error, ConfigError)


def _sweeping() -> bool:
    sweeping: bool = HydraConfig.get().mode == RunMode.MULTIRUN
    return sweeping


def _complain(error: BaseException | str, code: int) -> int:
    return _say("error: " + " ".join(str(error).split("Config search path")[0].split()), code)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def _leave(code: int) -> NoReturn:
    """Ends this process; the slow way, if a launcher keeps a pool for further runs, which nobody else would end."""
    workers = multiprocessing.get_context("fork").Process
    if any(not isinstance(child, workers) for child in multiprocessing.active_children()):
        sys.exit(code)
    leave(code)


if __name__ == "__main__":
    _leave(main())
