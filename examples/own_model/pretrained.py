"""A Hugging Face model with its tokenizer and pretrained weights from a local folder, on the texts of texts.py.

From a folder with this file and conf/, after `hf download NAME --local-dir bert`, with spardl cloned to SPARDL:

PYTHONPATH=. python SPARDL/train.py --config-dir conf "plugins=[pretrained]" model=my_weights dataset.root=TEXTS
"""

import csv
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from tasks.datasets.labelled_text import LabelledTextDataset, LabelledTexts

logging.disable_progress_bar()


class Classifier(nn.Module):
    def __init__(self, vocab_size, num_classes, folder):
        super().__init__()
        self.net = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_classes)

    def forward(self, tokens, lengths):
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
        return self.net(input_ids=tokens, attention_mask=mask.long()).logits


def load(root, folder, max_tokens):
    tokenizer, parts = AutoTokenizer.from_pretrained(folder), []
    for split in ("train", "test"):
        rows = list(csv.DictReader(Path(f"{root}/{split}.csv").read_text().splitlines()))
        ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_tokens)["input_ids"]
        ends, labels = torch.tensor([0, *map(len, ids)]).cumsum(0), torch.tensor([int(row["label"]) for row in rows])
        parts.append(LabelledTexts(torch.tensor([token for text in ids for token in text]), ends, labels, max_tokens))
    return LabelledTextDataset("my_texts", *parts, len(tokenizer), num_classes=int(parts[0].labels.max()) + 1)
