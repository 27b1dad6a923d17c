"""Hybrid sharding: FSDP2 (dense) inside nodes, and a method of this library between nodes.

Every FSDP unit ends its backward pass with a reduce-scatter inside the node. torch then calls a hook with the worker's
shard of the node's gradient, and the hook averages that shard with the same shard of the other nodes.

If the method averages updates of an optimizer, an :class:`Averager` averages the shards instead, as in the other
handles: it sends a group of parameters as soon as torch has stored all gradients of the group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spardl.basics.checks import check_dtypes
from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import on_finalize, weak_method
from spardl.clusters import ProcessGroupCluster
from spardl.hooks.averager import Averager, LoadChecks, Named, report_non_finite
from spardl.hooks.choosing import check_update, choose_method, update_facts
from spardl.hooks.handle import GradientHandle, Handle
from spardl.hooks.optimizer_steps import after_backward
from spardl.hooks.synchronizer import check_still_frozen
from spardl.method.method import Method, MethodState
from spardl.method.moving import Optimizers, matrices_of, optimizers_of, resolve_momentum, trained_by
from spardl.method.names import MethodName
from spardl.method.provenance import check_owner, check_whole, compare, kind_of, method_settings
from spardl.method.refusals import NonFiniteCounts, NonFiniteReports, is_due
from spardl.method.registry import check_averages_gradients
from spardl.protocol.programs import clone_data
from spardl.schedules import Wfbp
from spardl.vector.flat import local_part, write
from spardl.vector.layout import Layout

__all__ = ["Sharded", "ShardedUpdates", "attach_fsdp"]

# torch numbers running backward passes from 0.
_NO_PASS = -1


class Sharded(Handle):
    """Handle of an FSDP model whose gradient shards are averaged, as returned by :func:`attach_fsdp`.

    Args:
        units: FSDP units of the model, by name.
        method: Method that averages the shards.
        cluster: Workers that have the same shards.
        update: Function that returns settings of the optimizer, by name; they must be equal on all workers.
    """

    def __init__(
        self,
        units: Mapping[str, FSDPModule],
        method: Method,
        cluster: ProcessGroupCluster,
        update: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        super().__init__(method, cluster, _trained(units.values()))
        self._update_facts = update
        self._states: dict[str, MethodState] = {}
        # Loaded states of units that have had no backward pass yet.
        self._saved: dict[str, Any] = {}
        self._loads = LoadChecks()
        # Units that have been averaged in this step, and sums over micro-batches that have not.
        self._done: set[str] = set()
        self._partial: dict[str, Tensor] = {}
        self._warned_uncompressed = False
        self._units = dict(units)
        self._refusals = NonFiniteReports(self._worker.size)
        if meshes := _meshes(_trained(units.values())):
            self._key = _key_of(meshes[0])
        for name, unit in units.items():
            _record_flags(unit)
            # torch.compile would trace the hook into the backward graph.
            unit.set_all_reduce_hook(torch.compiler.disable(partial(self._average, name)))

    @torch.no_grad()
    def _average(self, name: str, shard: Tensor) -> None:
        flat = shard.view(-1)
        summed = self._partial.get(name)
        # FSDP omits unused parameters from shards, so lengths may differ between micro-batches.
        if summed is not None:
            _check_length(name, summed, flat)
        if not _all_reduces(self._units[name]):
            # As in native HSDP, keep the sum until the last micro-batch, whose average then includes it.
            self._partial[name] = flat.clone() if summed is None else summed.add_(flat)
            flat.zero_()
            return
        if summed is not None:
            flat.add_(self._partial.pop(name))
        if name not in self._states:
            self._begin(name, flat)
        # torch does not report the end of a step: a step has ended when a unit is averaged again.
        if name in self._done:
            self._meter.step()
            self._done.clear()
        if not self._done:
            facts = partial(self._facts, name, flat, self._states[name])
            if programs := self._loads.step(self._worker, facts, self._cluster.device):
                self._cluster.run_uncounted(programs)
        state = self._states[name]
        if flat.dtype is not state.memory.dtype:
            raise ConfigError(
                f"the shard of {name or 'the model'} was {state.memory.dtype} in the first step and is now "
                f"{flat.dtype}; convert the model before fully_shard(), then call attach_fsdp()"
            )
        _check_length(name, state.memory, flat)
        self.method.accumulate(flat, state)
        (average,) = self._cluster.run([self.method.average(self._worker, state)])
        write(average, flat)
        self._done.add(name)
        # Counts are exchanged once per step: for the first unit that has parameters.
        exchanges = is_due(self._loads.steps) and name == next(iter(self._states))
        report_non_finite(self._refusals, NonFiniteCounts.of(self._states.values()), self._cluster, exchanges=exchanges)

    def _begin(self, name: str, flat: Tensor) -> None:
        state = self.method.init_state(Layout.flat(flat.numel()), flat.dtype, flat.device)
        if name in self._saved:
            saved = self._saved.pop(name)
            check_whole(saved, state.state_dict(), f"units.{name}")
            state.load_state_dict(saved)
        # Shards of one unit may differ between nodes, for example if ranks froze other parameters.
        self._cluster.run_uncounted([compare(self._worker, self._facts(name, flat, state), self._cluster.device)])
        self._states[name] = state
        self._warn_uncompressed(name, len(flat))

    def _warn_uncompressed(self, name: str, entries: int) -> None:
        """Warns once, on the first rank, if a shard is so small that the compressor does not compress it."""
        limit = getattr(self.method.compressor, "exempt", 0)
        if entries > limit or self._warned_uncompressed:
            return
        self._warned_uncompressed = True
        if self._cluster.leads:
            warnings.warn(
                f"spardl: the shard of {name or 'the model'} ({entries:,} entries) is sent uncompressed, like every "
                f"shard of at most exempt={limit:,} entries; pass exempt=0 to attach_fsdp() to compress all of them.",
                stacklevel=4,
            )

    def _facts(self, name: str, flat: Tensor, state: MethodState) -> dict[str, str]:
        steps = {f"step of {each}": str(other.step) for each, other in self._states.items() if each != name}
        facts = {**method_settings(self.method), "handle": "attach_fsdp", "unit": name, "step": str(state.step)}
        facts |= {setting: str(value) for setting, value in self._update_facts().items()}
        return {**facts, "shard": kind_of(flat), **(steps if name in self._states else {})}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this worker as plain data, by name of the FSDP unit; each rank saves its own."""
        begun = {name: clone_data(state.state_dict()) for name, state in self._states.items()}
        return {"owner": dict(self._owner), "units": {**self._saved, **begun}}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank and number of nodes.

        All workers must load states of the same step; otherwise they fail at most 16 steps later.

        Args:
            values: Saved state.

        Raises:
            ConfigError: If the state belongs to another rank, number of nodes, method or model, or is incomplete. For a
                unit that has had no backward pass yet, some of these errors are raised in its first one.
            ValueError: If a shard has another length; for a unit that has had no backward pass yet, in its first one.
        """
        check_owner(values, self._owner, "units")
        check_whole(values, {"units": {name: state.state_dict() for name, state in self._states.items()}})
        unknown = sorted(values["units"].keys() - self._units.keys())
        if unknown:
            raise ConfigError(
                f"this state has FSDP units that the model lacks: {', '.join(unknown)}; load it into a model with the "
                "same fully_shard() calls"
            )
        # All are checked before the first is loaded, so that a damaged state changes nothing.
        for name, saved in values["units"].items():
            self._check_unit(name, saved)
        self._partial.clear()  # sums of an interrupted step
        for name, saved in values["units"].items():
            if name in self._states:
                self._states[name].load_state_dict(clone_data(saved))
            else:
                self._saved[name] = clone_data(saved)
        self._loads.note()

    def _check_unit(self, name: str, saved: Any) -> None:
        state = self._states.get(name)
        if state is None:
            memory = saved.get("memory") if isinstance(saved, Mapping) else None
            if not isinstance(memory, Tensor) or memory.dim() != 1:
                raise ConfigError(f"this state lacks units.{name}.memory; load the complete result of state_dict()")
            state = self.method.init_state(Layout.flat(memory.numel()), memory.dtype)
            check_whole(saved, state.state_dict(), f"units.{name}")
        elif len(state.memory) != len(saved["memory"]):
            state.check(saved)
        try:
            state.check(saved, finite=self.method.residual.remembers)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"this state is damaged: {name}: {error.args[0]}; load what state_dict() returned"
            ) from error

    @property
    def _nbytes(self) -> float:
        return sum(state.memory.nbytes for state in self._states.values())

    @property
    def _refused(self) -> int:
        return self._refusals.total

    @property
    def _in_step(self) -> bool:
        return bool(self._done)

    def reset(self) -> None:
        """Restarts the statistics at zero; residuals and moments stay."""
        if self._done:
            self._meter.step()
            self._done.clear()
        self._meter.reset(self._refused)


class ShardedUpdates(GradientHandle):
    """Handle of an FSDP model whose optimizer only applies averaged updates, as returned by :func:`attach_fsdp`.

    The method treats each node as one worker. Each node keeps moments of its gradient, of which each process holds
    the shard that belongs to its parameters.

    Args:
        units: FSDP units of the model.
        named: Names and parameters of the model, each of any shape.
        method: Method that averages updates.
        group: Process group of the workers with the same shard.
        timeout: Seconds after which a worker that does not answer counts as lost.
        optimizers: Optimizers of the model; no parameter belongs to two of them.
        clip_norm: Largest 2-norm of a node's gradient; ``None`` for no limit.

    Raises:
        ConfigError: If an argument is invalid or contradicts another one.
        PeerError: If a worker is lost.
    """

    _averager: Averager

    def __init__(
        self,
        units: Sequence[FSDPModule],
        named: Iterable[tuple[str, nn.Parameter]],
        method: Method,
        group: Any,
        timeout: float,
        optimizers: Sequence[torch.optim.Optimizer],
        clip_norm: float | None,
    ) -> None:
        # Parameters that fully_shard() ignores are not DTensors.
        sharded = [Named(*pair) for pair in named if isinstance(pair[1], DTensor)]
        trained = [pair for pair in sharded if pair.parameter.requires_grad]
        if not trained:
            raise ConfigError(
                "the model has no sharded parameter with requires_grad; call attach_fsdp() after fully_shard() and "
                "before the first forward pass"
            )
        if trained_by(optimizers).keys().isdisjoint(pair.parameter for pair in trained):
            raise ConfigError("optimizer has none of the sharded parameters; create it after fully_shard()")
        meshes = _meshes(pair.parameter for pair in trained)
        if local_part(trained[0].parameter).device.type != meshes[0].device_type:
            # Some versions of torch call gradient hooks before the gradients have been copied to the host.
            raise ConfigError("attach_fsdp(optimizer=...) does not support CPUOffloadPolicy; remove offload_policy=")
        if clip_norm is not None and (len(meshes) > 1 or meshes[0].ndim > 1):
            raise ConfigError(
                f"clip_norm={clip_norm} needs parameters that are all sharded over one mesh of one dimension; use "
                "that, or remove clip_norm"
            )
        super().__init__(
            method,
            Wfbp(),
            sharded,
            trained,
            device=local_part(trained[0].parameter).device,
            group=group,
            timeout=timeout,
            scaler=None,
            optimizer=optimizers,
            clip_norm=clip_norm,
        )
        self._frozen = [pair for pair in sharded if not pair.parameter.requires_grad]
        self._place = f"{list(meshes[0].get_coordinate() or ())} of {list(meshes[0].shape)}"
        self._key = _key_of(meshes[0])
        given = {"handle": "attach_fsdp", "clip_norm": clip_norm, "shard": self._place}
        self._averager = self._make_averager(trained, given)
        if clip_norm is not None:
            self._averager.engine.limit.joined = partial(_norm_of_node, meshes[0].get_group(), self._cluster.device)
        self._watch_steps()
        self._finalizer = on_finalize(self, self._optimizer_steps.handle_dropped)
        # Whether the running backward pass is the last one of its step (None between passes), and its number.
        self._last: bool | None = None
        self._pass = _NO_PASS
        self._end_later = after_backward(weak_method(self._end))
        self._units = units
        for unit in units:
            _record_flags(unit)
            _flag_of(unit).held = True
            # A strong reference: the model keeps its handle, as a DDP model does.
            unit.set_all_reduce_hook(torch.compiler.disable(partial(self._before_gradients, unit)))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(weak_method(self._on_gradient, number))
            for number, parameter in enumerate(self._averager.gradient.parameters)
        ]
        self._hooks += [each.register_step_pre_hook(weak_method(self._check_ended)) for each in self._optimizers]

    def _active_averager(self) -> Averager:
        return self._averager

    def _before_gradients(self, unit: FSDPModule, _shard: Tensor) -> None:
        """Runs after the reduce-scatter of a unit, before torch adds shards to ``.grad``."""
        self._check_ended()
        last, self._pass = _all_reduces(unit), torch._C._current_graph_task_id()
        if self._last is None:
            # Autograd does not announce gradients of sharded parameters; those of the first unit announce all.
            for each in self._trained:
                self._optimizer_steps.before_gradient(each)
            self._last = last
        elif self._last != last:
            raise ConfigError(
                "set_requires_all_reduce() has different values in one backward pass; set the same value for all FSDP "
                "units of the model"
            )
        self._end_later()

    def _check_ended(self, *_: object) -> None:
        """Checks that the last backward pass has ended. After one that failed, torch may reduce no gradients at all."""
        if self._last is not None and torch._C._current_graph_task_id() != self._pass:
            raise ConfigError(
                "the last backward pass failed after some of its gradients were averaged; restart the training from a "
                "checkpoint, with a new model and handle (if none failed, checkpoint blocks with use_reentrant=False)"
            )

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        # Pass all parameters, as at the end of the backward pass: the shard of this one may be empty.
        if self._ignores(self._averager.gradient.parameters):
            return
        self._averager.engine.note(number)
        if not self._last:
            return
        self._begin_once(self._averager)
        self._averager.put(number, parameter.grad)

    def _end(self) -> None:
        """Runs at the end of a backward pass, once or several times."""
        last, self._last = self._last, None
        if last:
            check_still_frozen(self._frozen)
            self._end_step(self._averager)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this process as plain data; each rank saves its own."""
        return {**self._averager.state_dict(), "shard": self._place}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Restores the state that ``state_dict`` returned on the same rank and number of nodes.

        All workers must load states of the same step. Workers with the same shard that differ fail at most 16 steps
        later; different shards are not compared.

        Args:
            values: Saved state.

        Raises:
            ConfigError: If the state belongs to another rank, number of nodes, method or model, or is incomplete;
                nothing is changed then.
        """
        self._averager.check_state(values)
        if values.get("shard") != self._place:
            raise ConfigError(
                f"this state belongs to shard {values.get('shard')}, but this is shard {self._place}; save and load "
                "the state on every rank, with the same number of workers inside nodes"
            )
        self._averager.load_state_dict(values)
        self._optimizer_steps.forget()

    @property
    def _nbytes(self) -> float:
        return sum(local_part(pair.parameter).nbytes for pair in self._trained)

    def detach(self) -> None:
        """Removes the hooks, so that gradients are averaged inside nodes only."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            unit.set_all_reduce_hook(_do_nothing)
            _flag_of(unit).held = False
        self._release()


def attach_fsdp(
    model: nn.Module,
    method: MethodName | str | Method = "spardl",
    *,
    group: Any,
    optimizer: Optimizers = None,
    clip_norm: float | None = None,
    timeout: float | None = None,
    **options: Any,
) -> Sharded | ShardedUpdates:
    """Averages the shards of a model between nodes, after each reduce-scatter inside them.

    Shard the model inside nodes only: ``fully_shard(model, mesh=mesh["inside"])`` with a mesh of nodes and of workers
    inside them. ``group=mesh["nodes"].get_group()`` connects the workers with the same shard. All workers must call
    this after ``fully_shard``, with equal weights on all nodes.

    For gradient accumulation, average only after the last micro-batch. Either call
    ``model.set_requires_gradient_sync(last)``, or ``set_requires_all_reduce(last)``, which reduces inside the node
    after each micro-batch and sums the shards until the last one. Call the latter on ``model`` or a module inside it,
    after this function: earlier calls have no effect on the handle.

    Args:
        model: Model with one or more FSDP units.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`Method`.
        group: Process group of the workers with the same shard; its timeout limits every wait if gradients are
            averaged.
        optimizer: Optimizer of the model (SGD, Adam or AdamW), or several of different parameters. Most sparse methods
            then average updates instead of gradients, as in :func:`attach`: each node keeps its own moments, and
            ``step()`` only applies averages.
        clip_norm: If updates are averaged, largest 2-norm of each node's own gradient.
        timeout: If updates are averaged, seconds after which a worker that does not answer counts as lost, 1800 by
            default.
        **options: Options of the method, for example ``density=0.01``.

    Returns:
        The handle, with ``state_dict``, ``load_state_dict`` and ``stats``; if updates are averaged, also with
        ``discard`` and ``detach``.

    Raises:
        ConfigError: If the model has no FSDP unit or is sharded among workers of the group, or the method or an option
            is unknown, does not support the number of nodes or compresses matrices, or the optimizer is unsupported or
            has other parameters; in a later step, if the parameters without a gradient, which FSDP leaves out of its
            shards, are not those of the first step.
    """
    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not units:
        raise ConfigError("attach_fsdp() needs a model sharded by fully_shard(); for a DDP model use attach()")
    check_dtypes(model.named_parameters())
    optimizers = optimizers_of(optimizer)
    if matrices_of(optimizers):
        raise ConfigError(
            "attach_fsdp() does not support Muon, which updates whole matrices, while FSDP has shards of them; use "
            "AdamW, or DDP with attach()"
        )
    made = resolve_momentum(choose_method(method, options), optimizers or None, for_handle=True)
    check_averages_gradients(made.compressor, made.momentum, "attach_fsdp()")
    if made.compressor.by_matrix:
        raise ConfigError(
            f"{type(made.compressor).__name__} compresses matrices, but FSDP's shards are flat and would be sent "
            "uncompressed; use a method for vectors, such as spardl, oktopk or int8"
        )
    if any(isinstance(setter := vars(unit).get(_SETTERS[0]), _FlagSetter) and setter.held for unit in units.values()):
        raise ConfigError("this model already has a handle with optimizer=; call its detach() before attach_fsdp()")
    cluster = ProcessGroupCluster(group, next(model.parameters()).device)
    _check_shards(model, cluster.group)
    named = [Named(*pair) for pair in model.named_parameters()]
    if optimizers and made.momentum.moved:
        seconds = 1800.0 if timeout is None else timeout
        return ShardedUpdates(list(units.values()), named, made, group, seconds, optimizers, clip_norm)
    check_update(Wfbp(), made, optimizers, clip_norm, None)
    if timeout is not None:
        raise ConfigError(
            f"timeout={timeout} has no effect, because this handle averages gradients, not updates; remove it, and set "
            "the timeout of the process group in new_group() or init_process_group()"
        )
    return Sharded(units, made, cluster, update_facts(optimizers, named))


def _trained(units: Iterable[FSDPModule]) -> list[nn.Parameter]:
    modules = [unit for unit in units if isinstance(unit, nn.Module)]
    return [each for module in modules for each in module.parameters() if each.requires_grad]


def _check_length(name: str, before: Tensor, now: Tensor) -> None:
    """Checks that a unit's shard has the same length, and so presumably the same parameters, as before.

    Raises:
        ConfigError: If it has another length.
    """
    if len(now) != len(before):
        raise ConfigError(
            f"the shard of {name or 'the model'} had {len(before)} entries and has {len(now)} now, because FSDP omits "
            "parameters that a step does not use; use all parameters in each step, and freeze none later"
        )


# Methods of an FSDP unit that set whether it all-reduces.
_SETTERS = ("set_requires_all_reduce", "set_requires_gradient_sync")


class _FlagSetter:
    """Wraps a method of an FSDP unit that sets whether it all-reduces, and records the flag: torch has no getter.

    Args:
        unit: FSDP unit.
        name: Name of the method to wrap.

    Attributes:
        flag: Value of the last call on this unit or on one that contains it.
        held: Whether a handle that is not detached applies updates of an optimizer to the unit.
    """

    def __init__(self, unit: FSDPModule, name: str) -> None:
        self._unit, self._original = unit, getattr(unit, name)
        self.flag, self.held = True, False

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self._original(*arguments, **options)
        # Binding finds the flag and `recurse` whether they are passed by position or by name.
        call = signature(self._original).bind(*arguments, **options)
        call.apply_defaults()
        flag, recurse = call.arguments.values()
        assert isinstance(self._unit, nn.Module)
        for module in self._unit.modules() if recurse else [self._unit]:
            if isinstance(setter := vars(module).get("set_requires_all_reduce"), _FlagSetter):
                setter.flag = flag


def _record_flags(unit: FSDPModule) -> None:
    # The second method also sets the flag of the first. Wrappers of an earlier handle are kept, with their flags.
    for name in _SETTERS:
        if not isinstance(vars(unit).get(name), _FlagSetter):
            setattr(unit, name, _FlagSetter(unit, name))


def _flag_of(unit: FSDPModule) -> _FlagSetter:
    setter = vars(unit)[_SETTERS[0]]
    assert isinstance(setter, _FlagSetter)
    return setter


def _all_reduces(unit: FSDPModule) -> bool:
    return _flag_of(unit).flag


def _do_nothing(_shard: Tensor) -> None:
    """Replaces an all-reduce hook, because torch cannot remove one."""


def _meshes(parameters: Iterable[Tensor]) -> list[DeviceMesh]:
    """Returns the different meshes over which parameters are sharded."""
    return list(dict.fromkeys(each.device_mesh for each in parameters if isinstance(each, DTensor)))


def _key_of(mesh: DeviceMesh) -> str:
    """Returns this process's prefix of keys in ``torch.distributed.checkpoint``; ranks of a node must differ in it."""
    return f"shard_{mesh.mesh.flatten().tolist().index(dist.get_rank())}." if mesh.mesh.numel() > 1 else ""


def _norm_of_node(group: dist.ProcessGroup, device: torch.device, norm: float) -> float:
    """Returns the norm of a node's gradient from the ``norm`` of this process's shard."""
    own = torch.tensor([norm], dtype=torch.float64, device=device)
    norms = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(norms, own, group=group)
    return math.hypot(*(float(each) for each in norms))


def _check_shards(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Checks that this worker is the only one in both the group and the model's meshes."""
    # FSDP has already averaged inside the meshes: another average over the same workers would mix different shards.
    among = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and among & set(parameter.device_mesh.mesh.flatten().tolist()):
            raise ConfigError(
                f"{name} is sharded or replicated among ranks of the process group passed as group=; create a device "
                'mesh with dimensions ("nodes", "inside"), shard inside each node with fully_shard(model, '
                'mesh=mesh["inside"]), and pass group=mesh["nodes"].get_group()'
            )
