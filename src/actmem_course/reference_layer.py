"""Parts of a transformer layer that the labs give to the learner: no parallelism, no recomputation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.parallel.rng import DropoutMask


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection's output ``[s, b, 3nd]``, first all of Q, then K, then V, for n heads of size d.

    Returns: Q, K and V, each ``[b·n, s, d]``.
    """
    s, b, width = qkv.shape
    parts = qkv.view(s, b, 3, num_heads, width // (3 * num_heads))
    # [s, b, 3, n, d] to three of [b·n, s, d]
    q, k, v = (part.reshape(s, b * num_heads, -1).transpose(0, 1) for part in parts.unbind(2))
    return q, k, v


def merge_heads(context: Tensor, micro_batch_size: int) -> Tensor:
    """Turn heads ``[b·n, s, d]`` back into ``[s, b, nd]``."""
    return context.transpose(0, 1).reshape(context.shape[1], micro_batch_size, -1)


def core_attention(q: Tensor, k: Tensor, v: Tensor, dropout=lambda weights: weights) -> Tensor:
    """Compute causal attention of q, k and v ``[b·n, s, d]``: QKᵀ, softmax, ``dropout``, times V.

    Source: 2205.05198 figure 3.
    """
    hidden = q.new_full((q.shape[1], k.shape[1]), float("-inf")).triu_(1)  # a query sees no later key
    scores = torch.baddbmm(hidden.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(dropout(F.softmax(scores, dim=-1)), v)


def gelu(x: Tensor) -> Tensor:
    """Compute GeLU by its tanh formula. Saves its input."""
    return F.gelu(x, approximate="tanh")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute layer norm over the last dimension. Saves its input and two numbers a token."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


class Dropouts:
    """A layer's dropouts: ``core`` for the attention weights, ``block`` for what is added to the residual.

    Saves: a mask of 1 byte an element, for each.

    Args:
        p: the probability.
        core, block: the generator of each; None: torch's default one.
    """

    def __init__(self, p: float, core: torch.Generator | None = None, block: torch.Generator | None = None):
        self._core, self._block = DropoutMask(p, core), DropoutMask(p, block)

    def core(self, weights: Tensor) -> Tensor:
        return self._core(weights).drop(weights)

    def block(self, x: Tensor) -> Tensor:
        return self._block(x).drop(x)


@dataclass
class LayerWeights:
    """One layer's parameters, as torch stores them, ``[out, in]``; one rank's shard if they are sharded.

    Attributes:
        num_attention_heads: a, of all ranks together.
        qkv_weight: its rows are those of Q, then K, then V.
    """

    num_attention_heads: int
    norm1_weight: Tensor
    norm1_bias: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor
    projection_weight: Tensor
    projection_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor

    def named(self) -> dict[str, Tensor]:
        """Return the twelve parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def map(self, function) -> LayerWeights:
        """Return a copy with ``function(name, tensor)`` in place of each parameter."""
        return replace(self, **{name: function(name, tensor) for name, tensor in self.named().items()})

    def part(self, rank: int, t: int) -> LayerWeights:
        """Return one rank's shard: QKV and up are split by output features, projection and down by input features."""

        def cut(name: str, tensor: Tensor) -> Tensor:
            if name.startswith("qkv"):
                return torch.cat([third.chunk(t)[rank] for third in tensor.chunk(3)])
            if name.startswith("up"):
                return tensor.chunk(t)[rank]
            return tensor.chunk(t, dim=1)[rank] if name in ("projection_weight", "down_weight") else tensor

        return self.map(lambda name, tensor: cut(name, tensor.detach()).clone())


def random_weights(
    hidden_size: int, num_attention_heads: int, seed: int = 0, dtype=torch.float64, device="cpu"
) -> LayerWeights:
    """Draw random parameters of a whole layer, the same on every rank."""
    h, generator = hidden_size, torch.Generator().manual_seed(seed)
    sizes = {
        "norm1": (h,),
        "qkv": (3 * h, h),
        "projection": (h, h),
        "norm2": (h,),
        "up": (4 * h, h),
        "down": (h, 4 * h),
    }

    def draw(*size: int) -> Tensor:
        return (torch.randn(size, dtype=torch.float64, generator=generator) / h**0.5).to(device, dtype)

    parts = {f"{name}_weight": draw(*size) for name, size in sizes.items()}
    parts |= {f"{name}_bias": draw(size[0]) for name, size in sizes.items()}
    return LayerWeights(num_attention_heads, **parts)


def attention(x: Tensor, w: LayerWeights, dropout=lambda weights: weights, core=core_attention) -> Tensor:
    """Compute self-attention of ``[s, b, h]`` with all heads.

    Args:
        core: what to call in place of core_attention.
    """
    q, k, v = split_heads(F.linear(x, w.qkv_weight, w.qkv_bias), w.num_attention_heads)
    return F.linear(merge_heads(core(q, k, v, dropout), x.shape[1]), w.projection_weight, w.projection_bias)


def mlp(x: Tensor, w: LayerWeights) -> Tensor:
    """Compute h → 4h, GeLU, 4h → h of ``[s, b, h]``."""
    return F.linear(gelu(F.linear(x, w.up_weight, w.up_bias)), w.down_weight, w.down_bias)


def layer(x: Tensor, w: LayerWeights, dropouts: Dropouts, core=core_attention) -> Tensor:
    """Run one layer of 2205.05198 figure 2 on ``[s, b, h]``, without any parallelism.

    Args:
        core: what to call in place of core_attention.
    """
    x = x + dropouts.block(attention(layer_norm(x, w.norm1_weight, w.norm1_bias), w, dropouts.core, core))
    return x + dropouts.block(mlp(layer_norm(x, w.norm2_weight, w.norm2_bias), w))
