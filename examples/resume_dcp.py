"""Saves a training with ``torch.distributed.checkpoint`` and resumes it with any number of workers.

torchrun --standalone --nproc-per-node 4 examples/resume_dcp.py checkpoint  # steps 1 to 50, then saves
torchrun --standalone --nproc-per-node 3 examples/resume_dcp.py checkpoint  # resumes with steps 51 to 100
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(sys.argv[1])
found = sorted(path.parent for path in folder.glob("step-*/.metadata"))  # DCP writes this file last

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)
handle = spardl.attach(ddp_model, "spardl", density=0.01, optimizer=optimizer)  # the handle keeps the momentum

first = 1
if found:
    state = {"model": model.state_dict(), "step": 0, "spardl": handle.sharded(found[-1])}
    dcp.load(state, checkpoint_id=found[-1])
    model.load_state_dict(state["model"])
    first = state["step"] + 1

for step in range(first, first + 50):
    draws = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 64, generator=draws)
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp_model(inputs), inputs[:, :10].argmax(1)).backward()
    optimizer.step()

state = {"model": model.state_dict(), "step": step, "spardl": handle.sharded()}
dcp.save(state, checkpoint_id=folder / f"step-{step:06}")
if rank == 0:
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"step {step}, {dist.get_world_size()} workers: sum of all weights {weights:.12f}")
# These keep the process group alive, and its threads can abort Python at exit (pytorch/pytorch#190489).
handle.detach()
del state, handle, optimizer, ddp_model
gc.collect()
dist.destroy_process_group()
