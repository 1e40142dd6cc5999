"""A plain transformer layer and its parts, which labs give to the learner. No parallelism, no recomputation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.parallel.rng import DropoutMask


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output of the QKV projection into Q, K and V.

    Args:
        qkv: ``[s, b, 3nd]`` for n heads of size d: first all heads of Q, then of K, then of V.
        num_heads: n.

    Returns: Q, K and V, each ``[b·n, s, d]``.
    """
    s, b, width = qkv.shape
    parts = qkv.view(s, b, 3, num_heads, width // (3 * num_heads))
    # [s, b, 3, n, d] to three of [b·n, s, d]
    q, k, v = (part.reshape(s, b * num_heads, -1).transpose(0, 1) for part in parts.unbind(2))
    return q, k, v


def merge_heads(context: Tensor, micro_batch_size: int) -> Tensor:
    """Rearrange the output of n heads, ``[b·n, s, d]``, to ``[s, b, nd]``.

    Args:
        context: the output of ``core_attention``, ``[b·n, s, d]``.
        micro_batch_size: b.
    """
    return context.transpose(0, 1).reshape(context.shape[1], micro_batch_size, -1)


def core_attention(q: Tensor, k: Tensor, v: Tensor, dropout=lambda weights: weights) -> Tensor:
    """Compute causal attention: dropout(softmax(QKᵀ/√d)) · V.

    Args:
        q: ``[b·n, s, d]`` for n heads of size d.
        k: ``[b·n, s, d]``.
        v: ``[b·n, s, d]``.
        dropout: a function of the attention weights ``[b·n, s, s]``, which returns a tensor of the same shape.

    Returns: ``[b·n, s, d]``.

    Source: 2205.05198 figure 3.
    """
    hidden = q.new_full((q.shape[1], k.shape[1]), float("-inf")).triu_(1)  # a query sees no later key
    scores = torch.baddbmm(hidden.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(dropout(F.softmax(scores, dim=-1)), v)


def gelu(x: Tensor) -> Tensor:
    """Compute GeLU with the tanh approximation, for x of any shape.

    Saves: x.
    """
    return F.gelu(x, approximate="tanh")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute layer norm over the last dimension.

    Args:
        x: ``[s, b, h]``.
        weight: ``[h]``.
        bias: ``[h]``.

    Returns: ``[s, b, h]``.

    Saves: x, and two numbers per token.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias)


class Dropouts:
    """A layer's dropouts: ``core`` for the attention weights, ``block`` for the outputs of attention and MLP.

    Args:
        p: the dropout probability, from 0 to 1.
        core: the random-number generator of the attention weights' dropout; None for torch's default generator.
        block: the random-number generator of the outputs' dropouts; None for torch's default generator.

    Saves: for each dropout a mask of 1 byte per element.
    """

    def __init__(self, p: float, core: torch.Generator | None = None, block: torch.Generator | None = None):
        self._core, self._block = DropoutMask(p, core), DropoutMask(p, block)

    def core(self, weights: Tensor) -> Tensor:
        return self._core(weights).apply(weights)

    def block(self, x: Tensor) -> Tensor:
        return self._block(x).apply(x)


@dataclass
class LayerWeights:
    """The parameters of one layer, or of one rank's shard of it. Weights are ``[out, in]``, as torch stores them.

    Shapes are those of an unsharded layer. On one of t ranks, dimensions with * are divided by t.

    Attributes:
        num_attention_heads: a, the heads of all ranks together.
        norm1_weight: ``[h]``.
        norm1_bias: ``[h]``.
        qkv_weight: ``[3h*, h]``; its rows are those of Q, then of K, then of V, each head by head.
        qkv_bias: ``[3h*]``.
        projection_weight: ``[h, h*]``.
        projection_bias: ``[h]``.
        norm2_weight: ``[h]``.
        norm2_bias: ``[h]``.
        up_weight: ``[4h*, h]``.
        up_bias: ``[4h*]``.
        down_weight: ``[h, 4h*]``.
        down_bias: ``[h]``.
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
        """Return the twelve parameters by their names, such as "qkv_weight"."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def map(self, function) -> LayerWeights:
        """Return a copy in which each parameter is replaced by what a function returns.

        Args:
            function: takes a parameter's name and the parameter, and returns the new parameter.
        """
        return replace(self, **{name: function(name, tensor) for name, tensor in self.named().items()})

    def part(self, rank: int, t: int) -> LayerWeights:
        """Return copies of one rank's shards of unsharded parameters.

        QKV and up are split by output features, projection and down by input features. The parameters of the norms, and
        the biases of projection and down, are not split.

        Args:
            rank: the rank's number, from 0 to t − 1.
            t: how many ranks share the layer.
        """

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
    """Draw random parameters of an unsharded layer; the same seed gives the same values on every rank.

    Args:
        hidden_size: h.
        num_attention_heads: a.
        seed: of the random numbers.
        dtype: of the parameters; they are drawn in float64 and then converted.
        device: of the parameters; they are drawn on the CPU and then moved.
    """
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
    """Compute self-attention with all heads.

    Args:
        x: ``[s, b, h]``.
        w: the layer's parameters, unsharded.
        dropout: a function that is applied to the attention weights, such as ``Dropouts.core``.
        core: a function to call in place of ``core_attention``, with the same arguments (q, k, v, dropout).

    Returns: ``[s, b, h]``.
    """
    q, k, v = split_heads(F.linear(x, w.qkv_weight, w.qkv_bias), w.num_attention_heads)
    return F.linear(merge_heads(core(q, k, v, dropout), x.shape[1]), w.projection_weight, w.projection_bias)


def mlp(x: Tensor, w: LayerWeights) -> Tensor:
    """Compute the MLP of x ``[s, b, h]``: a linear from h to 4h, GeLU, a linear from 4h to h.

    Args:
        x: ``[s, b, h]``.
        w: the layer's parameters, of which those of up and down are used.

    Returns: ``[s, b, h]``.
    """
    return F.linear(gelu(F.linear(x, w.up_weight, w.up_bias)), w.down_weight, w.down_bias)


def layer(x: Tensor, w: LayerWeights, dropouts: Dropouts, core=core_attention) -> Tensor:
    """Run one transformer layer without any parallelism.

    Args:
        x: ``[s, b, h]``.
        w: the layer's parameters, unsharded.
        dropouts: the layer's three dropouts: ``core`` of the attention weights, ``block`` of both outputs.
        core: a function to call in place of ``core_attention``, with the same arguments (q, k, v, dropout).

    Returns: ``[s, b, h]``.

    Source: 2205.05198 figure 2.
    """
    x = x + dropouts.block(attention(layer_norm(x, w.norm1_weight, w.norm1_bias), w, dropouts.core, core))
    return x + dropouts.block(mlp(layer_norm(x, w.norm2_weight, w.norm2_bias), w))
