"""Deleted handles: their memory and threads are released, and the rest is reported."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from tests.hooks.small import made, rule
from tests.support.harness import run_workers


def attached(steps: int = 2, **options: Any) -> Callable[[nn.Module], Any]:
    def train(model: nn.Module) -> Any:
        optimizer = rule(model)
        ddp = DistributedDataParallel(model)
        handle = spardl.attach(ddp, **options, optimizer=optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return handle

    return train


def synchronized(model: nn.Module) -> Any:
    optimizer = rule(model)
    handle = spardl.Synchronizer(model.named_parameters(), optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        with handle:
            model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return handle


def outer(model: nn.Module) -> Any:
    handle = spardl.Outer(model.named_parameters(), rule(model), every=1)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        handle.step()
    return handle


def talking() -> int:
    return sum(each.name == "spardl-communication" for each in threading.enumerate())


def settled(left: Callable[[], int]) -> int:
    """Returns the remaining count, once threads have finished."""
    until = time.monotonic() + 20
    while left() and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()
    return left()


@pytest.mark.parametrize(
    "train",
    [
        attached(method="spardl"),
        attached(method="none"),
        attached(method="none", steps=0),
        attached(method="none", schedule="dear"),
        synchronized,
        outer,
    ],
    ids=["spardl", "none", "never used", "dear", "Synchronizer", "Outer"],
)
@pytest.mark.parametrize("ended", [False, True], ids=["dropped", "detached"])
def test_deleted_handle_leaves_only_its_group(train: Callable[[nn.Module], Any], ended: bool) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[int, int, list[str]]:
        def trained() -> list[weakref.ref[Any]]:
            model = made()
            handle = train(model)
            if ended:
                (handle.close if isinstance(handle, spardl.Outer) else handle.detach)()
            return [weakref.ref(model), weakref.ref(handle), *map(weakref.ref, model.parameters())]

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            known = trained()
            alive = settled(lambda: sum(each() is not None for each in known))
            threads = settled(talking)
        said = [str(each.message) for each in caught if issubclass(each.category, ResourceWarning)]
        return alive, threads, [each for each in said if "spardl" in each]

    ((alive, threads, said),) = run_workers(1, work)
    assert (alive, threads) == (0, 0)
    assert len(said) == (not ended)
    assert ended or "without detach()" in said[0]


def test_synchronizer_without_a_reference() -> None:
    """It warns if it never averaged, and leaves parameters and optimizer as without it."""

    def work(cluster: ProcessGroupCluster) -> tuple[list[str], bool]:
        model, alone = made(), made()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            synchronized(model)  # has averaged, so it does not warn
            alone.load_state_dict(model.state_dict())
            optimizers = [rule(model), rule(alone)]
            spardl.Synchronizer(model.named_parameters(), optimizer=optimizers[0])
            for _ in range(2):
                for each, optimizer in zip([model, alone], optimizers, strict=True):
                    optimizer.zero_grad()
                    each(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
                    optimizer.step()
        said = [str(each.message) for each in caught if each.category is UserWarning]
        return said, all(map(torch.equal, model.parameters(), alone.parameters()))

    (((said,), same),) = run_workers(1, work)
    assert same
    assert said.startswith("spardl: a Synchronizer was deleted before it averaged anything")


@pytest.mark.parametrize("method", ["spardl", "none"])
def test_optimizer_of_a_dropped_handle_works_alone(method: str) -> None:
    """Its state restarts, as after ``detach()``."""

    def work(cluster: ProcessGroupCluster) -> bool:
        model, alone = made(), made()
        optimizers = [rule(model), rule(alone)]
        ddp = DistributedDataParallel(model)
        handle = spardl.attach(ddp, method, optimizer=optimizers[0])
        assert handle.method.momentum.moved == (method == "spardl")
        if method == "spardl":  # other methods keep the state of earlier steps
            optimizers[0].zero_grad()
            ddp(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
            optimizers[0].step()
        del ddp, handle
        gc.collect()
        alone.load_state_dict(model.state_dict())
        for _ in range(2):
            for each, optimizer in zip([model, alone], optimizers, strict=True):
                optimizer.zero_grad()
                each(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
                optimizer.step()
        return all(map(torch.equal, model.parameters(), alone.parameters()))

    assert run_workers(2, work) == [True, True]


def test_delayed_update_of_dropped_handle_refuses_steps() -> None:
    """Scheduled updates are still made, but gradients without average are refused."""

    def work(cluster: ProcessGroupCluster) -> str:
        model = made()
        optimizer = rule(model)
        ddp = DistributedDataParallel(model)
        spardl.attach(ddp, "none", schedule="dear", optimizer=optimizer)
        ddp(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        del ddp
        gc.collect()
        before = [each.detach().clone() for each in model.parameters()]
        optimizer.zero_grad()
        model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
        assert not any(map(torch.equal, before, model.parameters()))
        with pytest.raises(ConfigError) as error:
            optimizer.step()
        return str(error.value)

    assert all("to train without the handle, call detach()" in line for line in run_workers(2, work))


def test_dropped_outer_is_freed_while_its_optimizer_lives() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[int, int]:
        model = made()
        optimizer = rule(model)

        def trained() -> weakref.ref[Any]:
            handle = spardl.Outer(model.named_parameters(), optimizer, every=1)
            model(torch.ones(3, 6, dtype=torch.float64)).sum().backward()
            handle.step()
            return weakref.ref(handle)

        known = [trained() for _ in range(2)]
        alive = settled(lambda: sum(each() is not None for each in known))
        return alive, settled(talking)

    assert run_workers(1, work) == [(0, 0)]
