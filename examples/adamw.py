"""A small transformer with AdamW in four ways: dense, a single worker, and density 1% with and without `optimizer=`.

torchrun --standalone --nproc-per-node 4 examples/adamw.py

It takes two to four minutes on two cores; `--steps 100 --width 32 --layers 2` is faster. Each way has its own learning
rate, which you can change: `--published 0.001`. The text, and therefore the losses, depend on the Python version.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import spardl

RATES = {"dense": 0.02, "moved": 0.015, "alone": 0.01, "published": 0.003}  # each is the best of two to four candidates
WINDOW, BATCH = 64, 16

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--width", type=int, default=64, help="width of the model, a multiple of 4")
parser.add_argument("--layers", type=int, default=4)
for name, rate in RATES.items():
    parser.add_argument(f"--{name}", type=float, default=rate, metavar="RATE", help=f"learning rate (default: {rate})")
options = parser.parse_args()

# The text of help(), each paragraph once; the last tenth is the validation set.
text = "\n\n".join(dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n")))
alphabet = sorted(set(text))
characters = torch.tensor(list(map({each: i for i, each in enumerate(alphabet)}.get, text)))
train, validation = characters.split(len(text) * 9 // 10 + 1)


class Transformer(nn.Module):
    """Predicts each next character."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(len(alphabet), width), nn.Embedding(WINDOW, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for matrix in (each for each in self.parameters() if each.dim() > 1):
            nn.init.normal_(matrix, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW))

    def forward(self, windows):
        """Returns the loss of windows of WINDOW + 1 characters."""
        hidden = self.embedding(windows[:, :-1]) + self.positions.weight
        hidden = self.blocks(hidden, self.mask, is_causal=True)
        logits = hidden @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def schedule(step):
    """Returns the factor of the learning rate: linear warm-up in the first fifth, then cosine decay to 0."""
    done, warm = (step + 1) / options.steps, 0.2
    return done / warm if done < warm else (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2


def fit(way, rate):
    """Trains in one of the four ways; returns the validation loss and the bytes sent, as a share of dense."""
    torch.manual_seed(0)
    model = Transformer(options.width, options.layers)
    trained = model if way == "alone" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    handle = None
    if way == "published":  # compresses gradients; AdamW gets their averages
        handle = spardl.attach(trained, "spardl", density=0.01, recipe="published")
    elif way == "moved":  # compresses each worker's updates; AdamW only applies their averages
        handle = spardl.attach(trained, "spardl", density=0.01, optimizer=optimizer, clip_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        starts = torch.randint(len(train) - WINDOW, (BATCH, 1), generator=draws)
        optimizer.zero_grad()
        trained(train[starts + torch.arange(WINDOW + 1)]).backward()
        if way != "moved":  # "moved": .grad is an update of a gradient that clip_norm= has clipped
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        loss = model(validation.unfold(0, WINDOW + 1, WINDOW)).item()
    return loss, handle.stats().share if handle else float(way == "dense")


dist.init_process_group("gloo")
for way in RATES:
    if way != "alone" or dist.get_rank() == 0:
        loss, share = fit(way, getattr(options, way))
        if dist.get_rank() == 0:
            print(f"{way:9} {loss:.2f} nats, {share:6.1%} of the bytes of dense", flush=True)
dist.destroy_process_group()
