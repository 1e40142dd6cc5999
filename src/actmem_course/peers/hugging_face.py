"""Hugging Face's blocks, from a configuration and without weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from actmem_course.peers import PeerUnavailable
from actmem_more.llama_shape import LlamaShape


def hugging_face_block(
    name: str, shape: LlamaShape, dtype: torch.dtype, dropout: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The block of that name in ``others.others_keep``, and what to call it with beside its input ``[b, s, h]``.

    Raises PeerUnavailable if transformers isn't installed.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise PeerUnavailable("transformers is not installed: pip install transformers") from error
    model, _, how = name.removeprefix("Hugging Face ").partition(", ")
    s, a = shape.seq_length, shape.num_attention_heads
    mask = torch.full((1, 1, s, s), float("-inf"), dtype=dtype).triu(1) if how == "eager" else None
    if model == "GPT-2":
        p = 0.1 * dropout
        config = transformers.GPT2Config(
            n_embd=shape.hidden_size, n_head=a, n_positions=s, n_layer=1, resid_pdrop=p, attn_pdrop=p
        )
        config._attn_implementation = how
        block = _modeling("gpt2").GPT2Block(config, layer_idx=0)
        return block.to(dtype).train(), {"attention_mask": mask}
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": a,
        "num_key_value_heads": shape.num_key_value_heads,
    }
    if model == "Mixtral's experts":
        config = transformers.MixtralConfig(
            **sizes, num_local_experts=shape.num_experts, num_experts_per_tok=shape.experts_per_token
        )
        config._experts_implementation = how
        block = _modeling("mixtral").MixtralSparseMoeBlock(config).to(dtype).train()
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)  # the block leaves them unset
        return block, {}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=s, num_hidden_layers=1)
    config._attn_implementation = how
    llama = _modeling("llama")
    positions = torch.arange(s)[None]
    tables: tuple[Tensor, Tensor] = llama.LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
    options = {"attention_mask": mask, "position_embeddings": tables, "position_ids": positions}
    return llama.LlamaDecoderLayer(config, 0).to(dtype).train(), options


def _modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
