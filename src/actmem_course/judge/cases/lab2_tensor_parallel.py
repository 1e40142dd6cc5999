"""Lab 2: its cases, the functions that test a learner's answers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import check_tensors, close
from actmem_course.judge.observations import Cost, SummedTensor
from actmem_course.judge.verdict import Wrong, mend
from actmem_course.reference_layer import core_attention, merge_heads, split_heads

_F_BACKWARD = mend(
    "f's backward must all-reduce once, with SUM, and divide by nothing",
    "Each rank's gradient comes from its own slice of the weight, and these add up",
)
_F = {"": mend("f's forward must return x as it is", "every rank has the same x already"), "x": _F_BACKWARD}
_F_BAR = {
    "": mend("f_bar's forward must all-reduce once, with SUM", "The ranks' x are the terms of a sum"),
    "x": mend(
        "f_bar's backward must pass the gradient on unchanged: sum nothing, divide by nothing",
        "After the sum every rank runs the same code, so each has the whole gradient already",
    ),
}


def f(r: CaseRun) -> None:
    x = r.same(4, 3, 5)
    r.operator("f", x, _F)
    leaf, through, beside = x.clone().requires_grad_(), r.same(4, 3, 5), r.same(4, 3, 5)
    (r["f"](leaf, r.group) * through + leaf * beside).sum().backward()
    if leaf.grad is None or not close(leaf.grad, r.t * through + beside):
        raise Wrong(
            "where a residual branch reads x too, the gradient of x is wrong",
            "all-reduce only what comes through f",
            "f changes the residual branch's gradient as well",
        )


def f_bar(r: CaseRun) -> None:
    r.operator("f_bar", r.each(4, 3, 5), _F_BAR, r.same(4, 3, 5))


def column_parallel_linear(r: CaseRun) -> None:
    advice_on_result = mend(
        "return this rank's own output features, [s, b, out/t]: the row-parallel linear takes them as they are",
        "Every rank has other features, so there is nothing to add up or to join",
    )
    given = {"x": r.same(4, 3, 6), "weight": r.each(8, 6), "bias": r.each(8)}
    r.observe(r["column_parallel_linear"], given, r.group, advice={"": advice_on_result, "x": _F_BACKWARD})
    r.saves(lambda x, w, c: r["column_parallel_linear"](x, w, c, r.group), *given.values(), what="x")


def row_parallel_linear(r: CaseRun) -> None:
    given = {"x": r.each(4, 3, 5), "weight": r.each(6, 5), "bias": r.same(6)}
    r.observe(r["row_parallel_linear"], given, r.group, upstream=r.same(4, 3, 6))
    r.saves(lambda x, w, c: r["row_parallel_linear"](x, w, c, r.group), *given.values(), what="x")


def split_attention(r: CaseRun) -> None:
    """Test the shards of weights that the learner's function returns, on each of several ranks.

    Any assignment of whole heads to ranks is right.  So no rank's shards are compared with ours: attention is computed
    with them, and its sum over the ranks is compared.
    """
    here = 2
    heads = here * r.t
    h = 4 * heads  # so that splitting a rank's part into all heads, a mistake, runs
    qkv, projection, x = r.same(3 * h, h), r.same(h, h), r.same(5, 2, h)
    with r.unwritten(), r.watching():
        result = r["split_attention"](qkv, projection, heads, r.group)
    check_tensors(result, "this rank's qkv_weight and its projection_weight")
    own_qkv, own_projection = (part.detach() for part in result)
    if own_qkv.shape[1:] == (h,) and own_projection.dim() == 2 and len(own_projection) == h:
        rows, columns = _heads_of(own_qkv, qkv, heads), _heads_of(own_projection.t(), projection.t(), heads)
        wanted = [f"{which}{head[1:]}" for which in "QKV" for head in columns]
        if rows and columns and (rows != wanted or len(columns) != here):
            of = "heads" if len(columns) > 1 else "head"
            raise Wrong(
                f"rank {r.rank}'s QKV part has the rows of {', '.join(rows)}, and its projection the columns of {of} "
                f"{', '.join(head[1:] for head in columns)}",
                f"take Q, then K, then V of the same {here} heads, in the order of the columns",
            )
    r.see_value("the shape of this rank's qkv_weight", list(own_qkv.shape))
    r.see_value("the shape of this rank's projection_weight", list(own_projection.shape))
    if (own_qkv.shape, own_projection.shape) == ((3 * h // r.t, h), (h, h // r.t)):
        context = merge_heads(core_attention(*split_heads(F.linear(x, own_qkv), here)), x.shape[1])
        r.see(SummedTensor("the attention", F.linear(context, own_projection)))


def _heads_of(part: Tensor, whole: Tensor, heads: int) -> list[str]:
    """Which heads of Q, K, V the rows of a part are, in their order: ``Q0``.  Empty unless they are rows of the
    whole."""
    d = whole.shape[1] // heads
    places = (part[:, None] == whole).all(-1).nonzero()[:, 1].tolist()
    if len(places) % d or places != [first + i for first in places[::d] for i in range(d)]:
        return []
    return [f"{'QKV'[first // len(whole.t())]}{first // d % heads}" for first in places[::d]]


def mlp(r: CaseRun) -> None:
    given = {"x": r.same(4, 3, 4), "up_weight": r.each(16, 4), "up_bias": r.each(16)}
    given |= {"down_weight": r.each(4, 16), "down_bias": r.same(4)}
    r.observe(r["mlp"], given, r.group, upstream=r.same(4, 3, 4))


def attention(r: CaseRun) -> None:
    # With 3 heads a rank a/2 isn't t.  Both divide by 2 and 4, so that a rank's part can be split into all heads
    # by mistake.
    for here, prefix in ((3, ""), (2, "with 2 heads on each rank, ")):
        a, part = here * r.t, 4 * here
        h = 4 * a
        given = {"x": r.same(5, 3, h), "qkv_weight": r.each(3 * part, h), "qkv_bias": r.each(3 * part)}
        given |= {"projection_weight": r.each(h, part), "projection_bias": r.same(h)}
        r.observe(r["attention"], given, a, r.group, upstream=r.same(5, 3, h), prefix=prefix)


_OVERFLOWS = mend("subtract the largest logit of all ranks before exp", "exp of a logit above 709 is infinite")


def vocab_parallel_cross_entropy(r: CaseRun) -> None:
    s, rows = max(4, r.t), 5
    logits, targets = 3 * r.shard(s, 3, rows * r.t, dim=2), (r.same(s, 3) * 1e6).long().remainder(rows * r.t)
    # The first and the last id of every rank, where an id off by one goes to another rank.
    ends = torch.arange(r.t, device=r.device) * rows
    targets.view(-1)[: 2 * r.t] = torch.cat((ends, ends + rows - 1))
    upstream = r.same(s, 3)
    # Largest, sum and target, even if every rank's are gathered; of the logits it would be five of each rank.
    few = "a few numbers per position are enough"
    sends = Cost("", 3 * r.t * upstream.nbytes, few, "the logits themselves are sent")
    # exp overflows unless the largest of all ranks is subtracted first.
    for scale, prefix in ((1, ""), (300, "for logits of a thousand and more, ")):
        r.observe(
            lambda x: r["vocab_parallel_cross_entropy"](x, targets, r.group),
            {"logits": scale * logits},
            upstream=upstream,
            prefix=prefix,
            sends=sends,
            advice={"": _OVERFLOWS} if scale > 1 else None,
        )
