"""Lab 2's whole blocks: attention weights cut by heads, the MLP, self-attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import TOLERANCE, close, summed
from actmem_course.judge.lab_checks.blocks import Block, gradients_explained
from actmem_course.judge.lab_checks.known_blocks import (
    attention_program,
    attention_variants,
    mlp_program,
    scaled_biases,
)
from actmem_course.judge.lab_checks.operators import ACTIVATIONS, check_bias_everywhere, size_of
from actmem_course.judge.passes import Passes, check_exchanges, check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench, unchanged
from actmem_course.pieces import core_attention, gelu, merge_heads, split_heads

#: Divisible by 2 and 4 ranks, so that a rank's part can be split into all heads by mistake, and be told.
_HEAD_SIZE = 4


def attention_weights(b: Bench, seed: int) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """2t heads, and unsharded QKV weight and bias, projection weight and bias."""
    heads = 2 * b.size
    h = heads * _HEAD_SIZE
    return (
        heads,
        b.random(3 * h, h, seed=seed),
        b.random(3 * h, seed=seed + 1),
        b.random(h, h, seed=seed + 2),
        b.random(h, seed=seed + 3),
    )


def dense_attention(
    x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, projection_weight: Tensor, heads: int, core=core_attention
) -> Tensor:
    """Self-attention without the projection's bias."""
    q, k, v = split_heads(F.linear(x, qkv_weight, qkv_bias), heads)
    return F.linear(merge_heads(core(q, k, v), x.shape[1]), projection_weight)


def rows_of_rank(b: Bench, full: Tensor, rank: int) -> Tensor:
    """Rank's rows of Q, of K and of V, for a tensor that has all of Q, K, V along dimension 0."""
    return torch.cat([part.chunk(b.size)[rank] for part in full.chunk(3)])


def check_split_attention(b: Bench) -> None:
    heads, qkv, _, projection, _ = attention_weights(b, seed=20)
    h = qkv.shape[1]
    with unchanged(qkv_weight=qkv, projection_weight=projection), b.watching():
        result = b["split_attention"](qkv, projection, heads, b.group)
    if (
        not isinstance(result, (tuple, list))
        or len(result) != 2
        or not all(isinstance(part, Tensor) for part in result)
    ):
        raise Wrong("expected two tensors: this rank's qkv_weight and its projection_weight")
    own_qkv, own_projection = (part.detach() for part in result)
    if b.size > 1:
        _check_cut(b, own_qkv, own_projection, qkv)
    for name, part, sizes in (
        ("qkv_weight", own_qkv, (3 * h // b.size, h)),
        ("projection_weight", own_projection, (h, h // b.size)),
    ):
        if part.shape != sizes:
            raise Wrong(f"this rank's {name} has shape {list(part.shape)}; expected {list(sizes)}")
    # Any assignment of whole heads to ranks is right, so what counts is the sum over the ranks.
    x, no_bias = b.random(5, 2, h, seed=24), qkv.new_zeros(3 * h)
    parts = b.gather((own_qkv, own_projection))
    found = summed(dense_attention(x, w, no_bias[: w.shape[0]], p, heads // b.size) for w, p in parts)
    if not close(found, dense_attention(x, qkv, no_bias, projection, heads), 1e3 * TOLERANCE):
        # Each rank looks at its own part; the first that finds a fault speaks for all.
        faults = [
            fault for fault in b.gather(_explain_split(b, own_qkv, own_projection, qkv, projection, heads)) if fault
        ]
        raise Wrong(faults[0] if faults else "the ranks' parts together do not give the whole attention")


def _check_cut(b: Bench, own_qkv: Tensor, own_projection: Tensor, qkv: Tensor) -> None:
    h = qkv.shape[1]
    if close(own_qkv, qkv.chunk(b.size)[b.rank]):
        raise Wrong(
            "the 3h rows are cut into t blocks, so rank 0 gets the first rows and not its heads: each rank needs Q, K and V of the "
            "same heads, so cut each of the three"
        )
    if own_qkv.shape == (3 * h, h // b.size):
        raise Wrong(
            "the QKV weight is cut along its input features: heads are its output features, dimension 0 of [out, in]"
        )
    if own_projection.shape == (h // b.size, h):
        raise Wrong(
            "the projection is cut along its output features: heads are its input features, dimension 1 of [out, in]"
        )


def _explain_split(
    b: Bench, own_qkv: Tensor, own_projection: Tensor, qkv: Tensor, projection: Tensor, heads: int
) -> str:
    """What is wrong with this rank's part; "" if nothing is by itself."""
    h, here = qkv.shape[1], heads // b.size
    rows = _sources(own_qkv, qkv)
    if rows is None:
        return "some rows of the QKV part are not rows of qkv_weight"
    kinds, of_head = rows // h, rows % h // _HEAD_SIZE
    q, k, v = (set(of_head[kinds == kind].tolist()) for kind in range(3))
    if kinds.bincount(minlength=3).tolist() != [h // b.size] * 3:
        return "each rank needs as many rows of Q as of K and of V; here the three are mixed"
    if not q == k == v:
        return f"the rank's Q, K and V belong to different heads: Q to {_numbers(q)}, K to {_numbers(k)}, V to {_numbers(v)}"
    if len(q) != here:
        return f"heads are cut apart: each rank has {here} whole heads, here it has rows of {len(q)}"
    if not torch.equal(kinds, kinds.sort().values):
        return "the QKV part has the right rows in another order: expected all rows of Q first, then K, then V"
    if b.rank and 0 in q:
        return f"every rank takes heads {_numbers(q)}: which heads are a rank's follows from dist.get_rank(group)"
    columns = _sources(own_projection.t(), projection.t())
    if columns is None:
        return "some columns of the projection part are not columns of projection_weight"
    of_projection = set((columns // _HEAD_SIZE).tolist())
    if of_projection != q:
        return f"the rank has the QKV rows of heads {_numbers(q)} and the projection's columns of heads {_numbers(of_projection)}"
    return ""


def _sources(part: Tensor, full: Tensor) -> Tensor | None:
    """For each row of ``part`` its number in ``full``; None if one is not there."""
    same = (part.unsqueeze(1) == full.unsqueeze(0)).all(-1)
    return same.int().argmax(1).cpu() if same.any(1).all() else None


def _numbers(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def check_mlp(b: Bench) -> None:
    h, t = 4, b.size
    x, upstream = b.random(4, 3, h, seed=30), b.random(4, 3, h, seed=31)
    up, up_bias, down, down_bias = (
        b.random(4 * h * t, h, seed=32),
        b.random(4 * h * t, seed=33),
        b.random(h, 4 * h * t, seed=34),
        b.random(h, seed=35),
    )
    ups, up_biases, downs = b.shards(up), b.shards(up_bias), b.shards(down, dim=1)

    def dense(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, activation=gelu) -> Tensor:
        return F.linear(activation(F.linear(x, up, up_bias)), down, down_bias)

    whole = _gradients(dense, upstream, x, up, up_bias, down, down_bias)
    everyone = [
        {"up_weight": w, "up_bias": c, "down_weight": d, "down_bias": down_bias}
        for w, c, d in zip(ups, up_biases, downs)
    ]
    block = Block([x] * t, everyone, [upstream] * t, mlp_program, scaled_biases("up_bias", "down_bias"))
    partial = sum(F.linear(F.linear(x, w, c), d) for w, c, d in zip(ups, up_biases, downs))
    own = {
        "x": x,
        "up_weight": ups[b.rank],
        "up_bias": up_biases[b.rank],
        "down_weight": downs[b.rank],
        "down_bias": down_bias,
    }
    passes = run_passes(
        b,
        b["mlp"],
        own,
        (b.group,),
        expected=whole[0],
        upstream=upstream,
        mistakes={
            "the result holds down_bias t times: it is added on every rank before the all-reduce": whole[0]
            + (t - 1) * down_bias,
            "the result is this rank's part only: the down product must leave through f_bar": F.linear(
                gelu(F.linear(x, ups[b.rank], up_biases[b.rank])), downs[b.rank], down_bias
            ),
            "there is no gelu between the two linears": partial + down_bias,
            "the gelu comes after the sum; it belongs between the two linears": gelu(partial + down_bias),
            **{diagnosis: dense(x, up, up_bias, down, down_bias, other) for diagnosis, other in ACTIVATIONS.items()},
            "up_bias is missing": dense(x, up, 0 * up_bias, down, down_bias),
            "down_bias is missing": whole[0] - down_bias,
            "x is added to the result: this is the MLP alone; the layer adds x afterwards": whole[0] + x,
        },
        more=block.mistakes(b.rank),
    )
    _check_block(
        b,
        passes,
        whole,
        {"up_weight": b.shards(whole[2]), "up_bias": b.shards(whole[3]), "down_weight": b.shards(whole[4], 1)},
        "down_bias",
        block,
    )


#: Other cores of attention, and what to say of them.
_CORES = {
    "there is no causal mask, so a token attends to later ones: use core_attention": F.scaled_dot_product_attention,
    "Q and K are swapped: split_heads gives Q, K, V, and core_attention takes them in this order": lambda q, k, v: (
        core_attention(k, q, v)
    ),
    "K and V are swapped: split_heads gives Q, K, V, and core_attention takes them in this order": lambda q, k, v: (
        core_attention(q, v, k)
    ),
    "the scores are not divided by the root of the head size: use core_attention": lambda q, k, v: core_attention(
        q * q.shape[-1] ** 0.5, k, v
    ),
}


def check_attention(b: Bench) -> None:
    heads, qkv, qkv_bias, projection, bias = attention_weights(b, seed=40)
    h, t = qkv.shape[1], b.size
    x, upstream = b.random(5, 3, h, seed=45), b.random(5, 3, h, seed=46)
    whole = _gradients(
        lambda x, *w: dense_attention(x, w[0], w[1], w[2], heads) + w[3], upstream, x, qkv, qkv_bias, projection, bias
    )

    def cut_qkv(full: Tensor) -> list[Tensor]:
        return [rows_of_rank(b, full, rank) for rank in range(t)]

    own_parts = cut_qkv(qkv)[b.rank], cut_qkv(qkv_bias)[b.rank], b.shards(projection, 1)[b.rank]
    own = dict(zip(("x", "qkv_weight", "qkv_bias", "projection_weight", "projection_bias"), (x, *own_parts, bias)))
    everyone = [
        {"qkv_weight": w, "qkv_bias": c, "projection_weight": p, "projection_bias": bias}
        for w, c, p in zip(cut_qkv(qkv), cut_qkv(qkv_bias), b.shards(projection, 1))
    ]
    program, variants = attention_program(heads), attention_variants(heads, _HEAD_SIZE)
    block = Block([x] * t, everyone, [upstream] * t, program, variants)
    mistakes = {
        "the result holds projection_bias t times: it is added on every rank before the all-reduce": whole[0]
        + (t - 1) * bias,
        "the result is this rank's part only: the projection must leave through f_bar": dense_attention(
            x, *own_parts, heads // t
        )
        + bias,
        "projection_bias is missing": whole[0] - bias,
        "x is added to the result: this is attention alone; the layer adds x afterwards": whole[0] + x,
        **{
            diagnosis: dense_attention(x, qkv, qkv_bias, projection, heads, core) + bias
            for diagnosis, core in _CORES.items()
        },
    }
    if own_parts[0].shape[0] % (3 * heads) == 0:
        all_heads = sum(
            dense_attention(x, w, c, p, heads)
            for w, c, p in zip(cut_qkv(qkv), cut_qkv(qkv_bias), b.shards(projection, 1))
        )
        mistakes[
            "a rank's part is split into a heads; it holds a/t: divide num_attention_heads by the number of ranks"
        ] = all_heads + bias
    passes = run_passes(
        b,
        b["attention"],
        own,
        (heads, b.group),
        expected=whole[0],
        upstream=upstream,
        mistakes=mistakes,
        more=block.mistakes(b.rank),
    )
    parts = {"qkv_weight": cut_qkv(whole[2]), "qkv_bias": cut_qkv(whole[3]), "projection_weight": b.shards(whole[4], 1)}
    _check_block(b, passes, whole, parts, "projection_bias", block)


def _check_block(
    b: Bench, passes: Passes, whole: list[Tensor], parts: dict[str, list[Tensor]], last_bias: str, block: Block
) -> None:
    """Gradients and exchanges of a block that begins with f and ends with f_bar.

    whole: the unsharded block's result and gradients.  parts: every rank's part of a weight's gradient.
    """
    t, x, found = b.size, block.x[b.rank], b.gather(passes.gradients["x"])
    if None not in found and close(sum(found), whole[1]) and not close(found[b.rank], whole[1]):
        raise Wrong("the forward is right; the gradient of x is this rank's own part only: x must enter through f")
    for name, of_rank in parts.items():
        check_gradient(
            passes,
            name,
            of_rank[b.rank],
            {
                f"the gradient of {name} is t times what it should be: the backward of the sum at the end all-reduces": t
                * of_rank[b.rank],
            },
            t,
        )
    with gradients_explained(block, b.rank, passes):
        check_gradient(passes, "x", whole[1], t=t)
    check_bias_everywhere(b, passes.gradients[last_bias], last_bias)
    check_gradient(passes, last_bias, whole[5], t=t)
    check_exchanges(b, passes, {"all-reduce": size_of(x)}, {"all-reduce": size_of(x)})


def _gradients(function, upstream: Tensor, *arguments: Tensor) -> list[Tensor]:
    """The result of ``function``, then the gradient of each argument."""
    leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
    result = function(*leaves)
    result.backward(upstream)
    return [result.detach(), *(leaf.grad for leaf in leaves)]
