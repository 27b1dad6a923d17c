"""Loops in which the next step does not apply an average: mistakes raise or warn."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.loops import weights
from tests.hooks.small import DENSE, WHOLE, Loop, Parts, apart, sgd
from tests.support.harness import run_workers


def error_of(work: Callable[[], Any]) -> str:
    """Returns the error or the warnings, if any."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # handles are not detached here
        try:
            work()
        except ConfigError as error:
            return str(error)
    return "; ".join(line for each in caught if (line := str(each.message)).startswith("spardl"))


def accumulated(method: spardl.Method, schedule: str, *, zeros: bool = False) -> Callable[[], Tensor]:
    def work() -> Tensor:
        loop = Loop(method, schedule)
        for step in range(4):
            loop.optimizer.zero_grad(set_to_none=not zeros)
            loop.backward(2 * step)
            loop.backward(2 * step + 1)
            loop.optimizer.step()
        return loop.end()

    return work


def thrown_away(method: spardl.Method, schedule: str, *, zeros: bool = False) -> Callable[[], Tensor]:
    def work() -> Tensor:
        loop = Loop(method, schedule)
        for step in range(6):
            loop.optimizer.zero_grad(set_to_none=not zeros)
            loop.backward(step)
            if step % 2:
                loop.optimizer.step()
        return loop.end()

    return work


def with_closures(method: spardl.Method) -> Tensor:
    """Trains as Lightning does: ``step()`` clears gradients and makes the backward pass itself."""
    loop = Loop(method)

    def closure(step: int) -> float:
        loop.optimizer.zero_grad()
        loop.backward(step)
        return float(step)

    for step in range(4):
        make = partial(closure, step)
        with torch.no_grad():
            loss = loop.optimizer.step(closure=make) if step % 2 else loop.optimizer.step(make)
        assert loss == step
    return loop.end()


def test_step_runs_a_closure_and_applies_its_averages() -> None:
    def work(cluster: ProcessGroupCluster) -> list[Tensor]:
        loop = Loop(WHOLE)
        for step in range(4):
            loop.step(step)
        return [loop.end(), with_closures(WHOLE)]

    for expected, found in run_workers(2, work):
        assert torch.equal(found, expected)


def never_zeroed(schedule: str) -> Callable[[], Tensor]:
    def work() -> Tensor:
        loop = Loop(WHOLE, schedule)
        for step in range(4):
            loop.backward(step)
            loop.optimizer.step()
        return loop.end()

    return work


def thrown_away_and_accumulated() -> None:
    """The first one warns; the training stays correct."""
    loop = Loop(WHOLE)
    for step in range(4):
        loop.optimizer.zero_grad()
        loop.backward(step)
        loop.optimizer.zero_grad()
        with loop.ddp.no_sync():
            loop.backward(step)
            loop.backward(step + 10)
        loop.backward(step + 20)
        loop.optimizer.step()


def gan(inside: Callable[[Loop], nn.Module], *, quiet: bool) -> Callable[[], None]:
    """Clears the discriminator's gradients of the generator's pass before its next pass."""

    def work() -> None:
        loop, generator = Loop(WHOLE), nn.Linear(4, 4).double()
        for step in range(4):
            loop.step(step)
            with loop.ddp.no_sync() if quiet else nullcontext():
                inside(loop)(generator(torch.ones(2, 4, dtype=torch.float64))).sum().backward()

    return work


def stepped_without_an_average() -> None:
    loop = Loop(WHOLE)
    loop.step(0)
    loop.optimizer.zero_grad()
    with loop.ddp.no_sync():
        loop.backward(1)
    loop.optimizer.step()


def first_step_without_an_average(how: Callable[[Loop], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Steps after a pass in ``no_sync()`` or past DDP, before anything was averaged."""

    def work() -> None:
        loop = Loop(WHOLE)
        with how(loop):
            (loop.ddp if how is _no_sync else loop.model)(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        loop.optimizer.step()

    return work


def _no_sync(loop: Loop) -> AbstractContextManager[Any]:
    return loop.ddp.no_sync()


def first_step_without_waiting() -> None:
    model = nn.Linear(4, 3)
    optimizer = sgd(model.parameters())
    synchronizer = spardl.Synchronizer(model.named_parameters(), WHOLE, optimizer=optimizer)
    with synchronizer.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def past_ddp_without_the_optimizer() -> None:
    """Without the optimizer, such a step only warns."""
    loop = Loop(None)
    spardl.attach(loop.ddp, "bf16")
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        loop.optimizer.step()


def accumulated_without_the_optimizer() -> None:
    """Correct without the optimizer."""
    loop = Loop(None)
    spardl.attach(loop.ddp, "int8")
    for step in range(3):
        loop.optimizer.zero_grad(set_to_none=step > 1)
        with loop.ddp.no_sync():
            loop.backward(step)
        loop.backward(step + 10)
        loop.optimizer.step()


def averaged_too_early(first: int) -> Callable[[], None]:
    """The first of three passes is averaged, and the others add to the averages."""

    def work() -> None:
        loop = Loop(WHOLE)
        for step in range(first + 1):
            loop.optimizer.zero_grad()
            for number in range(3):
                with nullcontext() if number == (0 if step == first else 2) else loop.ddp.no_sync():
                    loop.backward(10 * step + number)
            loop.optimizer.step()

    return work


def changed_behind_the_version() -> None:
    """Changes values without their version, in one of the first steps."""
    loop = Loop(WHOLE)
    for step in range(4):
        loop.optimizer.zero_grad()
        loop.backward(step)
        if step == 3:
            loop.model[0].weight.grad.data.mul_(0.5)  # type: ignore[union-attr]
        loop.optimizer.step()


def unused_and_zeroed() -> None:
    model = Parts()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sgd(model.parameters())
    spardl.attach(ddp, WHOLE, optimizer=optimizer)
    for step in range(18):
        optimizer.zero_grad(set_to_none=False)
        ddp(torch.ones(2, 3, dtype=torch.float64), step < 16).square().mean().backward()
        optimizer.step()


def looked_in_between() -> None:
    loop = Loop(DENSE, "dear")
    loop.backward(0)
    loop.ddp(torch.ones(2, 4, dtype=torch.float64))
    loop.optimizer.step()


def rolled_back(schedule: str) -> Callable[[], None]:
    def work() -> None:
        loop = Loop(WHOLE, schedule)
        for step in range(3):
            loop.step(step)
        loop.optimizer.zero_grad()
        loop.backward(3)
        for each in (loop.model, loop.optimizer, loop.handle):
            each.load_state_dict(copy.deepcopy(each.state_dict()))
        loop.step(4)

    return work


def of_a_synchronizer() -> None:
    model = nn.Linear(4, 3)
    synchronizer = spardl.Synchronizer(model.named_parameters(), WHOLE, optimizer=sgd(model.parameters()))
    for _ in range(2):
        with synchronizer:
            model(torch.ones(2, 4)).sum().backward()


def with_two_optimizers(schedule: str, method: spardl.Method = WHOLE) -> Callable[[], object]:
    return lambda: Loop(method, schedule, without=1)


def with_a_new_group(schedule: str) -> Callable[[], None]:
    def work() -> None:
        loop = Loop(WHOLE, schedule)
        loop.step(0)
        other = nn.Parameter(torch.ones(2))
        loop.optimizer.add_param_group({"params": [other]})
        for step in range(3):
            loop.optimizer.zero_grad()
            other.grad = torch.ones(2)
            loop.backward(step)
            loop.optimizer.step()

    return work


def unfrozen(handle_of: Callable[[nn.Module], Any]) -> Callable[[], None]:
    def work() -> None:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        handle = handle_of(model)
        for step in range(3):
            model[0].requires_grad_(step > 0)
            model(torch.ones(2, 4)).sum().backward()
            handle.wait() if isinstance(handle, spardl.Synchronizer) else handle.step()

    return work


def frozen(schedule: str) -> Callable[[], None]:
    def work() -> None:
        loop = Loop(WHOLE, schedule)
        loop.step(0)
        loop.model[0].requires_grad_(False)
        loop.step(1)

    return work


def accumulated_with_an_unused_layer() -> None:
    """The DDP model allows unused parameters, so the error does not recommend it."""
    model = DistributedDataParallel(Parts(), find_unused_parameters=True)
    rule = sgd(model.parameters())
    spardl.attach(model, WHOLE, optimizer=rule)
    with model.no_sync():
        model(torch.ones(2, 3, dtype=torch.float64), False).sum().backward()
    rule.step()


def clipped_by_the_loop() -> None:
    loop = Loop(DENSE, "dear")
    loop.backward(0)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
    loop.optimizer.step()


NO_SYNC = "run all backward passes of a step except the last"
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "accumulated": (accumulated(WHOLE, "wfbp"), NO_SYNC),
    "accumulated on zeros": (accumulated(WHOLE, "wfbp", zeros=True), NO_SYNC),
    "accumulated, dear": (accumulated(WHOLE, "dear"), NO_SYNC),
    "accumulated, dense": (accumulated(DENSE, "dear"), ""),
    "accumulated, synchronizer": (of_a_synchronizer, NO_SYNC),
    "thrown away": (thrown_away(WHOLE, "wfbp"), "averaged gradients were cleared before"),
    "thrown away, zeros": (
        thrown_away(WHOLE, "wfbp", zeros=True),
        "averaged gradients were cleared before",
    ),
    "thrown away, dear": (thrown_away(WHOLE, "dear"), "averaged gradients were cleared before"),
    "thrown away, accumulated": (thrown_away_and_accumulated, "averaged gradients were cleared before"),
    "never zeroed": (never_zeroed("wfbp"), "call optimizer.zero_grad() before the first backward pass"),
    "never zeroed, dear": (never_zeroed("dear"), "before each step(), call zero_grad()"),
    "gan": (gan(lambda loop: loop.ddp, quiet=False), ""),
    "gan, in no_sync": (gan(lambda loop: loop.ddp, quiet=True), ""),
    "gan, without ddp": (gan(lambda loop: loop.model, quiet=False), ""),
    "no average": (stepped_without_an_average, "gradients that were not averaged since the last step()"),
    "no average at first, no_sync": (first_step_without_an_average(_no_sync), "gradients that were not averaged"),
    "no average at first, module": (first_step_without_an_average(lambda loop: nullcontext()), "(not ddp.module)"),
    "no average at first, synchronizer": (first_step_without_waiting, "gradients that were not averaged"),
    "no average, optimizer unknown": (past_ddp_without_the_optimizer, "applied and cleared without being averaged"),
    "accumulated, optimizer unknown": (accumulated_without_the_optimizer, ""),
    "averaged too early": (averaged_too_early(0), "a backward pass in no_sync() added to the gradient of 0."),
    "averaged too early, later": (averaged_too_early(5), "average in the last one"),
    "changed behind the version": (changed_behind_the_version, "was changed between backward() and step()"),
    "unused and zeroed": (unused_and_zeroed, ""),
    "looked in between, dear": (looked_in_between, "because a forward pass came between backward() and step()"),
    "rolled back": (rolled_back("wfbp"), ""),
    "rolled back, dear": (rolled_back("dear"), ""),
    "thrown away, dense": (thrown_away(DENSE, "dear"), ""),
    "two optimizers": (
        with_two_optimizers("wfbp"),
        "optimizer is missing 1 of the 4 averaged parameters (first: 0.weight)",
    ),
    "two optimizers, dear": (with_two_optimizers("dear", DENSE), "optimizer is missing 1 of the 4 averaged parameters"),
    "two optimizers, dense": (with_two_optimizers("wfbp", DENSE), ""),
    "new group": (with_a_new_group("wfbp"), "1 of the optimizer's 5 parameters are not averaged"),
    "new group, dear": (with_a_new_group("dear"), "parameters are not averaged by this handle"),
    "frozen": (frozen("wfbp"), "0.weight has no gradient: if it is frozen or unused, construct Distributed"),
    "frozen, dear": (frozen("dear"), "has no gradient: if it is frozen or unused, construct DistributedDataParallel"),
    "no average, unused": (accumulated_with_an_unused_layer, "outside no_sync(); to train without the handle"),
    "unfrozen": (
        unfrozen(lambda model: spardl.Synchronizer(model.named_parameters(), "none")),
        "0.weight was frozen when this handle was created and is trained now",
    ),
    "unfrozen, outer": (
        unfrozen(lambda model: spardl.Outer(model.named_parameters(), sgd(model.parameters()), "none", every=2)),
        "create the handle after requires_grad_(True)",
    ),
    "clipped, dear": (clipped_by_the_loop, "pass clip_norm= to attach()"),
}


def test_mistakes_in_loops_raise_or_warn() -> None:
    found = run_workers(2, lambda cluster: {name: error_of(work) for name, (work, _) in CASES.items()})
    for name, (_, words) in CASES.items():
        for line in (each[name] for each in found):
            assert words in line if words else line == "", (name, line)


def test_dense_halves_leave_out_or_add_what_ddp_does() -> None:
    """Averages without a residual may be discarded or accumulated."""

    def plain(work: Callable[..., Callable[[], Tensor]]) -> float:
        expected, found = (work(method, schedule)() for method, schedule in ((None, "wfbp"), (DENSE, "dear")))
        return float((found - expected).abs().max())

    for differences in run_workers(2, lambda cluster: [plain(accumulated), plain(thrown_away)]):
        assert max(differences) < 1e-12


def test_detach_resets_the_optimizer_state() -> None:
    def work(cluster: object) -> float:
        loop = Loop(None)
        loop.step(0)
        loop.handle = spardl.attach(loop.ddp, WHOLE, optimizer=loop.optimizer)
        loop.step(1)
        loop.handle.detach()
        before = weights(loop.model)
        fresh = Loop(None)
        fresh.model.load_state_dict(loop.model.state_dict())
        for each in (loop, fresh):
            each.handle = None
            each.step(2)
        assert not torch.equal(before, fresh.end())
        return float((loop.end() - fresh.end()).abs().max())

    assert max(run_workers(2, work)) < 1e-12


def test_workers_that_run_out_of_batches() -> None:
    """With DDP's join(): as without this library if the optimizer keeps its state, and refused otherwise."""

    def trained(method: spardl.Method | None, schedule: str = "", *, rank: int = 0) -> Tensor:
        loop = Loop(None)
        if method is not None:
            moved = {"schedule": schedule, "optimizer": loop.optimizer} if schedule else {}
            loop.handle = spardl.attach(loop.ddp, method, **moved)
        with loop.ddp.join():
            for step in range(2 + 2 * rank):
                loop.step(step)
        return loop.end()

    def work(cluster: ProcessGroupCluster) -> list[float]:
        (rank,) = cluster.local_ranks
        for method, schedule in ((WHOLE, "wfbp"), (WHOLE, "dear"), (DENSE, "dear")):
            with pytest.raises(ConfigError, match=r"ddp.join\(\) lets workers stop early"):
                trained(method, schedule, rank=rank)
        return apart(partial(trained, rank=rank))

    for found in run_workers(2, work):
        assert max(found) < 1e-12


def test_joint_early_stop_and_finished_join_blocks_are_allowed() -> None:
    """In neither case does a worker miss another; torch does not reset what join() sets."""

    def trained(method: spardl.Method, *, within: bool) -> Tensor:
        loop = Loop(None)
        with loop.ddp.join():
            loop.step(0)
        loop.handle = spardl.attach(loop.ddp, method, optimizer=loop.optimizer)
        with loop.ddp.join(throw_on_early_termination=True) if within else nullcontext():
            for step in range(1, 4):
                loop.step(step)
        return loop.end()

    def work(cluster: ProcessGroupCluster) -> bool:
        # Momentum starts when the handle takes over, so results differ from plain DDP.
        return torch.equal(trained(WHOLE, within=True), trained(WHOLE, within=False))

    assert run_workers(2, work) == [True, True]


def test_parameters_of_equal_names_are_distinguished() -> None:
    """Two modules in one Synchronizer: gradients of the second are not cleared between steps."""

    def work(cluster: ProcessGroupCluster) -> str:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        both = [*first.named_parameters(), *second.named_parameters()]
        optimizer = torch.optim.SGD([each for _, each in both], lr=0.1, momentum=0.9)
        synchronizer = spardl.Synchronizer(both, "spardl", density=0.5, optimizer=optimizer)
        for step in range(2):
            second(first(torch.ones(2, 4))).square().sum().backward()
            if step:
                with pytest.raises(ConfigError) as error:
                    synchronizer.wait()
                return str(error.value)
            synchronizer.wait()
            optimizer.step()
            first.zero_grad()
        return ""

    (said,) = run_workers(1, work)
    assert "still contained an earlier average when it was averaged" in said
