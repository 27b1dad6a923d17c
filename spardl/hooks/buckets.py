"""DDP's own buckets as groups: gradients that are summed where DDP has them are not copied.

DDP forms its buckets anew before the second step of every process, in the order in which the first one completed
gradients on rank 0 (Li et al., PyTorch Distributed, VLDB 2020, section 4.2). A backend's sum depends on the place of
an entry, so training must not depend on what DDP happens to have in the first step of a process: the groups are
those that DDP forms after the very first step, a saved state has them, and where a bucket is none of them, gradients
are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.basics.weak import weakly
from spardl.clusters.base import Cluster, gather_rows
from spardl.hooks.averager import Named
from spardl.method.method import Method
from spardl.schedules import Dear, Schedule, Training
from spardl.schedules.engine import Engine
from spardl.schedules.fusion import Range, is_partition
from spardl.schedules.wfbp import InBackward

__all__ = [
    "AsGiven",
    "Buckets",
    "Formed",
    "as_saved",
    "check_averaged",
    "check_joined",
    "check_modules",
    "check_wrapped",
    "dense",
    "end_to_end",
    "joining",
    "pending",
    "unchanged",
    "views_of",
]


# What a model must not have, or do, to be averaged in DistributedDataParallel.


def check_wrapped(ddp: nn.Module) -> None:
    """Accepts a DistributedDataParallel that calls its hook with the same buckets on all workers.

    Args:
        ddp: the model.

    Raises:
        ConfigError: if it is none, is compiled, or leaves out buckets that this worker did not use.
    """
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise ConfigError(
            "attach() needs the DistributedDataParallel itself, and torch.compile() has wrapped it; call "
            "spardl.attach(ddp_model, ...) first, then torch.compile(ddp_model)"
        )
    if isinstance(ddp, FSDPModule):
        raise ConfigError(
            f"attach() needs a DistributedDataParallel, got a {type(ddp).__name__} that fully_shard() sharded; call "
            "spardl.attach_fsdp(model, ..., group=...)"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach() needs a DistributedDataParallel, got a {type(ddp).__name__}; without DDP use spardl.Synchronizer"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "with skip_all_reduce_unused_params=True DDP shows its hook no bucket that nobody used, and a step would "
            "not end; leave it out, as find_unused_parameters=True alone does what is needed"
        )


def check_modules(model: nn.Module, schedule: Schedule) -> None:
    """Accepts a model of modules whose gradients, and forward passes, are what a handle can deal with.

    Args:
        model: that was wrapped.
        schedule: of the handle.

    Raises:
        ConfigError: if it has sparse gradients, or is compiled where each of its modules is to wait.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} has sparse gradients; make it with sparse=False")
        if isinstance(schedule, Dear) and hasattr(module, "_orig_mod"):
            raise ConfigError(
                f"{name or 'the model'} is a wrapper that torch.compile() made, and what it compiled before would not "
                "wait for schedule=dear's updates; compile in place before it is wrapped in DDP, model.compile(), or "
                "use schedule=wfbp"
            )


def check_joined(ddp: nn.Module | None, before: object) -> None:
    """Accepts a backward pass of a model in DDP, in all steps of whose optimizer each worker has a part.

    Args:
        ddp: whose pass it is.
        before: what ``joining`` gave when the handle was made: torch does not take back what a ``join()`` sets.

    Raises:
        ConfigError: if workers may leave others alone (``ddp.join()``), and would be missed.
    """
    now = joining(ddp)
    uneven = getattr(now, "enable", False) and not getattr(now, "throw_on_early_termination", False)
    if uneven and now is not before:
        raise ConfigError(
            "with ddp.join() some workers make fewer steps, and with optimizer= each keeps a part of the optimizer's "
            "state, for all of them; give all workers as many batches (a DistributedSampler does, and "
            "join(throw_on_early_termination=True) sees to it), or leave optimizer= out, and use "
            'recipe="published" with schedule="wfbp"; after a join() block, wrap the model in DDP anew'
        )


def check_averaged(left_out: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Checks that the parameters that DDP does not average are still frozen.

    DDP averages the parameters that required gradients when it was made. Weights of the others differ between ranks as
    soon as an optimizer updates them.

    Args:
        left_out: names and parameters that DDP does not average.

    Raises:
        ConfigError: if one of them requires a gradient.
    """
    for name, parameter in left_out:
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} was unfrozen after the model was wrapped in DDP, which does not average its gradient, and "
                "ranks would drift apart; wrap the model in DDP after requires_grad_(True), with a new optimizer, and "
                "call attach() again"
            )


def joining(ddp: nn.Module | None) -> object:
    """How the last ``join()`` of a model in DDP was set, or is."""
    return getattr(ddp, "_join_config", None)


_LIMIT = 25 * 2**20
_FIRST = 2**20


@dataclass(frozen=True)
class AsGiven(Schedule):
    """Sends given groups during the backward pass.

    Args:
        partition: the groups, in flat order.
    """

    partition: tuple[Range, ...]

    name = "wfbp"

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """With these groups."""
        return InBackward(method, cluster, training, self.partition)


class Formed(NamedTuple):
    """In which order and in which groups gradients are averaged.

    Attributes:
        named: the parameters; flat order is the reverse of theirs.
        schedule: has the groups.
    """

    named: list[Named]
    schedule: Schedule


class Buckets:
    """Watches the first step of a model, and tells which buckets DDP forms after it.

    Args:
        ddp: the model.
        named: its parameters, in the order in which it has them.
    """

    def __init__(self, ddp: DistributedDataParallel, named: Sequence[Named]) -> None:
        # The model has the hook that has this.
        self._ddp, self._limits = ref(ddp), _limits_of(ddp)
        self._named = [pair for pair in named if pair.parameter.requires_grad]
        self._order: list[int] = []
        self._hooks = [
            pair.parameter.register_post_accumulate_grad_hook(weakly(self._arrive, number))
            for number, pair in enumerate(self._named)
        ]

    def _arrive(self, number: int, parameter: Tensor) -> None:
        ddp = self._ddp()
        if ddp is not None and ddp.require_backward_grad_sync:  # DDP does not look at other passes either
            self._order.append(number)

    def found(self, cluster: Cluster, shown: Iterable[nn.Parameter]) -> Formed:
        """DDP's buckets of the parameters as they came on rank 0; all workers must call this at once.

        Args:
            cluster: the workers.
            shown: the parameters that DDP synchronizes.
        """
        self.close()
        mine = list(dict.fromkeys([*self._order, *range(len(self._named))]))
        (first, *_) = gather_rows(cluster, [torch.tensor(mine)])
        known = set(shown)
        named = [self._named[number] for number in first.tolist() if self._named[number].parameter in known]
        sizes = [pair.parameter.nbytes for pair in named]
        return Formed(named[::-1], AsGiven(tuple(_filled(sizes, self._limits))))

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def as_saved(named: Iterable[Named], values: Mapping[str, Any]) -> Formed | None:
    """The order and the groups of a saved state, if it is of some parameters.

    Args:
        named: the parameters.
        values: the state, which has all it must have.
    """
    own, partition = {pair.name: pair for pair in named}, values.get("partition", [])
    names = values["names"]
    if sorted(names) != sorted(own) or not is_partition(partition, len(own)):
        return None
    return Formed([own[name] for name in names], AsGiven(tuple((start, stop) for start, stop in partition)))


def _limits_of(ddp: DistributedDataParallel) -> list[int]:
    """Bytes at which DDP closes its first bucket, its second one and so on; the last number is that of the rest."""
    if listed := getattr(ddp, "bucket_bytes_cap_list", None):
        return list(listed)
    most = getattr(ddp, "bucket_bytes_cap", _LIMIT)
    default = getattr(ddp, "bucket_bytes_cap_default", most == _LIMIT)
    return [getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST), most] if default else [most]


def _filled(sizes: Sequence[int], limits: list[int]) -> list[Range]:
    """Buckets that are closed when they reach their limit."""
    found: list[Range] = []
    start = held = 0
    for number, size in enumerate(sizes):
        held += size
        if held >= limits[min(len(found), len(limits) - 1)]:
            found.append((start, number + 1))
            start, held = number + 1, 0
    return [*found, *([(start, len(sizes))] if start < len(sizes) else [])]


def end_to_end(views: Iterable[Tensor], buffer: Tensor) -> bool:
    """Whether some tensors are all of a buffer, end to end and each contiguous.

    Args:
        views: the tensors, in this order, of any shapes.
        buffer: shape (m,).
    """
    place = 0
    for view in views:
        if not view.is_contiguous() or view.data_ptr() != buffer.data_ptr() + place * buffer.itemsize:
            return False
        place += view.numel()
    return place == buffer.numel()


def views_of(bucket: GradBucket) -> dict[Tensor, Tensor]:
    """The gradients of a bucket, by parameter, where DDP has put them.

    DDP lays out a gradient as its parameter is (channels_last, transposed), and ``bucket.gradients()`` does not know.

    Args:
        bucket: of DDP.

    Returns:
        Views of its buffer, each of its parameter's shape.
    """
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return {parameter: _as_laid_out(view, parameter) for parameter, view in pairs}


def _as_laid_out(view: Tensor, like: Tensor) -> Tensor:
    # Strides are kept in a copy of what is dense and does not overlap; DDP takes anything else for contiguous.
    if like.is_contiguous() or torch.empty_like(like, device="meta").stride() != like.stride():
        return view
    return view.as_strided(like.shape, like.stride(), view.storage_offset())


def unchanged(bucket: GradBucket, device: torch.device) -> torch.futures.Future[Tensor]:
    """A bucket of DDP as it is, for a backward pass that does not count.

    Args:
        bucket: of DDP.
        device: of its gradients.

    Returns:
        A future that is done: the bucket's buffer, shape (n,).
    """
    ready = pending(device)
    ready.set_result(bucket.buffer())
    return ready


def pending(device: torch.device) -> torch.futures.Future[Tensor]:
    """A future whose result is to be set: a bucket's buffer, shape (n,), on ``device``."""
    devices: list[int | str | torch.device] = [device] if device.type == "cuda" else []
    ready: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    return ready


def dense(bucket: GradBucket, group: Any) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over the workers of a group, as DDP makes it without a hook: its buffer, shape (n,)."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    reduced = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return reduced.then(lambda done: done.value()[0])
