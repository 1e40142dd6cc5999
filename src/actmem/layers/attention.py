"""Self-attention with the heads shared among the ranks (2205.05198 figures 3 and 4)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ModelShape, check_divides
from actmem.drop import KEEP_ALL, NamedForward
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.parallel.weights import child_seed, fresh_seed
from actmem.recipes import Recompute
from actmem.recompute import checkpoint


def causal_mask(seq_length: int, device: torch.device | str, dtype: torch.dtype = torch.bool) -> Tensor:
    """Make a mask ``[s, s]`` that marks for each query the keys that it may not see: those after its own position.

    Args:
        seq_length: s, in tokens.
        device: the device of the mask.
        dtype: a bool mask is True at the hidden keys, 1 byte an element. A mask of a floating dtype is -inf at these
            keys and 0 elsewhere, which is what attention adds to the scores; make such a mask once for many layers and
            steps.
    """
    hidden = torch.ones(seq_length, seq_length, dtype=torch.bool, device=device).triu_(1)
    return hidden if dtype is torch.bool else _as_scores(hidden, dtype)


def _as_scores(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class CoreAttention(nn.Module):
    """The region that selective recomputation drops: QKᵀ, softmax, dropout, attention over V.

    Args:
        head_size: h/a, elements of one head's query.
        p: the dropout's probability.
        generator: the random-number generator from which the dropout draws.

    Args of ``forward``: q, k and v ``[b·a/t, s, h/a]``; a mask ``[s, s]`` from ``causal_mask``, of bool or of q's dtype
        (bool costs one more pass over ``[s, s]`` in every run); ``terms``, the NamedForward of the layer's forward
        pass, which says which tensors are not saved.
    Returns: ``[b·a/t, s, h/a]``.
    Saves: in 16 bits, 6sbh/t bytes (Q, K, V) and 5as²b/t (softmax output, dropout mask, dropout output).
    Source: 2205.05198 section 4.1 and figure 3.
    """

    def __init__(self, head_size: int, p: float, generator: torch.Generator):
        super().__init__()
        self.scale = head_size**-0.5
        self.dropout_mask = DropoutMask(p, generator)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        weights = terms("softmax output", self.softmax, q, k, mask)
        dropout = self.dropout_mask(weights, terms, "softmax dropout mask")
        weights = dropout.apply(weights, terms, "softmax dropout output")
        return terms("context", torch.bmm, weights, v)

    def softmax(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Return the attention weights ``[b·a/t, s, s]``: the softmax of the scaled and masked scores QKᵀ.

        Args:
            q: queries ``[b·a/t, s, h/a]``.
            k: keys, of the same shape.
            mask: ``[s, s]`` from ``causal_mask``.
        """
        # The matmul itself adds -inf.  There softmax's output and the scores' gradient are 0: no mask is kept.
        hidden = mask.to(q.dtype) if mask.is_floating_point() else _as_scores(mask, q.dtype)
        scores = torch.baddbmm(hidden.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=self.scale)
        return F.softmax(scores, dim=-1)


class SelfAttention(nn.Module):
    """Self-attention with a/t heads on each rank: a column-parallel QKV linear, core attention, a row-parallel linear.

    The rows of the QKV weight are ordered head by head, ``[a, 3, h/a]``: t equal shards then give each rank the Q, K
    and V of the same heads.

    Args:
        shape: the sizes of the layer.
        tp: the t ranks that share the layer.
        p: the dropout's probability.
        streams: the random-number streams from which the dropout draws.
        recompute: the layer's mode of recomputation; with region "core" the core attention is checkpointed.
        seed: seed from which the weights are drawn, the same on all t ranks; None draws a seed from torch's CPU
            generator.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; a mask from ``causal_mask``;
        ``terms``, the NamedForward of the layer's forward pass, which says which tensors are not saved.
    Returns: a tensor of the shape of x.
    Raises: ConfigError if t does not divide a.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel,
        p: float,
        streams: DropoutStreams,
        recompute: Recompute,
        *,
        seed: int | None = None,
        **factory,
    ):
        super().__init__()
        check_divides("num_attention_heads", shape.num_attention_heads, "tensor_parallel_size", tp.size)
        h, seed = shape.hidden_size, fresh_seed() if seed is None else seed
        self.head_size, self.recompute = shape.head_size, recompute
        self.qkv = ColumnParallelLinear(h, 3 * h, tp, seed=child_seed(seed, "qkv"), **factory)
        # The ranks hold different heads, so their dropout masks must differ.
        self.core = CoreAttention(shape.head_size, p, streams.sharded)
        self.projection = RowParallelLinear(h, h, tp, seed=child_seed(seed, "projection"), **factory)

    def forward(self, x: Tensor, mask: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        q, k, v = terms(("Q", "K", "V"), self.heads, x)
        if self.recompute.region == "core":
            generators = [self.core.dropout_mask.generator]
            context = checkpoint(self.core, q, k, v, mask, generators=generators, stop_early=self.recompute.stop_early)
        else:
            context = self.core(q, k, v, mask, terms)
        b = x.shape[1]  # not x itself: a recipe lives until backward, and with it what it closes over

        def side_by_side(c: Tensor) -> Tensor:
            return c.transpose(0, 1).reshape(c.shape[1], b, -1).contiguous()

        context = terms("attention projection input", side_by_side, context)
        return terms("attention output", self.projection, context)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return Q, K and V of the layer's input x, each ``[b·a/t, s, h/a]``: three views of one tensor, no copy."""
        qkv = self.qkv(x)  # [s, b, 3h/t]
        parts = qkv.view(qkv.shape[0], -1, 3, self.head_size).unbind(2)  # [s, b·a/t, h/a] each
        return tuple(part.transpose(0, 1) for part in parts)
