"""Local training: workers exchange 5% of their weight changes every ten steps, instead of gradients in every step.

torchrun --standalone --nproc-per-node 2 examples/outer.py
"""

import torch
import torch.distributed as dist
from torch import nn

import spardl

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(rank)  # Outer copies the weights of rank 0 to all workers
lstm, head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 16)
model = nn.ModuleList([lstm, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
outer = spardl.Outer(model.named_parameters(), optimizer, "spardl", every=10, density=0.05)

draws = torch.Generator().manual_seed(rank)
for step in range(1, 201):
    waves = torch.sin(torch.arange(13.0).view(1, 13, 1) + 6 * torch.rand(32, 1, 16, generator=draws))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(lstm(waves[:, :-1])[0]), waves[:, 1:])
    loss.backward()
    outer.step()  # instead of optimizer.step()
    if rank == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

if rank == 0:
    print(outer.stats())  # a step of these statistics is one exchange
outer.close()
dist.destroy_process_group()
