"""Run folders as train.py leaves them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CONFIG: Mapping[str, Any] = {
    "training": {"epochs": 3, "log_every": 10, "seed": 1},
    "cluster": {"_target_": "spardl.training.launch.Simulated", "workers": 4, "network": "ethernet_1g"},
    "dataset": {"_target_": "tasks.datasets.digits.load_digits", "crop_padding": 1},
    "task": {"_target_": "tasks.image_classification.ImageClassification"},
    "momentum": {"_target_": "spardl.momentum.OptimizerMomentum"},
    "residual": {"_target_": "spardl.residuals.GlobalResidual"},
    "communicator": {"_target_": "spardl.communicators.spardl.SparDL", "teams": 1},
    "compressor": {"_target_": "spardl.compressors.topk.TopK", "density": 0.01},
}
SUMMARY: Mapping[str, Any] = {
    "status": "finished",
    "metric": "accuracy",
    "steps": 4,
    "workers": 4,
    "cluster_seconds": 8.0,
    "step_bytes": 2.0,
    "step_bytes_dense": 100.0,
    "environment": {"spardl": "0.1.0", "python": "3.12", "torch": "2.7", "commit": "abc", "machine": "a machine"},
}


def write_run(folder: Path, seed: int = 1, value: float = 0.5, **changes: Any) -> Path:
    """Writes a finished run of four steps and two evaluations.

    Args:
        folder: where.
        seed: of the run.
        value: of its metric, in the end.
        changes: dotted names of settings, with two underscores for each dot, or ``summary`` for parts of the summary.
    """
    config = json.loads(json.dumps({"seed": seed, **CONFIG}))
    summary = {**SUMMARY, "final": {changes.get("summary", {}).get("metric", "accuracy"): value}}
    summary.update(changes.pop("summary", {}))
    for name, setting in changes.items():
        node, key = name.split("__")
        config.setdefault(node, {})[key] = setting
    metric = summary["metric"]
    events = [
        {"kind": "train", "step": 2, "epoch": 1.0, "loss": 3.0},
        {"kind": "eval", "step": 2, metric: value / 2},
        {"kind": "train", "step": 4, "epoch": 2.0, "loss": 1.0},
        {"kind": "eval", "step": 4, metric: value},
    ]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "command.txt").write_text(f"python train.py seed={seed}\n")
    return folder
