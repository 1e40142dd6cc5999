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
    weights = [{"weight": w, "bias": c} for w, c in zip(b.shards(weight), b.shards(bias))]
    block = Block([x] * t, weights, upstream, column_program, scaled_biases("bias"))
    own, right = weights[b.rank], block.right()
    result, gradients = right[b.rank]
    passes = run_passes(
        b,
        function,
        {"x": x, **own},
        (b.group,),
        expected=result,
        upstream=upstream[b.rank],
        mistakes={
            "the result is gathered from all ranks: return this rank's [s, b, out/t], which is just what the "
            "row-parallel linear after it takes": torch.cat([y for y, _ in right], -1),
            "the result is summed over the ranks: they hold different output features, so there is nothing to add up": summed(
                y for y, _ in right
            ),
            "x is summed over the ranks on its way in: every rank holds the same x, so it must enter through f, not f_bar": t
            * (result - own["bias"])
            + own["bias"],
        },
        more=block.mistakes(b.rank),
    )
    with gradients_explained(block, b.rank, passes):
        averaged = "the gradient of x is 1/t of what it should be: it is averaged over the ranks instead of summed"
        check_gradient(passes, "x", gradients["x"], {averaged: gradients["x"] / t}, t)
        for name in own:
            exchanged = f"the gradient of {name} is summed over the ranks: each rank's {name} is its own, so its gradient needs no exchange"
            check_gradient(passes, name, gradients[name], {exchanged: summed(of_rank[name] for _, of_rank in right)}, t)
    check_exchanges(b, passes, {}, {"all-reduce": size_of(x)})
    check_keeps(b, size_of(x), "x", lambda y, w, c: function(y, w, c, b.group), x, tuple(own.values()))


def check_row_parallel_linear(b: Bench) -> None:
    function, t = b["row_parallel_linear"], b.size
    xs, bias = b.shards(b.random(4, 3, 5 * t, seed=9), dim=2), b.random(6, seed=11)
    weights = [{"weight": w, "bias": bias} for w in b.shards(b.random(6, 5 * t, seed=10), dim=1)]
    upstream = b.random(4, 3, 6, seed=12)
    block = Block(xs, weights, [upstream] * t, row_program, scaled_biases("bias"))
    x, own, right = xs[b.rank], weights[b.rank], block.right()
    result, gradients = right[b.rank]
    passes = run_passes(
        b,
        function,
        {"x": x, **own},
        (b.group,),
        expected=result,
        upstream=upstream,
        mistakes={
            "the result holds the bias t times: every rank adds it before the all-reduce; add it once, after": result
            + (t - 1) * bias,
            "the result is this rank's part only, without the bias: the ranks' products must leave through f_bar": x
            @ own["weight"].t(),
            "the result is averaged over the ranks, not summed": (result - bias) / t + bias,
        },
        more=block.mistakes(b.rank),
    )
    with gradients_explained(block, b.rank, passes):
        check_gradient(
            passes,
            "x",
            gradients["x"],
            {
                "the gradient of x is t times what it should be: the backward of the sum all-reduces again, but must pass the gradient on unchanged": t
                * gradients["x"],
                "the gradient of x is 1/t of what it should be: the backward of the sum divides by t": gradients["x"]
                / t,
                "the gradient of x is summed over the ranks: each rank's x holds other features, so its gradient needs no exchange "
                "(no f at the entry)": summed(of_rank["x"] for _, of_rank in right),
            },
            t,
        )
        check_gradient(passes, "weight", gradients["weight"], t=t)
        check_bias_everywhere(b, passes.gradients["bias"], "bias")
        check_gradient(
            passes,
            "bias",
            gradients["bias"],
            {
                "the gradient of bias is 1/t of what it should be: the bias is divided among the ranks before the sum; add it whole, after": gradients[
                    "bias"
                ]
                / t,
                "the gradient of bias is t times what it should be: every rank has the whole gradient already, so summing it counts it t times": t
                * gradients["bias"],
            },
            t,
        )
    check_exchanges(b, passes, {"all-reduce": size_of(result)}, {})
    check_keeps(b, size_of(x), "x", lambda y, w, c: function(y, w, c, b.group), x, tuple(own.values()))
