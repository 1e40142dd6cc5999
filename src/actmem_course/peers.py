"""The paper's layer as one would write it for a single device, parallelized by torch: the peers of ours.

DTensor's plan of Colwise, Rowwise and SequenceParallel shards a layer without changes to its code.  FSDP2 shards only
its weights.  A peer maps plain ``[s, b, h]`` (``[s/t, b, h]`` under sequence parallelism) to the same, so that one
benchmark and one ledger serve them all.  One that can't run raises PeerUnavailable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.collectives import reduce_scatter
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute

_Layer = TypeVar("_Layer", bound=nn.Module)


class PeerUnavailable(RuntimeError):
    """This peer can't run here.  The message is one line that says why."""


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
    """PlainLayer sharded by torch's plan.  In and out: plain tensors, ``[s/t, b, h]`` or ``[s, b, h]``.

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

    Saves: what an unsharded layer saves for b' sequences.
    """
    layer = PlainLayer(shape, recompute, p, device=device, dtype=dtype)
    assert tp.group is not None
    fully_shard(layer, mesh=DeviceMesh.from_group(tp.group, device))  # in place
    return layer


def filled(layer: _Layer) -> _Layer:
    """The layer with weights as ours begin.

    torch scatters its own from rank 0, which an emulated rank is never sent.
    """
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


@contextmanager
def our_reduce_scatter(tp: TensorParallel) -> Iterator[None]:
    """In the block, DTensor's reduce-scatters over ``tp`` are ours: over gloo, which has none.

    torch runs an all-reduce there and discards the rest, twice the bytes.  Ours sends only what is kept
    (parallel.collectives).  With the same collective on both sides, what is left is the layer's own time.
    """

    def functional(x: Tensor, op: str, scatter_dim: int, group) -> Tensor:
        assert op.lower() == "sum" and scatter_dim == 0
        return reduce_scatter(x, tp)

    # It has another name from torch 2.13 on.
    with ExitStack() as stack:
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
            if hasattr(placement_types.funcol, name):
                stack.enter_context(patch.object(placement_types.funcol, name, functional))
        yield


OURS = "ours"
PEERS = {"DTensor": dtensor_layer, "FSDP2": fsdp_layer}


class WithMask(nn.Module):
    """Our layer with a causal mask made once, as peers have it and as layers of one model share it."""

    def __init__(self, layer: TransformerLayer, mask: Tensor):
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


def build(
    name: str, shape: ModelShape, tp: TensorParallel, mode: str, device: str, dtype: torch.dtype, p: float = 0.1
) -> nn.Module:
    """The layer of one peer, or ours.  Raises PeerUnavailable, or whatever the peer raises."""
    if name == OURS:
        layer = TransformerLayer(shape, tp, recompute=mode, p=p, device=device, dtype=dtype)
        return WithMask(layer, causal_mask(shape.seq_length, device))
    return PEERS[name](shape, tp, mode, p=p, device=device, dtype=dtype)
