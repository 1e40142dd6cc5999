"""Lab 2's cut of attention's weights: whole heads to every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.compare import TOLERANCE, close, summed
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench, unchanged
from actmem_course.pieces import core_attention, merge_heads, split_heads

#: Divisible by 2 and 4 ranks, so that splitting a rank's part into all heads, a mistake, runs and can be named.
HEAD_SIZE = 4


def check_split_attention(b: Bench) -> None:
    t, heads = b.size, 2 * b.size
    h = heads * HEAD_SIZE
    qkv, projection = b.random(3 * h, h, seed=20), b.random(h, h, seed=22)
    with unchanged(qkv_weight=qkv, projection_weight=projection), b.watching():
        result = b["split_attention"](qkv, projection, heads, b.group)
    if not isinstance(result, (tuple, list)) or [isinstance(part, Tensor) for part in result] != [True, True]:
        raise Wrong("expected two tensors: this rank's qkv_weight and its projection_weight")
    own_qkv, own_projection = own = result[0].detach(), result[1].detach()
    cuts = {
        "the 3h rows are cut into t blocks, so rank 0 gets the first rows and not its heads: each rank needs Q, K and V of the "
        "same heads, so cut each of the three": close(own_qkv, qkv.chunk(t)[b.rank]),
        "the QKV weight is cut along its input features: heads are its output features, dimension 0 of [out, in]":
            own_qkv.shape == (3 * h, h // t),
        "the projection is cut along its output features: heads are its input features, dimension 1 of [out, in]":
            own_projection.shape == (h // t, h),
    }  # fmt: skip
    for diagnosis, found in cuts.items():
        if found and t > 1:
            raise Wrong(diagnosis)
    sizes = {"qkv_weight": (3 * h // t, h), "projection_weight": (h, h // t)}
    for (name, size), part in zip(sizes.items(), own):
        if part.shape != size:
            raise Wrong(f"this rank's {name} has shape {list(part.shape)}; expected {list(size)}")

    # Any assignment of whole heads to ranks is right, so what counts is the sum over the ranks.
    def attended(qkv_weight: Tensor, projection_weight: Tensor, heads_there: int) -> Tensor:
        q, k, v = split_heads(F.linear(x, qkv_weight), heads_there)
        return F.linear(merge_heads(core_attention(q, k, v), x.shape[1]), projection_weight)

    x = b.random(5, 2, h, seed=24)
    found_sum = summed(attended(w, p, heads // t) for w, p in b.gather(own))
    if not close(found_sum, attended(qkv, projection, heads), 1e3 * TOLERANCE):
        # Each rank looks at its own part; the first that finds a fault speaks for all.
        faults = [fault for fault in b.gather(_fault(b, *own, qkv, projection, heads // t)) if fault]
        raise Wrong(faults[0] if faults else "the ranks' parts together do not give the whole attention")


def _fault(b: Bench, own_qkv: Tensor, own_projection: Tensor, qkv: Tensor, projection: Tensor, here: int) -> str:
    """What is wrong with this rank's part; "" if nothing is by itself.  here: the heads that it should have."""
    h, rows = qkv.shape[1], _sources(own_qkv, qkv)
    if rows is None:
        return "some rows of the QKV part are not rows of qkv_weight"
    kinds, of_head = rows // h, rows % h // HEAD_SIZE
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
    if columns is None and _sources(own_projection.t(), projection) is not None:
        return (
            "the projection part is cut from projection_weight's transpose: take columns of projection_weight as it is"
        )
    if columns is None:
        return "some columns of the projection part are not columns of projection_weight"
    of_projection = set((columns // HEAD_SIZE).tolist())
    if of_projection != q:
        return f"the rank has the QKV rows of heads {_numbers(q)} and the projection's columns of heads {_numbers(of_projection)}"
    return ""


def _sources(part: Tensor, full: Tensor) -> Tensor | None:
    """For each row of ``part`` its number in ``full``; None if one is not there."""
    same = (part.unsqueeze(1) == full.unsqueeze(0)).all(-1)
    return same.int().argmax(1).cpu() if same.any(1).all() else None


def _numbers(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
