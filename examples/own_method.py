"""A custom method outside spardl: sends all entries in turn; unsent entries stay in the residual.

torchrun --standalone --nproc-per-node 2 examples/own_method.py

To use it by name in every program (``spardl.attach(ddp_model, "round_robin")``), add to pyproject.toml:
[project.entry-points."spardl.methods"]
round_robin = "own_method:make"
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import spardl
from spardl.communicators import Dense
from spardl.compressors import SharedChoice
from spardl.method import LocalResidual


@dataclass(frozen=True)
class RoundRobin(SharedChoice):
    """Sends the next k entries in each step, cyclically; no positions are sent."""

    name = "round_robin"

    def positions(self, context, device):
        """Returns the positions to send: strictly increasing, equal on all workers."""
        n, k = context.layout.length, self.count(context)
        return ((context.step * k + torch.arange(k, device=device)) % n).sort().values


def make(density=0.01):
    """Returns the method: a compressor, a communicator and a residual."""
    return spardl.Method(RoundRobin(density), Dense(), LocalResidual())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
    handle = spardl.attach(ddp_model, make(density=0.1))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 101):
        inputs = torch.randn(32, 64, generator=draws)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp_model(inputs), inputs[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {handle.stats().bytes_sent:.0f} bytes per step")
    dist.destroy_process_group()
