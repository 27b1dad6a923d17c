"""Muon for the matrices of a small transformer and AdamW for its other parameters, both with averaged updates.

torchrun --standalone --nproc-per-node 2 examples/muon.py

It needs torch 2.9 or newer.
"""

from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl

WINDOW, BATCH, WIDTH, STEPS = 32, 16, 64, 100

text = "\n\n".join(topics[name] for name in sorted(topics))  # the texts of help()
alphabet = sorted(set(text))
characters = torch.tensor(list(map({each: i for i, each in enumerate(alphabet)}.get, text)))


class Transformer(nn.Module):
    """Predicts each next character."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(len(alphabet), WIDTH), nn.Embedding(WINDOW, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(alphabet))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW))

    def forward(self, windows):
        """Returns the loss of windows of WINDOW + 1 characters."""
        hidden = self.embedding(windows[:, :-1]) + self.positions.weight
        logits = self.head(self.blocks(hidden, self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ddp_model = DistributedDataParallel(Transformer())
matrices = [each for each in ddp_model.module.blocks.parameters() if each.ndim == 2]
others = [each for each in ddp_model.parameters() if all(each is not matrix for matrix in matrices)]
muon = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(others, lr=0.01)
handle = spardl.attach(ddp_model, optimizer=[muon, adamw])  # the method "onebit"

draws = torch.Generator().manual_seed(rank)
for step in range(STEPS):
    starts = torch.randint(len(characters) - WINDOW, (BATCH, 1), generator=draws)
    for optimizer in (muon, adamw):
        optimizer.zero_grad()
    loss = ddp_model(characters[starts + torch.arange(WINDOW + 1)])
    loss.backward()
    for optimizer in (muon, adamw):
        optimizer.step()
    if rank == 0 and (step % 25 == 0 or step == STEPS - 1):
        print(f"step {step}: loss {loss.item():.2f}")
if rank == 0:
    print(f"{handle.stats().share:.1%} of the bytes of dense averages")
dist.destroy_process_group()
