"""Trainer of Hugging Face transformers: one line before train(). A tiny BERT classifies texts by their first word.

pip install '.[accelerate]'
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py OUTPUT_FOLDER
"""

import gc
import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from spardl.hooks.adapters.transformers import attach_trainer

set_seed(0)
words = torch.randint(2, 50, (1024, 8))
examples = [{"input_ids": row, "labels": (row[0] >= 26).long()} for row in words]
model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=4,
    per_device_train_batch_size=32,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=16,
    save_steps=16,  # checkpoints include the residuals of every worker
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
)
trainer = Trainer(model=model, args=arguments, train_dataset=examples)
callback = attach_trainer(trainer, "spardl", density=0.01)
trainer.train()

if trainer.is_world_process_zero():
    stats = callback.handle.stats()
    print(f"{stats.bytes_sent:,.0f} bytes per worker and step; dense: {stats.dense_bytes:,.0f}")
# The trainer keeps the process group alive, and its threads can abort Python at exit (pytorch/pytorch#190489).
del trainer, callback, model
gc.collect()
torch.distributed.destroy_process_group()
