"""Lab 2's whole blocks: attention weights cut by heads, the MLP, self-attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import TOLERANCE, close, summed
from actmem_course.judge.lab_checks.blocks import Block, gradients_explained
from actmem_course.judge.lab_checks.known_blocks import (
    attention_program,
    attention_variants,
    mlp_program,
    mlp_variants,
)
from actmem_course.judge.lab_checks.operators import check_bias_everywhere, size_of
from actmem_course.judge.passes import check_exchanges, check_gradient, run_passes
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench, unchanged
from actmem_course.pieces import core_attention, merge_heads, split_heads

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


def dense_attention(x: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, projection_weight: Tensor, heads: int) -> Tensor:
    """Self-attention without the projection's bias."""
    q, k, v = split_heads(F.linear(x, qkv_weight, qkv_bias), heads)
    return F.linear(merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight)


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
    ups, up_biases = b.shards(b.random(4 * h * t, h, seed=32)), b.shards(b.random(4 * h * t, seed=33))
    downs, down_bias = b.shards(b.random(h, 4 * h * t, seed=34), dim=1), b.random(h, seed=35)
    weights = [
        {"up_weight": w, "up_bias": c, "down_weight": d, "down_bias": down_bias}
        for w, c, d in zip(ups, up_biases, downs)
    ]
    _check_block(b, "mlp", (b.group,), Block([x] * t, weights, [upstream] * t, mlp_program, mlp_variants))


def check_attention(b: Bench) -> None:
    heads, qkv, qkv_bias, projection, bias = attention_weights(b, seed=40)
    h, t = qkv.shape[1], b.size
    x, upstream = b.random(5, 3, h, seed=45), b.random(5, 3, h, seed=46)
    weights = [
        {
            "qkv_weight": rows_of_rank(b, qkv, rank),
            "qkv_bias": rows_of_rank(b, qkv_bias, rank),
            "projection_weight": own,
            "projection_bias": bias,
        }
        for rank, own in enumerate(b.shards(projection, 1))
    ]
    program, variants = attention_program(heads), attention_variants(heads, _HEAD_SIZE)
    _check_block(b, "attention", (heads, b.group), Block([x] * t, weights, [upstream] * t, program, variants))


def _check_block(b: Bench, name: str, rest: Sequence, block: Block) -> None:
    """Result, gradients and exchanges of a block that begins with f and ends with f_bar and a bias."""
    t, x, own = b.size, block.x[b.rank], block.weights[b.rank]
    result, gradients = block.right()[b.rank]
    passes = run_passes(
        b,
        b[name],
        {"x": x, **own},
        rest,
        expected=result,
        upstream=block.upstream[b.rank],
        more=block.mistakes(b.rank),
    )
    *cut, last_bias = own
    for weight in cut:
        twice = f"the gradient of {weight} is t times what it should be: the backward of the sum at the end all-reduces"
        check_gradient(passes, weight, gradients[weight], {twice: t * gradients[weight]}, t)
    with gradients_explained(block, b.rank, passes):
        check_gradient(passes, "x", gradients["x"], t=t)
    check_bias_everywhere(b, passes.gradients[last_bias], last_bias)
    check_gradient(passes, last_bias, gradients[last_bias], t=t)
    check_exchanges(b, passes, {"all-reduce": size_of(x)}, {"all-reduce": size_of(x)})
