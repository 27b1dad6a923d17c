"""Bayesian tuning of one number, such as the size of a fusion buffer, while training goes on."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from spardl.basics.checks import is_a
from spardl.basics.errors import ConfigError
from spardl.clusters.base import Cluster, gather_rows
from spardl.protocol.programs import derive_seed

__all__ = ["Trials", "Tuner", "check_installed"]


def check_installed() -> None:
    """Loads what tuning needs, which is no requirement of the package.

    Raises:
        ConfigError: if it is missing.
    """
    try:
        for name in ("optuna", "scipy"):
            importlib.import_module(name)
    except ImportError as fault:
        raise ConfigError(f"tuning needs two packages more ({fault}): pip install optuna scipy") from fault


class Tuner:
    """Seeks the point with the least seconds per step, by measuring one point after the other.

    Run ``proposal``, ``tell`` the seconds, and so on until ``done``. After the first, each proposal is the one with
    the largest expected improvement under a Gaussian process over the logarithms of point and time, after DeAR
    (arXiv 2302.12445), which tunes the buffer from 25 MB between 1 and 256. The process also estimates the noise.

    A proposal depends on the measurements so far, the settings and the proposal's number, on nothing else. So a tuner
    that continues from a ``state_dict`` proposes what it would have proposed without the break. With several workers,
    one owns the tuner and tells the others its proposals: other machines may round differently.

    Args:
        low: the least point, above 0.
        high: the greatest.
        start: the first to be measured.
        trials: points to measure.
        seed: of the search.

    Raises:
        ConfigError: if a setting cannot work, or optuna is not installed.
    """

    def __init__(self, low: float, high: float, start: float, trials: int, seed: int) -> None:
        if not all(is_a(float, value) and 0 < value < math.inf for value in (low, high, start)):
            raise ConfigError(f"tuner: low, high and start must be numbers above 0, got {low!r}, {high!r}, {start!r}")
        if not (low < high and low <= start <= high):
            raise ConfigError(f"tuner: low < high and low <= start <= high must hold, got {low!r}, {high!r}, {start!r}")
        for name, value, least in (("trials", trials, 1), ("seed", seed, 0)):
            if not is_a(int, value) or value < least:
                raise ConfigError(f"tuner.{name} must be a whole number, at least {least}, got {value!r}")
        check_installed()
        self._low, self._high = float(low), float(high)
        self._trials, self._seed = trials, seed
        self._points = [float(start)]
        self._seconds: list[float] = []

    @property
    def proposal(self) -> float:
        """The point to run now; after the end, the best."""
        return self.best if self.done else self._points[-1]

    @property
    def done(self) -> bool:
        """Whether all points have been measured."""
        return len(self._seconds) >= self._trials

    @property
    def best(self) -> float:
        """The point with the least seconds so far, the earliest of several; before any measurement, the start."""
        if not self._seconds:
            return self._points[0]
        return self._points[self._seconds.index(min(self._seconds))]

    def tell(self, seconds: float) -> None:
        """Takes the seconds per step that were measured at ``proposal``, and chooses the next.

        Raises:
            ValueError: if this is no time, or the tuner is done.
        """
        if self.done:
            raise ValueError("the tuner is done: it takes no further measurement")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds per step must be above 0 and finite, got {seconds!r}")
        self._seconds.append(float(seconds))
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        """The points, the current proposal included, and their times: plain data."""
        return {"points": list(self._points), "seconds": list(self._seconds)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave; more or fewer trials than before are allowed.

        Raises:
            ConfigError: if a point is outside of the bounds.
        """
        self._points, self._seconds = self.check_state(values)
        self._advance()

    def check_state(self, values: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        """Accepts values that ``load_state_dict`` can continue from; changes nothing.

        Returns:
            Points and their times.

        Raises:
            ConfigError: if a point is outside of the bounds.
            ValueError: if there are fewer points than times, or no point.
        """
        points, seconds = ([float(each) for each in values[name]] for name in ("points", "seconds"))
        if not all(self._low <= point <= self._high for point in points):
            raise ConfigError(
                f"tuner: a saved point is outside of [{self._low:g}, {self._high:g}]: keep low and high on resume"
            )
        if not points or len(points) < len(seconds):
            raise ValueError(f"the tuner has {len(points)} points for {len(seconds)} times")
        return points, seconds

    def _advance(self) -> None:
        """Sees to it that there is a point to measure."""
        number = len(self._seconds)
        if self.done or len(self._points) > number:
            return
        seed = derive_seed(self._seed, "tuner", number) % 2**32  # the sampler takes 32 bits
        self._points.append(_ask(self._points, self._seconds, self._low, self._high, seed))


def _ask(points: Sequence[float], seconds: Sequence[float], low: float, high: float, seed: int) -> float:
    """The next point after these.

    Each call builds a new study: a sampler that lasts has a random state and a cache that no checkpoint would hold.
    """
    with _quiet():
        from optuna import create_study, distributions, samplers, trial  # noqa: PLC0415

        space: dict[str, distributions.BaseDistribution] = {
            "point": distributions.FloatDistribution(low, high, log=True)
        }
        study = create_study(sampler=samplers.GPSampler(seed=seed, n_startup_trials=1))
        for point, value in zip(points, seconds, strict=True):
            # The noise of a time grows with the time; that of its logarithm is constant, as the process assumes.
            study.add_trial(trial.create_trial(params={"point": point}, distributions=space, value=math.log(value)))
        return float(study.ask(space).params["point"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps optuna's notes about itself off the user's screen, and leaves its settings as they were."""
    from optuna import exceptions, logging  # noqa: PLC0415

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", exceptions.ExperimentalWarning)
            yield
    finally:
        logging.set_verbosity(level)


# Trials of a number, such as the size of fusion groups, in the first steps of training.
#
# Source: DeAR (arXiv 2302.12445, section 4): each size is run for five steps, of which the first ones are not counted.
# Rank 0 measures and decides; all workers hear of it in the same step, that of the end included.


# A step measures the communication of the one before, too, so the first two after a change are of both.
_SKIPPED, _COUNTED = 2, 3


class Trials:
    """Measures steps and names the size to use; see ``Tuner`` for the arguments."""

    def __init__(self, low: float, high: float, start: float, trials: int, seed: int) -> None:
        self._tuner = Tuner(low, high, start, trials, seed)
        self._done = False
        self._began: float | None = None
        self._seconds: list[float] = []

    def disturb(self) -> None:
        """The running step is not like others, for something else is done in it."""
        self._began = None

    def next(self, cluster: Cluster) -> float | None:
        """Is called when a step begins, by all workers.

        Returns:
            The size to use from now on, equal on all workers; ``None`` if it stays as it is.
        """
        if self._done:
            return None
        now = cluster.seconds()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) < _SKIPPED + _COUNTED:
            return None
        return self._decide(cluster)

    def _decide(self, cluster: Cluster) -> float:
        if cluster.leads:
            self._tuner.tell(median(self._seconds[_SKIPPED:]))
        mine = torch.tensor([self._tuner.proposal, self._tuner.done], dtype=torch.float64)
        size, done = gather_rows(cluster, [mine for _ in cluster.local_ranks])[0].tolist()
        self._done = bool(done)
        self._seconds = []
        return float(size)

    @property
    def progress(self) -> tuple[bool, int]:
        """Whether trials are over, and steps that were measured since the last change: equal on all workers."""
        return self._done, len(self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """The finished trials; one that is under way begins anew."""
        return {"tuner": self._tuner.state_dict(), "done": self._done}

    def check_state(self, values: Any) -> None:
        """Accepts values that ``load_state_dict`` can continue from; changes nothing.

        Raises:
            KeyError: if something is missing.
            ValueError: if something is of another kind.
            ConfigError: if a size is outside of the bounds.
        """
        if not isinstance(values, Mapping) or type(values["done"]) is not bool:
            raise ValueError("trials have no 'done' of True or False")
        try:
            self._tuner.check_state(values["tuner"])
        except TypeError as error:
            raise ValueError(f"trials are broken: {error}") from error

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continues from what ``state_dict`` gave."""
        self._tuner.load_state_dict(values["tuner"])
        self._done = values["done"]
        self._seconds, self._began = [], None
