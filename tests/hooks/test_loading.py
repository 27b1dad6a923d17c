"""Loading of states: damaged ones change nothing, workers compare them, and torch's DCP keeps residuals."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.averager import LoadChecks
from spardl.protocol.programs import Worker
from tests.hooks.loops import Ddp, Hooks, batches, made, weights
from tests.hooks.test_agreement import complaint
from tests.support.harness import run_workers

SPARSE: dict[str, Any] = {"method": "spardl", "density": 0.2, "timeout": 20}


class Outermost:
    """An ``Outer`` with the interface of the other handles."""

    def __init__(self) -> None:
        self.model = made("cnn")
        self.rule = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.handle = spardl.Outer(
            self.model.named_parameters(), self.rule, "spardl", every=2, fragments=2, momentum=0.5, density=0.2
        )

    def run(self, steps: range) -> None:
        for batch in batches(self.model, steps):
            self.rule.zero_grad()
            self.model(batch).square().mean().backward()
            self.handle.step()


class Inner:
    """A handle in a training loop."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.model = made("cnn")
        self.rule = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if options.pop("optimizer", False):
            options["optimizer"] = self.rule
        given = {**SPARSE, **options}
        self.path = kind(self.model, {name: value for name, value in given.items() if value is not None})
        self.handle = self.path.handle

    def run(self, steps: range) -> None:
        for batch in batches(self.model, steps):
            self.rule.zero_grad()
            self.path.backward([batch])
            self.rule.step()


HANDLES: dict[str, Callable[[], Any]] = {
    "attach": lambda: Inner(Ddp, bucket_mb=0.001, optimizer=True),
    "dense": lambda: Inner(Ddp, method="none", density=None),
    "dear": lambda: Inner(Ddp, schedule="dear", optimizer=True, bucket_mb=0.001),
    "wfbp": lambda: Inner(Hooks, bucket_mb=0.001),
    "layer_fusion": lambda: Inner(Hooks, schedule="layer_fusion"),
    "mg_wfbp": lambda: Inner(Hooks, schedule="mg_wfbp"),
    "outer": Outermost,
}


# Keys that older states lack.
OLDER = {"partition", "usage", "kept", "decided", "trials", "left", "aloft", "fragments", "exchanges"}


def damaged(value: Any) -> Iterator[Any]:
    """Yields states in which one item is missing or has another type."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            for other in damaged(each):
                yield {**value, name: other}
            yield {**value, name: object()}
            if name not in OLDER:
                yield {other: kept for other, kept in value.items() if other != name}
    elif isinstance(value, list) and value and not isinstance(value[0], str):
        for place in {0, len(value) - 1}:
            for other in damaged(value[place]):
                yield [*value[:place], other, *value[place + 1 :]]
        yield value[:-1]
        yield [*value, value[-1]]
    elif isinstance(value, torch.Tensor) and value.numel():
        yield torch.ones(value.numel() + 1)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_damaged_state_changes_nothing() -> None:
    """For every handle and item that is missing or has another type: one line, and no change."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        said = []
        for name, make in HANDLES.items():
            loop = make()
            loop.run(range(8))
            state = loop.handle.state_dict()
            count = 0
            for values in damaged(state):
                count += 1
                try:
                    loop.handle.load_state_dict(values)
                    said.append(f"{name}: accepted number {count}")
                    loop.handle.load_state_dict(state)
                except ConfigError as error:
                    if "\n" in str(error):
                        said.append(f"{name}: {error}")
                except Exception as error:
                    said.append(f"{name}: number {count}: {type(error).__name__} {error}")
                if not same(loop.handle.state_dict(), state):
                    said.append(f"{name}: number {count} changed something")
            if count < 20:
                said.append(f"{name}: {count} states")
            loop.handle.load_state_dict(state)
            loop.run(range(8, 10))
        return said

    assert run_workers(1, work) == [[]]


@pytest.mark.parametrize("schedule", ["mg_wfbp", "layer_fusion"])
def test_measured_groups_continue_from_others(schedule: str) -> None:
    """Loads a state of wfbp, then an earlier own state: groups are merged and split again, residuals stay."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        one = Inner(Hooks, bucket_mb=0.001)
        one.run(range(3))
        loop = Inner(Hooks, schedule=schedule)
        loop.run(range(2))
        early = loop.handle.state_dict()
        loop.run(range(2, 9))
        own, found = loop.handle.state_dict(), []
        for state in (one.handle.state_dict(), own, early, own):
            loop.handle.load_state_dict(state)
            mine = torch.cat([group["memory"] for group in loop.handle.state_dict()["groups"]])
            found.append(torch.equal(mine, torch.cat([group["memory"] for group in state["groups"]])))
            loop.run(range(9, 18))
        return found

    assert run_workers(2, work) == [[True] * 4] * 2


def test_workers_compare_steps_after_a_load() -> None:
    """A single worker loads an older state: an error on all workers in the next step."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        said = []
        for make in (
            lambda: Inner(Hooks, method="random_k"),
            lambda: Inner(Ddp, optimizer=True),
            lambda: Inner(Ddp, schedule="dear", optimizer=True),
        ):
            loop = make()
            loop.run(range(3))
            old = loop.handle.state_dict()
            loop.run(range(3, 5))
            loop.handle.load_state_dict(loop.handle.state_dict())
            loop.run(range(5, 6))
            if cluster.local_ranks[0]:
                loop.handle.load_state_dict(old)
            said.append(complaint(lambda loop=loop: loop.run(range(6, 8))))  # type: ignore[misc]
        return said

    line = "rank 1 has step=3, rank 0 has step=6; all workers need the same value"
    assert run_workers(2, work) == [[line] * 3] * 2


def test_load_checks_run_in_few_steps() -> None:
    """They run in each of the first 20 steps, then in every 16th."""
    worker, loads = Worker(0, 2), LoadChecks()
    reported = [step for step in range(1, 101) if loads.step(worker, dict, torch.device("cpu"))]
    assert reported == [*range(1, 21), 33, 49, 65, 81, 97]
    assert not LoadChecks().step(Worker(0, 1), dict, torch.device("cpu"))


def test_late_loads_are_refused_within_16_steps() -> None:
    """Steps of the handle count, not those of the loaded state."""

    def work(cluster: ProcessGroupCluster) -> list[int]:
        loop = Inner(Hooks, method="random_k")
        loop.run(range(3))
        old = loop.handle.state_dict()
        loop.run(range(3, 21))
        if cluster.local_ranks[0]:
            loop.handle.load_state_dict(old)
        for step in range(21, 60):
            if complaint(lambda step=step: loop.run(range(step, step + 1))) != "nothing":  # type: ignore[misc]
                return [step]
        return []

    (step,), other = run_workers(2, work)
    assert other == [step]
    assert 21 < step <= 21 + 16


def test_workers_compare_rates_decay_and_frozen() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        rank, said = cluster.local_ranks[0], []
        for key, values in (("lr", (0.1, 0.2)), ("weight_decay", (0.0, 0.5))):
            loop = Inner(Hooks, optimizer=True)
            loop.rule.param_groups[0][key] = values[rank]
            said.append(complaint(lambda loop=loop: loop.run(range(1))))  # type: ignore[misc]
        loop = Inner(Hooks, optimizer=True)
        loop.run(range(1))
        next(loop.model.parameters()).requires_grad_(requires_grad=not rank)
        loop.handle.load_state_dict(loop.handle.state_dict())
        said.append(complaint(lambda: loop.run(range(1, 2))))
        return said

    end = "; all workers need the same value"
    rate, decay = "learning rate of parameter group 0", "weight decay of parameter group 0"
    expected = [
        f"rank 1 has {rate}=0.2, rank 0 has {rate}=0.1{end}",
        f"rank 1 has {decay}=0.5, rank 0 has {decay}=0.0{end}",
        f"rank 1 has frozen parameters=['body.0.weight'], rank 0 has frozen parameters=[]{end}",
    ]
    assert run_workers(2, work) == [expected] * 2


def test_dcp_keeps_residuals() -> None:
    """One key for each rank, into handles without steps; a common key is refused."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        rank, found = cluster.local_ranks[0], []
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder)
        for key in (f"spardl-{rank}", "spardl"):
            one = Inner(Ddp, optimizer=True)
            one.run(range(4))
            place = f"{folder[0]}/{len(found)}"
            dcp.save({"model": one.model.state_dict(), key: one.handle.state_dict()}, checkpoint_id=place)
            one.run(range(4, 7))
            other = Inner(Ddp, optimizer=True)
            state = {"model": other.model.state_dict(), key: other.handle.state_dict()}
            dcp.load(state, checkpoint_id=place)
            other.model.load_state_dict(state["model"])
            said = complaint(lambda other=other, own=state[key]: other.handle.load_state_dict(own))  # type: ignore[misc]
            if key == "spardl":
                lines: list[Any] = [None] * 2
                dist.all_gather_object(lines, said)
                found.append(any("save handle.sharded()" in line for line in lines))
            else:
                other.run(range(4, 7))
                found.append(said == "nothing" and torch.equal(weights(one.model), weights(other.model)))
        return found

    assert run_workers(2, work) == [[True, True]] * 2


class Folder(NamedTuple):
    """A checkpoint of ``torch.distributed.checkpoint`` and what has to be found in it."""

    place: str
    residual: torch.Tensor
    finish: torch.Tensor


def residual(loop: Any) -> torch.Tensor:
    """This worker's residual, shape (n,)."""
    return torch.cat([group["memory"] for group in loop.handle.state_dict()["groups"]])


def summed(vector: torch.Tensor) -> torch.Tensor:
    """The sum over all workers."""
    total = vector.clone()
    dist.all_reduce(total)
    return total


def save_sharded(kind: str, folder: str, *, later: bool) -> list[Folder]:
    """Four steps of four workers, a checkpoint, and three more steps."""

    def work(cluster: ProcessGroupCluster) -> Folder:
        loop = HANDLES[kind]()
        loop.run(range(4))
        state = {"model": loop.model.state_dict(), "spardl": loop.handle.sharded()}
        total = summed(residual(loop)) if kind != "outer" else torch.empty(0)
        if later:
            saving = dcp.async_save(state, checkpoint_id=folder)
            loop.run(range(4, 5))
            saving.result()
            loop.run(range(5, 7))
        else:
            dcp.save(state, checkpoint_id=folder)
            loop.run(range(4, 7))
        return Folder(folder, total, weights(loop.model))

    return run_workers(4, work)


def load_sharded(kind: str, found: list[Folder], workers: int) -> list[tuple[bool, bool]]:
    """Whether the sum of the residuals is that before, and the weights three steps later equal those before."""

    def work(cluster: ProcessGroupCluster) -> tuple[bool, bool]:
        loop, folder = HANDLES[kind](), found[min(cluster.local_ranks[0], 3)]
        state = {"model": loop.model.state_dict(), "spardl": loop.handle.sharded(folder.place)}
        dcp.load(state, checkpoint_id=folder.place)
        loop.model.load_state_dict(state["model"])
        kept = kind == "outer" or torch.allclose(summed(residual(loop)), folder.residual, rtol=0, atol=1e-12)
        loop.run(range(4, 7))
        return kept, torch.equal(weights(loop.model), folder.finish)

    return run_workers(workers, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "later"), [("attach", False), ("attach", True), ("dear", True), ("outer", False)], ids=str
)
def test_sharded_state_resumes_to_the_same_bits(kind: str, later: bool, tmp_path: Path) -> None:
    found = save_sharded(kind, str(tmp_path), later=later)
    assert load_sharded(kind, found, 4) == [(True, True)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 6, 1])
def test_sharded_state_of_other_workers_keeps_residuals(workers: int, tmp_path: Path) -> None:
    found = save_sharded("attach", str(tmp_path), later=False)
    assert found[0].residual.abs().sum() > 0
    kept = load_sharded("attach", found, workers)
    assert [each for each, _ in kept] == [True] * workers


def test_resharded_states_need_all_ranks() -> None:
    """The states of three workers, dealt to two; and handles that need the same number refuse."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        loop = HANDLES["wfbp"]()
        loop.run(range(2))
        own = loop.handle.state_dict()
        states = [{**own, "owner": {**own["owner"], "rank": rank, "workers": 3}} for rank in range(3)]
        total = 3 * residual(loop) if cluster.local_ranks[0] == 0 else torch.zeros_like(residual(loop))
        alike = [None, own] if cluster.local_ranks[0] else [own, None]
        dist.broadcast_object_list(states)
        dist.all_reduce(total)
        wrong = complaint(lambda: loop.handle.load_resharded([states[1], states[0], states[2]]))
        loop.handle.load_resharded(states)
        assert torch.allclose(summed(residual(loop)), total, rtol=0, atol=1e-12)
        loop.handle.load_resharded(alike)
        assert torch.equal(residual(loop), torch.cat([group["memory"] for group in own["groups"]]))
        outer = Outermost()
        return [wrong, complaint(lambda: outer.handle.load_resharded([{}] * 3))]

    for rank, (wrong, outer) in enumerate(run_workers(2, work)):
        assert wrong.startswith(f"this state belongs to rank {1 - rank} of 3, but this is rank {rank} of 3")
        assert "was saved by 3 workers" in outer
        assert outer.endswith("Outer needs the same number of workers")


def test_a_damaged_share_changes_nothing() -> None:
    """A single worker takes over the residuals of two; the second state is damaged."""

    def work(cluster: ProcessGroupCluster) -> bool:
        loop = HANDLES["wfbp"]()
        loop.run(range(2))
        own = loop.handle.state_dict()
        states = [{**own, "owner": {**own["owner"], "rank": rank, "workers": 2}} for rank in range(2)]
        loop.run(range(2, 3))
        before = loop.handle.state_dict()
        first = {name: value for name, value in own["groups"][0].items() if name != "memory"}
        states[1] = {**states[1], "groups": [first, *own["groups"][1:]]}
        assert "groups[0].memory" in complaint(lambda: loop.handle.load_resharded(states))
        return same(before, loop.handle.state_dict())

    assert run_workers(1, work) == [True]


class Failing(torch.autograd.Function):
    """The identity, whose backward pass runs out of memory."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")


def test_synchronizations_of_a_failed_step_do_not_change_a_loaded_state() -> None:
    def work(cluster: ProcessGroupCluster) -> tuple[bool, bool]:
        loop, reference = HANDLES["wfbp"](), HANDLES["wfbp"]()
        loop.run(range(2))
        reference.run(range(2))
        saved = loop.handle.state_dict()
        model, rule = copy.deepcopy((loop.model.state_dict(), loop.rule.state_dict()))
        # Groups of later layers are in flight when the pass fails, and rank 1 fails later.
        hook = next(loop.model.children()).register_forward_hook(lambda module, inputs, output: Failing.apply(output))
        if cluster.local_ranks[0] == 1:
            time.sleep(0.5)
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.run(range(2, 3))
        hook.remove()
        loop.handle.load_state_dict(saved)
        time.sleep(0.5)
        unchanged = same(saved, loop.handle.state_dict())
        loop.model.load_state_dict(model)
        loop.rule.load_state_dict(rule)
        loop.run(range(2, 4))
        reference.run(range(2, 4))
        return unchanged, torch.equal(weights(loop.model), weights(reference.model))

    assert run_workers(2, work) == [(True, True)] * 2


def test_calibration_counts_in_stats() -> None:
    """Three sizes (all, 1/8 and 1/64 of the entries), three times each, and 15 times of 8 bytes."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        loop = Inner(Hooks, schedule="layer_fusion", density=0.5)
        loop.run(range(6))
        before = loop.handle.stats()
        loop.run(range(6, 7))
        after = loop.handle.stats()
        more = 7 * (after.bytes_sent - before.bytes_sent)
        expected = 3 * (1 + 1 / 8 + 1 / 64) * before.bytes_sent + 15 * 8
        return [expected < more < 1.05 * expected]  # entries of small vectors are rounded up

    assert run_workers(2, work) == [[True]] * 2


def test_converted_models_and_destroyed_groups() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        said = []
        loop = Inner(Hooks)
        loop.model.float()
        with pytest.raises(ConfigError, match=r"was torch.float64 on cpu when this handle was created and is now"):
            loop.path.backward([batches(loop.model, [0])[0].float()])
        model = nn.Linear(4, 4)
        outer = spardl.Outer(model.named_parameters(), torch.optim.SGD(model.parameters(), lr=0.1), every=2)
        model.double()
        model(torch.ones(2, 4).double()).sum().backward()
        said.append(complaint(outer.step))
        group = dist.new_group([0])
        model = nn.Linear(4, 4)
        sync = spardl.Synchronizer(model.named_parameters(), group=group)
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        attached = spardl.attach(ddp)
        dist.destroy_process_group(group)
        said.append(complaint(lambda: model(torch.ones(2, 4)).sum().backward()))
        said.append(complaint(attached._averager.begin))
        for handle in (sync, attached):
            handle.state_dict()
            handle.detach()
        return said

    (said,) = run_workers(1, work)
    assert said[0].startswith("bias was torch.float32 on cpu when this handle was created and is now torch.float64")
    assert all(each.startswith("the process group of this handle was destroyed; call") for each in said[1:])
