"""A model of published runs that has no name in ``actmem plan``: a factory for its command line, with transformers."""

from typing import Any

import torch
from torch import nn


def bert_large(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """``bert-large-uncased`` with a class for each sequence, its attention as transformers ran it in 2022."""
    from transformers import BertConfig, BertForSequenceClassification

    fields: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    config = BertConfig(**fields | {"num_hidden_layers": l, "attn_implementation": "eager"})
    ids = torch.zeros(b, s, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone()}
    return BertForSequenceClassification(config), inputs
