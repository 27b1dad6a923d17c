"""The transformers Trainer with a method, compared with the plain Trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spardl.basics.errors import CheckpointError, ConfigError
from tests.hooks.adapters.workers import imported, launched
from tests.hooks.loops import weights

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    imported("spardl.hooks.adapters.transformers", "accelerate")


def trainer(folder: Path, steps: int = 8, same: bool = False, **arguments: Any) -> Any:
    """Trainer of a one-layer BERT on random words, or on constant words with momentum."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(7)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    draws = torch.Generator().manual_seed(1)
    words = torch.randint(40, (64, 8), generator=draws)
    examples = [{"input_ids": row, "labels": row.sum() % 2} for row in (words[:1].expand(64, 8) if same else words)]
    given = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_steps=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{"logging_strategy": "no", **arguments},
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) if same else None
    return Trainer(model=model, args=given, train_dataset=examples, optimizers=(optimizer, None))


def trained(folder: Path, options: dict[str, Any] | None, resume: str | None = None, **arguments: Any) -> torch.Tensor:
    from spardl.hooks.adapters.transformers import attach_trainer

    made = trainer(folder, **arguments)
    if options is not None:
        attach_trainer(made, **options)
    made.train(resume_from_checkpoint=resume)
    return weights(made.model)


@pytest.mark.parametrize("passes", [1, 2])
def test_density_1_equals_the_plain_trainer(tmp_path: Path, passes: int) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor]:
        plain = trained(tmp_path / "plain", None, gradient_accumulation_steps=passes)
        options = {"method": "spardl", "density": 1, "recipe": "published"}
        return plain, trained(tmp_path / "ours", options, gradient_accumulation_steps=passes)

    for plain, ours in launched(work):
        torch.testing.assert_close(ours, plain)


def test_optimizer_state_and_clipping_move_to_the_handle(tmp_path: Path) -> None:
    """Momentum is linear and all workers have equal gradients, so results equal the plain trainer."""

    def work() -> tuple[torch.Tensor, torch.Tensor, list[float], bool]:
        from spardl.hooks.adapters.transformers import attach_trainer

        plain = trained(tmp_path / "plain", None, same=True, max_grad_norm=0.05)
        made = trainer(tmp_path / "ours", same=True, max_grad_norm=0.05)
        attach_trainer(made, "spardl", density=1)
        limits = []
        for _ in range(2):
            made.train()
            limits.append(made.args.max_grad_norm)
        once = trained(tmp_path / "once", {"density": 1}, same=True, max_grad_norm=0.05)
        return plain, once, limits, not made.optimizer.state

    for plain, ours, limits, stateless in launched(work):
        torch.testing.assert_close(ours, plain)
        assert limits == [0.05, 0.05]
        assert stateless


def test_weights_include_the_last_step_when_training_ends(tmp_path: Path) -> None:
    """With dear, the next forward pass would apply it."""

    def work() -> list[torch.Tensor]:
        schedules = ("wfbp", "dear")
        return [
            trained(tmp_path / each, {"density": 1, "schedule": each}, same=True, save_strategy="no")
            for each in schedules
        ]

    for plain, delayed in launched(work):
        torch.testing.assert_close(delayed, plain)


def test_adamw_averages_updates_except_with_recipe_published(tmp_path: Path) -> None:
    def work() -> tuple[list[str], list[int]]:
        from spardl.hooks.adapters.transformers import attach_trainer

        names, states = [], []
        for options in ({}, {"recipe": "published"}, {"method": "bf16"}):
            made = trainer(tmp_path / "run", steps=2)
            callback = attach_trainer(made, **options)  # type: ignore[arg-type]
            made.train()
            assert callback.handle is not None
            names.append(callback.handle.method.momentum.name)
            states.append(len(made.optimizer.state))
        return names, states

    for names, states in launched(work):
        assert names == ["adam", "optimizer", "optimizer"]
        assert states[0] == 0 < states[1] == states[2]


def test_training_resumes_bit_exactly(tmp_path: Path) -> None:
    options = {"method": "spardl", "density": 0.05}

    def work() -> list[torch.Tensor]:
        undisturbed = trained(tmp_path / "run", options)
        halfway = tmp_path / "run" / "checkpoint-4"
        continued = trained(tmp_path / "run", options, str(halfway))
        moved = tmp_path / "moved"
        if dist.get_rank() == 0:
            shutil.copytree(halfway, moved)
            shutil.copytree(halfway, tmp_path / "dense")
            for path in (tmp_path / "dense").glob("spardl-*"):
                path.unlink()
        dist.barrier()
        # Its output folder has another run's checkpoint of the same step.
        (tmp_path / "other" / "checkpoint-4").mkdir(parents=True, exist_ok=True)
        elsewhere = trained(tmp_path / "other", options, str(moved))
        fresh = {**options, "fresh": True}
        return [undisturbed, continued, elsewhere, trained(tmp_path / "third", fresh, str(tmp_path / "dense"))]

    for undisturbed, continued, elsewhere, fresh in launched(work):
        assert torch.equal(continued, undisturbed)
        assert torch.equal(elsewhere, undisturbed)
        assert not torch.equal(fresh, undisturbed)


def test_files_of_another_save_are_refused(tmp_path: Path) -> None:
    """By all workers, even if only one of them has such a file."""

    def work() -> str:
        trained(tmp_path, {"method": "topka"}, steps=8)
        if dist.get_rank() == 1:
            name = "spardl-1-of-2.pt"
            shutil.copy(tmp_path / "checkpoint-8" / name, tmp_path / "checkpoint-4" / name)
        dist.barrier()
        with pytest.raises(CheckpointError) as error:
            trained(tmp_path, {"method": "topka"}, str(tmp_path / "checkpoint-4"))
        return str(error.value)

    wanted = "expected step 4 as the checkpoint; resume from an older checkpoint"
    assert launched(work) == [f"the states in {tmp_path}/checkpoint-4 were saved at steps 4, 8, {wanted}"] * 2


def test_trainer_that_trains_twice_continues(tmp_path: Path) -> None:
    def work() -> tuple[int, int]:
        from spardl.hooks.adapters.transformers import attach_trainer

        made = trainer(tmp_path, steps=3)
        callback = attach_trainer(made, "topka", density=0.1)
        made.train()
        first = callback.handle.stats().steps  # type: ignore[union-attr]
        made.train()
        return first, callback.handle.stats().steps  # type: ignore[union-attr]

    assert launched(work) == [(3, 6), (3, 6)]


def test_unsupported_uses_are_refused(tmp_path: Path) -> None:
    def work() -> list[str]:
        from spardl.hooks.adapters.transformers import attach_trainer

        said = []
        made = trainer(tmp_path, steps=1)
        attach_trainer(made, "topka", density=2)
        with pytest.raises(ConfigError) as error:
            made.train()
        said.append(str(error.value))
        made = trainer(tmp_path, steps=1)
        callback = attach_trainer(made)
        made.state.is_hyper_param_search = True
        with pytest.raises(ConfigError, match="hyperparameter_search") as error:
            callback.on_train_begin(made.args, made.state, made.control)
        return [*said, str(error.value)]

    for density, search in launched(work):
        assert "density" in density
        assert "call train() for each trial" in search


def test_failed_training_restores_the_clipping_limit(tmp_path: Path) -> None:
    """Clipping works again after an exception, and in a retry of ``auto_find_batch_size``."""

    def work() -> list[float | None]:
        from transformers import TrainerCallback

        from spardl.hooks.adapters.transformers import attach_trainer

        class Fails(TrainerCallback):
            def __init__(self, text: str) -> None:
                self.text = text

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                text, self.text = self.text, ""
                if text:
                    raise RuntimeError(text)

        found: list[float | None] = []
        for text, finds in (("an error", False), ("CUDA out of memory. Tried to allocate", True)):
            made = trainer(tmp_path / text[:5], steps=2, max_grad_norm=0.5, auto_find_batch_size=finds)
            callback = attach_trainer(made, "topka", density=0.1)
            made.add_callback(Fails(text))
            if not finds:
                with pytest.raises(RuntimeError, match=text):
                    made.train()
                found.append(made.args.max_grad_norm)
            made.train()
            assert callback.handle is not None
            assert callback.handle.gradient_norm is not None  # measured only if the handle clips
            found.append(made.args.max_grad_norm)
        return found

    assert launched(work) == [[0.5] * 3] * 2


def test_grad_norm_is_that_of_the_gradient(tmp_path: Path) -> None:
    """All workers have equal batches, so the norm equals that of the plain trainer."""

    def work() -> list[list[float]]:
        from spardl.hooks.adapters.transformers import attach_trainer

        norms = []
        for attaches in (False, True):
            logs = {"logging_strategy": "steps", "logging_steps": 1}
            made = trainer(tmp_path / str(attaches), steps=1, same=True, **logs)
            if attaches:
                made.optimizer = None
                attach_trainer(made, "spardl", density=0.5)
            made.train()
            norms.append([each["grad_norm"] for each in made.state.log_history if "grad_norm" in each])
        return norms

    for plain, ours in launched(work):
        assert len(ours) == 1
        assert ours == pytest.approx(plain, rel=1e-3)
