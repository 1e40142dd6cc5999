"""What others' blocks keep (``measure_peers.py --today``), by formula and counted; all sizes differ in a shape."""

from __future__ import annotations

import logging
from typing import Any

import torch

from actmem.config import ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.recorder import record
from actmem.parallel.groups import tensor_parallel
from actmem_course.others.others_keep import FRAMEWORKS, OTHERS, OtherLayer, bytes_of_other
from actmem_course.peers import PeerUnavailable
from actmem_course.peers.hugging_face import hugging_face_block
from actmem_course.peers.megatron import megatron_layer
from actmem_course.peers.plain import TitanLayer, memory_budget, titan_layer
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape

#: Sizes that 8 ranks can share, and how many do.
SHARED_SHAPES = (
    (LlamaShape(16, 2, 128, 16, 8, 192), 2),
    (LlamaShape(24, 3, 192, 24, 8, 256), 4),
    (LlamaShape(16, 2, 128, 16, 8, 192), 8),
)
OTHER_SHAPES = (
    LlamaShape(24, 2, 64, 4, 2, 160, num_experts=8, experts_per_token=2),
    LlamaShape(48, 3, 96, 6, 3, 256, num_experts=8, experts_per_token=2),
)
#: torch.compile's own choice of what to keep, run operation by operation.
PARTITIONER = "aot_eager_decomp_partition"


def measure_blocks() -> list[dict[str, Any]]:
    """A row for each implementation and shape; without bytes where it is not installed."""
    return [row for layer in (*OTHERS, *FRAMEWORKS) for row in rows_of(layer)]


def rows_of(layer: OtherLayer) -> list[dict[str, Any]]:
    """One layer at two shapes, or on 2, 4 and 8 emulated ranks if they share it."""
    rows = []
    for shape, t in SHARED_SHAPES if layer.divided else [(shape, 1) for shape in OTHER_SHAPES]:
        sizes = f"s={shape.seq_length} b={shape.micro_batch_size} h={shape.hidden_size}"
        row: dict[str, Any] = {
            "name": f"{layer.name}, dropout" if layer.dropout and not layer.divided else layer.name,
            "dtype": layer.dtype,
            "sizes": f"{sizes} t={t}" if t > 1 else sizes,
            "formula": layer.formula,
            "predicted_bytes": bytes_of_other(layer, shape, t),
            "measured_bytes": None,
            "why": layer.why,
            "unavailable": "",
        }
        try:
            row["measured_bytes"] = counted_bytes(layer, shape, t)
        except PeerUnavailable as error:
            row["unavailable"] = str(error)
        rows.append(row)
    return rows


def counted_bytes(layer: OtherLayer, shape: LlamaShape, t: int) -> int:
    """Bytes that the ledger counts.  Raises PeerUnavailable where the layer can't run."""
    if "on paper" in layer.name:
        raise PeerUnavailable("Liger's kernels need a GPU: its formula is read off what its functions save")
    dtype = getattr(torch, layer.dtype)
    b, s, h = shape.micro_batch_size, shape.seq_length, shape.hidden_size
    if layer.divided:
        tokens = s // t if layer.sequence_parallel else s
        with emulated_rank(t, real_tensors=True):
            tp = tensor_parallel(sequence_parallel=layer.sequence_parallel)
            if layer.name.startswith("megatron-core"):
                sizes = ModelShape(s, b, h, shape.num_attention_heads)
                return bytes_of_second_run(megatron_layer(sizes, tp, layer.modules, dtype=dtype), (tokens, b, h))
            return bytes_of_second_run(titan_layer(shape, tp, dtype), (b, tokens, h))
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
