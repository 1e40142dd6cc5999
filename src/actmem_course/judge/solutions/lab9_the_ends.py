"""python my/labs/lab9_the_ends.py

Lab 9: loss and embedding (with log-probabilities), where tensors are v wide.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them on four ranks (--ranks 2 for two).  For a hint, add --hint 9.1.

Letters as in 2205.05198: s tokens, b sequences, h hidden size, v size of the vocabulary.  Weights
are as torch stores them, [v, h].  Save tensors for backward with ctx.save_for_backward; what is held
in any other way escapes the count.  No function may write to a tensor that it was given, except main_grad.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


# given: the dtype to compute in
def wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays as it is."""
    return x if x.dtype is torch.float64 else x.float()


# 9.1
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token, log Σ exp(logits) − the target's logit.

    Compute in wide(logits), in backward too: where p is near 1, 16 bits lose p − 1.

    Args:
        logits: [s, b, v].
        targets: [s, b], ids from 0 to v − 1.

    Returns:
        [s, b], in the dtype of wide(logits).  The gradient of logits has their dtype.

    Saves: the ids, one tensor of v elements per token in the dtype of logits, and at most 32 bytes per token more:
        2sbv in 16 bits, where F.cross_entropy(logits.float(), …) saves 4sbv.
    Source: 2205.05198 section 4.3 counts those 4sbv.
    """
    return _CrossEntropy.apply(logits, targets)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets):
        normaliser = wide(logits).logsumexp(-1)
        target = wide(logits.gather(-1, targets.unsqueeze(-1))).squeeze(-1)
        ctx.save_for_backward(logits, targets, normaliser)
        return normaliser - target

    @staticmethod
    def backward(ctx, grad):
        logits, targets, normaliser = ctx.saved_tensors
        slope = (wide(logits) - normaliser.unsqueeze(-1)).exp()
        slope.scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))
        return (slope * grad.unsqueeze(-1)).to(logits.dtype), None


# 9.2
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """cross_entropy(F.linear(x, weight), targets), with the logits of ``chunk`` tokens at a time.

    No tensor is larger than the logits of a chunk, or than x or weight.  At once there are at most 4 tensors as
    large as a chunk's logits, 3 as large as x, and 3 as large as weight.  4 matmuls of s·b·v·h run, where the plain
    form runs 3.  The gradient of weight is added up over the chunks in wide(weight)'s dtype, float32.

    Args:
        x: [s, b, h].
        weight: [v, h].
        targets: [s, b], ids from 0 to v − 1.
        chunk: tokens, not positions; it need not divide s·b.

    Returns:
        [s, b], in the dtype of wide(x).  The gradients have the dtypes of x and weight.

    Saves: x, and 32 bytes per token at most.
    Source: 2205.05198 section 4.3 counts the 4sbv bytes of logits that are gone.
    """
    return _LinearCrossEntropy.apply(x, weight, targets, chunk)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, weight, targets, chunk):
        normalisers, losses = [], []
        for rows, ids in zip(x.flatten(0, 1).split(chunk), targets.flatten().split(chunk)):
            logits = wide(F.linear(rows, weight))
            normalisers.append(logits.logsumexp(-1))
            losses.append(normalisers[-1] - logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
        ctx.chunk = chunk
        ctx.save_for_backward(x, weight, targets, torch.cat(normalisers))
        return torch.cat(losses).view(targets.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight, targets, normaliser = ctx.saved_tensors
        by_token = (x.flatten(0, 1), targets.flatten(), normaliser, grad.flatten())
        grads_x, grad_weight = [], torch.zeros_like(wide(weight))
        for rows, ids, total, upstream in zip(*(tensor.split(ctx.chunk) for tensor in by_token)):
            slope = (wide(F.linear(rows, weight)) - total.unsqueeze(-1)).exp()
            slope[torch.arange(len(ids), device=ids.device), ids] -= 1
            slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)
            grads_x.append(slope @ weight)
            grad_weight += slope.t() @ rows
        return torch.cat(grads_x).view(x.shape), grad_weight.to(weight.dtype), None, None


# 9.3, advanced
def parallel_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, group) -> Tensor:
    """linear_cross_entropy, its chunks and sums too, with the vocabulary sharded among the ranks of group.

    group may be the ranks of a tensor-parallel layer, or those of a pipeline, whose last stage then has no more of
    the vocabulary than the others.

    Args:
        x: [s, b, h], the same on every rank.
        weight: [v/t, h], the rows r·v/t and up on rank r.
        targets: [s, b], ids from 0 to v − 1, the same on every rank.
        chunk: tokens.

    Returns:
        [s, b], the same on every rank.

    Collectives: of a few numbers per token in forward; in backward one all-reduce of x's gradient, whole or in
        chunks.
    Saves: x, and 32 bytes per token at most.
    Source: 2205.05198 section 4.3.
    """
    return _ParallelLinearCrossEntropy.apply(x, weight, targets, chunk, group)


class _ParallelLinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, weight, targets, chunk, group):
        own_ids = targets - dist.get_rank(group) * len(weight)
        mine = (own_ids >= 0) & (own_ids < len(weight))
        index = own_ids.clamp(0, len(weight) - 1)
        normalisers, picked = [], []
        for rows, ids in zip(x.flatten(0, 1).split(chunk), index.flatten().split(chunk)):
            logits = wide(F.linear(rows, weight))
            normalisers.append(logits.logsumexp(-1))
            picked.append(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
        part = torch.cat(normalisers)
        largest = part.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        # Only the rank that holds the target's logit adds it; the others add 0.
        sums = torch.stack(((part - largest).exp(), torch.cat(picked) * mine.flatten()))
        dist.all_reduce(sums, group=group)
        normaliser = sums[0].log() + largest
        ctx.chunk, ctx.group = chunk, group
        ctx.save_for_backward(x, weight, targets, normaliser)
        return (normaliser - sums[1]).view(targets.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight, targets, normaliser = ctx.saved_tensors
        by_token = (x.flatten(0, 1), targets.flatten(), normaliser, grad.flatten())
        grads_x, grad_weight = [], torch.zeros_like(wide(weight))
        own_rows = torch.arange(len(weight), device=weight.device) + dist.get_rank(ctx.group) * len(weight)
        for rows, ids, total, upstream in zip(*(tensor.split(ctx.chunk) for tensor in by_token)):
            slope = (wide(F.linear(rows, weight)) - total.unsqueeze(-1)).exp() - (ids.unsqueeze(-1) == own_rows).int()
            slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)
            grads_x.append(slope @ weight)
            grad_weight += slope.t() @ rows
        grad_x = torch.cat(grads_x).view(x.shape)
        dist.all_reduce(grad_x, group=ctx.group)
        return grad_x, grad_weight.to(weight.dtype), None, None, None


# 9.4
def log_probs_and_entropy(logits: Tensor, tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """What reinforcement learning needs from 16-bit logits: log p of the given tokens, and the entropy.

    p is the softmax of logits, the entropy −Σ p log p.  Compute in wide(logits), in backward too.  Widen ``chunk``
    tokens at a time, and free them before the next.

    Args:
        logits: [s, b, v].
        tokens: [s, b], ids from 0 to v − 1.
        chunk: tokens.

    Returns:
        Log-probabilities, [s, b], in the dtype of wide(logits). Entropies, [s, b], in the same dtype; the caller
        may use only one of the two.  The gradient of logits has their dtype.

    Saves: logits, and 32 bytes per token at most, where torch's operators save 8sbv bytes.
    """
    return _LogProbsAndEntropy.apply(logits, tokens, chunk)


class _LogProbsAndEntropy(Function):
    @staticmethod
    def forward(ctx, logits, tokens, chunk):
        normalisers, chosen, entropies = [], [], []
        for rows, ids in zip(logits.flatten(0, 1).split(chunk), tokens.flatten().split(chunk)):
            normalisers.append(wide(rows).logsumexp(-1))
            log_p = wide(rows) - normalisers[-1].unsqueeze(-1)
            chosen.append(log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        entropy = torch.cat(entropies)
        ctx.chunk = chunk
        ctx.save_for_backward(logits, tokens, torch.cat(normalisers), entropy)
        return torch.cat(chosen).view(tokens.shape), entropy.clone().view(tokens.shape)

    @staticmethod
    def backward(ctx, grad_chosen, grad_entropy):
        logits, tokens, normaliser, entropy = ctx.saved_tensors
        numbers = (tokens, normaliser, entropy, grad_chosen, grad_entropy)
        by_token = (logits.flatten(0, 1), *(tensor.reshape(-1, 1) for tensor in numbers))
        grads = []
        for rows, ids, total, h, up_chosen, up_entropy in zip(*(tensor.split(ctx.chunk) for tensor in by_token)):
            log_p = wide(rows) - total
            slope = -log_p.exp() * (up_chosen + up_entropy * (log_p + h))
            grads.append(slope.scatter_add_(-1, ids, up_chosen).to(logits.dtype))
        return torch.cat(grads).view(logits.shape), None, None


# 9.5
def embedding(ids: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
    """The rows of weight at ids; backward adds to main_grad and makes no gradient of weight's size.

    Backward adds wide(gradient) of each token to the row of its id; weight itself gets no .grad.

    Args:
        ids: [s, b], from 0 to v − 1, with repetitions.
        weight: [v, h].
        main_grad: [v, h] in the dtype of wide(weight), where earlier microbatches, and the output layer if it
            shares the weight, have left their gradients.

    Returns:
        [s, b, h].

    Saves: nothing but ids; torch's backward makes [v, h] each time.
    """
    return _Embedding.apply(ids, weight, main_grad)


class _Embedding(Function):
    @staticmethod
    def forward(ctx, ids, weight, main_grad):
        ctx.save_for_backward(ids)
        ctx.main_grad = main_grad  # a buffer that others write to: autograd would refuse it as a saved tensor
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1))
        return None, None, None
