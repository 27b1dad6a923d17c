"""A trainer and two rollout workers: the trainer periodically sends the bfloat16 weights that have changed.

torchrun --standalone --nproc-per-node 3 examples/weight_sync.py

A share is that of one call: most weights change in the first steps, and few with a small learning rate.
"""

import torch
import torch.distributed as dist
from torch import nn

import spardl

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(rank)  # the first call copies the weights of rank 0
model = nn.ModuleList([nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 16)])
if rank:
    model.to(torch.bfloat16)
weights = spardl.WeightSync(model.named_parameters(), source=0)


def loss_of(waves):
    """Returns the loss of predicting each next point, in the precision of the weights."""
    lstm, head = model
    waves = waves.to(head.weight.dtype)
    return nn.functional.mse_loss(head(lstm(waves[:, :-1])[0]), waves[:, 1:])


optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(201):
    waves = torch.sin(torch.arange(13.0).view(1, 13, 1) + 6 * torch.rand(32, 1, 16))
    if rank == 0:
        optimizer.param_groups[0]["lr"] = 0.01 if step < 150 else 1e-6
        optimizer.zero_grad()
        loss_of(waves).backward()
        optimizer.step()
    if step % 50 == 0 or step == 151:
        synced = weights.sync()
        if rank == 1:  # evaluates the received weights
            with torch.no_grad():
                loss = loss_of(waves).item()
            print(f"step {step}: {synced.patch_bytes:6,} bytes, {synced.share:6.1%} of all weights, loss {loss:.4f}")
dist.destroy_process_group()
