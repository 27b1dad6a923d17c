"""Without DDP: averages gradients as the backward pass completes them, here with four micro-batches per step.

torchrun --standalone --nproc-per-node 2 examples/synchronizer.py
"""

import torch
import torch.distributed as dist
from torch import nn

import spardl

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # weights must be equal at the start, because they are not broadcast
lstm, head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 16)
model = nn.ModuleList([lstm, head])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
synchronizer = spardl.Synchronizer(model.named_parameters(), "oktopk", density=0.05)

draws = torch.Generator().manual_seed(rank)
for step in range(1, 101):
    waves = torch.sin(torch.arange(13.0).view(1, 13, 1) + 6 * torch.rand(32, 1, 16, generator=draws))
    batches = waves.split(8)
    optimizer.zero_grad()
    total = 0.0
    for number, batch in enumerate(batches):
        loss = nn.functional.mse_loss(head(lstm(batch[:, :-1])[0]), batch[:, 1:]) / len(batches)
        total += loss.item()
        with synchronizer if number == len(batches) - 1 else synchronizer.no_sync():
            loss.backward()
    optimizer.step()
    if rank == 0 and step % 25 == 0:
        print(f"step {step}: loss {total:.4f}")

if rank == 0:
    print(synchronizer.stats())
dist.destroy_process_group()
