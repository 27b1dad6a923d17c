"""Real and simulated workers end with the same weights, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driver import here, only_run, results

RUN = ("training.max_steps=4", "training.precision=fp64", "training.eval_every=0.1", "cluster.workers=4")


@pytest.mark.parametrize(
    "method",
    [
        "compressor=none",
        pytest.param("compressor=topka", marks=pytest.mark.slow),
        "compressor=spardl",
        pytest.param("compressor=spardl communicator.teams=2", marks=pytest.mark.slow),
        pytest.param("compressor=spardl communicator.teams=4 communicator.gather=recursive", marks=pytest.mark.slow),
        pytest.param(
            "compressor=spardl training.precision=fp32 training.accumulation=2 training.clip_norm=0.1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_and_simulated_runs(method: str, tmp_path: Path) -> None:
    """ResNet-20 on digits: with batch normalisation, augmentation, momentum and a warm-up."""
    for cluster in ("process_group", "simulated"):
        assert here(*RUN, *method.split(), f"cluster={cluster}", f"output_dir={tmp_path / cluster}") == 0
    real, simulated = (results(only_run(tmp_path / cluster)) for cluster in ("process_group", "simulated"))
    assert real == simulated
    assert real["status"] == "finished"


@pytest.mark.slow
def test_another_seed_is_another_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        assert here(*RUN, "cluster=simulated", f"seed={seed}", f"output_dir={tmp_path / str(seed)}") == 0
    one, other = (results(only_run(tmp_path / str(seed))) for seed in (1, 2))
    assert one["weights_sha256"] != other["weights_sha256"]
