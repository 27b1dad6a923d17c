"""Profiles by model, with measured pass times that replace assumed ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spardl.basics.errors import ConfigError
from spardl.clusters.profile import Profile


class MeasuredPasses(NamedTuple):
    """Measured times of the passes of a model.

    Attributes:
        path: File of the profile.
        digest: Digest of the file; it is part of the ids of jobs, because their results depend on its content.
        profile: Measured layer times of the model.
    """

    path: Path
    digest: str
    profile: Profile

    @property
    def words(self) -> str:
        """The measurement, for captions."""
        profile = self.profile
        return f"{profile.compute:.3g} s for {profile.batch} examples on {profile.device} ({self.path.name})"

    def checked(self, model: str, entries: int) -> MeasuredPasses:
        """Returns the passes; raises ConfigError if the profile has another number of parameters than the model."""
        found = sum(self.profile.entries)
        if found != entries:
            raise ConfigError(
                f"--profile {model}={self.path} has {found:,} parameters, but {model} has {entries:,}; "
                f"measure {model} with scripts/profile_model.py"
            )
        return self


def read_passes(words: Sequence[str]) -> dict[str, MeasuredPasses]:
    """Reads measured passes by model from the options --profile, each ``MODEL=FILE``.

    Raises:
        ConfigError: If a value has another form, repeats a model, or its file is not a profile.
    """
    found: dict[str, MeasuredPasses] = {}
    for word in words:
        model, equals, file = word.partition("=")
        if not (model and equals and file):
            raise ConfigError(f"--profile must be MODEL=FILE, as in vgg16=vgg16.json, got {word}")
        if model in found:
            raise ConfigError(f"--profile names {model} twice; give one file for each model")
        path = Path(file).resolve()
        profile = Profile.read(path)
        found[model] = MeasuredPasses(path, hashlib.sha256(path.read_bytes()).hexdigest()[:16], profile)
    return found
