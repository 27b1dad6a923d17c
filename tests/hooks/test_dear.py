"""DeAR in a user's loop: loading, reading and copying while an update is pending."""

from __future__ import annotations

import copy
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError, PeerError, WorkerError
from spardl.clusters import ProcessGroupCluster
from spardl.schedules import Dear
from tests.hooks.loops import weights
from tests.hooks.small import DENSE, WHOLE, Loop, Parts, apart, sgd
from tests.support.harness import run_workers


def loaded(loop: Loop, what: str, saved: dict[str, Any]) -> Tensor:
    """Loads between a step and the next forward pass, while DeAR's update is pending."""
    loop.step(3)
    getattr(loop, what).load_state_dict(saved[what])
    loop.step(4)
    return loop.end()


def saved_of(loop: Loop) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save({what: getattr(loop, what).state_dict() for what in ("model", "ddp", "optimizer")}, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("method", [DENSE, WHOLE], ids=["dense", "whole"])
def test_dear_has_updated_before_something_is_loaded(method: spardl.Method) -> None:
    def work(cluster: object) -> dict[str, float]:
        found = {}
        for what in ("model", "ddp", "optimizer") if method is DENSE else ("model",):
            ends = []
            for loop in (Loop(None), Loop(method, "dear")):
                for step in range(3):
                    loop.step(step)
                ends.append(loaded(loop, what, saved_of(loop)))
            found[what] = float((ends[0] - ends[1]).abs().max())
        return found

    for found in run_workers(2, work):
        assert max(found.values()) < 1e-12, found


def test_dear_loads_its_state_with_nothing_in_flight() -> None:
    def work(cluster: object) -> bool:
        loop = Loop(spardl.make_method("spardl", density=0.3), "dear")
        for step in range(3):
            loop.step(step)
        saved = {what: copy.deepcopy(getattr(loop, what).state_dict()) for what in ("model", "optimizer", "handle")}
        ends = []
        for _ in range(2):
            loop.step(3)
            for what in ("handle", "model", "optimizer"):
                getattr(loop, what).load_state_dict(copy.deepcopy(saved[what]))
            loop.step(4)
            ends.append(loop.end())
        return torch.equal(*ends)

    assert all(run_workers(2, work))


@pytest.mark.parametrize("resharded", [False, True])
def test_dear_replaces_its_state_after_a_forward_pass(resharded: bool) -> None:
    """The forward pass has prepared synchronizations with the old residuals."""

    def work(cluster: object) -> bool:
        loops = [Loop(spardl.make_method("spardl", density=0.3), "dear") for _ in range(2)]
        for loop in loops:
            loop.step(0)
            loop.handle.flush()
        own = loops[0].handle.state_dict()
        of_four = [{**own, "owner": {**own["owner"], "rank": rank, "workers": 4}} for rank in range(4)]
        loops[1].ddp(torch.ones(5, 4, dtype=torch.float64))
        for loop in loops:
            if resharded:
                loop.handle.load_resharded(of_four)
            else:
                loop.handle.load_state_dict({})
            for step in range(3):
                loop.step(step)
            loop.end()
        first, second = (loop.handle.state_dict()["groups"] for loop in loops)
        return all(torch.equal(one["memory"], other["memory"]) for one, other in zip(first, second, strict=True))

    assert all(run_workers(2, work))


def with_trials(trials: int) -> Loop:
    loop = Loop(None)
    loop.handle = spardl.attach(loop.ddp, DENSE, schedule=Dear(trials=trials), optimizer=loop.optimizer)
    return loop


@pytest.mark.parametrize("trials", [0, 3])
def test_dear_compares_the_same_step(trials: int) -> None:
    """After a load, while a fast worker has already applied the step and changed its learning rate."""

    def work(cluster: object) -> int:
        loop = with_trials(trials) if trials else Loop(DENSE, "dear")
        rates = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
        # The second layer is slow, so that averages of the first step arrive late.
        loop.model[2].register_forward_pre_hook(lambda module, inputs: time.sleep(0.2))
        for step in range(7):
            if step == 4:  # workers wait for each other in the fourth step, in which they exchange counts
                loop.handle.load_state_dict(loop.handle.state_dict())
                time.sleep(torch.distributed.get_rank())
            loop.step(step)
            rates.step()
        loop.end()
        return loop.handle.stats().steps

    assert run_workers(2, work) == [7, 7]


def test_workers_of_dear_try_sizes_in_the_same_steps() -> None:
    """One worker completes pending updates to save the weights, which it does not count as training."""

    def work(cluster: object) -> bool:
        loop = with_trials(2)
        for step in range(14):
            loop.step(step)
            if step == 2 and torch.distributed.get_rank() == 0:
                loop.model.state_dict()
        end = loop.end()
        first = end.clone()
        torch.distributed.broadcast(first, 0)
        return torch.equal(first, end)

    assert all(run_workers(2, work))


def test_dears_flush_between_backward_and_step_loses_nothing() -> None:
    def trained(method: spardl.Method | None) -> Tensor:
        loop = Loop(method, "dear")
        for step in range(4):
            loop.optimizer.zero_grad()
            loop.backward(step)
            if loop.handle is not None:
                loop.handle.flush()
            loop.optimizer.step(None)  # type: ignore[call-overload]
        return loop.end()

    for found in run_workers(2, lambda cluster: apart(trained)):
        assert max(found) < 1e-12


def test_dear_detached_before_a_step_leaves_equal_weights() -> None:
    def work(cluster: object) -> list[float]:
        loop = Loop(DENSE, "dear")
        loop.step(0)
        loop.backward(1)
        with pytest.warns(UserWarning, match=r"detach\(\) was called between backward"):
            loop.handle.detach()
        loop.optimizer.step()
        return weights(loop.model).tolist()

    first, second = run_workers(2, work)
    assert first == second


# torch reads it while compiling.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_dear_supports_in_place_compile_but_not_wrappers() -> None:
    def trained(method: spardl.Method | None) -> Tensor:
        loop = Loop(None)
        loop.model.compile(backend="eager")
        if method is not None:
            loop.handle = spardl.attach(loop.ddp, method, schedule="dear", optimizer=loop.optimizer)
        for step in range(4):
            loop.step(step)
        return loop.end()

    def work(cluster: object) -> list[float]:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        model[1] = torch.compile(model[1], backend="eager")
        with pytest.raises(ConfigError, match=r"1 is a .* wrapper.* compile in place .* model.compile\(\)"):
            spardl.attach(DistributedDataParallel(model), schedule="dear", optimizer=sgd(model.parameters()))
        return apart(trained)

    for found in run_workers(2, work, 120):
        assert max(found) < 1e-12


def test_dear_leaves_unused_parameters_unchanged() -> None:
    """With find_unused_parameters, also after a step that uses all."""

    def trained(method: spardl.Method | None) -> Tensor:
        model = Parts()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = sgd(model.parameters())
        handle = spardl.attach(ddp, method, schedule="dear", optimizer=optimizer) if method else None
        for step in range(5):
            optimizer.zero_grad()
            ddp(torch.full((2, 3), 1.0 + step, dtype=torch.float64), step < 2).square().mean().backward()
            optimizer.step()
        if handle:
            handle.flush()
        return weights(model)

    for found in run_workers(2, lambda cluster: apart(trained)):
        assert max(found) < 1e-12


def test_copies_of_a_model_that_dear_trains_are_plain_models() -> None:
    def work(cluster: object) -> None:
        loop = Loop(WHOLE, "dear")
        loop.step(0)
        loop.step(1)
        loop.handle.flush()
        buffer = io.BytesIO()
        torch.save(loop.model, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(loop.model),
            torch.optim.swa_utils.AveragedModel(loop.model).module,
            torch.load(buffer, weights_only=False),
        ]
        loop.step(2)
        for each in copies:
            assert torch.equal(weights(each), weights(copies[0]))
            each(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            assert not torch.equal(weights(each), loop.end())

    run_workers(2, work)


def test_dear_detached_after_lost_worker_leaves_savable_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Worker 0 exits as soon as it has noticed.
    monkeypatch.setattr("spardl.clusters.workers.processes._NOTICE", 60.0)

    def work(cluster: ProcessGroupCluster) -> None:
        loop = Loop(None)
        handle = spardl.attach(loop.ddp, DENSE, schedule="dear", optimizer=loop.optimizer, timeout=30)
        for step in range(3):
            loop.step(step)
        if cluster.local_ranks[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError):
            while True:
                loop.step(1)
        for what in (loop.model.state_dict, handle.detach):
            with pytest.raises(PeerError):
                what()
        saved = [*loop.model.state_dict().values(), *loop.optimizer.state_dict()["state"]]
        (tmp_path / "saved").write_text(str(len(saved)))
        os._exit(0)

    with pytest.raises(WorkerError, match="worker 1 was killed by SIGKILL"):
        run_workers(2, work)
    assert (tmp_path / "saved").read_text() == "8"
