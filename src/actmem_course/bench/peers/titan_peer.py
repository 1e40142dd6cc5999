"""A Llama layer in torchtitan's style: torch's own modules, cut by DTensor's plan, or compiled.

Written from what torchtitan's layer does: nn.RMSNorm, complex rotary positions in float32,
``scaled_dot_product_attention(enable_gqa=True)``, and silu(gate) · up as two operations.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from actmem.llama_shape import LlamaShape
from actmem.parallel.groups import TensorParallel
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.peers.plain import filled


class TitanLayer(nn.Module):
    """x + attention(norm(x)), then the same with the MLP: ``[b, s, h]`` in and out, no dropout."""

    def __init__(self, shape: LlamaShape, dtype: torch.dtype):
        super().__init__()
        h = shape.hidden_size
        self.attention_norm, self.ffn_norm = nn.RMSNorm(h, dtype=dtype), nn.RMSNorm(h, dtype=dtype)
        self.attention, self.feed_forward = _Attention(shape, dtype), _FeedForward(h, shape.ffn_hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class _Attention(nn.Module):
    turns: Tensor

    def __init__(self, shape: LlamaShape, dtype: torch.dtype):
        super().__init__()
        h, self.d, keys = shape.hidden_size, shape.d, shape.num_key_value_heads * shape.d
        self.wq, self.wo = (nn.Linear(h, h, bias=False, dtype=dtype) for _ in range(2))
        self.wk, self.wv = (nn.Linear(h, keys, bias=False, dtype=dtype) for _ in range(2))
        angles = torch.outer(torch.arange(shape.seq_length), 10_000.0 ** -(torch.arange(0, self.d, 2) / self.d))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.d)) for linear in (self.wq, self.wk, self.wv))
        q, k, v = (part.transpose(1, 2) for part in (self._turn(q), self._turn(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def _turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(3).type_as(x)


class _FeedForward(nn.Module):
    def __init__(self, h: int, f: int, dtype: torch.dtype):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(h, f, bias=False, dtype=dtype) for _ in range(2))
        self.w2 = nn.Linear(f, h, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def titan_layer(shape: LlamaShape, tp: TensorParallel, dtype: torch.dtype) -> TitanLayer:
    """The layer cut by torchtitan's plan over the ranks of ``tp``.  In and out: ``[b, s, h]`` or ``[b, s/t, h]``."""
    layer = TitanLayer(shape, dtype)
    assert tp.group is not None
    mesh = DeviceMesh.from_group(tp.group, "cpu")
    row = RowwiseParallel(output_layouts=Shard(1)) if tp.sequence_parallel else RowwiseParallel()
    column = ColwiseParallel()
    plan: dict[str, ParallelStyle] = {
        name: column for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    }
    plan |= {"attention.wo": row, "feed_forward.w2": row}
    if tp.sequence_parallel:
        # One gather serves Q, K and V, and one gate and up.
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        norm = SequenceParallel(sequence_dim=1)
        plan |= {"attention": gather, "feed_forward": gather, "attention_norm": norm, "ffn_norm": norm}
    parallelize_module(layer, mesh, plan)
    return filled(layer)


def memory_budget(share: float) -> AbstractContextManager:
    """In the block torch.compile keeps at most that share of what it would keep.  Raises PeerUnavailable where torch has no such setting."""
    if share == 1:
        return nullcontext()
    try:
        return importlib.import_module("torch._functorch.config").patch(activation_memory_budget=share)
    except (ImportError, AttributeError) as error:
        raise PeerUnavailable("this torch has no activation memory budget") from error
