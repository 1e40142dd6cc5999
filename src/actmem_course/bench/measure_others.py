"""What others' layers keep, by formula and counted, at two shapes in which all sizes differ."""

from __future__ import annotations

import torch

from actmem.llama_shape import LlamaShape
from actmem.measure.ledger import record
from actmem.plan.others_keep import OTHERS, OtherLayer, bytes_of_other
from actmem.today.llama import LlamaLayer
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.peers.hugging_face import hugging_face_block
from actmem_course.results import OtherLine

OTHER_SHAPES = (
    LlamaShape(24, 2, 64, 4, 2, 160, num_experts=8, experts_per_token=2),
    LlamaShape(48, 3, 96, 6, 3, 256, num_experts=8, experts_per_token=2),
)


def measure_others() -> list[OtherLine]:
    """A line for each implementation and shape; without bytes where it is not installed."""
    return [_line(layer, shape) for layer in OTHERS for shape in OTHER_SHAPES]


def _line(layer: OtherLayer, shape: LlamaShape) -> OtherLine:
    predicted, measured, unavailable = bytes_of_other(layer, shape), None, ""
    try:
        measured = _kept(layer, shape)
    except PeerUnavailable as error:
        unavailable = str(error)
    name = f"{layer.name}, dropout" if layer.dropout else layer.name
    sizes = f"s={shape.seq_length} b={shape.micro_batch_size} h={shape.hidden_size}"
    return OtherLine(name, layer.dtype, sizes, layer.formula, predicted, measured, layer.why, unavailable)


def _kept(layer: OtherLayer, shape: LlamaShape) -> int:
    """Bytes that the ledger counts."""
    dtype = getattr(torch, layer.dtype)
    if layer.name.startswith("Hugging Face"):
        block, options = hugging_face_block(layer.name, shape, dtype, layer.dropout)
        x = torch.randn(shape.micro_batch_size, shape.seq_length, shape.hidden_size, dtype=dtype, requires_grad=True)
    else:
        recompute = "elementwise" if "elementwise" in layer.name else "none"
        experts = layer.name == "ours, experts"
        whole = LlamaLayer(
            shape if experts else shape.with_sizes(num_experts=None, experts_per_token=None),
            recompute=recompute,
            dtype=dtype,
        )
        block, options = (whole.mlp if experts else whole), {}
        x = torch.randn(shape.seq_length, shape.micro_batch_size, shape.hidden_size, dtype=dtype, requires_grad=True)
    with record(block) as ledger:
        output = block(x, **options)
    del output
    return ledger.total_bytes
