"""What a model must not have, or do, to be averaged in DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.schedules import Dear, Schedule

__all__ = ["check_averaged", "check_joined", "check_modules", "check_wrapped", "joining"]


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
