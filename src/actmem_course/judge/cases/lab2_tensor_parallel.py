"""Lab 2: on what each answer is judged, and the mistakes that are edits of ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import close
from actmem_course.judge.exchanged import F_BAR_OPERATOR, F_OPERATOR, size_of
from actmem_course.judge.verdict import Wrong, refuse
from actmem_course.pieces import core_attention, merge_heads, split_heads


def f(r: CaseRun) -> None:
    x = r.same(4, 3, 5)
    r.operator(F_OPERATOR, x)
    leaf, through, beside = x.clone().requires_grad_(), r.same(4, 3, 5), r.same(4, 3, 5)
    (r["f"](leaf, r.group) * through + leaf * beside).sum().backward()
    alone = (
        "the residual branch reads x too, and f must leave that gradient alone: all-reduce only what comes through f"
    )
    refuse(((leaf.grad is None or not close(leaf.grad, r.t * through + beside), alone),))


def f_bar(r: CaseRun) -> None:
    r.operator(F_BAR_OPERATOR, r.each(4, 3, 5), r.same(4, 3, 5))


def column_parallel_linear(r: CaseRun) -> None:
    why = (
        "return this rank's own output features, [s, b, out/t]. Every rank has other features, so there is nothing to add up, and "
        "the row-parallel linear takes them as they are"
    )
    given = {"x": r.same(4, 3, 6), "weight": r.each(8, 6), "bias": r.each(8)}
    r.passes(r["column_parallel_linear"], given, r.group, why={"": why, "x": F_OPERATOR.in_backward})
    r.keeps(lambda x, w, c: r["column_parallel_linear"](x, w, c, r.group), *given.values(), what="x")


def row_parallel_linear(r: CaseRun) -> None:
    given = {"x": r.each(4, 3, 5), "weight": r.each(6, 5), "bias": r.same(6)}
    r.passes(r["row_parallel_linear"], given, r.group, upstream=r.same(4, 3, 6))
    r.keeps(lambda x, w, c: r["row_parallel_linear"](x, w, c, r.group), *given.values(), what="x")


def split_attention(r: CaseRun) -> None:
    """Any assignment of whole heads to ranks is right, so what counts is the sum over the ranks."""
    here = 2
    heads = here * r.t
    h = 4 * heads  # so that splitting a rank's part into all heads, a mistake, runs
    qkv, projection, x = r.same(3 * h, h), r.same(h, h), r.same(5, 2, h)
    with r.unwritten(), r.b.watching():
        result = r["split_attention"](qkv, projection, heads, r.group)
    if not isinstance(result, (tuple, list)) or [isinstance(part, Tensor) for part in result] != [True, True]:
        raise Wrong("expected two tensors: this rank's qkv_weight and its projection_weight")
    own_qkv, own_projection = (part.detach() for part in result)
    if own_qkv.shape[1:] == (h,) and own_projection.dim() == 2 and len(own_projection) == h:
        rows, columns = _heads_of(own_qkv, qkv, heads), _heads_of(own_projection.t(), projection.t(), heads)
        wanted = [f"{which}{head[1:]}" for which in "QKV" for head in columns]
        if rows and columns and (rows != wanted or len(columns) != here):
            raise Wrong(
                f"rank {r.rank}'s QKV part has the rows of {', '.join(rows)}, and its projection the columns of heads "
                f"{', '.join(head[1:] for head in columns)}: take Q, then K, then V of the same {here} heads, in the order of the columns"
            )
    r.see("the shape of this rank's qkv_weight", list(own_qkv.shape), "equal")
    r.see("the shape of this rank's projection_weight", list(own_projection.shape), "equal")
    if (own_qkv.shape, own_projection.shape) == ((3 * h // r.t, h), (h, h // r.t)):
        context = merge_heads(core_attention(*split_heads(F.linear(x, own_qkv), here)), x.shape[1])
        r.see("the attention", F.linear(context, own_projection), "total")


def _heads_of(part: Tensor, whole: Tensor, heads: int) -> list[str]:
    """Which heads of Q, K, V the rows of a part are, in their order: ``Q0``.  Empty unless they are rows of the whole."""
    d = whole.shape[1] // heads
    places = (part[:, None] == whole).all(-1).nonzero()[:, 1].tolist()
    if len(places) % d or places != [first + i for first in places[::d] for i in range(d)]:
        return []
    return [f"{'QKV'[first // len(whole.t())]}{first // d % heads}" for first in places[::d]]


def mlp(r: CaseRun) -> None:
    given = {"x": r.same(4, 3, 4), "up_weight": r.each(16, 4), "up_bias": r.each(16)}
    given |= {"down_weight": r.each(4, 16), "down_bias": r.same(4)}
    r.passes(r["mlp"], given, r.group, upstream=r.same(4, 3, 4))


def attention(r: CaseRun) -> None:
    # With 3 heads a rank a/2 isn't t.  Both divide by 2 and 4, so that a rank's part can be split into all heads by mistake.
    for here, prefix in ((3, ""), (2, "with 2 heads on each rank, ")):
        a, part = here * r.t, 4 * here
        h = 4 * a
        given = {"x": r.same(5, 3, h), "qkv_weight": r.each(3 * part, h), "qkv_bias": r.each(3 * part)}
        given |= {"projection_weight": r.each(h, part), "projection_bias": r.same(h)}
        r.passes(r["attention"], given, a, r.group, upstream=r.same(5, 3, h), prefix=prefix)


def vocab_parallel_cross_entropy(r: CaseRun) -> None:
    s, rows = max(4, r.t), 5
    logits, targets = 3 * r.shard(s, 3, rows * r.t, dim=2), (r.same(s, 3) * 1e6).long().remainder(rows * r.t)
    # The first and the last id of every rank, where an id off by one goes to another rank.
    ends = torch.arange(r.t, device=r.device) * rows
    targets.view(-1)[: 2 * r.t] = torch.cat((ends, ends + rows - 1))
    upstream = r.same(s, 3)
    # exp overflows unless the largest of all ranks is subtracted first.
    for scale, prefix in ((1, ""), (300, "for logits of a thousand and more, ")):
        passes = r.passes(
            lambda x: r["vocab_parallel_cross_entropy"](x, targets, r.group),
            {"logits": scale * logits},
            upstream=upstream,
            prefix=prefix,
            exchanges=False,
        )
        # Largest, sum and target, even if every rank's are gathered; of the logits it would be five of each rank.
        enough = 3 * r.t * size_of(upstream)
        for when, seen in zip(("forward", "backward"), passes):
            sent = sum(collective.payload_bytes for collective in seen.collectives)
            words = f"{when} exchanges {{found:,}} B: the logits themselves are sent, where a few numbers per position are enough"
            r.see(f"{prefix}bytes sent in {when}", max(sent, enough) if r.t > 1 else 0, "most", words)


_TARGET = "each rank subtracts its own part of the target's logit, which is 0 on all ranks but one: sum it over the ranks first"
#: How the target's logit is found wrongly, with words.
_PICKED = {
    "(index < logits.shape[-1]) -> (index <= logits.shape[-1])": "a rank counts the first id after its range as its own: its last id is v/t − 1, so compare with <, not <=",
    "(index >= 0) -> (index >= -1)": "a rank counts the last id before its range as its own: its first id is 0, so compare with >= 0",
    "(index >= 0) -> (index > 0)": "no rank adds the logit of its first id: compare with >=, not >",
    "(index < logits.shape[-1]) -> (index < logits.shape[-1] - 1)": "no rank adds the logit of its last id: compare with < v/t",
    "squeeze(-1) * mine -> squeeze(-1)": "ranks that do not hold the target's logit add another logit instead: they must add 0",
    "squeeze(-1) * mine -> squeeze(-1) ;; index.clamp(0, logits.shape[-1] - 1) -> (index % logits.shape[-1])": "ranks that do not hold the target's logit add another logit instead: they must add 0",
    "targets - dist.get_rank(group) * logits.shape[-1] -> targets": "the target ids are not shifted by the first id of this rank",
    "get_rank(group) * logits.shape[-1] -> get_rank(group) * dist.get_world_size(group)": "this rank's first id is rank · v/t, not rank · t",
    "- sums[1] -> - target": _TARGET,
}
#: The largest subtracted from the target's logit too, in place of adding it back: as right, and wrong ids give other numbers.
_SHIFTED = (
    "target = logits.gather -> target = (logits - largest.unsqueeze(-1)).gather ;; "
    "sums[0].log() + largest - sums[1] -> sums[0].log() - sums[1]"
)
MISTAKES = {
    "2.8": "\n".join(f"{how}{edit} | {words}" for edit, words in _PICKED.items() for how in ("", f"{_SHIFTED} ;; "))
    + rf"""
        {_SHIFTED} ;; `        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)\n` ->  | each rank subtracts the largest of its own logits, and these differ: all-reduce the largest first (MAX)
        `        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)\n` ->  | the exponentials of the ranks are scaled by different largest logits before they are added: all-reduce the largest first (MAX)
        largest = logits.amax(-1) -> largest = 0 * logits.amax(-1) | right for small logits, but exp overflows for logits of a thousand and more: subtract the largest logit of all ranks before exp
        return sums[0].log() + largest -> return logits.logsumexp(-1) | only this rank's logits are normalised: the sum of the exponentials must run over all ranks
        sums[0].log() + largest -> sums[0].log() | the largest logit is subtracted and not added back: subtract it from the target's logit too, or add it to the logarithm
        (exponentials.sum(-1), target) -> (logits.logsumexp(-1), target) ;; sums[0].log() + largest -> sums[0] | the ranks' logarithms are added up: add the sums of the exponentials, and take one logarithm
        return sums[0].log() + largest - -> return (sums[0].log() + largest).exp() - | the logarithm of the sum is missing
        return sums[0].log() -> return sums[0] | the logarithm of the sum is missing
        return sums[0].log() -> return (sums[0] / dist.get_world_size(group)).log() | the sum of the exponentials is averaged over the ranks: all-reduce with SUM, and divide by nothing
        `+ largest - sums[1]` -> + largest | the target's logit is not subtracted
        dist.ReduceOp.MAX, group=group) -> group=group) | the ranks' largest logits are added up: reduce them with dist.ReduceOp.MAX
        return sums[0].log() + largest - sums[1] -> return sums[1] - sums[0].log() - largest | the result is the log-probability of the target; the loss is its negative
        return sums[0].log() + largest - sums[1] -> return (sums[0].log() + largest - sums[1]).mean() | the result is the mean over all positions; expected one loss per position
        return sums[0].log() + largest - sums[1] -> return (sums[0].log() + largest - sums[1]).mean().expand(targets.shape) | every position has the mean over all positions; expected one loss per position
        return sums[0].log() + largest - sums[1] -> return (sums[0].log() + largest - sums[1]).sum() | the result is the sum over all positions; expected one loss per position
        exponentials / sums[0].unsqueeze(-1) -> logits.softmax(-1) | the forward is right; the gradient of logits is that of this rank's own softmax: divide by the sum over all ranks
        softmax, index, mine = ctx.saved_tensors -> softmax, index, mine = [0 * ctx.saved_tensors[0], *ctx.saved_tensors[1:]] | the forward is right; no gradient comes back through the sum of the exponentials: its all-reduce needs a backward
        .scatter_(-1, index, mine.unsqueeze(-1).to(softmax.dtype)) ->  | the forward is right; the gradient of logits is that of the softmax alone: subtract 1 at the target
        index.clamp(0, logits.shape[-1] - 1).unsqueeze(-1) -> (index * mine).unsqueeze(-1) ;; mine.unsqueeze(-1).to(softmax.dtype) -> 1.0 | the forward is right; every rank subtracts 1 from a gradient: only the rank that holds the target may
        mine.unsqueeze(-1).to(softmax.dtype) -> 1.0 | the forward is right; every rank subtracts 1 from a gradient: only the rank that holds the target may
        (softmax - onehot) * grad.unsqueeze(-1) -> (softmax - onehot) | the forward is right; the gradient of logits ignores the incoming gradient: multiply by it
        ctx.save_for_backward(exponentials -> ctx.t = dist.get_world_size(group)\n        ctx.save_for_backward(exponentials ;; (softmax - onehot) * -> ((softmax - onehot) * ctx.t) * | the forward is right; the gradient of logits is t times what it should be: the backward of a sum over the ranks must not all-reduce, because each rank has its whole gradient already
        ctx.save_for_backward(exponentials -> ctx.t = dist.get_world_size(group)\n        ctx.save_for_backward(exponentials ;; (softmax - onehot) * -> (softmax * ctx.t - onehot) * | the forward is right; the gradient of logits that comes through the sum of the exponentials is t times what it should be: the backward of a sum over the ranks must not all-reduce, because each rank has its whole gradient already
        ctx.save_for_backward(exponentials -> ctx.t = dist.get_world_size(group)\n        ctx.save_for_backward(exponentials ;; (softmax - onehot) * -> (softmax - onehot * ctx.t) * | the forward is right; the gradient of the target's logit is t times what it should be: the backward of a sum over the ranks must not all-reduce, because each rank has its whole gradient already
        ctx.save_for_backward(exponentials -> ctx.t = dist.get_world_size(group)\n        ctx.save_for_backward(exponentials ;; (softmax - onehot) * -> ((softmax - onehot) / ctx.t) * | the forward is right; the gradient of logits is 1/t of what it should be: do not average over the ranks
        ctx.save_for_backward(exponentials -> ctx.t = dist.get_world_size(group)\n        ctx.save_for_backward(exponentials ;; (softmax - onehot) * -> (softmax / ctx.t - onehot) * | the forward is right; the gradient of logits that comes through the sum of the exponentials is 1/t of what it should be: do not average over the ranks
        ctx.save_for_backward(exponentials -> ctx.t = dist.get_world_size(group)\n        ctx.save_for_backward(exponentials ;; (softmax - onehot) * -> (softmax - onehot / ctx.t) * | the forward is right; the gradient of the target's logit is 1/t of what it should be: do not average over the ranks
    """,
    "2.3": r"""
        F.linear(f(x, group), weight, bias) -> F.linear(f(x, group), *(p.chunk(dist.get_world_size(group))[dist.get_rank(group)] for p in (weight, bias))) | weight and bias are cut again: they are this rank's parts already
        F.linear(f(x, group), weight, bias) -> F.linear(f(x, group), weight, bias if dist.get_rank(group) == 0 else None) | bias is used on rank 0 only: each rank's bias is that of its own features, so add it on every rank
    """,
    "2.4": r"""
        f_bar(F.linear(x, weight), group) + bias -> f_bar(F.linear(x, weight), group) / dist.get_world_size(group) + bias | the sum over the ranks is divided by t: take the sum, not the mean
        f_bar(F.linear(x, weight), group) + bias -> f_bar(F.linear(x, weight), group) | bias is missing: it belongs after the sum over the ranks, once
        f_bar(F.linear(x, weight), group) + bias -> f_bar(F.linear(x, weight), group) + f_bar(bias, group) | bias comes before f_bar: it belongs after the sum over the ranks, once (before the sum it would count t times)
        f_bar(F.linear(x, weight), group) + bias -> f_bar(F.linear(x, weight, bias / 2), group) | half of bias is added before f_bar, which is right for two ranks only: add bias after the sum over the ranks, once
        f_bar(F.linear(x, weight), group) + bias -> f_bar(F.linear(x, weight, bias / dist.get_world_size(group)), group) | the forward is right, the gradients are not: bias / t is added before f_bar. Add bias after the sum over the ranks, once
    """,
    "2.5": r"""
        `    return mine.reshape(3 * h // t, h), projection_weight.chunk(t, dim=1)[rank]` ->     own = slice(num_attention_heads // t * rank, num_attention_heads // t * rank + h // t)\n    return torch.cat([part[own] for part in qkv_weight.chunk(3)]), projection_weight[:, own] | the slice begins at the number of a head, not at its row: head n begins at row n · h/a
        `    return mine.reshape(3 * h // t, h), projection_weight.chunk(t, dim=1)[rank]` ->     own = slice(num_attention_heads // t * rank, num_attention_heads // t * (rank + 1))\n    return torch.cat([part[own] for part in qkv_weight.chunk(3)]), projection_weight[:, own] | a/t rows are taken; a rank has a/t heads, each of h/a rows
        projection_weight.chunk(t, dim=1)[rank] -> projection_weight[:, rank::t] | every t-th column of the projection is taken: take the columns of this rank's heads, which are contiguous
        mine.reshape(3 * h // t, h) -> qkv_weight.chunk(t)[rank] | the 3h rows are cut into t blocks, so rank 0 gets rows of Q and no V: cut Q, K and V each, so that a rank has all three of the same heads
        mine.reshape(3 * h // t, h) -> qkv_weight.chunk(t, dim=1)[rank] | the QKV weight is cut along its input features: heads are its output features, dimension 0 of [out, in]
        projection_weight.chunk(t, dim=1) -> projection_weight.chunk(t) | the projection is cut along its output features: heads are its input features, dimension 1 of [out, in]
        projection_weight.chunk(t, dim=1) -> projection_weight.t().chunk(t, dim=1) | the projection part is cut from projection_weight's transpose: take columns of projection_weight as it is
        mine.reshape(3 * h // t, h) -> mine.view(3, num_attention_heads // t, -1, h).transpose(0, 1).reshape(3 * h // t, h) | the QKV part has the right rows in another order: expected all rows of Q first, then K, then V
        dist.get_rank(group)\n    h = -> 0\n    h = | every rank takes rank 0's heads: take those of dist.get_rank(group)
        view(3, t, h // t, h)[:, rank] -> view(3, h // t, t, h)[:, :, rank] ;; projection_weight.chunk(t, dim=1)[rank] -> projection_weight[:, rank::t] | heads are cut apart: each rank has every t-th row, and needs whole heads
    """,
    "2.6": r"""
        return row_parallel_linear(y, down_weight, down_bias, group) -> return f_bar(x + F.linear(y, down_weight), group) + down_bias | x is added before the sum over the ranks, so t times: return the MLP's result without x, which the layer adds later
        y = gelu(column_parallel_linear(x, up_weight, -> y = gelu(column_parallel_linear(x, down_weight.t(), ;; (y, down_weight, -> (y, up_weight.t(), | up_weight and down_weight are swapped: they fit only because they are transposed
        gelu(column -> F.gelu(column | F.gelu is called without approximate="tanh": use gelu of actmem_course.pieces, which has the tanh formula
        row_parallel_linear(y, down_weight, down_bias, group) -> f_bar(F.linear(y, down_weight, down_bias / dist.get_world_size(group)), group) | the forward is right, the gradients are not: down_bias / t is added before f_bar. Add down_bias after the sum over the ranks, once
        return row_parallel_linear(y, down_weight, down_bias, group) -> return x + row_parallel_linear(y, down_weight, down_bias, group) | x is added to the result: return the MLP's result without x, which the layer adds later
    """,
    "2.7": r"""
        x, qkv_weight, qkv_bias, group) -> x, *(torch.cat([part.chunk(dist.get_world_size(group))[dist.get_rank(group)] for part in p.chunk(3)]) for p in (qkv_weight, qkv_bias)), group) ;; context, projection_weight, -> context, projection_weight.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)], | the weights are cut again: they are this rank's parts already
        core_attention(q, k, v), x -> core_attention(k, q, v), x | Q and K are swapped: split_heads gives Q, K, V, and core_attention takes them in this order
        core_attention(q, k, v), x -> core_attention(q, v, k), x | K and V are swapped: split_heads gives Q, K, V, and core_attention takes them in this order
        core_attention(q, k, v), x -> core_attention(q * (q.shape[-1] * dist.get_world_size(group) / x.shape[-1]) ** 0.5, k, v), x | the scores are divided by the root of h/t: core_attention divides them by the root of the head size
        q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), heads_here) -> parts = column_parallel_linear(x, qkv_weight, qkv_bias, group).chunk(3, -1)\n    q, k, v = (p.reshape(-1, len(x), p.shape[-1] // heads_here) for p in parts) | tokens and heads are mixed: a reshape does not put the heads before the tokens. Use split_heads
        core_attention(q, k, v), x -> F.scaled_dot_product_attention(q, k, v), x | there is no causal mask, so a token attends to later ones: use core_attention
        core_attention(q, k, v), x -> core_attention(q * q.shape[-1] ** 0.5, k, v), x | the scores are not divided by the root of the head size: use core_attention
        core_attention(q, k, v), x -> core_attention(q * (q.shape[-1] / x.shape[-1]) ** 0.5, k, v), x | the scores are divided by the root of h: core_attention divides them by the root of the head size
        core_attention(q, k, v), x -> core_attention(q * q.shape[-1] ** -0.5, k, v), x | the scores are divided by the root of the head size twice: core_attention divides them already
        num_attention_heads // dist.get_world_size(group) -> 1 | this rank's part is split into one head, but it holds a/t: split_heads(y, num_attention_heads // t)
        num_attention_heads // dist.get_world_size(group) -> num_attention_heads | this rank's part is split into a heads, but it holds a/t: divide num_attention_heads by the number of ranks
        column_parallel_linear(x, qkv_weight, qkv_bias, group), heads_here) -> column_parallel_linear(x, qkv_weight, qkv_bias, group).unflatten(-1, (heads_here, 3, -1)).transpose(-2, -3).flatten(-3), heads_here) | the rows of Q, K and V are read head by head, as Megatron-LM stores them; here all of Q come first: use split_heads
        merge_heads(core_attention(q, k, v), x.shape[1]) -> core_attention(q, k, v).reshape(x.shape[0], x.shape[1], -1) | a reshape does not put the sequence first again, so heads and tokens are mixed: use merge_heads
        , x.shape[1]) -> , heads_here) | merge_heads is given a number of heads: its second argument is the number of sequences, x.shape[1]
        , x.shape[1]) -> , x.shape[0]) | merge_heads is given the sequence length: its second argument is the number of sequences, x.shape[1]
        return row_parallel_linear(context, projection_weight, projection_bias, group) -> return x + row_parallel_linear(context, projection_weight, projection_bias, group) | x is added to the result: return attention's result without x, which the layer adds later
    """,
}
