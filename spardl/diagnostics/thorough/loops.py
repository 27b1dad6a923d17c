"""``attach`` in a loop of DDP with autocast and a GradScaler, beside the same loop by hand on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from spardl.diagnostics.doctor.correctness import distance
from spardl.diagnostics.thorough.outcome import Outcome, Place, judged
from spardl.diagnostics.thorough.sharing import setting, shared
from spardl.hooks.ddp import attach
from spardl.hooks.hook import Hook

__all__ = ["LOSSLESS", "batch", "check_attach", "model_of", "optimizer_of"]

LOSSLESS = 1.0
"""The density at which a sparse method averages everything."""
_SPARSE, _SCALE = 0.05, 2.0**8
# Two good steps, one with an infinity in the last worker's gradient, and a good one.
_HARM = (1.0, 1.0, torch.inf, 1.0)
# How far an update in float16 may be from one by hand, relative to its size, as devices round products differently.
_NEAR = 0.02


class _Run(NamedTuple):
    """What one worker's loop came to.

    Attributes:
        start: the weights in the beginning, one after the other.
        weights: the same after each step.
        scales: of the loss, after each step.
    """

    start: Tensor
    weights: list[Tensor]
    scales: list[float]


def model_of(device: torch.device) -> nn.Module:
    """A model with layers of several sizes, the same everywhere."""
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    """What a worker sees in a step, shape (32, 64)."""
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(32, 64, generator=random).to(device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def check_attach(workers: int) -> Callable[[Place], Outcome]:
    """The check for so many workers that share the device."""

    def check(place: Place) -> Outcome:
        where = setting(place, workers)
        whole = shared(place, workers, lambda device: _attached(device, LOSSLESS))
        sparse = shared(place, workers, lambda device: _attached(device, _SPARSE))
        # Last: where there is a GPU, no process can be forked after a backward pass in its parent.
        by_hand = _by_hand(workers)
        off = [
            distance(one - whole[0].start, by - by_hand.start)
            for one, by in zip(whole[0].weights, by_hand.weights, strict=True)
        ]
        problems = [
            *_faults(whole, f"at density {LOSSLESS:g}, {where}"),
            *_faults(sparse, f"at density {_SPARSE:g}, {where}"),
            *(
                f"attach: after step {step} the weights are {each:.0e} off those by hand on the CPU, {where}"
                for step, each in enumerate(off)
                if not each <= _NEAR
            ),
        ]
        good = (
            f"attach with optimizer=, autocast and GradScaler, {where}: the weights of a loop by hand on the CPU "
            f"but for {max(off):.0e}, replicas equal, and all skip a step in which one worker overflowed"
        )
        fix = "do not train with it on this device, and send the file of --json with your report"
        return judged(good, problems, fix, {"workers": workers, "off": off, "scales": whole[0].scales})

    return check


def _faults(runs: list[_Run], where: str) -> Iterator[str]:
    for step, harm in enumerate(_HARM):
        before = [run.weights[step - 1] if step else run.start for run in runs]
        after = [run.weights[step] for run in runs]
        stayed = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
        if not all(torch.equal(after[0], each) and each.isfinite().all() for each in after):
            yield f"attach: weights differ between workers, or are not finite, after step {step}, {where}"
        elif harm == 1 and any(stayed):
            yield f"attach: step {step} changed no weights, {where}"
        elif harm != 1 and not all(stayed):
            yield f"attach: step {step} was not skipped, although one worker overflowed, {where}"
        elif harm != 1 and any(run.scales[step] >= run.scales[step - 1] for run in runs):
            yield f"attach: the loss is not scaled down after the overflow in step {step}, {where}"


def _attached(device: torch.device, density: float) -> _Run:
    """As a user writes it; the momentum is moved in front of the compression."""
    rank = torch.distributed.get_rank()
    last = rank == torch.distributed.get_world_size() - 1
    ddp = DistributedDataParallel(model_of(device))
    rule, scaler = optimizer_of(ddp), GradScaler(device.type, init_scale=_SCALE)
    handle: Hook = attach(ddp, "spardl", density=density, optimizer=rule, scaler=scaler, timeout=60)
    run = _Run(_weights(ddp), [], [])
    for step, harm in enumerate(_HARM):
        rule.zero_grad()
        loss = _loss(ddp, batch(rank, step, device), device)
        (scaler.scale(loss) * (harm if last else 1.0)).backward()
        scaler.step(rule)
        scaler.update()
        run.weights.append(_weights(ddp))
        run.scales.append(scaler.get_scale())
    handle.detach()
    return run


def _by_hand(workers: int) -> _Run:
    """What all workers together come to, in one process on the CPU, without this library."""
    cpu = torch.device("cpu")
    model = model_of(cpu)
    rule = optimizer_of(model)
    run = _Run(_weights(model), [], [])
    for step, harm in enumerate(_HARM):
        if harm == 1:
            rule.zero_grad()
            for rank in range(workers):
                (_SCALE * _loss(model, batch(rank, step, cpu), cpu)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= _SCALE * workers
            rule.step()
        run.weights.append(_weights(model))
    return run


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype=torch.float16)


def _loss(model: nn.Module, given: Tensor, device: torch.device) -> Tensor:
    with _autocast(device):
        out: Tensor = model(given)
    return out.float().square().mean()


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
