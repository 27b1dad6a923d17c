"""Interrupts a training and resumes it bit for bit: each rank saves the state of its handle.

torchrun --standalone --nproc-per-node 2 examples/resume.py checkpoint  # steps 1 to 50, then saves
torchrun --standalone --nproc-per-node 2 examples/resume.py checkpoint  # resumes with steps 51 to 100
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl

dist.init_process_group("gloo")
rank = dist.get_rank()
path = Path(sys.argv[1]) / f"rank-{rank}.pt"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ddp_model = DistributedDataParallel(model)
handle = spardl.attach(ddp_model, "spardl", density=0.01)
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1, momentum=0.9)

saved = torch.load(path) if path.exists() else {"step": 0}
first = saved["step"] + 1
steps = [0] * dist.get_world_size()
dist.all_gather_object(steps, saved["step"])
if len(set(steps)) > 1:  # interrupted while ranks were saving
    if rank == 0:
        print(f"error: ranks in {path.parent} saved different steps {steps}; delete it", file=sys.stderr)
    dist.barrier()  # no rank exits before the message is printed
    dist.destroy_process_group()
    sys.exit(2)
if saved["step"]:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["handle"])

for step in range(first, first + 50):
    draws = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 64, generator=draws)
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp_model(inputs), inputs[:, :10].argmax(1)).backward()
    optimizer.step()

path.parent.mkdir(exist_ok=True)
parts = {"model": model, "optimizer": optimizer, "handle": handle}
temporary = path.with_suffix(".new")
torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, temporary)
temporary.replace(path)  # atomic, so a file is never half written
if rank == 0:
    print(f"step {step}: sum of all weights {sum(p.double().sum().item() for p in model.parameters()):.12f}")
dist.destroy_process_group()
