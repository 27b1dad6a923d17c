"""FSDP2 inside each node, and 1% of the gradient between nodes; here, two "nodes" of two workers.

torchrun --standalone --nproc-per-node 4 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from spardl.hooks.fsdp import attach_fsdp

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("nodes", "inside"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh["inside"])
fully_shard(model, mesh=mesh["inside"])
handle = attach_fsdp(model, "spardl", density=0.01, group=mesh["nodes"].get_group())

optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
draws = torch.Generator().manual_seed(rank)
for step in range(1, 101):
    inputs = torch.randn(16, 32, generator=draws)
    loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

if rank == 0:
    stats = handle.stats()
    print(f"between nodes: {stats.bytes_sent:,.0f} bytes per worker and step; dense: {stats.dense_bytes:,.0f}")
dist.destroy_process_group()
