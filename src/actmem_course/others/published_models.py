"""Models of published runs that have no name in ``actmem plan``: factories for its command line, with transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def bert_large(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """``bert-large-uncased`` with a class for each sequence, its attention as transformers ran it in 2022."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        num_hidden_layers=l,
        attn_implementation="eager",
    )
    ids = torch.zeros(b, s, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone()}
    return BertForSequenceClassification(config), inputs


def tiny_llama(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """``TinyLlama-1.1B``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        num_hidden_layers=l,
        vocab_size=32000,
        use_cache=False,
    )
    ids = torch.zeros(b, s, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}
