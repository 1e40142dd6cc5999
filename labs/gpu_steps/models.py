"""Models from other libraries, with random weights: for ``actmem record``, ``tape`` and ``plan``.

Each function returns a model, and the keyword arguments with which to call it. Letters: s tokens, b sequences, h hidden
size, a heads, k key and value heads, f width of the MLP, l layers, v words of the vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig


def _inputs(s: int, b: int, v: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(v, (b, s))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(s).expand(b, s)}


def _llama(s: int, h: int, a: int, k: int, f: int, l: int, v: int, **more: Any) -> nn.Module:  # noqa: E741
    config = LlamaConfig(
        hidden_size=h, intermediate_size=f, num_hidden_layers=l, num_attention_heads=a, num_key_value_heads=k,
        vocab_size=v, max_position_embeddings=max(s, 16), use_cache=False, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def llama_1b(
    s: int = 2048, b: int = 2, h: int = 2048, a: int = 32, k: int = 8, f: int = 8192, l: int = 16, v: int = 128_256
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make Hugging Face's Llama 3.2 1B, whose output layer uses the word embedding's weight."""
    return _llama(s, h, a, k, f, l, v, tie_word_embeddings=True), _inputs(s, b, v)


def llama_8b_lora(
    s: int = 2048, b: int = 1, h: int = 4096, a: int = 32, k: int = 8, f: int = 14336, l: int = 32, v: int = 128_256
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make Hugging Face's Llama 3 8B with PEFT's LoRA adapters of rank 16 at all linears of the layers."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    # PEFT would keep the adapters in float32, and a float32 copy of every input beside them.
    model = get_peft_model(_llama(s, h, a, k, f, l, v), adapters, autocast_adapter_dtype=False)
    return model, _inputs(s, b, v)


def gpt_dropout(
    s: int = 1024, b: int = 4, h: int = 2048, a: int = 16, l: int = 24, v: int = 50_304
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make Hugging Face's GPT-2 with 1.3B parameters, a dropout of 0.1, and torch's RMS norms in its layers."""
    config = GPT2Config(n_embd=h, n_head=a, n_layer=l, n_positions=s, vocab_size=v, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"  # which transformers takes too, and warns
    for block in model.transformer.h:
        block.ln_1, block.ln_2 = nn.RMSNorm(h), nn.RMSNorm(h)
    return model, _inputs(s, b, v)


FACTORIES: dict[str, Any] = {"llama_1b": llama_1b, "llama_8b_lora": llama_8b_lora, "gpt_dropout": gpt_dropout}
