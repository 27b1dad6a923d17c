"""Synchronizations on an emulated GPU: launches and host reads in the steady state, and the bits of the CPU."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import spardl
from spardl.method.method import Method
from spardl.vector import kernels
from spardl.vector.late import LateConditions
from spardl.vector.layout import Layout, Range
from spardl.vector.selection import PortableFinder, top_k_unread
from spardl.vector.sparse import SparseVector, merge, merge_padded, top_padded
from tests.support.emulated_gpu import (
    CPU,
    DEVICE,
    Meter,
    emulated,
    emulated_with_triton,
    measured,
    on_device,
    on_host,
    steps_of,
)
from tests.vector.kernels.gpu_worker import Call, worker

LAYOUT = Layout.of([(30, 40), (40,), (24, 20), (20,)])
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Known(NamedTuple):
    """Upper bounds of one synchronization of worker 0 of 4.

    The targets are 0 host reads and 40 launches for all methods, and 12 launches of SparDL until its messages are
    packed. Sizes of Ok-Topk, which depend on values, miss them.

    Attributes:
        launches: With portable operations; messages are encoded and decoded by about 25 of them each.
        triton: Launches with Triton kernels.
        reads: Host reads of both.
    """

    launches: int
    triton: int
    reads: int = 0


KNOWN: dict[str, tuple[dict[str, Any], Known]] = {
    "spardl": ({"density": 0.02}, Known(288, 31)),
    "topka": ({"density": 0.02}, Known(152, 19)),
    "gtopk": ({"density": 0.02}, Known(237, 31)),
    "powersgd": ({}, Known(61, 35)),
    "int8": ({}, Known(176, 37)),
    "int4": ({"format": "int4"}, Known(198, 40)),
    # The sizes of Ok-Topk's messages depend on values: workers exchange the numbers of their entries, and allocate
    # messages of these sizes. The host reads the numbers of entries above the threshold and above raised ones, the
    # borders and counts of regions, the number of sums, the counts of all regions, and an evaluated threshold.
    "oktopk": ({"density": 0.02}, Known(373, 78, reads=6)),
}


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling the kernels of the CPU would take longer than the tests."""
    monkeypatch.setenv("SPARDL_KERNELS", "portable")


def method(name: str) -> Method:
    return spardl.make_method("quantized" if name.startswith("int") else name, **KNOWN[name][0])


@pytest.mark.parametrize("name", KNOWN)
def test_steady_state_of_every_method(name: str) -> None:
    (meter,) = measured(method(name), LAYOUT, warm=2, steps=1)
    launches, reads = meter.totals
    assert launches <= KNOWN[name][1].launches, meter.by_section()
    assert reads <= KNOWN[name][1].reads, meter.reads


@pytest.mark.parametrize("name", [name for name, (_, known) in KNOWN.items() if not known.reads])
def test_steps_repeat_the_same_operations(name: str) -> None:
    """Equal operations on equal shapes: nothing new is allocated, and only conditions are copied to the host."""
    before, after = measured(method(name), LAYOUT, warm=3, steps=2)
    assert before.operations == after.operations
    copies = [shapes for _, operation, shapes in after.operations if operation.startswith("copy between")]
    assert all(math.prod(shape) <= 8 for shapes in copies for shape in shapes), copies


SPARDL_TARGET = 12
"""Most launches of SparDL with 4 workers until its messages are packed."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def with_triton() -> Iterator[Call]:
    """Calls functions in a process where Triton's interpreter runs the kernels."""
    with worker(needs_cpu=True) as call:
        yield call


def with_portable_cpu() -> AbstractContextManager[object]:
    """Leaves Triton as it is, unlike ``SPARDL_KERNELS``."""
    return patch.object(kernels, "_is_there", lambda library: library == "triton")


def launches_with_triton(name: str) -> tuple[dict[tuple[str, str], int], tuple[int, int]]:
    """Launches by section and operation, and all launches and host reads, of the only worker with Triton."""
    with with_portable_cpu():
        (meter,) = measured(
            method(name), LAYOUT, devices=(DEVICE, CPU, CPU, CPU), warm=2, steps=1, emulation=emulated_with_triton
        )
    return dict(meter.launches), meter.totals


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_steady_state_with_triton(with_triton: Call, name: str) -> None:
    found, (launches, reads) = with_triton(launches_with_triton, name)
    assert launches <= KNOWN[name][1].triton, found
    assert reads <= KNOWN[name][1].reads, found
    if name == "spardl":
        # Before messages leave: accumulate, select and pack. Decoding is charged to the same section as packing.
        sent = [count for (section, name), count in found.items() if section in ("accumulate", "select")]
        assert sum(sent) + found["pack", "_encode"] <= SPARDL_TARGET, found


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can use this GPU")
def test_a_gpu_that_triton_cannot_use_is_left_to_torch() -> None:
    with pytest.warns(UserWarning, match="Triton cannot run kernels on cuda:0 .*so torch is used"):
        assert not kernels._launches.__wrapped__(torch.device("cuda:0"))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.max().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.empty(3).copy_(x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
    ],
)
def test_the_meter_finds_every_kind_of_host_read(work: Callable[[Tensor], object]) -> None:
    meter = Meter()
    with emulated(meter):
        values = on_device(torch.tensor([0.0, 1.0, 2.0]))
        meter.section = "here"
        work(values)
    assert meter.totals[1] == 1


def test_the_meter_counts_launches_without_views() -> None:
    meter = Meter()
    with emulated(meter):
        values = on_device(torch.arange(6.0))
        meter.section = "here"
        values[2:].view(2, 2).add_(1)
        torch.empty_like(values)
        torch.arange(3).to(values.device, non_blocking=True)
    assert meter.launches == {("here", "add_"): 1, ("here", "_to_copy"): 1}
    assert on_host(values).tolist() == [0, 1, 3, 4, 5, 6]


def harmed(harm: str) -> Callable[[int, int, Tensor], None]:
    """Changes the gradients of some workers in step 1; ``harm`` names how."""

    def change(step: int, rank: int, gradient: Tensor) -> None:
        most = torch.finfo(gradient.dtype).max
        gradient[::7].round_()  # many equal magnitudes
        if harm == "nan" and (step, rank) == (1, 1):
            gradient[5] = torch.nan
        elif harm == "overflow" and step in (1, 2) and rank:
            gradient[9] = most
        elif harm == "zeros":
            gradient[:-10] = 0

    return change


def assert_same_on_both(made: Method, dtype: torch.dtype, harm: str, triton: bool = False) -> None:
    """Averages, residuals and counts of refused steps."""
    # Triton's interpreter is slow: with it, two workers use the GPU, of which one is always harmed, and two the CPU.
    devices = (DEVICE, DEVICE, CPU, CPU) if triton else (DEVICE,) * 4
    with with_portable_cpu():
        with torch.no_grad():
            averages, states = steps_of(made, LAYOUT, (CPU,) * 4, dtype, 3, harmed(harm))
        with emulated_with_triton(Meter()) if triton else emulated(Meter()):
            others, twins = steps_of(made, LAYOUT, devices, dtype, 3, harmed(harm))
    whole = BITS[dtype.itemsize]
    for average, other in zip(averages, others, strict=True):
        assert torch.equal(average.view(whole), other.view(whole))
    for state, twin in zip(states, twins, strict=True):
        twin.catch_up()
        assert torch.equal(state.memory.view(whole), on_host(twin.memory).view(whole))
        assert (state.refused, state.refused_last, state.overflowed) == (
            twin.refused,
            twin.refused_last,
            twin.overflowed,
        )


@pytest.mark.parametrize("harm", ["none", "nan", "overflow", "zeros"])
def test_spardl_has_the_bits_of_the_cpu(harm: str) -> None:
    assert_same_on_both(method("spardl"), torch.float32, harm)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "name"), [*enumerate(name for name in KNOWN if name != "powersgd")])
def test_all_methods_have_the_bits_of_the_cpu(place: int, name: str) -> None:
    """All pairs of a method, a type and a harm."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for number, harm in enumerate(("none", "nan", "overflow", "zeros")):
        assert_same_on_both(method(name), dtypes[(place + number) % 3], harm)


OTHER_FORMS: list[tuple[str, dict[str, Any]]] = [
    ("spardl", {"teams": 2}),
    ("spardl", {"teams": 2, "gather": "recursive"}),
    ("spardl", {"scope": "layer"}),
    ("spardl", {"scope": "bucket", "bucket_entries": 40}),
    ("gtopk", {"variant": "doubling"}),
    ("spardl", {"density": 1.0}),
    ("topkdsa", {}),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "options"), OTHER_FORMS)
def test_other_forms_have_the_bits_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    assert_same_on_both(spardl.make_method(name, **{"density": 0.02, **options}), torch.float32, "none")


def same_with_triton(name: str, options: dict[str, Any], dtype: torch.dtype, harms: tuple[str, ...]) -> None:
    made = spardl.make_method(name, **options)
    for harm in harms:
        assert_same_on_both(made, dtype, harm, triton=True)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "dtype", "harms"),
    [
        ("spardl", torch.float32, ("none", "zeros")),
        ("spardl", torch.bfloat16, ("overflow",)),
        ("spardl", torch.float16, ("nan",)),
        *((name, torch.float32, ("overflow",)) for name in ("topka", "gtopk", "int8", "int4", "oktopk")),
    ],
)
def test_triton_has_the_bits_of_the_cpu(
    with_triton: Call, name: str, dtype: torch.dtype, harms: tuple[str, ...]
) -> None:
    with_triton(same_with_triton, "quantized" if name.startswith("int") else name, KNOWN[name][0], dtype, harms)


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "options"), OTHER_FORMS)
def test_triton_runs_other_forms(with_triton: Call, name: str, options: dict[str, Any]) -> None:
    with_triton(same_with_triton, name, {"density": 0.02, **options}, torch.float32, ("none",))


@pytest.mark.parametrize("k", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("numbers", [[0, 0, 0, 0, 0, 0, 0, 0], [1, 2, 2, 2, 3, 2, 2, 0], [5, 1, 4, 1, 3, 2, 6, 7]])
def test_unread_selection_prefers_the_lowest_index(numbers: list[int], k: int) -> None:
    magnitude = torch.tensor(numbers, dtype=torch.float32)
    order = sorted(range(len(numbers)), key=lambda index: (-numbers[index], index))
    assert top_k_unread(magnitude, k).tolist() == sorted(order[:k])


def test_late_conditions_are_read_once_in_order() -> None:
    late = LateConditions()
    late.send(1, [torch.tensor(True), torch.tensor(False)])
    late.send(2, [torch.tensor(True)])
    assert late.waiting == 2
    assert list(late.read(wait=False)) == [(1, [True, False]), (2, [True])]
    assert list(late.read(wait=True)) == []


def test_copies_of_late_conditions_are_empty() -> None:
    late = LateConditions()
    late.send(1, [torch.tensor(False)])
    twin = pickle.loads(pickle.dumps(late))
    twin.send(2, [torch.tensor(True)])
    assert list(twin.read(wait=True)) == [(2, [True])]
    assert late.waiting == 1


def test_unread_rows_prefer_the_lowest_index() -> None:
    """Eight rows with many equal entries, one that selects nothing and one that selects all."""
    values = torch.randint(-3, 4, (8, 6), generator=torch.Generator().manual_seed(1)).float()
    values[1] = torch.inf
    wanted = [2, 0, 6, 1, 3, 5, 4, 2]
    ranges = [Range(6 * row, 6 * row + 6, k) for row, k in enumerate(wanted)]
    with emulated(Meter()):
        found = on_host(PortableFinder().largest(on_device(values.view(-1)), ranges, []).positions)
    assert found.tolist() == PortableFinder().largest(values.view(-1), ranges, []).positions.tolist()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_padded_sums_drop_what_exact_sums_drop(k: int) -> None:
    one = SparseVector(torch.tensor([1, 4, 6, 8]), torch.tensor([1.0, -2.0, 3.0, 0.5]), 10)
    two = SparseVector(torch.tensor([0, 4, 6, 9]), torch.tensor([1.0, 2.0, 0.25, -4.0]), 10)
    kept, others = top_padded(merge_padded([one, two]), k)
    wanted, dropped = merge([one, two]).top(k)
    assert kept.indices.tolist() == wanted.indices.tolist()
    assert kept.values.tolist() == wanted.values.tolist()
    vector, expected = torch.arange(10.0), torch.arange(10.0)
    # Repeated entries are written twice, with the same sum.
    vector[others.indices] = vector[others.indices] + others.values
    expected[dropped.indices] += dropped.values
    assert torch.equal(vector, expected)
