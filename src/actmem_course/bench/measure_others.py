"""What others' layers keep, by formula and counted, at two shapes in which all sizes differ."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.recorder import record
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.peers.megatron import megatron_layer
from actmem_course.bench.peers.plain import TitanLayer, memory_budget, titan_layer
from actmem_course.others.others_keep import FRAMEWORKS, OTHERS, OtherLayer, bytes_of_other
from actmem_course.results import OtherLine
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape

#: Sizes that 8 ranks can share, and how many do.
SHARED_SHAPES = (
    (LlamaShape(16, 2, 128, 16, 8, 192), 2),
    (LlamaShape(24, 3, 192, 24, 8, 256), 4),
    (LlamaShape(16, 2, 128, 16, 8, 192), 8),
)
#: torch.compile's own choice of what to keep, run operation by operation.
PARTITIONER = "aot_eager_decomp_partition"
OTHER_SHAPES = (
    LlamaShape(24, 2, 64, 4, 2, 160, num_experts=8, experts_per_token=2),
    LlamaShape(48, 3, 96, 6, 3, 256, num_experts=8, experts_per_token=2),
)


def measure_others() -> list[OtherLine]:
    """A line for each implementation and shape; without bytes where it is not installed."""
    return [line for layer in (*OTHERS, *FRAMEWORKS) for line in other_lines(layer)]


def other_lines(layer: OtherLayer) -> list[OtherLine]:
    """One layer at two shapes, or on 2, 4 and 8 emulated ranks if they share it."""
    lines = []
    for shape, t in SHARED_SHAPES if layer.divided else [(shape, 1) for shape in OTHER_SHAPES]:
        predicted, measured, unavailable = bytes_of_other(layer, shape, t), None, ""
        try:
            measured = _kept(layer, shape, t)
        except PeerUnavailable as error:
            unavailable = str(error)
        name = f"{layer.name}, dropout" if layer.dropout and not layer.divided else layer.name
        sizes = f"s={shape.seq_length} b={shape.micro_batch_size} h={shape.hidden_size}" + f" t={t}" * (t > 1)
        lines.append(OtherLine(name, layer.dtype, sizes, layer.formula, predicted, measured, layer.why, unavailable))
    return lines


def _kept(layer: OtherLayer, shape: LlamaShape, t: int) -> int:
    """Bytes that the ledger counts."""
    if "on paper" in layer.name:
        raise PeerUnavailable("Liger's kernels need a GPU: its formula is read off what its functions save")
    dtype = getattr(torch, layer.dtype)
    b, s, h = shape.micro_batch_size, shape.seq_length, shape.hidden_size
    if layer.divided:
        each = s // t if layer.sequence_parallel else s
        with emulated_rank(t, real_tensors=True):
            tp = tensor_parallel(sequence_parallel=layer.sequence_parallel)
            if layer.name.startswith("megatron-core"):
                sizes = ModelShape(s, b, h, shape.num_attention_heads)
                return bytes_of_second_run(megatron_layer(sizes, tp, layer.modules, dtype=dtype), (each, b, h))
            return bytes_of_second_run(titan_layer(shape, tp, dtype), (b, each, h))
    if "torch.compile" in layer.name:
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it warns that hooks make it compile again
        torch.compiler.reset()
        with memory_budget(layer.budget):
            # The partitioner decides what is kept; generating code would only take time.
            block = torch.compile(TitanLayer(shape, dtype), backend=PARTITIONER, dynamic=False)
            return bytes_of_second_run(block, (b, s, h))
    if layer.name.startswith("Hugging Face"):
        block, options = hugging_face_block(layer.name, shape, dtype, layer.dropout)
        x = torch.randn(b, s, h, dtype=dtype, requires_grad=True)
    else:
        experts, recompute = layer.name == "ours, experts", "elementwise" if "elementwise" in layer.name else "none"
        plain = shape if experts else shape.with_sizes(num_experts=None, experts_per_token=None)
        whole = LlamaLayer(plain, recompute=recompute, dtype=dtype)
        block, options = (whole.mlp if experts else whole), {}
        x = torch.randn(s, b, h, dtype=dtype, requires_grad=True)
    with record(block) as ledger:
        output = block(x, **options)
    del output
    return ledger.total_bytes


def bytes_of_second_run(block: Any, size: tuple[int, ...]) -> int:
    """Bytes that the ledger counts once buffers of the process and compiled graphs exist."""
    x = torch.randn(size, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        with record(block) as ledger:
            output = block(x)
        output.backward(output.detach())
    return ledger.total_bytes


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
