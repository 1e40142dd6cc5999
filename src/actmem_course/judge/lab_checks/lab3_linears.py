"""Lab 3's column-parallel linear, which keeps the gathered input or its shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from actmem.measure.comms import Collective
from actmem_course.judge.compare import summed
from actmem_course.judge.kept import check_keeps
from actmem_course.judge.lab_checks.blocks import Block
from actmem_course.judge.lab_checks.known_blocks import gathering_program, scaled_biases
from actmem_course.judge.lab_checks.operators import size_of
from actmem_course.judge.passes import Passes, check_collectives, check_exchanges, check_gradient, run_passes
from actmem_course.judge.workbench import Bench


def check_gathering_linear(b: Bench) -> None:
    passes, full, _ = _check_numbers(b, "gathering_linear", seed=10)
    if b.size > 1:
        check_collectives("forward", passes.forward.collectives, [Collective("all-gather", size_of(full))])
        # Whoever gathers again here has already found what exercise 3.5 is after.
        again = [Collective("all-gather", size_of(full))] * (len(passes.backward.collectives) == 2)
        check_collectives(
            "backward", passes.backward.collectives, [Collective("reduce-scatter", size_of(full)), *again]
        )


def check_shard_keeping_linear(b: Bench) -> None:
    passes, full, (x, weight, bias) = _check_numbers(b, "shard_keeping_linear", seed=20)
    check_keeps(
        b,
        size_of(x),
        "x, this rank's tokens",
        lambda y, w, c: b["shard_keeping_linear"](y, w, c, b.group),
        x,
        (weight, bias),
        more="save the shard and gather it again in backward",
    )
    check_exchanges(
        b, passes, {"all-gather": size_of(full)}, {"all-gather": size_of(full), "reduce-scatter": size_of(full)}
    )


def _check_numbers(b: Bench, name: str, seed: int) -> tuple[Passes, torch.Tensor, tuple]:
    """Result and gradients of a column-parallel linear under sequence parallelism."""
    t = b.size
    shards = b.random_by_rank(2, 3, 6, seed=seed)
    weights = b.shards(b.random(5 * t, 6, seed=seed + 1))
    biases = b.shards(b.random(5 * t, seed=seed + 2))
    upstream = b.random_by_rank(2 * t, 3, 5, seed=seed + 3)
    x, weight, bias, own = (values[b.rank] for values in (shards, weights, biases, upstream))
    full = torch.cat(shards)
    y = full @ weight.t()
    everyone = [{"weight": w, "bias": c} for w, c in zip(weights, biases)]
    block = Block(shards, everyone, upstream, gathering_program, scaled_biases("bias"))
    passes = run_passes(
        b,
        b[name],
        {"x": x, "weight": weight, "bias": bias},
        (b.group,),
        expected=y + bias,
        upstream=own,
        mistakes={
            "the result has this rank's tokens only: x must enter through g": x @ weight.t() + bias,
            "the result lacks the bias": y,
            "the result holds the bias t times": y + t * bias,
            "the linear is applied before the gathering: the ranks' outputs of their own tokens and weights are joined, so most "
            "tokens meet another rank's weight. Gather x first": torch.cat(
                [F.linear(s, w, c) for s, w, c in zip(shards, weights, biases)]
            ),
        },
        more=block.mistakes(b.rank),
    )
    partial = [u @ w for u, w in zip(upstream, weights)]
    whole = summed(partial).chunk(t)[b.rank]
    check_gradient(
        passes,
        "x",
        whole,
        {
            "the gradient of x is taken from this rank's gradient alone: the ranks' gradients must be added up (reduce-scatter)": partial[
                b.rank
            ].chunk(t)[b.rank],
            "the gradient of x is 1/t of what it should be: the ranks' gradients are averaged, and must be summed": whole
            / t,
            "the gradient of x is t times what it should be: the ranks' gradients are added up twice": t * whole,
        },
        t,
    )
    rows, own_rows = own.flatten(0, 1), own.chunk(t)[b.rank].flatten(0, 1)
    check_gradient(
        passes,
        "weight",
        rows.t() @ full.flatten(0, 1),
        {
            "the gradient of weight comes from this rank's tokens only: the weight was applied to all tokens, so x must be gathered again": own_rows.t()
            @ x.flatten(0, 1),
            "the gradient of weight is summed over the ranks: each rank's weight is its own": summed(
                u.flatten(0, 1).t() @ full.flatten(0, 1) for u in upstream
            ),
        },
        t,
    )
    check_gradient(
        passes,
        "bias",
        own.sum((0, 1)),
        {
            "the gradient of bias comes from this rank's tokens only: the bias is added to all tokens": own_rows.sum(0),
            "the gradient of bias is summed over the ranks: each rank's bias is its own": summed(
                u.sum((0, 1)) for u in upstream
            ),
        },
        t,
    )
    return passes, full, (x, weight, bias)
