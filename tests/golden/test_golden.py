"""What must stay as it is while the code moves: ids of runs, the weights of trainings, and saved states.

``tests/golden`` holds them as the first edition (0.1.0) made them. Where a change of results is meant, write them anew:

    SPARDL_WRITE_GOLDEN=1 python -m pytest -m "slow or not slow" tests/golden/test_golden.py tests/hooks/test_golden.py
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.driver import ROOT, composed, here, only_run, results
from tests.support.quick import some_quick
from trainer.experiment import experiment_id
from trainer.report import environment

GOLDEN = ROOT / "tests" / "golden"
SAVED = GOLDEN / "stopped-run"
WRITING = "SPARDL_WRITE_GOLDEN"
PUBLISHED = "recipe=published"
CONFIGURATIONS = (
    "recipe=published",
    "compressor=none",
    "compressor=oktopk model=lstm recipe=published",
    "compressor=spardl communicator.teams=2 residual=partial schedule=wfbp recipe=published",
    "compressor=topk communicator=oktopk residual=partial compressor.scope=layer recipe=published",
    "compressor=powersgd warmup.steps=100 model=bert_tiny",
    "compressor=topka momentum=corrected schedule=dear cluster=simulated cluster.workers=4",
    "compressor=sketch_fusion schedule=layer_fusion model=vgg16 dataset=cifar10",
    "compressor=gtopk schedule=mg_wfbp optimizer=adamw optimizer.lr=0.05 optimizer.weight_decay=1e-4 recipe=published",
    "compressor=topka wire=bfloat16 optimizer.lr=0.2 recipe=published",
    "compressor=random_block model=lstm_imdb training.elastic=true",
    "experiment=oktopk/lstm_an4 scale=smoke",
    "experiment=spardl/vgg16_cifar10",
    "experiment=dear/resnet50",
    "experiment=residual_collection residual=local",
    "experiment=study/lstm_lm",
    # The recommended recipe is younger than 0.1.0.
    "",
    "compressor=oktopk model=bert_tiny",
    "compressor=spardl compressor.scope=model model=bert_tiny",
    "compressor=spardl model=bert_tiny",
)
# A language model of 6,000 parameters, which trains in half a second.
TINY = (
    "model=lstm",
    "dataset=synthetic_tokens",
    "dataset.vocab_size=200",
    "dataset.tokens=20000",
    "model.embedding_size=8",
    "model.hidden_size=12",
    "task.seq_len=8",
    "training.batch_size=2",
    "training.max_steps=4",
    "training.checkpoint_every=2",
    "training.eval_examples=16",
    "training.precision=fp64",
    "cluster.device=cpu",
)
TRAININGS = (
    "compressor=none cluster.workers=2",
    f"compressor=spardl compressor.density=0.05 cluster.workers=2 schedule=wfbp schedule.bucket_mb=0.01 {PUBLISHED}",
    "compressor=spardl communicator.teams=2 cluster=simulated cluster.workers=4 schedule=dear schedule.layers=1 "
    + PUBLISHED,
    "compressor=topka momentum=corrected cluster=simulated cluster.workers=3",
    "compressor=gtopk cluster=simulated cluster.workers=3 schedule=wfbp schedule.bucket_mb=0 training.clip_norm=0.5 "
    + PUBLISHED,
    "compressor=topkdsa momentum=local cluster=simulated cluster.workers=3 training.accumulation=2",
    "compressor=powersgd cluster.workers=2 schedule=wfbp optimizer=adamw optimizer.lr=0.01",
    "compressor=count_sketch cluster=simulated cluster.workers=3 warmup.steps=1",
    "compressor=qsgd cluster=simulated cluster.workers=2 lr_schedule=linear",
    "compressor=spardl cluster.workers=2 schedule=wfbp schedule.bucket_mb=0.01 training.clip_norm=0.5",
    "compressor=spardl compressor.scope=model cluster=simulated cluster.workers=3 schedule=dear optimizer=adamw "
    "optimizer.lr=0.01",
    # Chunks, by default.
    "compressor=spardl cluster=simulated cluster.workers=3 schedule=dear optimizer=adamw optimizer.lr=0.01",
    "compressor=topka momentum=adam cluster=simulated cluster.workers=2 optimizer=adamw optimizer.lr=0.01",
)
# The half that is in the repository was done on one processor; where it is continued on another, the end is neither's.
HALF_ELSEWHERE = "(first half saved)"
RESUMED = "compressor=spardl momentum=local compressor.density=0.05 cluster.workers=2"


def bits_depend_on() -> str:
    """The library and the processor: matrix products add up in an order of theirs."""
    return f"torch {torch.__version__.split('+')[0]}, {environment()['cpu']}"


class Book:
    """Figures of one kind, by command line: read from a file, and written anew if that is asked for."""

    def __init__(self, name: str) -> None:
        self._path = GOLDEN / f"{name}.json"
        self.writing = bool(os.environ.get(WRITING))
        self.figures: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def save(self) -> None:
        if self.writing:
            self._path.write_text(json.dumps(self.figures, indent=1) + "\n")


@pytest.fixture(scope="module")
def ids() -> Iterator[Book]:
    book = Book("ids")
    yield book
    book.save()


@pytest.fixture(scope="module")
def digests() -> Iterator[Book]:
    book = Book("digests")
    yield book
    book.save()


@pytest.mark.parametrize("words", CONFIGURATIONS)
def test_id(words: str, ids: Book) -> None:
    plain = composed(*words.split())
    found = experiment_id(plain, plain["cluster"]["workers"] or 4)
    if ids.writing:
        ids.figures[words] = found
    assert ids.figures[words] == found


def outcome(words: str, folder: Path, *more: str) -> tuple[str, float]:
    """The digest of the final weights, and the loss of the last step."""
    assert here(*TINY, *words.split(), *more, f"output_dir={folder}") == 0
    run = only_run(folder)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return str(results(run)["weights_sha256"]), [line["loss"] for line in lines if line["kind"] == "train"][-1]


def compare(words: str, found: tuple[str, float], book: Book) -> None:
    """To the last bit where the bits are known; elsewhere as exactly as sums in another order allow."""
    digest, loss = found
    if book.writing:
        known = book.figures.get(words, {}).get("digests", {})
        book.figures[words] = {"loss": loss, "digests": {**known, bits_depend_on(): digest}}
    entry = book.figures[words]
    assert loss == pytest.approx(entry["loss"], rel=1e-9)
    assert digest == entry["digests"].get(bits_depend_on(), digest)


@pytest.mark.parametrize("words", some_quick(TRAININGS, 3))
def test_weights(words: str, digests: Book, tmp_path: Path) -> None:
    compare(words, outcome(words, tmp_path), digests)


def test_a_saved_run_continues(digests: Book, tmp_path: Path) -> None:
    """One that version 0.1.0 left after two of four steps."""
    uninterrupted = outcome(RESUMED, tmp_path / "whole")
    compare(RESUMED, uninterrupted, digests)
    if digests.writing and not SAVED.exists():
        keep_half(only_run(tmp_path / "whole"))
    folder = tmp_path / "resumed" / "run"
    shutil.copytree(SAVED, folder)
    compare(f"{RESUMED} {HALF_ELSEWHERE}", outcome(RESUMED, folder.parent, f"resume={folder}"), digests)


def keep_half(run: Path) -> None:
    """Keeps a run as it was after its first checkpoint."""
    steps = sorted((run / "checkpoints").iterdir())
    shutil.copytree(steps[0], SAVED / "checkpoints" / steps[0].name)
    summary = json.loads((run / "summary.json").read_text())
    (SAVED / "summary.json").write_text(json.dumps({"id": summary["id"], "status": "stopped"}) + "\n")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (SAVED / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 2))
