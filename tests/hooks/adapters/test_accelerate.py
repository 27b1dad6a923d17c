"""Models prepared by Accelerate, compared with plain Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spardl.basics.errors import CheckpointError, ConfigError
from tests.hooks.adapters.workers import imported, launched
from tests.hooks.loops import weights

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    imported("spardl.hooks.adapters.accelerate", "accelerate")


class Job:
    """A prepared model, optimizer and data; ``options=None`` is plain DDP."""

    def __init__(self, options: dict[str, Any] | None, **accelerator: Any) -> None:
        from accelerate import Accelerator

        from spardl.hooks.adapters.accelerate import attach

        torch.manual_seed(3)
        data = TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.accelerator = Accelerator(cpu=True, **accelerator)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=4)
        )
        if options is not None:
            moves = options.get("moves", False)
            given = {"optimizer": self.optimizer} if moves else {"recipe": "published"}
            options = {key: each for key, each in options.items() if key != "moves"} | given
        self.handle = None if options is None else attach(self.accelerator, self.model, **options)

    def train(self, epochs: int = 1) -> torch.Tensor:
        for _ in range(epochs):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(nn.functional.mse_loss(self.model(inputs), targets))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return weights(self.model)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_density_1_equals_plain_accelerate(passes: int, moves: bool) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor, int, int]:
        plain = Job(None, gradient_accumulation_steps=passes).train(3)
        job = Job({"method": "spardl", "density": 1, "moves": moves}, gradient_accumulation_steps=passes)
        trained = job.train(3)
        kept = len(job.optimizer.optimizer.state)
        return plain, trained, job.handle.stats().steps, kept  # type: ignore[union-attr]

    for plain, ours, steps, kept in launched(work):
        assert steps == 3 * 8 // passes
        assert (kept == 0) is moves
        torch.testing.assert_close(ours, plain)


def test_training_resumes_bit_exactly(tmp_path: Path) -> None:
    """With Accelerate's own save_state and load_state, which must include residuals."""
    options = {"method": "spardl", "density": 0.1}

    def work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, second, third = Job(options), Job(options), Job(options)
        first.train()
        first.accelerator.save_state(str(tmp_path / "saved"))
        undisturbed = first.train()
        for job in (second, third):
            job.accelerator.load_state(str(tmp_path / "saved"))
        third.handle.load_state_dict({})  # type: ignore[union-attr]
        return undisturbed, second.train(), third.train()

    for undisturbed, continued, forgetful in launched(work):
        assert torch.equal(continued, undisturbed)
        assert not torch.equal(forgetful, undisturbed)


def test_two_models_of_one_accelerator_and_a_forgotten_one(tmp_path: Path) -> None:
    def work() -> list[bool]:
        from spardl.hooks.adapters.accelerate import attach

        job = Job({"method": "topka", "density": 0.1})
        other = job.accelerator.prepare(nn.Linear(6, 2))
        handles: list[Any] = [job.handle, attach(job.accelerator, other, "spardl", density=0.5, recipe="published")]
        other(torch.ones(3, 6)).square().sum().backward()
        job.train()
        job.accelerator.save_state(str(tmp_path / "saved"))
        before = [handle.state_dict()["groups"][0]["memory"] for handle in handles]
        for handle in handles:
            handle.load_state_dict({})
        job.accelerator.load_state(str(tmp_path / "saved"))
        after = [handle.state_dict()["groups"][0]["memory"] for handle in handles]
        job.accelerator.free_memory()
        job.accelerator.save_state(str(tmp_path / "empty"))
        nothing = not list((tmp_path / "empty").glob("spardl*"))
        return [*(torch.equal(*pair) for pair in zip(before, after, strict=True)), bool(before[0].any()), nothing]

    assert launched(work) == [[True] * 4] * 2


def test_an_overflow_on_one_worker_is_skipped_by_all() -> None:
    """With the accelerator's GradScaler, which must be passed explicitly on a CPU."""

    def work() -> tuple[float, bool, bool]:
        import torch.distributed as dist
        from accelerate.optimizer import AcceleratedOptimizer

        from spardl.hooks.adapters.accelerate import attach

        job = Job(None)
        job.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = AcceleratedOptimizer(job.optimizer.optimizer, scaler=scaler)
        attach(job.accelerator, job.model, "spardl", density=0.2, recipe="published")
        before = weights(job.model).clone()
        for number in range(3):
            harm = torch.inf if number == 0 and dist.get_rank() == 1 else 1.0
            optimizer.zero_grad()
            job.accelerator.backward(job.model(torch.ones(2, 6)).square().mean() * harm)
            optimizer.step()
            if number == 0:
                untouched = torch.equal(weights(job.model), before)
        moved = weights(job.model)
        return scaler.get_scale(), untouched, bool(moved.isfinite().all()) and not torch.equal(moved, before)

    assert launched(work) == [(512.0, True, True)] * 2


def test_checkpoint_without_residuals_is_refused(tmp_path: Path) -> None:
    def work() -> str:
        Job(None).accelerator.save_state(str(tmp_path / "dense"))
        job = Job({"method": "topka", "fresh": True})
        job.accelerator.load_state(str(tmp_path / "dense"))
        job.train()
        with pytest.raises(CheckpointError) as error:
            Job({"method": "topka"}).accelerator.load_state(str(tmp_path / "dense"))
        return str(error.value)

    for rank, said in enumerate(launched(work)):
        missing = f"no workers' states, but no spardl-0-{rank}-of-2.pt"
        way_out = "resume with the number of workers that saved it, or pass fresh=True to start with zero residuals"
        assert said == f"{tmp_path}/dense has {missing}; {way_out}"


def test_single_process_is_refused() -> None:
    def work() -> str:
        from spardl.hooks.adapters.accelerate import attach

        with pytest.raises(ConfigError) as error:
            attach(Job(None).accelerator, nn.Linear(2, 2))
        return str(error.value)

    (said,) = launched(work, workers=1)
    assert said.startswith(
        "the model is a Linear and not a DistributedDataParallel; start several workers (accelerate launch, or torchrun"
    )


def test_a_missing_optimizer_is_refused() -> None:
    """Unless the method averages gradients."""

    def work() -> str:
        from spardl.hooks.adapters.accelerate import attach

        job = Job(None)
        attach(job.accelerator, job.model, "bf16").detach()
        with pytest.raises(ConfigError) as error:
            attach(job.accelerator, job.model, "spardl")
        return str(error.value)

    for said in launched(work):
        assert said == (
            "attach() needs the optimizer, because this method averages its updates; add optimizer=optimizer (as "
            'returned by accelerator.prepare()), or recipe="published" to average gradients'
        )
