"""Our layer, with torch.compile on the regions between its exchanges.

The compiler fuses what lies between two exchanges and decides by itself what backward keeps and
what it recomputes, so the bytes are no longer the paper's: the ledger shows which they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.conjugates import g_bar
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import RowParallelLinear
from actmem.recipes import Recompute
from actmem_course.bench.peers import PeerUnavailable


def compiled_layer(
    shape: ModelShape,
    tp: TensorParallel,
    recompute: str = "none",
    *,
    p: float = 0.1,
    device: str = "cpu",
    dtype=torch.float32,
    backend: str = "inductor",
) -> nn.Module:
    """Our layer under sequence parallelism, its five regions compiled.  In and out: ``[s/t, b, h]``.

    backend: of torch.compile.  Raises PeerUnavailable for other modes: recomputation is the
    compiler's, and its dropout has one stream of random numbers where TP alone needs two.
    """
    if Recompute.of(recompute).region != "none":
        raise PeerUnavailable("the compiler chooses by itself what to run again")
    if not tp.sequence_parallel:
        raise PeerUnavailable("compiled dropout has one stream of random numbers; tensor parallelism alone needs two")
    layer = TransformerLayer(shape, tp, p=p, device=device, dtype=dtype)
    return _Compiled(layer, causal_mask(shape.seq_length, device), p, backend)


class _Compiled(nn.Module):
    """The layer, cut at its exchanges: what is between two of them is one compiled function."""

    def __init__(self, layer: TransformerLayer, mask: Tensor, p: float, backend: str):
        super().__init__()
        self.layer, self.p, self.tp = layer, p, layer.mlp.up.tp
        self.register_buffer("mask", mask, persistent=False)

        def compiled(region: Callable) -> Callable:
            return torch.compile(region, backend=backend, dynamic=False)

        self._norm, self._core, self._join_and_norm = compiled(_norm), compiled(_core), compiled(_join_and_norm)
        self._gelu, self._join = compiled(_gelu), compiled(_join)

    def forward(self, x: Tensor) -> Tensor:
        layer, p = self.layer, self.p
        attention, mlp, norm1, norm2 = layer.attention, layer.mlp, layer.norm1, layer.norm2
        qkv = attention.qkv(self._norm(x, norm1.weight, norm1.bias))
        y = self._row(attention.projection, self._core(qkv, self.mask, attention.head_size, p))
        x, normed = self._join_and_norm(x, y, attention.projection.bias, norm2.weight, norm2.bias, p)
        return self._join(x, self._row(mlp.down, self._gelu(mlp.up(normed))), mlp.down.bias, p)

    def _row(self, linear: RowParallelLinear, x: Tensor) -> Tensor:
        """A row-parallel linear without its bias, which the region after it adds."""
        return g_bar(F.linear(x, linear.weight), self.tp)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _core(qkv: Tensor, mask: Tensor, head_size: int, p: float) -> Tensor:
    s, b, _ = qkv.shape
    q, k, v = (part.transpose(0, 1) for part in qkv.view(s, -1, 3, head_size).unbind(2))
    scores = torch.bmm(q, k.transpose(1, 2)) * head_size**-0.5
    weights = F.dropout(F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1), p)
    return torch.bmm(weights, v).transpose(0, 1).reshape(s, b, -1)


def _join(x: Tensor, y: Tensor, bias: Tensor, p: float) -> Tensor:
    return x + F.dropout(y + bias, p)


def _join_and_norm(
    x: Tensor, y: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    x = _join(x, y, bias, p)
    return x, _norm(x, weight, norm_bias)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
