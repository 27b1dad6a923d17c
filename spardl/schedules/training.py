"""What a schedule is given to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from spardl.schedules.scaling import Scale
from spardl.vector.storage import Storage

__all__ = ["Training"]


class Training(NamedTuple):
    """What is trained.

    Attributes:
        model: whose passes are to be overlapped with communication.
        gradient: all its gradients.
        optimizer: of its parameters; ``None`` if somebody else uses the averages.
        clip_norm: largest 2-norm of the averaged gradient, or, where an optimizer's momentum is moved before
            compression, of each worker's own; ``None`` for any.
        scale: of the gradients, where a GradScaler changes it. All workers then agree in each step whether somebody's
            gradient overflowed, at the price of one byte from each to each in every group.
        find_unused: whether workers ask one another in every step which parameters nobody used; otherwise only until a
            step in which all used all.
        decay: the multiple of a parameter's weights that is added to its gradient; ``None``: the momentum's, for all.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> training = spardl.Training(model, spardl.FlatGradient(model.named_parameters()), optimizer)
        >>> cluster = spardl.SimulatedCluster(2, spardl.Network(alpha=50e-6, gbit=1))
        >>> synchronizer = spardl.Wfbp(bucket_mb=1).start(spardl.make_method("spardl"), cluster, training)
        >>> for local in range(2):  # the workers that this process plays
        ...     synchronizer.begin(local)
        ...     loss = model(torch.randn(5, 100)).square().mean()
        ...     synchronizer.before_backward(last=True)
        ...     loss.backward()
        ...     synchronizer.collect()
        >>> synchronizer.finish()
        >>> print(f"{synchronizer.kept} entries averaged, {cluster.ledgers[0].bytes_sent} bytes sent by each worker")
        10 entries averaged, 56 bytes sent by each worker
    """

    model: nn.Module | None
    gradient: Storage
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None = None
    scale: Scale | None = None
    find_unused: bool = False
    decay: Callable[[nn.Parameter], float] | None = None
