"""Parts of a transformer layer that the labs give to the learner: plain functions, no parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, each ``[b·n, s, d]``, from ``[s, b, 3nd]``: first all of Q, then K, then V; n heads of size d."""
    s, b, width = qkv.shape
    parts = qkv.view(s, b, 3, num_heads, width // (3 * num_heads))
    # [s, b, 3, n, d] to three of [b·n, s, d]
    return tuple(part.reshape(s, b * num_heads, -1).transpose(0, 1) for part in parts.unbind(2))


def merge_heads(context: Tensor, micro_batch_size: int) -> Tensor:
    """``[b·n, s, d]`` back to ``[s, b, nd]``."""
    return context.transpose(0, 1).reshape(context.shape[1], micro_batch_size, -1)


def core_attention(q: Tensor, k: Tensor, v: Tensor, dropout=lambda weights: weights) -> Tensor:
    """Causal attention of ``[b·n, s, d]``: QKᵀ, softmax, ``dropout``, times V (2205.05198 figure 3)."""
    scores = torch.baddbmm(
        q.new_empty(1).expand(q.shape[0], q.shape[1], k.shape[1]), q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5
    )
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1)
    weights = F.softmax(scores.masked_fill_(future, float("-inf")), dim=-1)
    return torch.bmm(dropout(weights), v)


def gelu(x: Tensor) -> Tensor:
    """GeLU by its tanh formula; keeps its input."""
    return F.gelu(x, approximate="tanh")
