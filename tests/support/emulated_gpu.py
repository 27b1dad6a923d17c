"""An emulated GPU: tensors in host memory that take the code path of a GPU, while their operations are counted.

A tensor of the emulated device wraps one in host memory and reports another device, so the library runs the code for a
GPU, with real numbers. A ``Meter`` counts two kinds of events. A *launch* is an operation on the device that is neither
a view nor an allocation (on a GPU, one operation of torch may launch several kernels). A *host read* is an operation
after which the host has to wait for the device: it reads a value, or the size of the result depends on values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spardl.method.method import Method, MethodState
from spardl.protocol.programs import AllGather, AllReduce, Exchange, Phase, Program, ReduceScatter, Worker
from spardl.vector.flat import write
from spardl.vector.layout import Layout

# The only device type that needs no driver, and that torch indexes without one.
DEVICE = torch.device("meta")
CPU = torch.device("cpu")

# Sizes of the results of these operations depend on values.
_SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
_READS = {"_local_scalar_dense", "equal", "is_nonzero"}
# Views, allocations and metadata, besides the operations that torch marks as views.
_FREE = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "alias"}
_FREE |= {"_reshape_alias", "new_empty_strided", "resize_"}


class OnDevice(Tensor):
    """A tensor of the emulated device; ``host`` holds its entries."""

    host: Tensor
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        tensor = Tensor._make_wrapper_subclass(
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, device=DEVICE
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def on_device(tensor: Tensor) -> Tensor:
    """Copies a tensor in host memory to the emulated device."""
    return OnDevice(tensor.clone())


def on_host(tensor: Tensor) -> Tensor:
    """Returns the entries of a tensor of the emulated device."""
    return tensor.host if isinstance(tensor, OnDevice) else tensor


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation in host memory; its results are on the device unless it copies them to the host."""
    arrives = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    host_args, host_kwargs = tree_map(on_host, (tuple(args), dict(kwargs)))
    if host_kwargs.get("device") is not None:
        host_kwargs["device"] = "cpu"
    found = func(*host_args, **host_kwargs)
    name = func.overloadpacket.__name__
    if name.endswith("_") and not name.endswith("__") and not arrives:
        return args[0] if isinstance(args[0], OnDevice) else tree_map(_wrapped, found)
    return found if arrives else tree_map(_wrapped, found)


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, OnDevice) else value


def _touches_device(args: Any, kwargs: Mapping[str, Any]) -> bool:
    found: list[bool] = []
    tree_map(lambda value: found.append(isinstance(value, OnDevice)), (args, kwargs))
    device = kwargs.get("device")
    return any(found) or (device is not None and torch.device(device).type == DEVICE.type)


class Meter:
    """Counts of the operations on the emulated device.

    Attributes:
        launches: number of launches by section and operation.
        reads: number of host reads by section and operation.
        operations: section, name and shapes of each launch, in order; copies between host and device are named so.
        section: part of the synchronization that operations are charged to; ``None`` counts nothing.
    """

    def __init__(self) -> None:
        self.launches: Counter[tuple[str, str]] = Counter()
        self.reads: Counter[tuple[str, str]] = Counter()
        self.operations: list[tuple[str, str, list[tuple[int, ...]]]] = []
        self.section: str | None = None

    def launch(self, name: str, args: Any = (), *, crosses: bool = False) -> None:
        if self.section is not None:
            self.launches[self.section, name] += 1
            shapes = [tuple(each.shape) for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.operations.append((self.section, "copy between host and device" if crosses else name, shapes))

    def read(self, name: str) -> None:
        if self.section is not None:
            self.reads[self.section, name] += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside the ``with`` block."""
        section, self.section = self.section, None
        try:
            yield
        finally:
            self.section = section

    def by_section(self) -> dict[str, tuple[int, int]]:
        """Launches and host reads of each section."""
        sections = dict.fromkeys(section for section, _ in [*self.launches, *self.reads])
        return {section: (_sum(self.launches, section), _sum(self.reads, section)) for section in sections}

    @property
    def totals(self) -> tuple[int, int]:
        """Launches and host reads in total."""
        return sum(self.launches.values()), sum(self.reads.values())


def _sum(counts: Counter[tuple[str, str]], section: str) -> int:
    return sum(count for (where, _), count in counts.items() if where == section)


class _Operations(TorchDispatchMode):
    """Emulates the device, and counts."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _touches_device(args, kwargs):
            return func(*args, **kwargs)
        self._count(func, args, kwargs)
        return _run(func, args, kwargs)

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = func.overloadpacket.__name__
        if name in _READS:
            self._meter.read(name)
            return
        if name in _FREE or func.is_view:
            return
        copies = name in ("_to_copy", "copy_")
        crosses = copies and _crosses(name, args, kwargs)
        waits = name in _SIZED_BY_VALUES or (name == "index" and _has_mask(args[1]))
        waits = waits or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if waits or (crosses and not _non_blocking(name, args, kwargs)):
            self._meter.read(name)
        self._meter.launch(name, args, crosses=crosses)


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _non_blocking(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def _crosses(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy is between the host and the device, in either direction."""
    if name == "copy_":
        # A number is passed to the kernel.
        return args[1].dim() > 0 and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice)
    device = kwargs.get("device")
    return device is not None and (torch.device(device).type == DEVICE.type) != isinstance(args[0], OnDevice)


class _Calls(TorchFunctionMode):
    """Functions that bypass the dispatcher: copies inside torch, and addresses."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "tolist" and isinstance(args[0], OnDevice):
            self._meter.read(name)
            return args[0].host.tolist()
        if name == "data_ptr" and isinstance(args[0], OnDevice):
            return args[0].host.data_ptr()
        device = kwargs.get("device", args[0].device if name == "new_tensor" else None)
        if name in ("tensor", "new_tensor") and device is not None and torch.device(device).type == DEVICE.type:
            # From pageable memory, this copy waits for the stream.
            self._meter.read(name)
            self._meter.launch(name, crosses=True)
            kwargs.pop("device", None)
            if name == "tensor":
                return on_device(torch.tensor(*args, **kwargs))
            return on_device(torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)))
        return func(*args, **kwargs)


@contextmanager
def emulated(meter: Meter) -> Iterator[None]:
    """Emulates a GPU without Triton inside the ``with`` block, and counts its operations on the ``meter``."""
    with _Operations(meter), _Calls(meter), torch.no_grad():
        yield


@contextmanager
def emulated_with_triton(meter: Meter) -> Iterator[None]:
    """Emulates a GPU with Triton; its interpreter must be enabled before this process imports Triton."""
    from spardl.vector import kernels
    from spardl.vector.kernels import gpu

    launch = gpu.launch

    def counted(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        assert any(isinstance(each, OnDevice) for each in tensors)
        # Kernels read adjacent entries in the memory of the device.
        assert all(each.is_contiguous() and (isinstance(each, OnDevice) or not each.numel()) for each in tensors)
        meter.launch(function.fn.__name__, arguments)
        launch(function, grid, *map(on_host, arguments), **options)

    with (
        patch.object(gpu, "launch", counted),
        patch.object(kernels, "_TRITON_DEVICES", frozenset({DEVICE.type})),
        emulated(meter),
    ):
        yield


def gradients_of(layout: Layout, workers: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Gradients in host memory, with magnitudes that change slowly from step to step."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(layout.length, generator=generator)
    scale = base.abs().add(0.1)
    return [
        torch.randn(layout.length, generator=generator.manual_seed(1000 * step + rank)).mul_(scale).to(dtype)
        for rank in range(workers)
    ]


def synchronize(
    method: Method, states: Sequence[MethodState], gradients: Sequence[Tensor], meters: Sequence[Meter]
) -> list[Tensor]:
    """Runs one synchronization of all workers in lockstep, and returns the averages that each of them writes.

    Args:
        method: method of the workers.
        states: state of each worker.
        gradients: gradient of each worker, shape (n,); overwritten with the average.
        meters: meter of each worker; the meter of the worker that runs must be the one that ``emulated`` was given,
            so they may all be equal.
    """
    size = len(states)
    programs = []
    for rank, (state, gradient, meter) in enumerate(zip(states, gradients, meters, strict=True)):
        meter.section = "accumulate"
        method.accumulate(gradient, state)
        meter.section = None
        programs.append(method.average(Worker(rank, size), state))
    pending: dict[int, Any] = {}
    mail: dict[tuple[int, int], list[Tensor]] = {}
    results: dict[int, Any] = {}
    sections, replies = ["select"] * size, [None] * size
    while len(results) < size:
        for rank, program in enumerate(programs):
            if rank in results or rank in pending:
                continue
            meter = meters[rank]
            meter.section = sections[rank]
            try:
                pending[rank] = _next_request(program, replies[rank], meter)
                _post(rank, pending[rank], mail)
            except StopIteration as stop:
                results[rank] = stop.value
                meter.section = "update"
                write(stop.value, gradients[rank])
            sections[rank], meter.section = meter.section or "", None
        ready = [rank for rank, request in pending.items() if _is_ready(rank, request, mail)]
        assert ready or not pending, f"workers {sorted(pending)} wait for messages that no worker sends"
        for rank in ready:
            replies[rank] = _received(rank, pending.pop(rank), mail, type(states[rank].memory))
    return list(gradients)


def _next_request(program: Program[Any], reply: Any, meter: Meter) -> Exchange:
    """Runs a program up to its next exchange, including the work that overlaps it."""
    request = program.send(reply)
    while not isinstance(request, Exchange):
        assert not isinstance(request, AllReduce | ReduceScatter | AllGather), "backends are not emulated"
        if isinstance(request, Phase):
            meter.section = request.value
        request = program.send(None)
    if request.meanwhile is not None:
        request.meanwhile()
    return request


# The transport moves payloads in host memory and counts nothing.


def _post(rank: int, request: Exchange, mail: dict[tuple[int, int], list[Tensor]]) -> None:
    for send in request.sends:
        if send.payload.numel():
            mail.setdefault((rank, send.to), []).append(on_host(send.payload).clone())


def _is_ready(rank: int, request: Exchange, mail: Mapping[tuple[int, int], list[Tensor]]) -> bool:
    return all(mail.get((receive.source, rank)) for receive in request.receives if receive.size)


def _received(
    rank: int, request: Exchange, mail: Mapping[tuple[int, int], list[Tensor]], kind: type[Tensor]
) -> list[Tensor]:
    arrived = []
    for receive in request.receives:
        empty = torch.empty(0, dtype=receive.dtype)
        message = mail[receive.source, rank].pop(0) if receive.size else empty
        assert message.numel() == receive.size
        assert message.dtype == receive.dtype
        if receive.into is None:
            arrived.append(on_device(message) if kind is OnDevice else message)
        else:
            on_host(receive.into).copy_(message)
            arrived.append(receive.into)
    return arrived


def steps_of(
    method: Method,
    layout: Layout,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    steps: int,
    change: Callable[[int, int, Tensor], None],
) -> tuple[list[Tensor], list[MethodState]]:
    """Runs some steps; returns the averages of all steps and workers, in host memory, and the states.

    Args:
        method: method to run.
        layout: layout of the gradient.
        devices: of each worker: ``DEVICE``, inside ``emulated``, or ``CPU``.
        dtype: dtype of the gradients.
        steps: number of steps.
        change: called with the step, the rank and the gradient in host memory, which it may change.
    """
    states, averages, idle = _states(method, layout, devices, dtype), list[Tensor](), Meter()
    for step in range(steps):
        gradients = gradients_of(layout, len(devices), step, dtype)
        for rank, gradient in enumerate(gradients):
            change(step, rank, gradient)
        placed = list(map(_placed, gradients, devices))
        averages += [on_host(each).clone() for each in synchronize(method, states, placed, [idle] * len(devices))]
    return averages, states


def _states(method: Method, layout: Layout, devices: Sequence[torch.device], dtype: torch.dtype) -> list[MethodState]:
    return [method.init_state(layout, dtype, device) for device in devices]


def _placed(gradient: Tensor, device: torch.device) -> Tensor:
    return gradient if device == CPU else on_device(gradient)


def measured(
    method: Method,
    layout: Layout,
    *,
    devices: Sequence[torch.device] = (DEVICE,) * 4,
    warm: int = 4,
    steps: int = 2,
    emulation: Callable[[Meter], AbstractContextManager[None]] = emulated,
) -> list[Meter]:
    """Measures float32 steps in the steady state of a method.

    Args:
        method: method to run.
        layout: layout of the gradient.
        devices: of each worker: ``DEVICE`` or ``CPU``.
        warm: number of steps before the measured ones.
        steps: number of measured steps.
        emulation: ``emulated`` or ``emulated_with_triton``.

    Returns:
        The meter of each measured step, with the counts of worker 0.
    """
    # Only one worker is counted: the others have a meter that the modes do not know.
    shared, idle, meters = Meter(), Meter(), []
    with emulation(shared):
        states = _states(method, layout, devices, torch.float32)
        for step in range(warm + steps):
            shared.launches, shared.reads, shared.operations = Counter(), Counter(), []
            gradients = list(map(_placed, gradients_of(layout, len(devices), step), devices))
            synchronize(method, states, gradients, [shared, *[idle] * (len(devices) - 1)])
            if step >= warm:
                meter = Meter()
                meter.launches, meter.reads, meter.operations = shared.launches, shared.reads, shared.operations
                meters.append(meter)
    return meters
