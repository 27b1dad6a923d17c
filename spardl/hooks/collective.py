"""The function :func:`all_reduce`, which averages a single tensor over all workers and measures the cost."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import AVERAGED_DTYPES, check_bool, check_integer
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.averager import Meter, Stats
from spardl.hooks.choosing import choose_method
from spardl.method import provenance
from spardl.method.method import Method
from spardl.method.moving import resolve_momentum
from spardl.method.names import MethodName
from spardl.method.provenance import method_settings
from spardl.method.refusals import NonFiniteCounts, NonFiniteReports
from spardl.method.registry import check_averages_gradients
from spardl.vector.flat import write
from spardl.vector.layout import Layout

__all__ = ["Reduced", "all_reduce"]


class Reduced(NamedTuple):
    """Result of :func:`all_reduce`.

    Attributes:
        average: Average of the tensors of all workers, of the same shape, bit-identical on all workers.
        residual: Part of this worker's tensor that was not sent, of the same shape. Add it to the next tensor.
        cost: Communication statistics of this worker.
    """

    average: Tensor
    residual: Tensor
    cost: Stats


def all_reduce(
    tensor: Tensor,
    method: MethodName | str | Method = "spardl",
    *,
    group: Any = None,
    step: int = 0,
    compare: bool = True,
    **options: Any,
) -> Reduced:
    """Averages a tensor over all workers; all must call this, with tensors of equal shape and dtype.

    Args:
        tensor: Floating-point tensor of any shape; not modified.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`Method`. Calls share no state.
        group: Process group; ``None`` for the default group. Its timeout limits every wait.
        step: Number of the call, from 0, equal on all workers. It seeds random choices and selects the stage of a
            warm-up.
        compare: Whether workers first compare their arguments, and all raise an error if they differ. This takes
            ceil(log2 P) additional rounds of 32 bytes, which ``cost`` does not include.
        **options: Options of the method, for example ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The average, this worker's residual and the cost.

    Raises:
        ConfigError: If the method or an option is unknown or does not support the number of workers, or if the dtype of
            the tensor is not supported; also, on all workers, if their arguments differ.
        PeerError: If another worker is lost or does not answer in time.

    Example:
        >>> reduced = spardl.all_reduce(torch.tensor([3.0, -1.0, 0.5, -4.0]), "spardl", density=0.5)
        >>> reduced.average
        tensor([ 3.,  0.,  0., -4.])
        >>> reduced.residual
        tensor([ 0.0000, -1.0000,  0.5000,  0.0000])
    """
    _check(tensor, step, compare)
    made = resolve_momentum(choose_method(method, options), None)
    check_averages_gradients(made.compressor, made.momentum, "all_reduce()")
    cluster = ProcessGroupCluster(group, tensor.device)
    made.communicator.check_workers(cluster.size)
    state = made.init_state(Layout.of([tensor.shape]), tensor.dtype, tensor.device)
    state.step = step  # seeds random choices, and selects the stage of a warm-up
    meter = Meter(cluster.ledgers[0], cluster.size)
    # A worker with other arguments would send messages of another size, and all would hang or crash.
    if compare:
        facts = {**method_settings(made), "handle": "all_reduce", "step": str(step)}
        facts |= {"shape": str(tuple(tensor.shape)), "dtype": str(tensor.dtype).removeprefix("torch.")}
        cluster.run_uncounted([provenance.compare(cluster.local_workers[0], facts, cluster.device)])
    with torch.no_grad():
        # Resolves the lazy negation of views, such as the imaginary part of a conjugate.
        made.accumulate(tensor.detach().resolve_neg().reshape(-1), state)
        (total,) = cluster.run([made.average(cluster.local_workers[0], state)])
        # The result may be sparse, or share memory with buffers of the method.
        average = torch.empty_like(state.memory)
        write(total, average)
        residual = state.memory.clone() if made.residual.remembers else torch.zeros_like(average)
    state.catch_up()
    line = NonFiniteReports(cluster.size).notice({cluster.local_ranks[0]: NonFiniteCounts.of([state])})
    if line:
        warnings.warn(f"spardl: {line}.", stacklevel=2)
    meter.step()
    cost = meter.stats(average.nbytes, state.refused)
    return Reduced(average.view(tensor.shape), residual.view(tensor.shape), cost)


def _check(tensor: Tensor, step: int, compare: bool) -> None:
    check_integer("step", step, least=0)
    check_bool("compare", compare)
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"all_reduce() averages a tensor, got a {type(tensor).__name__}; convert it with torch.tensor(...)"
        )
    if tensor.dtype not in AVERAGED_DTYPES:
        way = "pass torch.view_as_real(tensor)" if tensor.is_complex() else "convert it with tensor.float()"
        raise ConfigError(
            f"all_reduce() averages floating-point tensors of at least 16 bits, got {tensor.dtype}; {way}"
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"all_reduce() averages dense tensors, got one of layout {tensor.layout}; convert it with tensor.to_dense()"
        )
    if tensor.is_meta:
        raise ConfigError(
            "all_reduce() averages tensors with values, got one on the meta device; create it on cpu or cuda"
        )
