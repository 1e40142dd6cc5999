"""Layers as one would write them for a single device, parallelized by torch.

The paper's, and a Llama's in torchtitan's style.

DTensor's plan of Colwise, Rowwise and SequenceParallel cuts a layer without changes to its code.  FSDP2 cuts only
its weights.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.parallel.collectives import reduce_scatter, start_reduce_scatter
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem_course.peers import PeerUnavailable
from actmem_more.llama_shape import LlamaShape

_Layer = TypeVar("_Layer", bound=nn.Module)


class PlainLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP: ``[s, b, h]`` in and out.

    recompute: "none", "selective" or "full", by ``torch.utils.checkpoint``.  Raises PeerUnavailable for other modes.
    """

    mask: Tensor

    def __init__(self, shape: ModelShape, recompute: str, p: float, **factory):
        super().__init__()
        h = shape.hidden_size
        self.head_size, self.p, self.region = shape.head_size, p, Recompute.of(recompute).region
        if self.region == "terms":
            raise PeerUnavailable("torch.utils.checkpoint runs a region again, not single tensors")
        self.norm1, self.norm2 = nn.LayerNorm(h, **factory), nn.LayerNorm(h, **factory)
        self.qkv, self.projection = nn.Linear(h, 3 * h, **factory), nn.Linear(h, h, **factory)
        self.up, self.down = nn.Linear(h, 4 * h, **factory), nn.Linear(4 * h, h, **factory)
        self.register_buffer("mask", causal_mask(shape.seq_length, factory.get("device") or "cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.region == "layer":
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.norm1(x)), self.p)
        return x + dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.p)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)  # [s, b, 3h/t], a plain tensor
        s, b, _ = qkv.shape
        q, k, v = (part.transpose(0, 1) for part in qkv.view(s, -1, 3, self.head_size).unbind(2))
        if self.region == "core":
            context = checkpoint(self.core, q, k, v, use_reentrant=False)
        else:
            context = self.core(q, k, v)
        return self.projection(context.transpose(0, 1).reshape(s, b, -1))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(self.head_size**-0.5).masked_fill_(self.mask, float("-inf"))
        return torch.bmm(dropout(F.softmax(scores, dim=-1), self.p), v)


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout with a 1-byte mask; on CPU F.dropout would keep one of the activations' dtype."""
    return torch.native_dropout(x, p, True)[0] if p else x


def dtensor_layer(
    shape: ModelShape, tp: TensorParallel, recompute: str, *, p: float, device: str, dtype: torch.dtype
) -> nn.Module:
    """PlainLayer cut by torch's plan.  In and out: plain tensors, ``[s/t, b, h]`` or ``[s, b, h]``.

    Under sequence parallelism it keeps the gathered inputs of both column-parallel linears whole
    (formulas.activations.gathered_input_bytes).
    """
    layer = PlainLayer(shape, recompute, p, device=device, dtype=dtype)
    assert tp.group is not None
    mesh = DeviceMesh.from_group(tp.group, device)
    if not tp.sequence_parallel:
        column, row = ColwiseParallel(), RowwiseParallel()
        parallelize_module(layer, mesh, {"qkv": column, "projection": row, "up": column, "down": row})
        return filled(layer)
    norm, row = SequenceParallel(sequence_dim=0), RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    plan = {
        "norm1": norm,
        # The core attention works on plain tensors, each rank on its own heads.
        "qkv": ColwiseParallel(input_layouts=Shard(0)),
        "projection": row,
        "norm2": norm,
        "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "down": row,
    }
    parallelize_module(layer, mesh, plan)
    return _Local(filled(layer), mesh)


def fsdp_layer(
    shape: ModelShape, tp: TensorParallel, recompute: str, *, p: float, device: str, dtype: torch.dtype
) -> nn.Module:
    """PlainLayer with its weights sharded over the ranks by FSDP2.

    In and out: ``[s, b', h]``, b' sequences of this rank alone.

    Keeps what an uncut layer keeps for b' sequences.
    """
    layer = PlainLayer(shape, recompute, p, device=device, dtype=dtype)
    assert tp.group is not None
    fully_shard(layer, mesh=DeviceMesh.from_group(tp.group, device))  # in place
    return layer


def filled(layer: _Layer) -> _Layer:
    """The layer with weights as ours begin: torch scatters its own from rank 0, which an emulated rank lacks."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if name.endswith("bias"):
                local.zero_()
            elif "norm" in name:
                local.fill_(1)
            else:
                local.normal_(std=0.02)
    return layer


class _Local(nn.Module):
    """Plain shards of the sequence in and out, DTensors inside."""

    def __init__(self, layer: PlainLayer, mesh: DeviceMesh):
        super().__init__()
        self.layer, self.mesh = layer, mesh

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)).to_local()


class TitanLayer(nn.Module):
    """x + attention(norm(x)), then the same with the MLP: ``[b, s, h]`` in and out, no dropout.

    Written from what torchtitan's layer does: nn.RMSNorm, complex rotary positions in float32,
    ``scaled_dot_product_attention(enable_gqa=True)``, and silu(gate) · up as two operations.
    """

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
    """In the block torch.compile keeps at most that share of what it would keep.

    Raises PeerUnavailable where torch has no such setting.
    """
    if share == 1:
        return nullcontext()
    try:
        return importlib.import_module("torch._functorch.config").patch(activation_memory_budget=share)
    except (ImportError, AttributeError) as error:
        raise PeerUnavailable("this torch has no activation memory budget") from error


@contextmanager
def our_reduce_scatter(tp: TensorParallel) -> Iterator[None]:
    """In the block, DTensor's and megatron-core's reduce-scatters over ``tp`` are ours: over gloo, which has none.

    torch runs an all-reduce there and discards the rest, twice the bytes.  Ours sends only what is kept
    (parallel.collectives).  With the same exchange on both sides, what is left is the layer's own time.
    """

    def functional(x: Tensor, op: str, scatter_dim: int, group) -> Tensor:
        assert op.lower() == "sum" and scatter_dim == 0
        return reduce_scatter(x, tp)

    def into(output: Tensor, x: Tensor, group=None, async_op: bool = False) -> SimpleNamespace:
        pending = start_reduce_scatter(x, tp)
        handle = SimpleNamespace(wait=lambda: output.copy_(pending.wait()))
        if not async_op:
            handle.wait()
        return handle

    # DTensor looks it up under another name from torch 2.13 on; megatron-core in two modules, loaded if it is a peer.
    megatron = [sys.modules.get(f"megatron.core.tensor_parallel.{name}") for name in ("layers", "mappings")]
    places = [
        *((placement_types.funcol, name, functional) for name in ("reduce_scatter_single", "reduce_scatter_tensor")),
        *((module, "dist_reduce_scatter_func", into) for module in megatron),
    ]
    with ExitStack() as stack:
        for module, name, ours in places:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, ours))
        yield
