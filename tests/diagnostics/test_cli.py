"""The command ``spardl``: its help, its refusals, and profiles of one's own models."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import spardl
from spardl.clusters.profile import Profile
from spardl.diagnostics.cli import front, run
from spardl.diagnostics.commands.advise import with_progress
from spardl.schedules.fusion import Linear
from tests.support.labs import ROOT

TRAINING = """
import torch
from torch import nn

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, inputs, targets=None):
        out = self.layer(inputs)
        return {"loss": (out - targets).square().mean(), "out": out} if targets is not None else (out, [out])

def one(): return nn.Linear(3, 2), torch.ones(5, 3)
def several(): return Named(), [torch.ones(7, 3)]
def named(): return Named(), {"inputs": torch.ones(4, 3), "targets": torch.zeros(4, 2)}
def loss():
    model = nn.Linear(3, 2)
    return model, lambda: model(torch.ones(2, 3)).sum()
def number(): return 3
def fails(): raise ValueError("two\\nlines")
def detached():
    class Off(nn.Linear):
        def forward(self, inputs): return super().forward(inputs).detach()
    return Off(3, 2), torch.ones(5, 3)
value = 5
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, in the working directory."""
    name = f"training_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRAINING)
    (tmp_path / f"broken_{tmp_path.name}.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def spoken(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(front, words, "spardl")
    return code, *capsys.readouterr()


def test_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = spoken(capsys, "--help")
    assert (code, err) == (0, "")
    commands = out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in commands] == [
        "advise",
        "doctor",
        "precompile",
        "profile",
        "timeline",
        "version",
    ]
    assert all(len(line.split()) > 3 and line.endswith(".") and not line.endswith("...") for line in commands)
    assert spoken(capsys)[1] == out


@pytest.mark.parametrize("name", ["advise", "doctor", "precompile", "profile", "timeline"])
def test_each_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = spoken(capsys, name, "--help")
    assert code == 0
    assert f"  spardl {name}" in out.split("Examples:\n")[1]


def test_kernels_are_compiled_by_method(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = spoken(capsys, "precompile", "topka", "--workers", "2")
    assert code == 0
    assert re.fullmatch(r"topka \.\.\. \d+\.\d s\n", out)
    code, _, err = spoken(capsys, "precompile", "nosuch")
    assert (code, err.count("\n")) == (2, 1)
    assert "nosuch" in err


@pytest.mark.parametrize("command", ["advise", "timeline"])
def test_commands_share_network_and_workers_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(spoken(capsys, command, "--help")[1].split())
    assert re.search(r"--network, --bandwidth TEXT .* \[default: 1gbit\]", out)
    assert "--workers INTEGER RANGE Number of workers. [default: 8; x>=1]" in out


def test_timeline_takes_a_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(ROOT / "scripts/profiles/resnet20.json"), "--methods", "none", "--schedules", "wfbp")
    found = [
        spoken(capsys, "timeline", *words, *more) for more in ((), ("--network", "1gbit"), ("--bandwidth", "1gbit"))
    ]
    assert found[0] == found[1] == found[2]
    assert (found[0][0], "8 workers, 1gbit" in found[0][1]) == (0, True)


def test_advise_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter(range(100))
    seconds = with_progress(lambda name, options: lambda entries: 0.0, 6, clock=lambda: float(next(ticks)))
    out = capsys.readouterr()
    assert (
        out.out,
        out.err.startswith("measuring the compression of 6 methods on one core: about 12 s on an idle "),
    ) == (
        "",
        True,
    )
    seconds("bf16", {})
    seconds("topka", {"density": 0.01})
    assert capsys.readouterr().err == (
        "measuring bf16 (1 of 6) ... 1.0 s\nmeasuring topka, density=0.01 (2 of 6) ... 1.0 s\n"
    )


def test_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = (Linear(1e-3, 2e-9), [])
    monkeypatch.setattr("spardl.diagnostics.advice.measure_compression", lambda *arguments: fixed)
    for load, said in ((100.0, 1), (0.0, 0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "cpu_count", lambda: 4)
        _, _, err = spoken(capsys, "advise", str(ROOT / "scripts/profiles/resnet20.json"))
        assert err.count("this machine is busy (load 100.0 on 4 cores)") == said


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert spoken(capsys, "version")[1].startswith(f"spardl {spardl.__version__}, torch ")
    assert spoken(capsys, "--version")[1] == f"spardl {spardl.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("foo", "No such command 'foo'; see spardl --help"),
        ("advise", "Missing argument 'PROFILE'; see spardl advise --help"),
        ("advise nowhere.json", "nowhere.json is not a profile"),
        (
            "advise nowhere.json --workers x",
            "Invalid value for '--workers': 'x' is not a valid integer range; see spardl adv",
        ),
        ("timeline nowhere.json", "nowhere.json is not a profile"),
        ("timeline nowhere.json --methods top", "--methods top is unknown; choose from arc_topk, arc_topk_ef21, bf16"),
        ("profile TRAINING:one", "Missing option '--out'; see spardl profile --help"),
        ("profile TRAINING --out x", "MODEL must be package.module:function, torchvision:NAME, timm:NAME, got train"),
        ("profile TRAINING:one --out nowhere/x", "No such file or directory"),
        ("profile TRAINING:none --out x", "has no function none"),
        ("profile TRAINING:value --out x", "has no function value"),
        (
            "profile TRAINING:number --out x",
            "must return a tuple (torch.nn.Module, batch) or (torch.nn.Module, loss function), got 3",
        ),
        ("profile TRAINING:fails --out x", ":fails failed with ValueError: two"),
        ("profile TRAINING:detached --out x", "the model returned Tensor without a differentiable tensor"),
        ("profile TRAINING:one --out x --passes 0", "Invalid value for '--passes': 0 is not in the range x>=1"),
        ("profile nowhere.there:one --out x", "module nowhere.there is neither in "),
        ("profile BROKEN:one --out x", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_bad_input_is_one_line(
    words: str, said: str, training: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = words.replace("TRAINING", training).replace("BROKEN", f"broken_{tmp_path.name}")
    code, out, err = spoken(capsys, *names.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("error: ")
    assert said in err
    assert not Path("x").exists()


@pytest.mark.parametrize(("name", "examples"), [("one", 5), ("several", 7), ("named", 4), ("loss", 8)])
def test_user_model_is_profiled(name: str, examples: int, training: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = spoken(capsys, "profile", f"{training}:{name}", "--passes", "1", "--out", "model.json")
    assert (code, err) == (0, "")
    assert " 1 layers, 8 entries, " in out
    found = Profile.read(Path("model.json"))
    assert (found.batch, found.entries, found.layers[0].shapes) == (examples, (8,), ((2, 3), (2,)))


def test_an_interruption_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Profile, "read", interrupt)
    code, _, err = spoken(capsys, "advise", "model.json")
    assert (code, err.split()) == (130, ["error:", "interrupted"])
