"""The two ends of the model, with the vocabulary shared among the ranks: lookup and loss.

Rank r holds the rows of v/t tokens of the embedding, from r·v/t on.  The output layer uses the
same rows, so each rank makes the logits of its own tokens, and the loss is found without
ever putting the logits of one position together (2205.05198 sections 3 and 4.3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.parallel.collectives import all_reduce, all_reduce_max
from actmem.parallel.conjugates import f_bar, g_bar
from actmem.parallel.groups import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Word vectors, ``weight`` ``[v/t, h]``.

    In: token ids ``[s, b]``.  Out: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.
    Keeps a 4-byte copy of the ids, 4sb bytes.  v must be divisible by t.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, **factory):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(vocab_size // tp.size, hidden_size, **factory))
        self.weight.partition_dim = 0
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        leave = g_bar if self.tp.sequence_parallel else f_bar
        own_copy = ids.to(torch.int32, copy=True)  # a view of the batch would keep the whole batch
        return leave(_Lookup.apply(own_copy, self.weight, self.tp), self.tp)


class _Lookup(Function):
    """Rows of the ids that this rank holds, zeros for the others: a partial sum over t."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tp, ctx.num_rows = tp, weight.shape[0]
        rows, mine = _own(ids, ctx.num_rows, tp)
        return F.embedding(rows, weight) * mine.unsqueeze(-1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        rows, mine = _own(ids, ctx.num_rows, ctx.tp)
        grad = grad * mine.unsqueeze(-1)
        return None, torch.ops.aten.embedding_dense_backward(grad, rows, ctx.num_rows, -1, False), None


def _own(ids: Tensor, num_rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Row numbers on this rank, kept within its rows, and which of them are really its own."""
    rows = ids.long() - tp.rank * num_rows
    mine = (rows >= 0) & (rows < num_rows)
    return rows.clamp_(0, num_rows - 1), mine


class VocabParallelCrossEntropy(nn.Module):
    """Mean loss of all positions, from logits whose vocabulary is shared among the ranks.

    In: logits ``[s, b, v/t]``, target ids ``[s, b]``.  Out: a scalar, the same on all ranks.
    Works in float32 (float64 for float64 logits) and keeps one tensor of the logits' size,
    4sbv/t bytes, and a 4-byte copy of the targets.  Exchanges 3sb numbers.
    Source: 2205.05198 section 4.3.
    """

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.tp = tp

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _CrossEntropy.apply(logits, targets.to(torch.int32, copy=True), self.tp).mean()


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, tp: TensorParallel) -> Tensor:
        # One float32 copy, which turns into the softmax in place: the only large thing kept.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        z.sub_(all_reduce_max(z.amax(-1), tp).unsqueeze(-1))
        rows, mine = _own(targets, z.shape[-1], tp)
        target = z.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * mine
        z.exp_()
        denominator, target = all_reduce(torch.stack((z.sum(-1), target)), tp)
        z.div_(denominator.unsqueeze(-1))
        ctx.tp, ctx.dtype = tp, logits.dtype
        ctx.save_for_backward(z, targets)
        return denominator.log() - target  # [s, b]

    @staticmethod
    def backward(ctx, grad: Tensor):
        softmax, targets = ctx.saved_tensors
        rows, mine = _own(targets, softmax.shape[-1], ctx.tp)
        index, grad = rows.unsqueeze(-1), grad.unsqueeze(-1)
        # softmax − onehot, written straight in the logits' dtype: no second float32 copy.
        grad_logits = torch.mul(softmax, grad, out=torch.empty_like(softmax, dtype=ctx.dtype))
        at_target = (softmax.gather(-1, index) - mine.unsqueeze(-1).to(softmax.dtype)) * grad
        return grad_logits.scatter_(-1, index, at_target.to(ctx.dtype)), None, None
