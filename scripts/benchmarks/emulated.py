"""A model that computes by sleeping: the times and sizes of a profile, with real gradients and real communication.

If several workers share few cores, each is slowed down by the computation of the others and by its own communication,
unlike a worker with a GPU. Here, passes only sleep, so any number of workers fits on a machine.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spardl.clusters.profile import Profile
from spardl.diagnostics.commands.profile import Job


class _Pass(torch.autograd.Function):
    """A layer whose output does not depend on its weights, but whose weights get a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.gradient, ctx.seconds = torch.full_like(weight, 1e-3), backward
        time.sleep(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return outer[0], ctx.gradient, None, None


class _Layer(nn.Module):
    def __init__(self, entries: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(entries))
        self._seconds = (max(0.0, forward), max(0.0, backward))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = _Pass.apply(inputs, self.weight, *self._seconds)
        return outputs


class Emulated(nn.Module):
    """The layers of a profile, one after the other in the order of their first use.

    Args:
        profile: Layer times and sizes of the model.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        layers = sorted(profile.layers, key=lambda layer: layer.needed)
        needed = [0.0, *(layer.needed for layer in layers[1:]), profile.forward]
        # The backward pass comes by the other way round, and ends after the first layer.
        ready = [profile.backward, *(layer.ready for layer in layers[1:]), 0.0]
        forward = [later - sooner for sooner, later in pairwise(needed)]
        backward = [later - sooner for later, sooner in pairwise(ready)]
        sizes = [layer.entries for layer in layers]
        self.layers = nn.Sequential(*map(_Layer, sizes, forward, backward))

    def forward(self, inputs: Tensor) -> Tensor:
        """Passes the inputs on, after the forward pass's seconds."""
        passed: Tensor = self.layers(inputs)
        return passed


def from_profile(path: str, seconds: float | None = None) -> Job:
    """Returns the model of a profile, scaled to the given seconds of both passes."""
    profile = Profile.read(Path(path))
    if seconds is not None:
        profile = profile.scaled(seconds)
    inputs = torch.zeros(1, requires_grad=True)
    return Job(Emulated(profile), {"inputs": inputs}, lambda model, data: model(data["inputs"]).sum())
