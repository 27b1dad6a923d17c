from __future__ import annotations

import contextlib
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spardl.basics.errors import ConfigError
from spardl.method.momentum import LocalMomentum
from tests.support.harness import spardl
from tests.trainer.toy import plan
from trainer.launch import Hosted, ProcessGroup, Simulated
from trainer.memory import Need, available_bytes, check_address_space, memory_warning

SGD, ADAMW = partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW


def model() -> nn.Module:
    """100 x 10 weights and 10 biases; 21 numbers of running statistics."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(100, 10), nn.BatchNorm1d(10, affine=False))


@pytest.mark.parametrize(("optimizer", "moments"), [(SGD, 1), (ADAMW, 2), (partial(torch.optim.SGD, lr=0.1), 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_kept_between_steps(optimizer: Any, moments: int, dtype: torch.dtype) -> None:
    length = 1010 * dtype.itemsize
    need = Need.of(model(), dtype, optimizer, spardl(0.1), 1)
    assert need == Need(length + 21 * dtype.itemsize, length, moments * length, length)
    assert need.whole == (3 + moments) * length + 21 * dtype.itemsize


def test_simulated_workers_share_the_weights() -> None:
    need, alone = (Need.of(model(), torch.float32, SGD, spardl(0.1), workers) for workers in (14, 1))
    assert need.residuals == 14 * alone.residuals
    assert need.gradients == alone.gradients
    assert need.weights == alone.weights + 13 * 21 * 4


def test_a_velocity_counts() -> None:
    method = spardl(0.1)
    with_velocity = type(method)(method.compressor, method.communicator, method.residual, LocalMomentum(0.9))
    plain, more = (Need.of(model(), torch.float32, SGD, made, 1).residuals for made in (method, with_velocity))
    assert more == 2 * plain


def test_available_memory(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:  24 kB\nMemAvailable:      7 kB\n")
    assert available_bytes(table) == 7 * 1024
    assert available_bytes(tmp_path / "missing") is None
    assert (available_bytes() or 0) > 1e6


def test_a_warning_if_memory_is_too_small() -> None:
    need = Need(10**9, 10**9, 2 * 10**9, 4 * 10**8)
    assert memory_warning(need, 4, None) is None
    assert memory_warning(need, 4, 4 * need.whole) is None
    assert memory_warning(need, 4, 4 * need.whole - 1) == (
        "not enough memory: 4 process(es) on this machine need at least 17.6 GB, each 4.4 (weights 1, gradients "
        "1, residuals 0.4, optimizer 2; excluding activations), and 17.6 GB are available; use fewer workers, or a "
        "smaller model"
    )


def test_who_shares_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProcessGroup(workers=3, device="cpu").hosted() == Hosted(3, 1)
    assert Simulated(workers=3, device="cpu").hosted() == Hosted(1, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert ProcessGroup(workers=3).hosted() is None
    assert ProcessGroup(workers=4).hosted() == Hosted(4, 1)
    assert Simulated(workers=3).hosted() is None


def test_of_a_plan() -> None:
    made = plan(spardl(0.1), precision="fp32")
    length = 4 * (16 * 6 + 16 + 16 + 16 + 3 * 16 + 3)
    assert made.need(1).gradients == length
    assert made.need(1).optimizer == length


@pytest.mark.parametrize(("beyond", "fits"), [(4 << 30, True), (100 << 20, False)])
def test_a_limit_on_the_address_space(beyond: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + beyond, used + beyond))
    with (
        contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r"^ulimit -v allows .* at least .* MiB")
    ):
        check_address_space(lambda: Need(1 << 20, 1 << 20, 0, 0))


def test_no_limit_on_the_address_space_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    check_address_space(lambda: pytest.fail("no need to compute"))
