"""The collective alone: the average of a tensor over all workers, and what it cost."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.clusters import ProcessGroupCluster
from spardl.errors import ConfigError
from spardl.flat import write
from spardl.layout import Layout
from spardl.method import Method
from spardl.recipes import make_method
from spardl.refusals import Refusals, Refused
from spardl.stats import Stats

__all__ = ["Reduced", "all_reduce"]


class Reduced(NamedTuple):
    """What :func:`all_reduce` found.

    Attributes:
        average: of the tensor's shape, bit-identical on all workers.
        residual: of the tensor's shape: what of this worker's tensor is in no average yet. Add it to the next tensor.
        cost: what this worker sent and spent.
    """

    average: Tensor
    residual: Tensor
    cost: Stats


def all_reduce(
    tensor: Tensor,
    method: str | Method = "spardl",
    *,
    group: Any = None,
    step: int = 0,
    **options: Any,
) -> Reduced:
    """Averages a tensor over all workers, who call this with tensors of one shape and type.

    Args:
        tensor: floating-point, of any shape; stays as it is.
        method: a name (``spardl.method_names()``), or a :class:`Method`. It begins anew with each call.
        group: a process group; ``None`` for the default one. Its timeout bounds every wait.
        step: number of the call, counted from 0 and equal on all workers; methods that draw random numbers draw others
            in each step, those with a warm-up are past it some time.
        **options: of the method, for instance ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The average, this worker's residual, and the cost.

    Raises:
        ConfigError: if the method or an option is unknown, or does not fit so many workers, or the tensor is of another
            type.
        PeerError: if another worker is lost, or does not answer in time.

    Example:
        >>> reduced = spardl.all_reduce(torch.tensor([3.0, -1.0, 0.5, -4.0]), "spardl", density=0.5)
        >>> reduced.average
        tensor([ 3.,  0.,  0., -4.])
        >>> reduced.residual
        tensor([ 0.0000, -1.0000,  0.5000,  0.0000])
    """
    if not tensor.is_floating_point():
        raise ConfigError(f"all_reduce() averages floating-point tensors, got {tensor.dtype}")
    made = make_method(method, **options)
    cluster = ProcessGroupCluster(group, tensor.device)
    made.communicator.check_workers(cluster.size)
    state = made.init_state(Layout.of([tensor.shape]), tensor.dtype, tensor.device)
    state.step = step
    with torch.no_grad():
        made.accumulate(tensor.detach().reshape(-1), state)
        (total,) = cluster.run([made.average(cluster.local_workers[0], state)])
        average = torch.empty_like(state.memory)
        write(total, average)
        residual = state.memory.clone() if made.residual.remembers else torch.zeros_like(average)
    line = Refusals(cluster.size).notice({cluster.local_ranks[0]: Refused.of([state])})
    if line:
        warnings.warn(f"spardl: {line}.", stacklevel=2)
    cost = Stats.of(cluster.ledgers[0], 1, average.nbytes, cluster.size, state.refused)
    return Reduced(average.view(tensor.shape), residual.view(tensor.shape), cost)
