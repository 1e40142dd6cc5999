"""Lab 3: sequence parallelism."""

from __future__ import annotations

import torch

from actmem_course.judge.compare import summed
from actmem_course.judge.lab_checks.exchanged import explain_exchange, ran
from actmem_course.judge.lab_checks.operators import check_keeps_nothing, size_of
from actmem_course.judge.passes import check_exchanges, check_gradient, run_passes
from actmem_course.judge.workbench import Bench


def check_g(b: Bench) -> None:
    g, t = b["g"], b.size
    shards, upstream = b.random_by_rank(2, 3, 5, seed=1), b.random_by_rank(2 * t, 3, 5, seed=2)
    own, full = shards[b.rank], torch.cat(shards)
    passes = run_passes(
        b,
        g,
        {"x": own},
        (b.group,),
        expected=full,
        upstream=upstream[b.rank],
        mistakes={
            "the result is this rank's x: g's forward must gather the tokens of all ranks": own,
            "the shards are joined along dimension 1, the batch: tokens are dimension 0": torch.cat(shards, 1),
            "the shards are joined along dimension 2, the hidden one: tokens are dimension 0": torch.cat(shards, 2),
            "the shards are stacked in a new dimension: join them along dimension 0": torch.stack(shards),
            "the shards are added up: g's forward joins them, one after the other": summed(shards),
            "the shards are joined in the wrong order: rank 0's tokens come first": torch.cat(shards[::-1]),
            "the tokens are interleaved, one from each rank in turn: rank r's tokens are contiguous, from r·s/t on": torch.stack(
                shards, 1
            ).flatten(0, 1),
        },
        explain=lambda found: explain_exchange(found, full, shards, b.rank, "g's forward gathers along dimension 0"),
    )
    parts = [u.chunk(t)[b.rank] for u in upstream]
    own_part, whole = parts[b.rank], summed(parts)
    check_gradient(
        passes,
        "x",
        whole,
        {
            "the gradient of x is taken from this rank's gradient alone: every rank used these tokens, so the ranks' gradients "
            "must be added up as well (reduce-scatter)": own_part,
            "the gradient of x is 1/t of what it should be: the ranks' gradients are averaged, and must be summed": whole
            / t,
            "the gradient of x is t times what it should be: the ranks' gradients are added up twice": t * whole,
            "the gradient of x is the largest of the ranks' gradients: reduce-scatter with SUM, not MAX": torch.stack(
                parts
            ).amax(0),
            "the gradient of x belongs to another rank's tokens": summed(u.chunk(t)[b.rank - 1] for u in upstream),
        },
        t,
        lambda found: explain_exchange(
            found, whole, upstream, b.rank, "g's backward reduce-scatters, with SUM", ran=ran(passes.backward)
        ),
    )
    check_exchanges(b, passes, {"all-gather": size_of(full)}, {"reduce-scatter": size_of(full)})
    check_keeps_nothing(b, g, own)


def check_g_bar(b: Bench) -> None:
    g_bar, t = b["g_bar"], b.size
    full, upstream = b.random_by_rank(2 * t, 3, 5, seed=3), b.random_by_rank(2, 3, 5, seed=4)
    own, total = full[b.rank], summed(full)
    expected = total.chunk(t)[b.rank]
    passes = run_passes(
        b,
        g_bar,
        {"x": own},
        (b.group,),
        expected=expected,
        upstream=upstream[b.rank],
        mistakes={
            "the result has all tokens: g_bar's forward adds up and leaves this rank's tokens only": total,
            "the result is this rank's tokens of its own x: the ranks' x must be added up": own.chunk(t)[b.rank],
            "the result is 1/t of what it should be: the ranks' x are averaged, and must be summed": expected / t,
            "the result is another rank's tokens": total.chunk(t)[b.rank - 1],
            "every rank has the tokens of rank 0": total.chunk(t)[0],
            "the tokens are interleaved: this rank's tokens are contiguous, from r·s/t on": total[b.rank :: t],
        },
        explain=lambda found: explain_exchange(
            found, expected, full, b.rank, "g_bar's forward reduce-scatters, with SUM"
        ),
    )
    whole = torch.cat(upstream)
    only_own = (
        torch.zeros_like(whole)
        .view(t, 2, 3, 5)
        .index_copy(0, torch.tensor([b.rank], device=b.device), upstream[b.rank][None])
        .view_as(whole)
    )
    check_gradient(
        passes,
        "x",
        whole,
        {
            "the gradient of x is zero at the other ranks' tokens: this rank's x went into all tokens, so it needs the "
            "gradients of all (all-gather)": only_own,
            "the gradient of x is 1/t of what it should be: joining the ranks' gradients needs no division": whole / t,
            "the gradient of x is t times what it should be: join the ranks' gradients, don't add them up": t * whole,
            "the gradient of x repeats this rank's gradient: each rank has those of its own tokens, so they must be joined": torch.cat(
                [upstream[b.rank]] * t
            ),
            "the gradient of x has the ranks' tokens in the wrong order": torch.cat(upstream[::-1]),
        },
        t,
        lambda found: explain_exchange(
            found, whole, upstream, b.rank, "g_bar's backward gathers along dimension 0", ran=ran(passes.backward)
        ),
    )
    check_exchanges(b, passes, {"reduce-scatter": size_of(own)}, {"all-gather": size_of(own)})
    check_keeps_nothing(b, g_bar, own)
