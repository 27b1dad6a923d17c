"""Each thorough check finds what it is there for: broken once, it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spardl.diagnostics.doctor.board import Verdict
from spardl.diagnostics.thorough import kernels, laws, loops
from spardl.diagnostics.thorough.outcome import Outcome, Place, backend_of
from spardl.method.recipes import make_method
from spardl.method.residuals import GlobalResidual
from spardl.vector import packing
from spardl.vector.accumulator import Accumulator
from spardl.vector.flat import CopiedGradient

HERE = Place("cpu", 30, 4)


def said(outcome: Outcome, verdict: Verdict, text: str) -> None:
    assert outcome.verdict is verdict, outcome.text
    assert text in outcome.text


# --- laws


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {name: make_method(name) for name in ("spardl", "qsgd")}
    monkeypatch.setattr(laws, "every_method", lambda findings: methods)


def test_nccl_takes_one_worker_for_each_gpu() -> None:
    ways = [backend_of(Place(device, 1, 1), workers) for device in ("cuda", "cpu") for workers in (1, 2)]
    assert ways == ["nccl", "gloo", "gloo", "gloo"]


def test_laws_hold(few: None) -> None:
    outcome = laws.check_laws(2)(HERE)
    said(outcome, Verdict.OK, "2 workers over gloo on cpu: all ")
    assert all(found["same"] for found in outcome.figures["methods"].values())
    assert "spardl at density 1" in outcome.figures["methods"]


def _forget(self: GlobalResidual, accumulated: Accumulator, final: Tensor) -> None:
    accumulated.values.zero_()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "broken", "text"),
    [
        ("spardl.method.residuals.GlobalResidual.keep", _forget, "the sum of averages and residuals differs"),
        ("spardl.diagnostics.thorough.laws.total", lambda *of: torch.ones(20_000), "differs from the dense average by"),
    ],
)
def test_a_broken_law_is_found(
    place: str, broken: Callable[..., Any], text: str, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, broken)
    said(laws.check_laws(2)(HERE), Verdict.FAILED, text)


def test_single_bit_deviation_is_found(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = laws.simulated

    def other(*arguments: Any) -> Tensor:
        return torch.nextafter(own(*arguments), torch.tensor(9.0))

    monkeypatch.setattr(laws, "simulated", other)
    said(laws.check_laws(1)(HERE), Verdict.FAILED, "the average differs from the CPU simulation by ")


@pytest.mark.parametrize(("off", "verdict"), [(1e-7, Verdict.OK), (0.1, Verdict.WARNING), (1.0, Verdict.FAILED)])
def test_a_gpu_may_round_otherwise_but_not_average_otherwise(off: float, verdict: Verdict) -> None:
    found = {"spardl": laws._Found(None, 0.0, off, same=False)}
    cases = {"spardl": laws._Case(make_method("spardl"), 1, torch.ones(1), dense=False)}
    assert laws._verdict(Place("cuda", 1, 1), 2, cases, found).verdict is verdict


# --- kernels


def _kernel(flaw: str) -> Any:
    """What the kernel does, by torch, with a flaw."""

    def add_and_list(
        memory: Tensor,
        gradient: Tensor | None,
        starts: Sequence[int],
        stops: Sequence[int],
        bounds: Sequence[float],
        room: int,
    ) -> tuple[Tensor, list[int]]:
        if gradient is not None:
            memory.add_(gradient)
        if flaw == "the sums":
            memory[-1] = -memory[-1]
        ranges = zip(starts, stops, bounds, strict=True)
        found = [(memory[a:b].abs() >= bound).nonzero().squeeze(1) + a for a, b, bound in ranges]
        counts = [len(each) - (flaw == "the counts") for each in found]
        return torch.cat(found) + (flaw == "the positions"), counts

    return SimpleNamespace(add_and_list=add_and_list)


@pytest.mark.parametrize("flaw", ["", "the sums", "the counts", "the positions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deviating_kernel_is_found(flaw: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spardl.vector.kernels.gpu", _kernel(flaw))
    monkeypatch.setattr(kernels, "_SMALL_SIZES", (1, 1000))
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    outcome = kernels.check_triton(dtype)(HERE)
    said(outcome, Verdict.FAILED if flaw else Verdict.OK, f"{flaw} of 1" if flaw else "in all 30 cases")


def test_without_triton_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    said(kernels.check_triton(torch.float32)(HERE), Verdict.FAILED, "triton is not installed; pip install triton")


def test_vectors_cover_critical_values() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        kinds = kernels.vectors(1000, dtype)
        assert all(values.dtype == dtype and len(values) == 1000 for values in kinds.values())
        assert kinds["infinite"].isinf().sum() == 13
        assert kinds["zeros"].signbit().sum() == 500
        assert 0 < kinds["subnormal"].abs().max() < torch.finfo(dtype).smallest_normal
        assert len(kinds["ties"].unique()) == 9


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SMALL_SIZES", (1, 1000))
    said(kernels.check_messages(HERE), Verdict.OK, "in all 24 cases")
    own = packing._encode

    def damaged(indices: Tensor, slot: packing.Slot, out: Tensor) -> None:
        own(indices, slot, out)
        out[-1] ^= 1

    monkeypatch.setattr(packing, "_encode", damaged)
    said(
        kernels.check_messages(HERE),
        Verdict.FAILED,
        "messages: the messages of 1 normal entries, float32, differ from the CPU kernels",
    )


# --- selection


def test_selection_is_compared_with_a_copy() -> None:
    outcome = kernels.check_selection(20_000)(HERE)
    figures = outcome.figures
    assert (figures["entries"], figures["kept"], figures["turns"]) == (20_000, 200, 50)
    assert min(figures["select"], figures["copy"], figures["topk"]) > 0
    assert f"{figures['ratio']:.2g} x a copy" in outcome.text


def test_what_takes_too_long_is_timed_once() -> None:
    turns = []
    assert len(kernels._timed(Place("cpu", 1, 0), lambda: turns.append(1))) == len(turns) == 1


@pytest.mark.parametrize(
    ("select", "turns", "verdict", "text"),
    [
        (2.9, 15, Verdict.OK, "2.9e+03 ms including the addition"),
        (3.1, 15, Verdict.WARNING, "exceeds the goal of 3 x a copy"),
        (1.0, 14, Verdict.WARNING, "medians of only 14 repetitions"),
    ],
)
def test_selection_is_judged(select: float, turns: int, verdict: Verdict, text: str) -> None:
    said(kernels._verdict("x", HERE, {"select": select, "copy": 1.0, "topk": 9.0, "turns": turns}), verdict, text)


def test_vector_beyond_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_free_bytes", lambda place: 3_000_000_000)
    said(kernels.check_selection(133_000_000)(HERE), Verdict.WARNING, "skipped, because it needs 4.3 GB of memory")


# --- attach


@pytest.mark.slow
def test_attach() -> None:
    outcome = loops.check_attach(2)(HERE)
    said(outcome, Verdict.OK, "all workers skip a step in which one of them overflows")
    assert outcome.figures["scales"] == [256.0, 256.0, 128.0, 128.0]


def test_workers_are_forked_before_the_first_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, torch refuses a backward pass in a process that was forked after one."""
    order = []
    run = loops._Run(torch.zeros(1), [torch.ones(1)] * 4, [1.0] * 4)
    for name in ("shared", "_manual"):
        monkeypatch.setattr(loops, name, lambda *of, name=name: order.append(name) or ([run] if of[1:] else run))
    loops.check_attach(1)(HERE)
    assert order == ["shared", "shared", "_manual"]


@pytest.mark.slow
def test_an_average_that_is_a_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spardl.method.method._limited", lambda total, workers, state: total)
    said(loops.check_attach(2)(HERE), Verdict.FAILED, "the weights differ from a manual loop on the CPU by ")


@pytest.mark.slow
def test_an_overflow_that_a_scaler_does_not_see_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spardl.schedules.averaging.Averaging._overflow", lambda self, number, gradient: gradient.zero_()
    )
    outcome = loops.check_attach(2)(HERE)
    said(outcome, Verdict.FAILED, "attach: ")
    assert any("does not decrease after the overflow in step 2" in problem for problem in outcome.figures["problems"])


@pytest.mark.parametrize(
    ("after", "scale", "text"),
    [
        ([1.0, 2.0, 3.0, 4.0], 1.0, "step 2 was not skipped"),
        ([1.0, 2.0, 2.0, 2.0], 1.0, "step 3 changed no weights"),
        ([1.0, 2.0, 2.0, 3.0], 2.0, "the loss scale does not decrease after the overflow in step 2"),
        ([1.0, 2.0, 2.0, 3.0], 1.0, None),
    ],
)
def test_steps_are_judged(after: list[float], scale: float, text: str | None) -> None:
    run = loops._Run(torch.zeros(1), [torch.tensor([each]) for each in after], [2.0, 2.0, scale, scale])
    found = list(loops._problems([run, run], "here"))
    assert [text in line for line in found] == [True] if text else not found


# --- waits


def _span(name: str, begin: float, seconds: float, thread: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": seconds, "tid": thread}


def test_waits_are_found_in_a_trace() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        _span(loops._MARK, 10, 10, 1),
        _span("spardl/hooks/hook.py(120): average", 11, 5, 1),
        _span("lib/spardl/vector/norms.py(57): largest", 12, 2, 1),
        _span("cudaStreamSynchronize", 13, 0.5, 1),
        _span("cudaDeviceSynchronize", 15, 0.5, 1),
        _span("aten::item", 16, 0.1, 2),
        _span("cudaStreamSynchronize", 30, 0.5, 1),
        _span("cudaMemcpyAsync", 14, 0.5, 1),
    ]
    assert loops.waits_in(events, {2}) == [
        loops.Wait("cudaStreamSynchronize", "spardl/vector/norms.py(57): largest", overlapped=False),
        loops.Wait("cudaDeviceSynchronize", "spardl/hooks/hook.py(120): average", overlapped=False),
        loops.Wait("aten::item", "outside of spardl", overlapped=True),
    ]


@pytest.mark.slow
def test_a_wait_in_the_backward_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = loops.check_waits(HERE)
    said(outcome, Verdict.OK, "no reads of tensor values")
    assert sum(outcome.figures["beside"].values()) > 0
    own = CopiedGradient.put

    def slow(self: CopiedGradient, number: int, gradient: Tensor | None) -> None:
        assert gradient is not None
        gradient.sum().item()
        own(self, number, gradient)

    monkeypatch.setattr(CopiedGradient, "put", slow)
    outcome = loops.check_waits(HERE)
    said(
        outcome,
        Verdict.WARNING,
        "6 reads of tensor values, which would wait for a GPU, per pass in the compute threads",
    )
    assert "spardl/hooks/averager.py" in outcome.text
