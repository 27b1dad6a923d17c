"""FSDP2 with AdamW and bfloat16 inside each node, 2% of the updates between nodes; here, two "nodes" of two workers.

torchrun --standalone --nproc-per-node 4 examples/fsdp_adamw.py

Each node keeps AdamW's moments of the node's gradient, sharded like the parameters; optimizer.step() applies averages.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import spardl

STEPS, PARTS = 100, 2  # each step accumulates the gradients of two micro-batches

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("nodes", "inside"))


class Model(nn.Module):
    """Residual blocks with activation checkpointing."""

    def __init__(self, width=32, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, width)

    def forward(self, hidden):
        """Returns predictions of the same shape as the inputs."""
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


torch.manual_seed(0)
model = Model()
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh["inside"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
group = mesh["nodes"].get_group()
handle = spardl.attach_fsdp(model, "spardl", density=0.02, group=group, optimizer=optimizer, clip_norm=1.0)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, STEPS, cycle_momentum=False)

draws = torch.Generator().manual_seed(rank)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    for part in range(PARTS):
        model.set_requires_gradient_sync(part == PARTS - 1)  # only the last micro-batch sends
        inputs = torch.randn(16, 32, generator=draws)
        loss = nn.functional.mse_loss(model(inputs).float(), inputs.roll(1, dims=1))
        (loss / PARTS).backward()
    optimizer.step()
    scheduler.step()
    if rank == 0 and step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {handle.stats().share:.1%} of the bytes of dense")
dist.destroy_process_group()
