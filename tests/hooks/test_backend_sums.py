"""Dense methods by name: handles use sums of the backend, in DDP's buckets, and still resume bit-exactly."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.communicators import Backend, Dense
from spardl.hooks import buckets
from spardl.hooks.choosing import choose_method
from spardl.schedules import Dear, Wfbp
from tests.hooks.loops import Ddp, Hooks, Path, batches, loss_of, made, train, weights
from tests.support.harness import run_workers

NAMES = ("none", "fp16", "bf16", "cast")
PATHS: dict[str, type[Path]] = {"attach": Ddp, "Synchronizer": Hooks}
# Small enough for several buckets of the models in the tests.
LIMITS = (200,)
STEPS = 6


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes DDP's first bucket small, so that there are several; ``bucket_cap_mb`` would change all buckets."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", LIMITS[0])


# --- choice of the communicator


@pytest.mark.parametrize("name", NAMES)
def test_the_backend_is_the_default_communicator(name: str) -> None:
    assert choose_method(name, {}).communicator == choose_method(name, {}, "wfbp").communicator == Backend()
    assert choose_method(name, {"communicator": "dense"}).communicator == Dense()
    assert choose_method(name, {"communicator": "backend", "halves": True}).communicator == Backend(halves=True)
    # DeAR needs splittable sums; a method object stays unchanged.
    assert choose_method(name, {}, "dear").communicator == choose_method(name, {}, Dear()).communicator == Dense()
    assert choose_method(spardl.make_method(name), {}).communicator == Dense()


def test_other_methods_keep_their_communicator() -> None:
    for name in set(spardl.method_names()) - set(NAMES):
        assert type(choose_method(name, {}).communicator) is type(spardl.make_method(name).communicator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"communicator": "denze"}, "communicator must be one of allgather, "),
        ({"communicator": "spardl"}, "communicator=spardl cannot sum dense tensors"),
        ({"communicator": "dense", "halves": True}, "unknown option halves; this method has"),
        ({"density": 0.1}, "unknown option density; this method has"),
    ],
)
def test_invalid_requests(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose_method("none", options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("kind", PATHS)
def test_replicas_are_bit_identical(kind: str, name: str) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[Tensor, Any]:
        model = made("cnn", torch.float32).double() if name == "none" else made("cnn")
        path = PATHS[kind](model, {"method": name})
        return train(path, model, range(STEPS)), path.handle.method.communicator

    (first, by), *others = run_workers(3, work)
    assert by == Backend()
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other, _ in others)


@pytest.mark.parametrize("kind", PATHS)
def test_dense_adds_up_in_the_order_of_the_ranks(kind: str) -> None:
    """As in the simulation, for every position of an entry, also in DDP's buckets."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        model = made("cnn")
        path = PATHS[kind](model, {"method": "none", "communicator": "dense"})
        found = []
        for step in range(3):
            alone = made("cnn")
            alone.load_state_dict(model.state_dict())
            grown = [batch for rank in range(3) for batch in [batch_of(alone, step, rank)]]
            own = [gradient(alone, batch) for batch in grown]
            model.zero_grad()
            path.backward([grown[cluster.local_ranks[0]]])
            found.append(torch.equal(flat(model), (own[0] + own[1] + own[2]) / 3))
        return found

    assert run_workers(3, work) == [[True] * 3] * 3


def batch_of(model: Any, step: int, rank: int) -> Tensor:
    return model.batch(4, torch.Generator().manual_seed(1000 * step + rank))


def gradient(model: nn.Module, batch: Tensor) -> Tensor:
    model.zero_grad()
    loss_of(model, batch).backward()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


# --- in DDP's buckets


def begun(name: str = "none", saved: Sequence[Mapping[str, Any]] = (), **ddp: Any) -> tuple[Any, Ddp, Any]:
    """Returns a model with a hook, in whose DDP buckets are those of a first step."""
    model = made("cnn")
    path = Ddp(model, {"method": name}, **ddp)
    rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if saved:
        go_back((model, path, rule), saved)
    return model, path, rule


def go_back(parts: tuple[Any, Ddp, Any], saved: Sequence[Mapping[str, Any]]) -> None:
    model, path, rule = parts
    for part, values in zip((model, path.handle, rule), deepcopy(list(saved)), strict=True):
        part.load_state_dict(values)


def run(parts: tuple[Any, Ddp, Any], steps: range) -> list[dict[str, Any]]:
    """Makes some steps, and returns the state after them."""
    model, path, rule = parts
    for batch in batches(model, steps):
        rule.zero_grad()
        path.backward([batch])
        rule.step()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, path.handle, rule)], file)
    file.seek(0)
    return list(torch.load(file, weights_only=True))


def lent(path: Ddp) -> tuple[int, int]:
    """Returns the number of groups averaged in DDP's buffers, and of all groups."""
    averager = path.handle._averager
    return len(averager._lent), len(averager.engine.gradient_state.groups)


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_from_the_second_step_on_gradients_stay_in_ddps_buckets(view: bool) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[list[tuple[int, int]], bool]:
        parts = begun(gradient_as_bucket_view=view)
        found = []
        for step in range(3):
            run(parts, range(step, step + 1))
            found.append(lent(parts[1]))
        plain = made("cnn")
        dense = train(Ddp(plain, None), plain, range(3))
        return found, torch.allclose(weights(parts[0]), dense, rtol=1e-12)

    # After the first step, groups are what DDP's buckets will be.
    assert run_workers(2, work) == [([(0, 2), (2, 2), (2, 2)], True)] * 2


@pytest.mark.parametrize("options", [{"bucket_mb": 25.0}, {"schedule": Wfbp()}, {"method": "spardl"}], ids=str)
def test_explicit_bucket_mb_is_respected(options: dict[str, Any]) -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[int, int]:
        model = made("cnn")
        path = Ddp(model, {"method": "none", **options})
        train(path, model, range(3))
        return lent(path)

    assert run_workers(2, work) == [(0, 1)] * 2


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_saved_state_continues_bit_for_bit(after: int) -> None:
    """Sums of three workers depend on the groups, and a new DDP has other buckets in its first step."""

    def work(cluster: ProcessGroupCluster) -> tuple[bool, bool]:
        whole = begun()
        run(whole, range(STEPS))
        saved = run(begun(), range(after))
        fresh, live = begun("none", saved), begun()
        run(fresh, range(after, STEPS))
        run(live, range(3))
        go_back(live, saved)
        run(live, range(after, STEPS))
        return torch.equal(weights(fresh[0]), weights(whole[0])), torch.equal(weights(live[0]), weights(whole[0]))

    assert run_workers(3, work) == [(True, True)] * 3


def test_state_of_dense_training_continues() -> None:
    """States of sums are empty, so any kind of sum can load them; groups are DDP's after one step."""

    def work(cluster: ProcessGroupCluster) -> tuple[bool, tuple[int, int]]:
        model = made("cnn")
        old = (
            model,
            Ddp(model, {"method": spardl.make_method("none"), "bucket_mb": 25.0}),
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )
        saved = run(old, range(3))
        assert saved[1]["owner"]["parts"][1] == "Dense"
        new = begun("none", saved)
        run(new, range(3, STEPS))
        run(old, range(3, STEPS))
        return torch.allclose(weights(new[0]), weights(old[0]), rtol=1e-12), lent(new[1])

    # Two workers' sums are the same in either order.
    assert run_workers(2, work) == [(True, (2, 2))] * 2


def test_a_state_of_another_method_is_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        saved = run(begun(), range(2))
        found = []
        for name in ("fp16", "topka"):
            with pytest.raises(ConfigError) as caught:
                begun(name, saved)
            found.append(str(caught.value).split(";")[0])
        parts = begun()
        run(parts, range(2))
        before = weights(parts[0])
        with pytest.raises(ConfigError, match="this state belongs to other parameters"):
            parts[1].handle.load_state_dict({**saved[1], "names": [*saved[1]["names"][:-1], "other"]})
        run(parts, range(2, 4))
        return [*found, str(before.isfinite().all().item())]

    (found, other) = run_workers(2, work)
    assert found == other
    assert (
        found[0].startswith("this state belongs to the method NoCompression + Backend + NoResidual")
        and found[2] == "True"
    )
    assert "but this method is TopK + AllGather" in found[1]


def test_the_other_order_is_followed_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a bucket that is no group are copied, with the same average."""
    monkeypatch.setattr(buckets, "_fill_buckets", lambda sizes, limits: [(0, 1), (1, len(sizes))])

    def work(cluster: ProcessGroupCluster) -> tuple[bool, tuple[int, int]]:
        parts, plain = begun(), made("cnn")
        run(parts, range(4))
        expected = train(Ddp(plain, None), plain, range(4))
        return torch.allclose(weights(parts[0]), expected, rtol=1e-12), lent(parts[1])

    assert run_workers(2, work) == [(True, (0, 2))] * 2
