"""A Hugging Face model from a configuration file, on your own texts: train.csv and test.csv in TEXTS (text, label).

From a folder with this file, bert.json and conf/, with spardl cloned to SPARDL (`pip install datasets` is optional):

PYTHONPATH=. python SPARDL/train.py --config-dir conf "plugins=[texts]" model=my_bert dataset.root=TEXTS
"""

import csv
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from tasks.datasets.labelled_text import LabelledTextDataset, number_texts, texts_from


class Classifier(nn.Module):
    def __init__(self, vocab_size, num_classes, config):
        super().__init__()
        config = AutoConfig.from_pretrained(config, vocab_size=vocab_size, num_labels=num_classes)
        self.net = AutoModelForSequenceClassification.from_config(config)

    def forward(self, tokens, lengths):
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        return self.net(input_ids=tokens, attention_mask=mask.long()).logits


def load(root, vocab_size, max_tokens):
    files = {split: f"{root}/{split}.csv" for split in ("train", "test")}
    if find_spec("datasets"):
        rows = __import__("datasets").load_dataset("csv", data_files=files)
    else:
        rows = {split: csv.DictReader(Path(file).read_text().splitlines()) for split, file in files.items()}
    parts = {split: [(row["text"].split(), int(row["label"])) for row in rows[split]] for split in files}
    train, test = (texts_from(number_texts(parts, vocab_size), split, max_tokens) for split in files)
    return LabelledTextDataset("my_texts", train, test, vocab_size, num_classes=int(train.labels.max()) + 1)
