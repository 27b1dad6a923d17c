"""Lightning: one strategy. A folder next to each checkpoint has the residuals of every worker.

pip install '.[lightning]'
python examples/lightning_fit.py OUTPUT_FOLDER
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spardl.hooks.adapters.lightning import SpardlStrategy


class Classifier(lightning.LightningModule):
    """Predicts which of the first four inputs is the largest."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))

    def training_step(self, batch, number):
        """Returns the loss of a batch."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        """Prints the loss, on the first worker only."""
        self.print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss'].item():.3f}")

    def configure_optimizers(self):
        """Returns AdamW; each worker keeps its own moments, and the strategy averages updates."""
        return torch.optim.AdamW(self.parameters(), lr=0.003)


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(2048, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=32, shuffle=True)
    strategy = SpardlStrategy("spardl", density=0.02)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=4,
        default_root_dir=sys.argv[1],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader)
    if trainer.is_global_zero:
        stats = strategy.handle.stats()
        print(f"{stats.bytes_sent:,.0f} bytes per worker and step; dense: {stats.dense_bytes:,.0f}")
