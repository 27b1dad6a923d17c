"""Checks of DDP models, and groups of parameters that coincide with DDP's own buckets.

Gradients that are summed in DDP's own buffers need no copy. DDP rebuilds its buckets before the second step of every
process, in the order in which the first step completed gradients on rank 0 (Li et al., PyTorch Distributed, VLDB 2020,
section 4.2). How a backend rounds the sum of an entry depends on the entry's position in the bucket. So that a
restarted process computes the same results, groups do not follow the buckets that DDP has in the first step of a
process. Instead, the groups are the buckets that DDP forms after the very first step of a training. Saved states
contain these groups. Gradients in a bucket that equals no group are copied.
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
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import weak_method
from spardl.clusters.base import Cluster, gather_rows
from spardl.hooks.averager import Named
from spardl.method.method import Method
from spardl.schedules import Dear, Schedule, Training
from spardl.schedules.engine import Engine
from spardl.schedules.fusion import Range, is_partition
from spardl.schedules.wfbp import InBackward

__all__ = [
    "BucketWatcher",
    "FixedGroups",
    "Grouping",
    "check_averaged",
    "check_joined",
    "check_modules",
    "check_wrapped",
    "dense_mean",
    "fills_buffer",
    "join_config",
    "pending_future",
    "saved_grouping",
    "unchanged_bucket",
    "views_of",
]


# --- requirements on the model


def check_wrapped(ddp: nn.Module) -> None:
    """Checks that a model is a DistributedDataParallel that calls its hook with the same buckets on all workers.

    Args:
        ddp: Model to check.

    Raises:
        ConfigError: If the model is not a DDP, is compiled, or skips buckets that this worker did not use.
    """
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise ConfigError(
            "attach() needs the DistributedDataParallel itself, got its torch.compile() wrapper; call "
            "spardl.attach(ddp_model, ...) first, then torch.compile(ddp_model)"
        )
    if not isinstance(ddp, DistributedDataParallel):
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - takes 0.4 s

        if isinstance(ddp, FSDPModule):
            raise ConfigError(
                f"attach() needs a DistributedDataParallel, got a {type(ddp).__name__} sharded by fully_shard(); call "
                "spardl.attach_fsdp(model, ..., group=...)"
            )
        raise ConfigError(
            f"attach() needs a DistributedDataParallel, got a {type(ddp).__name__}; without DDP use spardl.Synchronizer"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "skip_all_reduce_unused_params=True makes DDP skip the hook for unused buckets, so a step would never end; "
            "remove it (find_unused_parameters=True is enough)"
        )


def check_modules(model: nn.Module, schedule: Schedule) -> None:
    """Checks that a handle with this schedule supports a model.

    Args:
        model: Module inside DDP.
        schedule: Schedule of the handle.

    Raises:
        ConfigError: If the model has sparse gradients, or contains a ``torch.compile()`` wrapper, which would not wait
            for the updates of ``schedule=dear``.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} has sparse gradients; create it with sparse=False")
        if isinstance(schedule, Dear) and hasattr(module, "_orig_mod"):
            raise ConfigError(
                f"{name or 'the model'} is a torch.compile() wrapper, and code compiled earlier would not wait for the "
                "updates of schedule=dear; compile in place with model.compile() before wrapping in DDP, or use "
                "schedule=wfbp"
            )


def check_joined(ddp: nn.Module | None, before: object) -> None:
    """Checks that a backward pass runs outside ``ddp.join()``; for handles that keep the optimizer's moments.

    Args:
        ddp: Model of the pass.
        before: Result of ``join_config`` when the handle was created. Equal settings belong to a ``join()`` that has
            ended: torch does not delete them.

    Raises:
        ConfigError: If ``ddp.join()`` allows workers to make fewer steps than others.
    """
    now = join_config(ddp)
    uneven = getattr(now, "enable", False) and not getattr(now, "throw_on_early_termination", False)
    if uneven and now is not before:
        raise ConfigError(
            "ddp.join() lets workers stop early, but optimizer= needs all workers in every step; give all workers the "
            "same number of batches (DistributedSampler) and remove join(), or call attach() without optimizer=, with "
            'recipe="published" and schedule="wfbp"; after a join() block, wrap the module in a new DDP'
        )


def check_averaged(left_out: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Checks that all parameters that DDP does not average are still frozen.

    DDP averages only those parameters that required gradients when it was created. If an optimizer updates any other
    parameter, its weights differ between ranks.

    Args:
        left_out: Names and parameters that DDP does not average.

    Raises:
        ConfigError: If one of them requires a gradient.
    """
    for name, parameter in left_out:
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} was unfrozen after the model was wrapped in DDP, which does not average its gradient; call "
                "requires_grad_(True) before the model is wrapped (with Lightning: before trainer.fit()), and create "
                "the optimizer and the handle after that"
            )


def join_config(ddp: nn.Module | None) -> object:
    """Returns the settings of the current or last ``join()`` of a DDP model, as torch stores them in the model."""
    return getattr(ddp, "_join_config", None)


# --- groups that coincide with DDP's buckets


# DDP's default bucket sizes: of all buckets except the first, and of the first.
_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class FixedGroups(Schedule):
    """Schedule that sends given groups of layers during the backward pass.

    Args:
        partition: Ranges of layers, one per group, in the order of the gradient storage.
    """

    partition: tuple[Range, ...]

    name = "wfbp"

    def make(self, method: Method, cluster: Cluster, training: Training) -> Engine:
        """Creates the engine (the running instance of the schedule) with these groups."""
        return InBackward(method, cluster, training, self.partition)


class Grouping(NamedTuple):
    """Order and groups in which gradients are averaged.

    Attributes:
        named: Parameters and their names; the gradient storage contains them in reverse order.
        schedule: Schedule that forms the groups.
    """

    named: list[Named]
    schedule: Schedule


class BucketWatcher:
    """Observes the first step of a DDP model to predict the buckets that DDP forms afterwards.

    Args:
        ddp: Model to observe.
        named: All parameters of the model, in its order.
    """

    def __init__(self, ddp: DistributedDataParallel, named: Sequence[Named]) -> None:
        # Weak, because the model owns the hook that owns this object.
        self._ddp, self._limits = ref(ddp), _limits_of(ddp)
        self._named = [pair for pair in named if pair.parameter.requires_grad]
        self._order: list[int] = []
        self._hooks = [
            pair.parameter.register_post_accumulate_grad_hook(weak_method(self._on_gradient, number))
            for number, pair in enumerate(self._named)
        ]

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        ddp = self._ddp()
        # Under no_sync(), DDP does not record the order either.
        if ddp is not None and ddp.require_backward_grad_sync:
            self._order.append(number)

    def observed(self, cluster: Cluster, synchronized: Iterable[nn.Parameter]) -> Grouping:
        """Returns the order and groups of DDP's next buckets, as observed on rank 0; all workers must call this.

        Args:
            cluster: Cluster that connects the workers.
            synchronized: Parameters that DDP synchronizes.
        """
        self.close()
        mine = list(dict.fromkeys([*self._order, *range(len(self._named))]))
        (first, *_) = gather_rows(cluster, [torch.tensor(mine)])
        known = set(synchronized)
        named = [self._named[number] for number in first.tolist() if self._named[number].parameter in known]
        sizes = [pair.parameter.nbytes for pair in named]
        return Grouping(named[::-1], FixedGroups(tuple(_fill_buckets(sizes, self._limits))))

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def saved_grouping(named: Iterable[Named], values: Mapping[str, Any]) -> Grouping | None:
    """Returns the order and groups of a saved state; ``None`` if it has other parameters.

    Args:
        named: Parameters of the handle.
        values: Saved state whose keys have been checked.
    """
    own, partition = {pair.name: pair for pair in named}, values.get("partition", [])
    names = values["names"]
    if sorted(names) != sorted(own) or not is_partition(partition, len(own)):
        return None
    return Grouping([own[name] for name in names], FixedGroups(tuple((start, stop) for start, stop in partition)))


def _limits_of(ddp: DistributedDataParallel) -> list[int]:
    """Returns the sizes in bytes at which DDP closes its first bucket, the second, and all others."""
    # Names of these attributes differ between versions of torch.
    if listed := getattr(ddp, "bucket_bytes_cap_list", None):
        return list(listed)
    most = getattr(ddp, "bucket_bytes_cap", _BUCKET_BYTES)
    default = getattr(ddp, "bucket_bytes_cap_default", most == _BUCKET_BYTES)
    return [getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BUCKET_BYTES), most] if default else [most]


def _fill_buckets(sizes: Sequence[int], limits: list[int]) -> list[Range]:
    """Divides tensors into buckets; each is closed when it reaches its limit, as in DDP."""
    found: list[Range] = []
    start = held = 0
    for number, size in enumerate(sizes):
        held += size
        if held >= limits[min(len(found), len(limits) - 1)]:
            found.append((start, number + 1))
            start, held = number + 1, 0
    return [*found, *([(start, len(sizes))] if start < len(sizes) else [])]


# --- single buckets


def fills_buffer(views: Iterable[Tensor], buffer: Tensor) -> bool:
    """Returns whether tensors are contiguous, lie in a buffer one after the other without gaps, and fill it completely.

    Args:
        views: Tensors of any shapes, in the expected order.
        buffer: Buffer, shape (m,).
    """
    place = 0
    for view in views:
        if not view.is_contiguous() or view.data_ptr() != buffer.data_ptr() + place * buffer.itemsize:
            return False
        place += view.numel()
    return place == buffer.numel()


def views_of(bucket: GradBucket) -> dict[Tensor, Tensor]:
    """Returns the gradients of a bucket by parameter, as views of its buffer.

    DDP stores a gradient with the strides of its parameter (such as channels_last or transposed). The views have these
    strides, unlike those of ``bucket.gradients()``.

    Args:
        bucket: Bucket from DDP.

    Returns:
        Views of the buffer, each of its parameter's shape.
    """
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return {parameter: _in_layout_of(parameter, view) for parameter, view in pairs}


def _in_layout_of(parameter: Tensor, view: Tensor) -> Tensor:
    # DDP keeps the strides of dense tensors without overlap, as empty_like() does, and treats others as contiguous.
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return view
    return view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())


def unchanged_bucket(bucket: GradBucket, device: torch.device) -> torch.futures.Future[Tensor]:
    """Returns a bucket unchanged, as the result of a hook in a backward pass whose gradients are ignored.

    Args:
        bucket: Bucket from DDP.
        device: Device of the bucket's gradients.

    Returns:
        A completed future with the bucket's buffer, shape (n,), unchanged.
    """
    ready = pending_future(device)
    ready.set_result(bucket.buffer())
    return ready


def pending_future(device: torch.device) -> torch.futures.Future[Tensor]:
    """Returns an unfinished future on ``device`` for a bucket's buffer, shape (n,); the caller must set its result."""
    devices: list[int | str | torch.device] = [device] if device.type == "cuda" else []
    ready: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    return ready


def dense_mean(bucket: GradBucket, group: Any) -> torch.futures.Future[Tensor]:
    """Averages a bucket over a group as DDP does without a hook; returns a future with the buffer, shape (n,)."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    reduced = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return reduced.then(lambda done: done.value()[0])
