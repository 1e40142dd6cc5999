"""The output layer and the loss in one operation, a chunk of tokens at a time: never all logits at once in memory."""

from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import check_size
from actmem.keep import differentiates_once
from actmem.parallel.collectives import all_gather, all_reduce, all_reduce_max, reduce_scatter
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import as_rows, autocast_dtype
from actmem.parallel.vocab import checked_targets, leave_out_padding, own_rows, target_logits


class LinearCrossEntropy(nn.Module):
    """Output layer and cross entropy in one operation, which computes the logits of ``chunk`` tokens at a time.

    Args:
        tp: the t ranks that share the vocabulary.
        chunk: for how many tokens logits exist at once.
        ignore_index: positions with this target have loss 0 and gradient 0.
        vocab_size: words of the vocabulary without padding, if the weight has more rows so that t divides their number;
            the logits of padding rows are left out of the loss. None: all rows are words.

    Args of ``forward``:
        x: ``[s, b, h]``, the same on all ranks, or this rank's ``[s/t, b, h]`` under sequence parallelism.
        weight: ``[v/t, h]``, this rank's rows.
        targets: ids ``[s, b]``, all of them on every rank.

    Returns: the loss of each token, ``[s, b]`` in float32 (float64 for float64 x), the same on all ranks.
        ``vocab.VocabParallelCrossEntropy`` returns the mean instead.
    Saves: x as given, in 16 bits 2sbh bytes or 1/t of that; a 4-byte copy of the targets; one number a token.
    Recomputes: each chunk's logits in backward. So there are 4 matmuls of s·b·v·h where separate operations run 3; 3
        matmuls if x or the weight needs no gradient.
    Collectives: in forward, all-reduces of three numbers for each of the sb positions; in backward, an all-reduce of
        x's gradient. Under sequence parallelism x is all-gathered in both passes, and its gradient is reduce-scattered.
    Raises: ConfigError if ``chunk`` is below 1; if there isn't one target for each token; if a target is neither in
        0 … v − 1 nor ``ignore_index`` (on a GPU that is a device-side assertion).
    Source: 2205.05198 section 4.3 for the sharing; 2410.10989 (Liger) and 2411.09009 for the chunks.
    """

    def __init__(self, tp: TensorParallel, chunk: int = 1024, ignore_index: int = -100, vocab_size: int | None = None):
        super().__init__()
        self.tp, self.chunk, self.ignore_index = tp, check_size("chunk", chunk), ignore_index
        self.vocab_size = vocab_size

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        x = x.to(autocast_dtype(x))  # before it is gathered
        rows = weight.shape[0] * self.tp.size
        words = rows if self.vocab_size is None else check_size("vocab_size", self.vocab_size, largest=rows)
        return _LinearCrossEntropy.apply(x, weight, targets, self.tp, self.chunk, self.ignore_index, words)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, tp: TensorParallel, chunk: int, ignored: int, words: int
    ) -> Tensor:
        full = all_gather(x, tp) if tp.sequence_parallel else x  # [s, b, h]
        targets = checked_targets(targets, full, words, ignored)
        cast, wide = weight.to(x.dtype), torch.promote_types(x.dtype, torch.float32)
        normaliser, target = x.new_empty((2, targets.numel()), dtype=wide)
        chunks = zip(*(tensor.split(chunk) for tensor in (as_rows(full), targets.flatten(), normaliser, target)))
        for tokens, ids, own_sum, own_target in chunks:
            z = leave_out_padding(F.linear(tokens, cast).to(wide), words, tp)
            rows, mine = own_rows(ids, z.shape[-1], tp)
            own_target.copy_(target_logits(z, rows, mine))
            largest = z.amax(-1).clamp_(min=torch.finfo(wide).min)  # a rank may have no word at all
            torch.add(z.sub_(largest.unsqueeze(-1)).exp_().sum(-1).log_(), largest, out=own_sum)
            del z  # before the next chunk's
        largest = all_reduce_max(normaliser, tp)
        denominator, target = all_reduce(torch.stack(((normaliser - largest).exp_(), target)), tp)
        normaliser = denominator.log() + largest
        ctx.tp, ctx.chunk, ctx.ignored, ctx.words = tp, chunk, ignored, words
        ctx.save_for_backward(x, weight, targets, normaliser)
        return torch.where(targets != ignored, (normaliser - target).view(targets.shape), 0)

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        x, weight, targets, normaliser = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        full, cast = all_gather(x, ctx.tp) if ctx.tp.sequence_parallel else x, weight.to(x.dtype)
        grad_x = torch.empty_like(full, memory_format=torch.contiguous_format) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if needs_weight else None
        grad = grad * (targets != ctx.ignored)
        by_token = (as_rows(full), targets.flatten(), normaliser, grad.flatten())
        results = repeat(None) if grad_x is None else as_rows(grad_x).split(ctx.chunk)
        for tokens, ids, own_sum, upstream, result in zip(*(tensor.split(ctx.chunk) for tensor in by_token), results):
            z = leave_out_padding(F.linear(tokens, cast).to(normaliser.dtype), ctx.words, ctx.tp)
            z.sub_(own_sum.unsqueeze(-1)).exp_().mul_(upstream.unsqueeze(-1))
            rows, mine = own_rows(ids, z.shape[-1], ctx.tp)
            z.scatter_add_(-1, rows.unsqueeze(-1), -(upstream * mine).unsqueeze(-1))
            z = z.to(x.dtype)
            if result is not None:
                torch.mm(z, cast, out=result)
            if grad_weight is not None:
                grad_weight += z.t() @ tokens
            del z  # before the next chunk's
        if grad_x is not None:
            grad_x = (
                reduce_scatter(grad_x, ctx.tp)
                if ctx.tp.sequence_parallel
                else all_reduce(grad_x, ctx.tp, in_place=True)
            )
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None
