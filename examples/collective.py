"""A single collective call: the average of a tensor, the residual, and the cost.

torchrun --standalone --nproc-per-node 2 examples/collective.py
"""

import torch
import torch.distributed as dist

import spardl

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()

tensor = torch.randn(500, 200, generator=torch.Generator().manual_seed(rank))
for method, options in (("none", {}), ("spardl", {"density": 0.01}), ("topka", {"density": 0.01}), ("powersgd", {})):
    reduced = spardl.all_reduce(tensor, method, **options)
    # Entries that are missing from the average stay in residuals, which workers add to their next tensors.
    kept = reduced.residual / workers
    dist.all_reduce(kept)
    mean = tensor / workers
    dist.all_reduce(mean)
    missing = (reduced.average + kept - mean).abs().max().item()
    if rank == 0:
        cost = reduced.cost
        print(f"{method:9} {cost.bytes_sent:9,.0f} bytes in {cost.rounds:.0f} rounds; entries off by {missing:.0e}")
dist.destroy_process_group()
