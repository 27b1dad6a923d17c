"""DistributedDataParallel that sends 1% of the gradient; --plain runs DDP without spardl.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
teacher = nn.Linear(64, 10)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
handle = None if "--plain" in sys.argv else spardl.attach(ddp_model, "spardl", density=0.01, optimizer=optimizer)

draws = torch.Generator().manual_seed(rank)
for step in range(1, 201):
    inputs = torch.randn(32, 64, generator=draws)
    targets = teacher(inputs).argmax(1)
    loss = nn.functional.cross_entropy(ddp_model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()  # .grad holds averages when this returns
    optimizer.step()
    if rank == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

if rank == 0 and handle:
    stats = handle.stats()
    print(f"{workers} workers sent {stats.bytes_sent:,.0f} bytes each per step; dense: {stats.dense_bytes:,.0f}")
dist.destroy_process_group()
