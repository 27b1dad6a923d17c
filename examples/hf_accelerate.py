"""Hugging Face Accelerate: one line after prepare(); save_state() and load_state() include residuals.

pip install '.[accelerate]'
torchrun --standalone --nproc-per-node 2 examples/hf_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spardl.hooks.adapters.accelerate import attach

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
inputs = torch.randn(2048, 32)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
handle = attach(accelerator, model, "spardl", density=0.02, optimizer=optimizer)

for epoch in range(1, 5):
    total = 0.0
    for batch, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
    accelerator.print(f"epoch {epoch}: loss {total / len(loader):.3f}")

stats = handle.stats()
accelerator.print(f"{stats.bytes_sent:,.0f} bytes per worker and step; dense: {stats.dense_bytes:,.0f}")
accelerator.end_training()
