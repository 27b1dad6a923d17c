"""Bayesian tuning of one number during training, such as the size of a fusion group.

Source: DeAR (arXiv 2302.12445, section 4). Each value runs for five steps, of which the first two are not counted.
Rank 0 measures and decides; all workers receive the decision, and the end of the tuning, in the same step.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from spardl.basics.checks import is_number
from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster, gather_rows
from spardl.protocol.programs import derive_seed

__all__ = ["Trials", "Tuner", "check_installed"]


def check_installed() -> None:
    """Imports the optional packages that tuning needs.

    Raises:
        ConfigError: If a package is missing.
    """
    try:
        for name in ("optuna", "scipy"):
            importlib.import_module(name)
    except ImportError as fault:
        raise ConfigError(f"tuning needs optuna and scipy ({fault}); run: pip install optuna scipy") from fault


class Tuner:
    """Searches for the value of a setting (a point) with the shortest step time, by measuring one value after another.

    Alternate between ``proposal`` and ``tell`` until ``done``. After the first point, each proposal is the one with the
    largest expected improvement under a Gaussian process over the logarithms of point and time. This follows DeAR
    (arXiv 2302.12445), which starts at a buffer of 25 MB and searches from 1 to 256 MB. The Gaussian process also
    estimates the noise of the measurements.

    A proposal depends only on the previous measurements, the settings and the number of the proposal. A tuner that
    continues from a ``state_dict`` therefore proposes the same points as without the interruption. With several
    workers, one owns the tuner and sends its proposals to the others, because machines may round differently.

    Args:
        low: Smallest value to try, above 0 (such as a size in megabytes).
        high: Largest value to try, in the same unit (such as megabytes).
        start: First value to measure, in the same unit (such as megabytes).
        trials: Number of values (points) to measure.
        seed: Seed of the random search.

    Raises:
        ConfigError: If a setting is invalid, or optuna is not installed.
    """

    def __init__(self, low: float, high: float, start: float, trials: int, seed: int) -> None:
        if not all(is_number(float, value) and 0 < value < math.inf for value in (low, high, start)):
            raise ConfigError(
                f"tuner: low, high and start must be numbers above 0, got low={low!r}, high={high!r}, start={start!r}"
            )
        if not (low < high and low <= start <= high):
            raise ConfigError(
                f"tuner: low must be below high, and start from low to high, got low={low!r}, high={high!r}, "
                f"start={start!r}"
            )
        for name, value, least in (("trials", trials, 1), ("seed", seed, 0)):
            if not is_number(int, value) or value < least:
                raise ConfigError(f"tuner.{name} must be an integer, at least {least}, got {value!r}")
        check_installed()
        self._low, self._high = float(low), float(high)
        self._trials, self._seed = trials, seed
        self._points = [float(start)]
        self._seconds: list[float] = []

    @property
    def proposal(self) -> float:
        """Value (point) to measure next; after the last measurement, the fastest one."""
        return self.best if self.done else self._points[-1]

    @property
    def done(self) -> bool:
        """Whether all points have been measured."""
        return len(self._seconds) >= self._trials

    @property
    def best(self) -> float:
        """Value (point) with the shortest time so far; before any measurement, ``start``."""
        if not self._seconds:
            return self._points[0]
        return self._points[self._seconds.index(min(self._seconds))]

    def tell(self, seconds: float) -> None:
        """Records the ``seconds`` per step that were measured at ``proposal``, and chooses the next point.

        Raises:
            ValueError: If ``seconds`` is not finite and above 0, or the tuner is done.
        """
        if self.done:
            raise ValueError(f"tell() was called after the last of {self._trials} trials; check done before tell()")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds per step must be above 0 and finite, got {seconds!r}")
        self._seconds.append(float(seconds))
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        """Returns the points, including the current proposal, and their times as plain data."""
        return {"points": list(self._points), "seconds": list(self._seconds)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Loads ``values`` that ``state_dict`` returned; the number of trials may have changed.

        Raises:
            ConfigError: If a point is outside the bounds.
        """
        self._points, self._seconds = self.check_state(values)
        self._advance()

    def check_state(self, values: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        """Checks that ``load_state_dict`` can load ``values``, without changing anything.

        Returns:
            Points and their times.

        Raises:
            ConfigError: If a point is outside the bounds.
            ValueError: If there are fewer points than times, or no point.
        """
        points, seconds = ([float(each) for each in values[name]] for name in ("points", "seconds"))
        if not all(self._low <= point <= self._high for point in points):
            raise ConfigError(
                f"tuner: a saved point is outside [{self._low:g}, {self._high:g}]; keep low and high when resuming"
            )
        if not points or len(points) < len(seconds):
            raise ValueError(
                f"tuner must have a point for each measured time, got {len(points)} points and {len(seconds)} times"
            )
        return points, seconds

    def _advance(self) -> None:
        number = len(self._seconds)
        if self.done or len(self._points) > number:
            return
        seed = derive_seed(self._seed, "tuner", number) % 2**32  # the sampler accepts 32 bits
        self._points.append(_ask(self._points, self._seconds, self._low, self._high, seed))


def _ask(points: Sequence[float], seconds: Sequence[float], low: float, high: float, seed: int) -> float:
    """Returns the point to measure after ``points``."""
    # Each call creates a new study: checkpoints would not contain the random state and cache of a persistent sampler.
    with _quiet():
        from optuna import create_study, distributions, samplers, trial  # noqa: PLC0415

        space: dict[str, distributions.BaseDistribution] = {
            "point": distributions.FloatDistribution(low, high, log=True)
        }
        study = create_study(sampler=samplers.GPSampler(seed=seed, n_startup_trials=1))
        for point, value in zip(points, seconds, strict=True):
            # The noise of a time grows with the time. The process assumes constant noise, as the logarithm has.
            study.add_trial(trial.create_trial(params={"point": point}, distributions=space, value=math.log(value)))
        return float(study.ask(space).params["point"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences optuna's log messages and warnings, without changing its settings permanently."""
    from optuna import exceptions, logging  # noqa: PLC0415

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", exceptions.ExperimentalWarning)
            yield
    finally:
        logging.set_verbosity(level)


# Trials in the first steps of training.


# Number of skipped and of counted steps per value: a step contains communication of the previous step, so the first two
# steps after a change mix two values.
_SKIPPED, _COUNTED = 2, 3


class Trials:
    """Runs training steps with different values of a setting, and finds the fastest one with a ``Tuner`` on rank 0.

    Args:
        low: Smallest value to try, above 0 (such as a size in megabytes).
        high: Largest value to try, in the same unit (such as megabytes).
        start: First value to measure, in the same unit (such as megabytes).
        trials: Number of values to measure.
        seed: Seed of the random search.
    """

    def __init__(self, low: float, high: float, start: float, trials: int, seed: int) -> None:
        self._tuner = Tuner(low, high, start, trials, seed)
        self._done = self._begun = False
        self._step_start: float | None = None
        self._seconds: list[float] = []

    def skip_step(self) -> None:
        """Excludes the current step from the measurements, for example because it contains other work."""
        self._step_start = None

    def next(self, cluster: Cluster) -> float | None:
        """Counts a step that begins; returns a new value after enough steps with the last one.

        All workers must call this in every step.

        Args:
            cluster: Cluster that runs the workers.

        Returns:
            The value to use from now on (such as megabytes), equal on all workers; ``None`` if it does not change.
        """
        if self._done:
            return None
        now = cluster.seconds()
        # Counts every step, also a skipped one: workers skip different steps, but must decide in the same one.
        if self._begun:
            self._seconds.append(math.nan if self._step_start is None else now - self._step_start)
        self._begun, self._step_start = True, now
        if len(self._seconds) < _SKIPPED + _COUNTED:
            return None
        return self._decide(cluster)

    def _decide(self, cluster: Cluster) -> float:
        found = [each for each in self._seconds[_SKIPPED:] if not math.isnan(each)]
        if cluster.leads and found:  # otherwise all were skipped, and the same value is measured again
            self._tuner.tell(median(found))
        mine = torch.tensor([self._tuner.proposal, self._tuner.done], dtype=torch.float64)
        size, done = gather_rows(cluster, [mine for _ in cluster.local_ranks])[0].tolist()
        self._done = bool(done)
        self._seconds = []
        return float(size)

    @property
    def progress(self) -> tuple[bool, int]:
        """Whether all trials are done, and the number of steps measured with the current value.

        Both are equal on all workers.
        """
        return self._done, len(self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """Returns the results of the finished trials; after loading, the current trial starts again."""
        return {"tuner": self._tuner.state_dict(), "done": self._done}

    def check_state(self, values: Any) -> None:
        """Checks that ``load_state_dict`` can load ``values``, without changing anything.

        Raises:
            KeyError: If a value is missing.
            ValueError: If a value has the wrong type.
            ConfigError: If a saved group size is outside the tuner's bounds.
        """
        if not isinstance(values, Mapping) or type(values["done"]) is not bool:
            raise ValueError("'trials' must be a dict whose 'done' is True or False")
        try:
            self._tuner.check_state(values["tuner"])
        except TypeError as error:
            raise ValueError(f"'trials' is malformed: {error}") from error

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Loads ``values`` that ``state_dict`` returned."""
        self._tuner.load_state_dict(values["tuner"])
        self._done = values["done"]
        self._seconds, self._begun, self._step_start = [], False, None
