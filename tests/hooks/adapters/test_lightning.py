"""SpardlStrategy compared with plain DDPStrategy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spardl
from spardl.basics.errors import CheckpointError, ConfigError
from spardl.schedules import Dear
from tests.hooks.adapters.workers import imported, launched
from tests.hooks.loops import weights

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    imported("spardl.hooks.adapters.lightning", "lightning")


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: nn.Module) -> Any:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def one_for_each_layer(module: Any) -> Any:
    return [torch.optim.Adam(layer.parameters()) for layer in (module.net[0], module.net[2])]


def module(optimizers: Callable[[Any], Any] = sgd, manual: bool = False) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
            self.automatic_optimization = not manual

        def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            loss = self.loss(batch)
            if manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return optimizers(self)

    return Module()


def loader() -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(64, 6, generator=draws), torch.randn(64, 2, generator=draws)), 4)


def trainer(folder: Path, strategy: Any, epochs: int, **arguments: Any) -> Any:
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def trained(folder: Path, strategy: Any, epochs: int = 2, resume: Path | None = None, **arguments: Any) -> torch.Tensor:
    made, model = trainer(folder, strategy, epochs, **arguments), module()
    made.fit(model, loader(), loader(), ckpt_path=resume)
    return weights(model)


def ours(**options: Any) -> Any:
    from spardl.hooks.adapters.lightning import SpardlStrategy

    return SpardlStrategy(**options)


@pytest.mark.parametrize("passes", [1, 2])
def test_density_1_equals_ddp(tmp_path: Path, passes: int) -> None:
    def work() -> tuple[torch.Tensor, torch.Tensor, int]:
        from lightning.pytorch.strategies import DDPStrategy

        strategy = ours(method="spardl", density=1, ddp={"find_unused_parameters": True})
        plain = trained(tmp_path, DDPStrategy(), accumulate_grad_batches=passes, enable_checkpointing=False)
        sparse = trained(tmp_path, strategy, accumulate_grad_batches=passes, enable_checkpointing=False)
        return plain, sparse, strategy.handle.stats().steps

    for plain, sparse, steps in launched(work):
        assert steps == 2 * 8 // passes
        torch.testing.assert_close(sparse, plain)


def test_training_resumes_bit_exactly(tmp_path: Path) -> None:
    options = {"method": "spardl", "density": 0.1}

    def work() -> list[torch.Tensor]:
        from lightning.pytorch.callbacks import ModelCheckpoint

        keep = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", save_top_k=-1)
        undisturbed = trained(tmp_path, ours(**options), 2, callbacks=[keep])
        saved = tmp_path / "kept" / "epoch=0.ckpt"
        if dist.get_rank() == 0:
            shutil.copy(saved, tmp_path / "dense.ckpt")
        dist.barrier()
        continued = trained(tmp_path, ours(**options), 2, saved, enable_checkpointing=False)
        with pytest.raises(CheckpointError, match=r"dense.ckpt.spardl has no workers' states"):
            trained(tmp_path, ours(**options), 2, tmp_path / "dense.ckpt", enable_checkpointing=False)
        fresh = ours(fresh=True, **options)
        return [
            undisturbed,
            continued,
            trained(tmp_path, fresh, 2, tmp_path / "dense.ckpt", enable_checkpointing=False),
        ]

    for undisturbed, continued, fresh in launched(work):
        assert torch.equal(continued, undisturbed)
        assert not torch.equal(fresh, undisturbed)


def test_states_go_with_their_checkpoints(tmp_path: Path) -> None:
    """The last of three epochs is kept; testing weights does not affect a later training."""

    def work() -> list[str]:
        from lightning.pytorch.callbacks import ModelCheckpoint

        keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=1, monitor="epoch", mode="max")
        strategy = ours(method="topka")
        made, model = trainer(tmp_path, strategy, 3, callbacks=[keep]), module()
        made.fit(model, loader(), loader())
        made.validate(model, loader(), ckpt_path=keep.best_model_path, verbose=False)
        assert strategy._resume is None
        dist.barrier()
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))

    for found in launched(work):
        folder = "epoch=2.ckpt.spardl"
        assert found == ["epoch=2.ckpt", folder, f"{folder}/spardl-0-of-2.pt", f"{folder}/spardl-1-of-2.pt"]


def test_symlink_to_a_checkpoint_and_reload_within_a_fit(tmp_path: Path) -> None:
    """As Lightning's learning-rate finder does: save, try steps, load, remove, then train."""

    def work() -> list[torch.Tensor]:
        from lightning.pytorch.callbacks import Callback, ModelCheckpoint

        class Search(Callback):
            def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
                if trainer.current_epoch == 1:
                    path = str(tmp_path / "search.ckpt")
                    trainer.save_checkpoint(path)
                    for residual in trainer.strategy.handle._averager.engine.gradient_state.residuals():
                        residual.add_(1.0)
                    trainer.strategy.load_checkpoint(path)
                    trainer.strategy.remove_checkpoint(path)

        def options() -> Any:
            return ours(method="spardl", density=0.1)

        keep = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", save_top_k=-1, save_last="link")
        undisturbed = trained(tmp_path, options(), 3)
        searched = trained(tmp_path, options(), 3, callbacks=[Search()])
        trained(tmp_path, options(), 2, callbacks=[keep])
        assert (tmp_path / "kept" / "last.ckpt").is_symlink()
        strategy = options()
        linked = trained(tmp_path, strategy, 3, tmp_path / "kept" / "last.ckpt", enable_checkpointing=False)
        assert strategy._resume is None
        return [undisturbed, searched, linked]

    for undisturbed, searched, linked in launched(work):
        assert torch.equal(searched, undisturbed)
        assert torch.equal(linked, undisturbed)


def looped(epochs: int, **options: Any) -> torch.Tensor:
    """Trains the same model on the same batches in a plain loop with ``optimizer=``."""
    model = module()
    ddp = nn.parallel.DistributedDataParallel(model.net)
    optimizer = adam(model)
    spardl.attach(ddp, optimizer=optimizer, **options)
    data = loader().dataset
    sampler: DistributedSampler[Any] = DistributedSampler(data)  # Lightning's own, by default
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, 4, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(batch[0]), batch[1]).backward()
            optimizer.step()
    return weights(model)


def test_adam_moments_are_each_workers(tmp_path: Path) -> None:
    """Equal to a plain loop with ``optimizer=``, in both of Lightning's loops and when resumed."""
    options = {"method": "spardl", "density": 0.1, "clip_norm": 0.5}

    def work() -> list[torch.Tensor]:
        from lightning.pytorch.callbacks import ModelCheckpoint

        found = [looped(2, **options)]
        for manual in (False, True):
            strategy, model = ours(**options), module(adam, manual)
            keep = ModelCheckpoint(dirpath=tmp_path / str(manual), filename="{epoch}", save_top_k=-1)
            trainer(tmp_path, strategy, 2, callbacks=[keep]).fit(model, loader())
            assert not strategy.optimizers[0].state
            again = module(adam, manual)
            first = tmp_path / str(manual) / "epoch=0.ckpt"
            trainer(tmp_path, ours(**options), 2, enable_checkpointing=False).fit(again, loader(), ckpt_path=first)
            found += [weights(model), weights(again)]
        return found

    for expected, *found in launched(work):
        for each in found:
            assert torch.equal(each, expected)


def test_published_leaves_optimizers_and_clipping_to_lightning(tmp_path: Path) -> None:
    def work() -> tuple[int, int]:
        strategy = ours(method="spardl", density=0.1, recipe="published")
        made = trainer(tmp_path, strategy, 1, enable_checkpointing=False, gradient_clip_val=0.5)
        made.fit(module(adam), loader())
        return strategy.handle.stats().steps, len(strategy.optimizers[0].state)

    assert launched(work) == [(8, 4)] * 2


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "several optimizers": (
        one_for_each_layer,
        {},
        "with Lightning, this method averages the updates of one optimizer, but configure_optimizers() returned 2; use "
        'a method that averages gradients (SpardlStrategy("int8"), or recipe="published"), or a loop without '
        "Lightning: spardl.attach(ddp_model, optimizer=[muon, adamw])",
    ),
    "clipping": (
        adam,
        {"gradient_clip_val": 0.5},
        "Trainer(gradient_clip_val=0.5) would clip updates instead of gradients, because this method averages updates; "
        "remove it and pass clip_norm=0.5 to SpardlStrategy, which clips each worker's gradient, or pass "
        'recipe="published" to average gradients',
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_options_that_do_not_fit_updates_are_refused(tmp_path: Path, what: str) -> None:
    optimizers, arguments, expected = REFUSED[what]

    def work() -> str:
        made = trainer(tmp_path, ours(method="spardl"), 1, enable_checkpointing=False, **arguments)
        with pytest.raises(ConfigError) as error:
            made.fit(module(optimizers, manual=what == "several optimizers"), loader())
        return str(error.value)

    assert launched(work) == [expected] * 2


def test_layers_unfrozen_during_training_are_refused(tmp_path: Path) -> None:
    """As ``BackboneFinetuning`` does, after Lightning has wrapped the model in DDP."""

    def work() -> str:
        from lightning.pytorch.callbacks import BackboneFinetuning

        model = module(lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
        model.backbone = model.net[0]
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)
        made = trainer(tmp_path, ours(method="spardl"), 2, enable_checkpointing=False, callbacks=[unfreezing])
        with pytest.raises(ConfigError) as error:
            made.fit(model, loader())
        return str(error.value)

    for said in launched(work):
        assert "was unfrozen after the model was wrapped in DDP, which does not average its gradient" in said


def test_dear_is_refused() -> None:
    for schedule in ("dear", Dear()):
        with pytest.raises(ConfigError, match=r"^schedule=dear updates in the next forward pass, but Lightning runs"):
            ours(method="spardl", schedule=schedule)


def test_remote_folder_is_refused_before_training(tmp_path: Path) -> None:
    def work() -> str:
        from lightning.pytorch.callbacks import ModelCheckpoint

        with pytest.raises(ConfigError) as error:
            trained(tmp_path, ours(), callbacks=[ModelCheckpoint(dirpath="memory://far")])
        return str(error.value)

    for said in launched(work):
        assert said == "memory://far is not a local path, as SpardlStrategy needs; set dirpath to a local folder"
