"""The embedding and the loss, with the vocabulary sharded over the ranks.

Rank r holds v/t rows of the embedding, from row r·v/t on.  The output layer uses the same rows, so each rank computes
the logits of its own words.  The loss is computed from these shards: no rank ever has all logits of a position
(2205.05198 sections 3, 4.3).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.config import ConfigError, check_size, check_vocab_size
from actmem.keep import differentiates_once
from actmem.parallel.collectives import all_reduce, all_reduce_max
from actmem.parallel.conjugates import f_bar_or_g_bar
from actmem.parallel.groups import TensorParallel
from actmem.parallel.weights import ParallelModule, own_weight
from actmem.torch_private import assert_async


class VocabParallelEmbedding(ParallelModule):
    """Word vectors with the vocabulary sharded over the ranks: ``weight`` is ``[v/t, h]``.

    Args:
        vocab_size: v, words of the vocabulary; t must divide it.
        hidden_size: h, elements of a word vector.
        tp: the t ranks that share the vocabulary.
        seed: seed from which the weight is drawn, the same on all t ranks; None draws a seed from torch's CPU
            generator.
        factory: dtype and device of the weight.

    Args of ``forward``: token ids ``[s, b]``.
    Returns: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.
    Saves: a 4-byte copy of the ids, 4sb bytes.
    Raises: ConfigError if t does not divide v, or if an id is not in 0 … v − 1 (on a GPU a device-side assertion, which
        does not synchronise).
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        self.tp = tp
        rows = check_vocab_size(vocab_size, tp.size)
        self.weight = own_weight(tp, seed, rows, hidden_size, dim=0, **factory)

    def forward(self, ids: Tensor) -> Tensor:
        own_copy = checked_copy("token ids", ids, self.weight.shape[0] * self.tp.size)
        return f_bar_or_g_bar(_Lookup.apply(own_copy, self.weight, self.tp), self.tp)


class _Lookup(Function):
    """Looks up this rank's rows for the ids that it holds, and zeros for the others: a partial sum over t."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tp, ctx.num_rows = tp, weight.shape[0]
        rows, mine = own_rows(ids, ctx.num_rows, tp)
        # Written over with 0, not multiplied by 0: NaN in one row of the embedding must not reach other words.
        return F.embedding(rows, weight).masked_fill_(~mine.unsqueeze(-1), 0)

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        (ids,) = ctx.saved_tensors
        rows, mine = own_rows(ids, ctx.num_rows, ctx.tp)
        rows.masked_fill_(~mine, -1)  # torch's number of a row to pass over: 0 times an infinite gradient is no number
        return None, torch.ops.aten.embedding_dense_backward(grad, rows, ctx.num_rows, -1, False), None


def own_rows(ids: Tensor, num_rows: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Find the rows of this rank's weight shard that belong to token ids.

    Args:
        ids: ids of the whole vocabulary, of any shape.
        num_rows: v/t, rows of the shard.
        tp: the t ranks that share the vocabulary.

    Returns: two tensors of the shape of ids: the row number in this rank's shard, clamped to 0 … num_rows − 1, and a
        mask that is True where the id really lies in this shard.
    """
    rows = ids.long() - tp.rank * num_rows
    mine = (rows >= 0) & (rows < num_rows)
    return rows.clamp_(0, num_rows - 1), mine


def checked_copy(argument: str, ids: Tensor, vocab_size: int, ignore_index: int | None = None) -> Tensor:
    """Check token ids, and return an int32 copy of them to save for backward.

    A view of the ids would keep the whole batch alive. The check doesn't wait for a GPU: there a bad id raises later,
    as a device-side assertion.

    Args:
        argument: the name of the ids in error messages, such as "token ids".
        ids: token ids, of any shape.
        vocab_size: v, words of the vocabulary.
        ignore_index: an id that is allowed besides 0 … v − 1; None: no other id is allowed.

    Raises: ConfigError unless each id is a whole number from 0 to v − 1 or is ``ignore_index``.
    """
    if ids.is_floating_point() or ids.is_complex():
        raise ConfigError(argument, f"must be whole numbers, got {ids.dtype}")
    wide = ids.long()  # in 8 bits 300 is 44
    valid, rule = (wide >= 0) & (wide < vocab_size), f"from 0 to {vocab_size - 1}"
    if ignore_index is not None:
        valid, rule = valid | (wide == ignore_index), f"{rule}, or ignore_index = {ignore_index}"
    try:
        assert_async(valid.all(), f"{argument}: must be {rule}")
    except RuntimeError:  # on a CPU, where looking at the values is free
        wrong = wide[~valid].flatten()[0].item()
        raise ConfigError(argument, f"must be {rule}, got {wrong}") from None
    return ids.to(torch.int32, copy=True)


def checked_targets(targets: Tensor, x: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Check the targets of a loss, and return an int32 copy of them, as ``checked_copy`` does.

    Args:
        targets: ids ``[…]``, one for each token of x.
        x: what the loss reads, activations ``[…, h]`` or logits ``[…, v/t]``; only its shape is looked at.
        vocab_size: v, words of the vocabulary.
        ignore_index: the target of tokens that have no loss, allowed besides 0 … v − 1.

    Raises: ConfigError if the shapes don't fit, or on an id that isn't in 0 … v − 1 and isn't ``ignore_index``.
    """
    if targets.shape != x.shape[:-1]:
        sizes = f"{list(targets.shape)} for x of {list(x.shape)}"
        raise ConfigError("targets", f"must be one for each token of x, got {sizes}")
    return checked_copy("targets", targets, vocab_size, ignore_index)


def target_logits(z: Tensor, rows: Tensor, mine: Tensor) -> Tensor:
    """Return for each position the logit of its target, and 0 if that logit is on another rank.

    The sum of the results over the ranks is then every position's target logit.

    Args:
        z: this rank's logits ``[…, v/t]``.
        rows: ``[…]``, the row of each target in this rank's shard, from ``own_rows``.
        mine: ``[…]``, True where the target lies in this rank's shard, from ``own_rows``.

    Returns: ``[…]``.
    """
    return z.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0)


def leave_out_padding(z: Tensor, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Set the logits of padding rows to -inf, in place, so that they add nothing to the softmax's denominator.

    Args:
        z: this rank's logits ``[…, v/t]``.
        vocab_size: words of the vocabulary; rows of the weight from this number on are padding.
        tp: the t ranks that share the vocabulary.

    Returns: z.
    """
    first = max(0, vocab_size - tp.rank * z.shape[-1])
    if first < z.shape[-1]:
        z[..., first:] = -torch.inf
    return z


class VocabParallelCrossEntropy(nn.Module):
    """Mean loss over all positions, from logits with a sharded vocabulary.

    Positions whose target is ``ignore_index`` have no loss and no gradient and are left out of the mean, as in torch;
    the mean of no positions is nan. If microbatches leave out different numbers of positions, weight the mean of each
    microbatch by the number of positions that it doesn't leave out. The loss is computed in float32 (for float64 logits
    in float64). ``actmem_more.chunked_loss.LinearCrossEntropy`` returns each token's loss instead of the mean.

    Args:
        tp: the t ranks that share the vocabulary.
        ignore_index: the target of positions that are left out.
        vocab_size: words of the vocabulary, if t does not divide it and the weight has rows beyond it
            (``config.padded_vocab_size``): those have no part in the loss, and no gradient. None: all rows are words.

    Args of ``forward``: logits ``[s, b, v/t]``, target ids ``[s, b]``.
    Returns: a scalar, the same on all ranks.
    Saves: one tensor of the logits' size, 4sbv/t bytes, and a 4-byte copy of the targets.
    Collectives: three numbers for each of the sb positions: all-reduces of the maximum, of the denominator and of the
        target's logit.
    Raises: ConfigError unless there is one target for each token, each in 0 … v − 1 or ``ignore_index`` (on a GPU a
        device-side assertion), and unless ``vocab_size`` is from 1 to the number of rows.
    Source: 2205.05198 section 4.3.
    """

    def __init__(self, tp: TensorParallel, ignore_index: int = -100, vocab_size: int | None = None):
        super().__init__()
        self.tp, self.ignore_index, self.vocab_size = tp, ignore_index, vocab_size

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows = logits.shape[-1] * self.tp.size
        words = rows if self.vocab_size is None else check_size("vocab_size", self.vocab_size, largest=rows)
        ids = checked_targets(targets, logits, words, self.ignore_index)
        return _CrossEntropy.apply(logits, ids, self.tp, self.ignore_index, words)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, tp: TensorParallel, ignore_index: int, words: int) -> Tensor:
        # One float32 copy, which turns into the softmax in place: the only large thing kept.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        leave_out_padding(z, words, tp)
        z.sub_(all_reduce_max(z.amax(-1), tp).unsqueeze(-1))
        rows, mine = own_rows(targets, z.shape[-1], tp)
        target = target_logits(z, rows, mine)
        z.exp_()
        denominator, target = all_reduce(torch.stack((z.sum(-1), target)), tp)
        z.div_(denominator.unsqueeze(-1))
        ctx.tp, ctx.ignore_index, ctx.dtype = tp, ignore_index, logits.dtype
        ctx.save_for_backward(z, targets)
        counted = targets != ignore_index
        losses = denominator.log() - target  # [s, b]
        # Every rank has all targets, so the divisor needs no collective.
        return torch.where(counted, losses, 0).sum() / counted.sum()

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        softmax, targets = ctx.saved_tensors
        counted = targets != ctx.ignore_index
        grad = torch.where(counted, grad / counted.sum(), 0)  # [s, b]
        rows, mine = own_rows(targets, softmax.shape[-1], ctx.tp)
        index, grad = rows.unsqueeze(-1), grad.unsqueeze(-1)
        # softmax − onehot, written straight in the logits' dtype: no second float32 copy.
        grad_logits = torch.mul(softmax, grad, out=torch.empty_like(softmax, dtype=ctx.dtype))
        at_target = (softmax.gather(-1, index) - mine.unsqueeze(-1).to(softmax.dtype)) * grad
        return grad_logits.scatter_(-1, index, at_target.to(ctx.dtype)), None, None, None, None


#: The autograd Functions of embedding and loss, for tools that name them.
FUNCTIONS = {"lookup": _Lookup, "cross_entropy": _CrossEntropy}
