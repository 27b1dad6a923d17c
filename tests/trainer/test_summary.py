from __future__ import annotations

import subprocess

import pytest
import torch

from trainer.report import environment


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment()["torch"] == torch.__version__
    assert environment()["cpu"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")

    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment()["commit"] is None
