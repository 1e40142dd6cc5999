"""Lab 2: tensor parallelism."""

from __future__ import annotations

import torch

from actmem_course.judge.compare import summed
from actmem_course.judge.kept import check_keeps
from actmem_course.judge.lab_checks.blocks import Block, gradients_explained
from actmem_course.judge.lab_checks.exchanged import explain_exchange, ran
from actmem_course.judge.lab_checks.known_blocks import column_program, row_program, scaled_biases
from actmem_course.judge.lab_checks.operators import check_bias_everywhere, check_keeps_nothing, size_of
from actmem_course.judge.passes import check_exchanges, check_gradient, run_passes
from actmem_course.judge.workbench import Bench


def check_f(b: Bench) -> None:
    f, t = b["f"], b.size
    x, upstream = b.random(4, 3, 5, seed=1), b.random_by_rank(4, 3, 5, seed=2)
    own, whole = upstream[b.rank], summed(upstream)
    passes = run_passes(
        b,
        f,
        {"x": x},
        (b.group,),
        expected=x,
        upstream=own,
        mistakes={"f's forward must return x as it is; here it already sums x over the ranks": t * x},
    )
    check_gradient(
        passes,
        "x",
        whole,
        {
            **(
                {}
                if passes.backward.collectives
                else {"the gradient of x is this rank's own part only: f's backward must all-reduce": own}
            ),
            "the gradient of x is t times what it should be: f's backward all-reduces twice": t * whole,
            "the gradient of x is 1/t of what it should be: f's backward averages; the parts must be summed": whole / t,
            "the gradient of x is 1/t of this rank's own part: f's backward must all-reduce and not divide": own / t,
            "the gradient of x is the largest of the ranks' parts: all-reduce with SUM, not MAX": torch.stack(
                upstream
            ).amax(0),
        },
        t,
        lambda found: explain_exchange(
            found, whole, upstream, b.rank, "f's backward must all-reduce, with SUM", ran=ran(passes.backward)
        ),
    )
    check_exchanges(b, passes, {}, {"all-reduce": size_of(x)})
    check_keeps_nothing(b, f, x)


def check_f_bar(b: Bench) -> None:
    f_bar, t = b["f_bar"], b.size
    parts, upstream = b.random_by_rank(4, 3, 5, seed=3), b.random(4, 3, 5, seed=4)
    own, whole = parts[b.rank], summed(parts)
    passes = run_passes(
        b,
        f_bar,
        {"x": own},
        (b.group,),
        expected=whole,
        upstream=upstream,
        mistakes={
            "the result is this rank's own x: f_bar's forward must all-reduce": own,
            "the result is 1/t of what it should be: f_bar sums the parts, it doesn't average them": whole / t,
            "the result is t times what it should be: f_bar's forward all-reduces twice": t * whole,
        },
        explain=lambda found: explain_exchange(found, whole, parts, b.rank, "f_bar's forward all-reduces, with SUM"),
    )
    check_gradient(
        passes,
        "x",
        upstream,
        {
            "the gradient of x is t times what it should be: f_bar's backward must not all-reduce. After the sum every rank "
            "runs the same code, so each already holds the whole gradient": t * upstream,
            "the gradient of x is 1/t of what it should be: f_bar's backward divides by t, but must pass the gradient on unchanged": upstream
            / t,
        },
        t,
    )
    check_exchanges(b, passes, {"all-reduce": size_of(own)}, {})
    check_keeps_nothing(b, f_bar, own)


def check_column_parallel_linear(b: Bench) -> None:
    function, t = b["column_parallel_linear"], b.size
    x, weight, bias = b.random(4, 3, 6, seed=5), b.random(5 * t, 6, seed=6), b.random(5 * t, seed=7)
    upstream = b.shards(b.random(4, 3, 5 * t, seed=8), dim=2)
    own_weight, own_bias, own = b.shards(weight)[b.rank], b.shards(bias)[b.rank], upstream[b.rank]
    everyone = [{"weight": w, "bias": c} for w, c in zip(b.shards(weight), b.shards(bias))]
    block = Block([x] * t, everyone, upstream, column_program, scaled_biases("bias"))
    y = x @ own_weight.t()
    passes = run_passes(
        b,
        function,
        {"x": x, "weight": own_weight, "bias": own_bias},
        (b.group,),
        expected=y + own_bias,
        upstream=own,
        mistakes={
            "the result lacks the bias": y,
            "the result is gathered from all ranks: return this rank's [s, b, out/t], which is just what the "
            "row-parallel linear after it takes": x @ weight.t() + bias,
            "the result is summed over the ranks: they hold different output features, so there is nothing to add up": summed(
                x @ w.t() + c for w, c in zip(b.shards(weight), b.shards(bias))
            ),
            "x is summed over the ranks on its way in: every rank holds the same x, so it must enter through f, not f_bar": t
            * y
            + own_bias,
        },
        more=block.mistakes(b.rank),
    )
    with gradients_explained(block, b.rank, passes):
        parts = [u @ w for u, w in zip(upstream, b.shards(weight))]
        check_gradient(
            passes,
            "x",
            summed(parts),
            {
                "the gradient of x is this rank's own part only: x must enter through f": parts[b.rank],
                "the gradient of x is t times what it should be: it is all-reduced twice": t * summed(parts),
                "the gradient of x is 1/t of what it should be: it is averaged over the ranks instead of summed": summed(
                    parts
                )
                / t,
            },
            t,
        )
        own_gradient = own.flatten(0, 1).t() @ x.flatten(0, 1)
        all_gradients = summed(u.flatten(0, 1).t() @ x.flatten(0, 1) for u in upstream)
        check_gradient(
            passes,
            "weight",
            own_gradient,
            {
                "the gradient of weight is summed over the ranks: each rank's weight is its own, so its gradient needs no exchange": all_gradients,
            },
            t,
        )
        check_gradient(
            passes,
            "bias",
            own.sum((0, 1)),
            {
                "the gradient of bias is summed over the ranks: each rank's bias is its own": summed(
                    u.sum((0, 1)) for u in upstream
                ),
            },
            t,
        )
    check_exchanges(b, passes, {}, {"all-reduce": size_of(x)})
    check_keeps(b, size_of(x), "x", lambda y, w, c: function(y, w, c, b.group), x, (own_weight, own_bias))


def check_row_parallel_linear(b: Bench) -> None:
    function, t = b["row_parallel_linear"], b.size
    full, weight, bias = b.random(4, 3, 5 * t, seed=9), b.random(6, 5 * t, seed=10), b.random(6, seed=11)
    upstream = b.random(4, 3, 6, seed=12)
    xs, weights = b.shards(full, dim=2), b.shards(weight, dim=1)
    x, own_weight = xs[b.rank], weights[b.rank]
    y = full @ weight.t()
    block = Block(
        xs, [{"weight": w, "bias": bias} for w in weights], [upstream] * t, row_program, scaled_biases("bias")
    )
    passes = run_passes(
        b,
        function,
        {"x": x, "weight": own_weight, "bias": bias},
        (b.group,),
        expected=y + bias,
        upstream=upstream,
        mistakes={
            "the result holds the bias t times: every rank adds it before the all-reduce; add it once, after": y
            + t * bias,
            "the result lacks the bias": y,
            "the result is this rank's part only: the ranks' products are partial sums and must leave through f_bar": x
            @ own_weight.t()
            + bias,
            "the result is this rank's part only, without the bias: the ranks' products must leave through f_bar": x
            @ own_weight.t(),
            "the result is averaged over the ranks, not summed": y / t + bias,
        },
        more=block.mistakes(b.rank),
    )
    with gradients_explained(block, b.rank, passes):
        own_gradient = upstream @ own_weight
        check_gradient(
            passes,
            "x",
            own_gradient,
            {
                "the gradient of x is t times what it should be: the backward of the sum all-reduces again, but must pass the gradient on unchanged": t
                * own_gradient,
                "the gradient of x is 1/t of what it should be: the backward of the sum divides by t": own_gradient / t,
                "the gradient of x is summed over the ranks: each rank's x holds other features, so its gradient needs no exchange "
                "(no f at the entry)": summed(upstream @ w for w in weights),
            },
            t,
        )
        check_gradient(passes, "weight", upstream.flatten(0, 1).t() @ x.flatten(0, 1), t=t)
        check_bias_everywhere(b, passes.gradients["bias"], "bias")
        whole = upstream.sum((0, 1))
        check_gradient(
            passes,
            "bias",
            whole,
            {
                "the gradient of bias is 1/t of what it should be: the bias is divided among the ranks before the sum; add it whole, after": whole
                / t,
                "the gradient of bias is t times what it should be: every rank has the whole gradient already, so summing it counts it t times": t
                * whole,
            },
            t,
        )
    check_exchanges(b, passes, {"all-reduce": size_of(y)}, {})
    check_keeps(b, size_of(x), "x", lambda y, w, c: function(y, w, c, b.group), x, (own_weight, bias))
