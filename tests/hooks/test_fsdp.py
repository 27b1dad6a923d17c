"""Sharded inside nodes, sparse between nodes: two nodes of two workers each."""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import spardl
from spardl.basics.errors import ConfigError
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.fsdp import attach_fsdp
from tests.hooks.loops import Ddp, Loss, Path, batches, loss_of, made, train, weights
from tests.hooks.test_moved import OPTIMIZERS, adamw
from tests.hooks.test_moved import whole as whole_method
from tests.support.harness import run_workers

SPARSE = {"method": "spardl", "density": 0.1}


class Nodes(Path):
    """FSDP inside a node, the method between nodes."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        fully_shard(model.head if hasattr(model, "head") else model.layer, mesh=mesh["inside"])
        fully_shard(model, mesh=mesh["inside"])
        self.called = model
        self.handle = attach_fsdp(model, group=mesh["nodes"].get_group(), **(options or {}))

    def backward(self, parts: list[torch.Tensor], loss: Loss = loss_of) -> None:
        for number, part in enumerate(parts):
            self.called.set_requires_gradient_sync(number == len(parts) - 1)  # type: ignore[operator]
            (loss(self.called, part) / len(parts)).backward()


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_density_1_is_plain_ddp(kind: str) -> None:
    """Also with four micro-batches, of which the last one is synchronized."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        plain = made(kind)
        expected = train(Ddp(plain, None), plain)
        same = []
        for passes in (1, 4):
            sharded = made(kind)
            path = Nodes(sharded, {"method": "spardl", "density": 1.0})
            train_only(path, sharded, range(20), momentum=0.9, passes=passes)
            same.append(bool(torch.allclose(whole(sharded), expected, rtol=1e-10, atol=1e-12)))
        return same

    assert run_workers(4, work) == [[True, True]] * 4


def train_only(path: Path, model: Any, steps: range, momentum: float = 0.0, passes: int = 1) -> None:
    rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    for batch in batches(model, steps):
        rule.zero_grad()
        path.backward(list(batch.split(len(batch) // passes)))
        rule.step()


@pytest.mark.slow
def test_the_state_round_trip() -> None:
    def first(cluster: ProcessGroupCluster) -> Any:
        model = made("cnn")
        path = Nodes(model, SPARSE)
        train_only(path, model, range(5))
        buffer = io.BytesIO()
        torch.save((path.handle.state_dict(), whole(model)), buffer)
        train_only(path, model, range(5, 9))
        return buffer.getvalue(), whole(model), path.handle.stats()

    halfway = run_workers(4, first)
    assert all(torch.equal(weights, halfway[0][1]) for _, weights, _ in halfway)
    assert all(stats.steps == 9 and 0 < stats.bytes_sent < stats.dense_bytes for _, _, stats in halfway)

    def second(cluster: ProcessGroupCluster) -> bool:
        saved, expected, _ = halfway[cluster.local_ranks[0]]
        state, weights = torch.load(io.BytesIO(saved), weights_only=True)
        model = made("cnn")
        nn.utils.vector_to_parameters(weights, model.parameters())
        path = Nodes(model, SPARSE)
        with pytest.raises(ConfigError, match="not the state of a handle of this kind"):
            path.handle.load_state_dict({"owner": state["owner"], "groups": []})
        path.handle.load_state_dict(state)
        train_only(path, model, range(5, 9))
        return torch.equal(whole(model), expected)

    assert all(run_workers(4, second))


@pytest.mark.slow
def test_groups_that_cut_across_shards_are_refused() -> None:
    """Shards of different parameters must not be averaged, nor those that native HSDP has averaged."""

    def work(cluster: ProcessGroupCluster) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        said = []
        for inside, group in ((mesh["inside"], None), (mesh, mesh["nodes"].get_group())):
            model = made("cnn")
            fully_shard(model, mesh=inside)
            with pytest.raises(ConfigError) as error:
                attach_fsdp(model, group=group)
            said.append(str(error.value))
        return said

    for said in run_workers(4, work):
        assert all(
            "replicated among ranks of the process group passed as group=; create a device mesh" in each
            for each in said
        )


SHARDS_ARE_FLAT = (
    "compresses matrices, but FSDP's shards are flat and would be sent uncompressed; use a method for vectors"
)
REFUSED = {
    "powersgd": SHARDS_ARE_FLAT,
    "arc_topk": SHARDS_ARE_FLAT,
    "compute_visible": "but attach_fsdp() averages gradients; use attach(..., optimizer=...)",
}


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_shards_do_not_support(method: str) -> None:

    def work(cluster: ProcessGroupCluster) -> str:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
        model = made("cnn")
        fully_shard(model, mesh=mesh["inside"])
        with pytest.raises(ConfigError) as error:
            attach_fsdp(model, method, group=mesh["nodes"].get_group())
        return str(error.value)

    assert all(REFUSED[method] in found for found in run_workers(2, work))


def test_a_model_that_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match=r"needs a model sharded by fully_shard\(\)"):
        attach_fsdp(nn.Linear(2, 2), group=None)


def test_attach_names_attach_fsdp_for_a_sharded_model() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError) as error:
            spardl.attach(model, "topka", density=0.5)  # type: ignore[arg-type]
        return str(error.value)

    (said,) = run_workers(1, work)
    assert said == (
        "attach() needs a DistributedDataParallel, got a FSDPLinear sharded by fully_shard(); call "
        "spardl.attach_fsdp(model, ..., group=...)"
    )


def accumulated(how: str, **options: Any) -> tuple[torch.Tensor, Any]:
    """Trains two steps of three micro-batches on two nodes; only the last micro-batch sends."""
    model = made("cnn")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
    fully_shard(model.head, mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    handle = attach_fsdp(model, group=mesh["nodes"].get_group(), **options)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(model, range(2), size=6):
        rule.zero_grad()
        for number, part in enumerate(batch.split(2)):
            ACCUMULATING[how](model, number == 2)
            loss_of(model, part).backward()
        rule.step()
    return whole(model), handle.stats()


def set_unit_by_unit(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last, recurse=False)
    model.head.set_requires_all_reduce(requires_all_reduce=last)


def set_by_both_methods(model: Any, last: bool) -> None:
    """``set_requires_gradient_sync(True)`` also reverts ``set_requires_all_reduce(False)``."""
    if last:
        model.set_requires_gradient_sync(True)
    else:
        model.set_requires_all_reduce(False)


ACCUMULATING: dict[str, Any] = {
    "set_requires_gradient_sync": lambda model, last: model.set_requires_gradient_sync(last),
    "set_requires_all_reduce": lambda model, last: model.set_requires_all_reduce(last),
    "unit by unit": set_unit_by_unit,
    "by both methods": set_by_both_methods,
}


@pytest.mark.slow
def test_set_requires_all_reduce_sends_only_the_last() -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        return [accumulated(how, **SPARSE) for how in ACCUMULATING]

    for (expected, usual), *others in run_workers(2, work):
        for found, ours in others:
            torch.testing.assert_close(found, expected)
            assert ours.steps == usual.steps == 2
            assert ours.bytes_sent == usual.bytes_sent


def test_a_second_handle_knows_the_flag_set_after_the_first() -> None:
    def work(cluster: ProcessGroupCluster) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "inside"))
        model: Any = fully_shard(nn.Linear(4, 2), mesh=mesh["inside"])
        attach_fsdp(model, group=mesh["nodes"].get_group())
        model.set_requires_all_reduce(False)
        handle = attach_fsdp(model, group=mesh["nodes"].get_group())
        steps = []
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            steps.append(handle.stats().steps)
            model.set_requires_all_reduce(True)
        return steps

    assert run_workers(2, work) == [[0, 1]] * 2


@pytest.mark.slow
def test_uncompressed_shards_are_reported() -> None:
    def work(cluster: ProcessGroupCluster) -> list[Any]:
        found: list[Any] = []
        for options in ({}, {"exempt": 0}):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, stats = accumulated("set_requires_gradient_sync", method="int8", **options)
            found += [stats.share, [str(each.message) for each in caught if "uncompressed" in str(each.message)]]
        return found

    first, second = run_workers(2, work)
    said = "is sent uncompressed, like every shard of at most exempt=16,384 entries; pass exempt=0"
    assert (first[0], first[3], second[1], second[3]) == (1.0, [], [], [])
    assert first[2] < 0.5
    assert len(first[1]) == 1
    assert said in first[1][0]


# --- with optimizer=: moments before compression


def set_gradient_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def set_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "clip_norm", "passes", "accumulate"),
    [
        *((name, 0.5, 2, set_gradient_sync) for name in (*OPTIMIZERS, "compute_visible")),
        *((name, None, 1, set_gradient_sync) for name in ("adamw", "compute_visible")),
        ("nesterov", 0.5, 2, set_all_reduce),
    ],
)
def test_nodes_update_like_unsharded_workers(
    name: str, clip_norm: float | None, passes: int, accumulate: Callable[[Any, bool], None]
) -> None:
    """Each node has the updates of a worker that has the node's whole model and batch."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        node, inside, group = mesh.get_local_rank("nodes"), mesh.get_local_rank("inside"), mesh["nodes"].get_group()
        plain = made("transformer")
        model: Any = copy.deepcopy(plain)
        fully_shard(model.layer, mesh=mesh["inside"])
        fully_shard(model, mesh=mesh["inside"])
        visible = name == "compute_visible"
        rules = [OPTIMIZERS["adamw" if visible else name](each) for each in (plain, model)]
        for owned in (rule.param_groups for rule in rules if visible):
            owned[0]["lr"], owned[1]["lr"] = 2e-4, 1e-4  # at which bfloat16 sees a part of the updates
        given = {"method": whole_method(name), "group": group, "clip_norm": clip_norm}
        if visible:
            given |= {"method": name, "update_scale": "none"}
        reference = spardl.Synchronizer(plain.named_parameters(), optimizer=rules[0], **given)
        handle: Any = attach_fsdp(model, optimizer=rules[1], **given)
        schedules = [torch.optim.lr_scheduler.StepLR(rule, 2, 0.5) for rule in rules]
        found = []
        for step in range(5):
            parts = [
                torch.randint(20, (2, 2, 6), generator=torch.Generator().manual_seed(100 * step + number + 10 * node))
                for number in range(passes)
            ]
            for rule in rules:
                rule.zero_grad(set_to_none=step % 2 == 0)
            for number, part in enumerate(parts):
                accumulate(model, number == passes - 1)
                (loss_of(model, part[inside]) / passes).backward()
            with reference:
                (sum(loss_of(plain, part.flatten(0, 1)) for part in parts) / passes).backward()
            for each in (*rules, *schedules):
                each.step()
            found.append(float((whole(model) - weights(plain)).abs().max()))
        reference.detach()
        handle.detach()
        return found

    assert all(max(found) < 1e-13 for found in run_workers(4, work))


class Blocks(nn.Module):
    """Three residual blocks, whose shards are of unequal lengths.

    Args:
        reentrant: how to checkpoint the blocks; ``None`` for no checkpoints.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 21), nn.ReLU(), nn.Linear(21, 7)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            if self.reentrant is None:
                hidden = hidden + block(hidden)
            else:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


class Blockwise:
    """A training of :class:`Blocks` with AdamW, on a mesh of two nodes.

    Args:
        inside: number of workers in a node.
        prepare: called with the model before it is sharded.
        bfloat16: whether to compute in bfloat16.
        frozen: names of frozen parameters.
        reentrant: how to checkpoint the blocks.
        nodes: number of nodes.
        **options: of the handle.
    """

    def __init__(
        self,
        inside: int,
        prepare: Callable[[Blocks], None] = lambda model: None,
        *,
        bfloat16: bool = False,
        frozen: Iterable[str] = (),
        reentrant: bool | None = None,
        nodes: int = 2,
        **options: Any,
    ) -> None:
        mesh = init_device_mesh("cpu", (nodes, inside), mesh_dim_names=("nodes", "inside"))
        torch.manual_seed(5)
        self.model: Any = Blocks(reentrant)
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        prepare(self.model)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh["inside"], mp_policy=policy)
        self.group = mesh["nodes"].get_group()
        self.rule: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        given = {"density": 0.2, "group": self.group, "optimizer": self.rule, **options}
        self.options = {name: value for name, value in given.items() if value is not None}
        self.handle: Any = attach_fsdp(self.model, **self.options)

    def loss(self, step: int) -> torch.Tensor:
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        return (self.model(inputs) - inputs[:, :3]).float().square().mean()

    def train(self, steps: Iterable[int], *, detaches: bool = False) -> torch.Tensor:
        for step in steps:
            self.rule.zero_grad()
            self.loss(step).backward()
            self.rule.step()
        if detaches:
            self.handle.detach()
        # Nodes have equal weights.
        own = torch.cat([each.detach().to_local().flatten() for each in self.model.parameters()])
        others = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(others, own, group=self.group)
        assert torch.equal(*others)
        return whole(self.model)


def compiled_by_block(model: Blocks) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


@pytest.mark.slow
def test_ways_of_computing_have_the_same_bits() -> None:
    def work(cluster: ProcessGroupCluster) -> list[bool]:
        expected = Blockwise(2).train(range(8), detaches=True)
        ways = [Blockwise(2, reentrant=False), Blockwise(2, compiled_by_block)]
        with warnings.catch_warnings():
            # torch.compile reads .grad of unsharded parameters.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            found = [torch.equal(way.train(range(8), detaches=True), expected) for way in ways]
        half = Blockwise(2, bfloat16=True)
        early = float(half.loss(99).detach())
        half.train(range(40))
        dtypes = {each.dtype for each in half.model.parameters()} | {half.handle._averager.gradient.vectors[0].dtype}
        return [*found, float(half.loss(99).detach()) < 0.8 * early, dtypes == {torch.float32}]

    assert run_workers(4, work) == [[True] * 4] * 4


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True])
def test_checkpoints_continue_with_the_same_bits(published: bool) -> None:
    """Also in ``torch.distributed.checkpoint``, where shards with the same rank between nodes need different keys."""

    def work(cluster: ProcessGroupCluster) -> list[bool]:
        options: dict[str, Any] = {"optimizer": None} if published else {}

        def made_run() -> Blockwise:
            run = Blockwise(2, **options)
            if published:
                run.rule = torch.optim.SGD(run.model.parameters(), lr=0.1)
            return run

        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        run, file = made_run(), io.BytesIO()
        run.train(range(4))
        dcp.save({"model": get_model_state_dict(run.model), "spardl": run.handle.sharded()}, checkpoint_id=folders[0])
        torch.save((run.handle.state_dict(), run.rule.state_dict(), get_model_state_dict(run.model)), file)
        expected = run.train(range(4, 8))
        file.seek(0)
        state, rule, model = torch.load(file, weights_only=False)
        second = made_run()
        set_model_state_dict(second.model, model)
        second.rule.load_state_dict(rule)
        second.handle.load_state_dict(state)
        third = made_run()
        loaded = {"model": get_model_state_dict(third.model), "spardl": third.handle.sharded(folders[0])}
        dcp.load(loaded, checkpoint_id=folders[0])
        set_model_state_dict(third.model, loaded["model"])
        return [torch.equal(each.train(range(4, 8)), expected) for each in (second, third)]

    assert run_workers(4, work) == [[True, True]] * 4


def test_another_number_of_nodes_shares_the_residuals() -> None:
    def first(cluster: ProcessGroupCluster) -> Any:
        run = Blockwise(1)
        run.train(range(3))
        return run.handle.state_dict()

    states = run_workers(2, first)

    def second(cluster: ProcessGroupCluster) -> Any:
        run = Blockwise(1, nodes=1)
        run.handle.load_resharded(states)
        return run.handle.state_dict()

    (found,) = run_workers(1, second)
    for before, after in zip(zip(*(each["groups"] for each in states), strict=True), found["groups"], strict=True):
        torch.testing.assert_close(sum(each["memory"] for each in before), after["memory"])
        assert after["step"] == 3


def test_states_of_other_shards_are_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> str:
        run = Blockwise(1)
        run.train(range(1))
        state = run.handle.state_dict()
        with pytest.raises(ConfigError) as error:
            run.handle.load_state_dict({**state, "shard": "[1] of [2]"})
        run.handle.load_state_dict(state)
        return str(error.value)

    assert all(said.startswith("this state belongs to shard [1] of [2]") for said in run_workers(2, work))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


class OwnAdam(torch.optim.Adam):
    """An optimizer whose update is unknown."""


def test_unsuitable_optimizers_are_refused() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        early: list[nn.Parameter] = []
        run = Blockwise(1, lambda model: early.extend(model.parameters()))
        parameters = list(run.model.parameters())
        matrices = [each for each in parameters if each.ndim == 2]

        def attached(rule: Any, **options: Any) -> str:
            return refused(lambda: attach_fsdp(run.model, **{**run.options, "optimizer": rule, **options}))

        said = [attached(run.rule)]
        run.handle.detach()
        several = [torch.optim.AdamW(matrices), torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]
        stray = torch.optim.AdamW([*parameters, nn.Parameter(torch.ones(3))])
        rules = [torch.optim.AdamW(early), torch.optim.AdamW(matrices), stray, OwnAdam(parameters), several]
        said += [attached(rule) for rule in rules]
        said.append(attached(getattr(torch.optim, "Muon", torch.optim.Adagrad)(matrices)))
        said.append(attached(None, clip_norm=1.0))
        said.append(attached(None, update_scale="measured"))
        said.append(attached(None, timeout=10.0))
        said.append(attached(None, scaler=torch.amp.GradScaler("cpu")))
        return said

    expected = [
        "this model already has a handle with optimizer=; call its detach()",
        "optimizer has none of the sharded parameters; create it after fully_shard()",
        "optimizer is missing 8 of the 16 averaged parameters",
        "1 of the optimizer's 17 parameters are not averaged by this handle",
        "SGD, Adam, AdamW",
        "the optimizers (AdamW and SGD) may differ in learning rate and weight decay",
        "does not support Muon" if hasattr(torch.optim, "Muon") else "supports SGD, Adam",
        "clip_norm=1.0 needs optimizer=",
        "update_scale=measured has no effect",
        "timeout=10.0 has no effect, because this handle averages gradients, not updates",
        "scaler is an argument of attach() and Synchronizer()",
    ]
    for found in run_workers(2, work):
        for line, start in zip(found, expected, strict=True):
            assert start in line


def test_a_method_without_moments_leaves_them_to_adamw() -> None:
    def work(cluster: ProcessGroupCluster) -> Any:
        run = Blockwise(1, method="int8", density=None, exempt=0)
        run.train(range(2))
        kept = sum(each["exp_avg"].numel() for each in run.rule.state.values())
        other = Blockwise(1, method="int8", density=None, exempt=0)
        other.rule.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        return run.handle.stats().steps, kept > 0, refused(lambda: other.loss(0).backward())

    said = "rank 1 has learning rate of parameter group 0=0.2, rank 0 has learning rate of parameter group 0=0.1"
    for steps, kept, found in run_workers(2, work):
        assert (steps, kept) == (2, True)
        assert found.startswith(said)


def interrupt(module: nn.Module) -> None:
    """Makes the next backward pass fail at the output of a module."""

    def fail(_gradient: torch.Tensor) -> None:
        raise ConfigError("the pass was interrupted")

    def arm(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        armed.remove()
        output.register_hook(fail)

    armed = module.register_forward_hook(arm)


def test_wrong_loops_raise_errors() -> None:
    def work(cluster: ProcessGroupCluster) -> list[str]:
        said = []
        # Without zero_grad().
        run = Blockwise(1)
        run.train(range(2))
        run.loss(2).backward()
        said.append(refused(run.rule.step))
        # step() without a backward pass.
        run = Blockwise(1)
        run.train(range(2))
        said.append(refused(run.rule.step))
        # Two backward passes that both send.
        run = Blockwise(1)
        run.loss(0).backward()
        said.append(refused(lambda: run.loss(1).backward()))
        # Units that disagree.
        run = Blockwise(1)
        run.model.set_requires_all_reduce(False, recurse=False)
        said.append(refused(lambda: run.loss(0).backward()))
        # A clipped update.
        run = Blockwise(1)
        run.loss(0).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        said.append(refused(run.rule.step))
        # A parameter that is trained later.
        run = Blockwise(1, frozen=["first.weight"])
        run.train(range(1))
        run.model.first.weight.requires_grad_(True)
        said.append(refused(lambda: run.train([1])))
        # A nested backward pass, which ends before the others have begun.
        run = Blockwise(1, reentrant=True)
        said.append(refused(lambda: run.loss(0).backward()))
        # A pass that failed on all workers.
        run = Blockwise(1)
        interrupt(run.model.blocks[0])
        said.append(refused(lambda: run.loss(0).backward()))
        run.rule.zero_grad()
        run.loss(1).backward()
        said.append(refused(run.rule.step))
        # Workers with different learning rates.
        run = Blockwise(1)
        run.rule.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        said.append(refused(lambda: run.loss(0).backward()))
        return said

    expected = [
        "step() would apply the gradient of",
        "step() would apply gradients that were not averaged since the last step()",
        "still contained an earlier average when it was averaged",
        "set_requires_all_reduce() has different values in one backward pass",
        "an averaged update, was changed between backward() and step()",
        "first.weight was frozen when this handle was created and is trained now",
        "still contained an earlier average when it was averaged",
        "the pass was interrupted",
        "the last backward pass failed after some of its gradients were averaged; restart the training",
        "rank 1 has learning rate of parameter group 0=0.2, rank 0 has learning rate of parameter group 0=0.1",
    ]
    for found in run_workers(2, work):
        for line, start in zip(found, expected, strict=True):
            assert start in line
            assert "\n" not in line


def test_foreach_functions_on_shards_are_noticed() -> None:
    """torch does not increase the version counter of a DTensor that they change."""

    def work(cluster: ProcessGroupCluster) -> str:
        run = Blockwise(1)
        run.rule.param_groups[0]["foreach"] = True
        for step in range(24):
            if step % 2:
                torch._foreach_zero_([each.grad for each in run.model.parameters()])
            else:
                run.rule.zero_grad()
            run.loss(step).backward()
            if step < 23:
                run.rule.step()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-6, foreach=True)
        return refused(run.rule.step)

    for found in run_workers(2, work):
        assert "an averaged update, was changed between backward() and step()" in found


@pytest.mark.slow
def test_a_pass_that_no_step_uses_is_ignored_on_all_shards() -> None:
    """Also where a worker has no entries of a parameter."""

    def work(cluster: ProcessGroupCluster) -> bool:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("nodes", "inside"))
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))
        fully_shard(model, mesh=mesh["inside"])
        rule = torch.optim.AdamW(model.parameters(), lr=0.01)
        handle = attach_fsdp(model, "spardl", density=0.5, group=mesh["nodes"].get_group(), optimizer=rule)
        for step in range(3):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            rule.step()
            model(inputs).square().mean().backward()  # of another model's loss, as in a GAN
            rule.zero_grad()
        return handle.stats().steps == 3

    assert all(run_workers(2, work))


def test_discarded_passes_and_frozen_parameters() -> None:
    def work(cluster: ProcessGroupCluster) -> list[bool]:
        expected = Blockwise(1).train(range(4), detaches=True)
        run = Blockwise(1)
        for step in range(4):
            found = run.train([step])
            with run.handle.discard():
                run.loss(99).backward()
        names = ["first.weight", "blocks.1.0.bias"]
        frozen = Blockwise(1, frozen=names)
        before = [each.full_tensor().clone() for each in frozen.model.parameters()]
        frozen.train(range(3))
        pairs = zip(before, frozen.model.named_parameters(), strict=True)
        same = [name for old, (name, now) in pairs if torch.equal(old, now.full_tensor())]
        return [torch.equal(found, expected), same == names]

    assert run_workers(2, work) == [[True, True]] * 2


@pytest.mark.slow
def test_moments_of_an_earlier_training_continue() -> None:
    """As if the handle had had them: both trainings send everything, and AdamW keeps both moments."""

    def work(cluster: ProcessGroupCluster) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        found = []
        for late in (False, True):
            model: Any = made("transformer")
            for module in (model.layer, model):
                fully_shard(module, mesh=mesh["inside"])
            rule, handle = adamw(model), None
            for step in range(6):
                # Nodes have the same batches, so that they agree without a handle.
                words = torch.randint(20, (2, 2, 6), generator=torch.Generator().manual_seed(step))
                if handle is None and (step == 3 or not late):
                    handle = attach_fsdp(model, whole_method("adamw"), group=mesh["nodes"].get_group(), optimizer=rule)
                rule.zero_grad()
                loss_of(model, words[mesh.get_local_rank("inside")]).backward()
                rule.step()
            found.append((whole(model), len(rule.state)))
        (first, _), (second, left) = found
        return [bool(torch.allclose(first, second, rtol=1e-12, atol=1e-13)), left]

    assert run_workers(4, work) == [[True, 0]] * 4


def test_all_nodes_count_skipped_gradients() -> None:
    """The root unit has no parameters of its own, and never synchronizes."""

    def work(cluster: ProcessGroupCluster) -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for module in (*model, model):
            fully_shard(module, mesh=mesh["inside"])
        handle = attach_fsdp(model, group=mesh["nodes"].get_group(), **SPARSE)
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            infinite = step == 1 and cluster.local_ranks[0] == 0
            model(torch.full((2, 8), torch.inf if infinite else 1.0)).sum().backward()
            rule.step()
            rule.zero_grad()
        return handle.stats().refused

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = run_workers(4, work)
    assert counts[0] > 0 and counts == counts[:1] * 4


@pytest.mark.slow
def test_density_1_is_plain_fsdp_with_adamw() -> None:
    """Nodes with the same batches have the same updates, so their average is that of each node."""

    def work(cluster: ProcessGroupCluster) -> bool:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
        found = []
        for attached in (False, True):
            model: Any = made("transformer")
            for module in (model.layer, model):
                # Plain FSDP2 averages over both dimensions itself.
                fully_shard(module, mesh=mesh["inside"] if attached else mesh)
            rule = adamw(model)
            if attached:
                attach_fsdp(model, whole_method("adamw"), group=mesh["nodes"].get_group(), optimizer=rule)
            for step in range(6):
                words = torch.randint(20, (2, 2, 6), generator=torch.Generator().manual_seed(step))
                rule.zero_grad()
                loss_of(model, words[mesh.get_local_rank("inside")]).backward()
                rule.step()
            found.append(whole(model))
        return bool(torch.allclose(*found, rtol=1e-12, atol=1e-13))

    assert all(run_workers(4, work))
