"""Lab 3's layer: the same numbers as the unsharded one, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.compare import check_tensor, close, summed
from actmem_course.judge.kept import kept
from actmem_course.judge.lab_checks.blocks import Block
from actmem_course.judge.lab_checks.known_layer import KnownLayer
from actmem_course.judge.lab_checks.operators import check_bias_everywhere
from actmem_course.judge.passes import Passes, check_collectives, check_gradient, run_passes
from actmem_course.judge.solutions.lab3_sequence_parallel import gathering_linear, shard_keeping_linear
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import Dropouts, LayerWeights, random_weights

#: Parameters that meet s/t tokens on each rank, so that each rank finds a part of their gradient.
PARTIAL = ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias")

#: Divisible by 2 and 4 ranks, so that a rank's part can be split into all heads by mistake, and be told.
HEAD_SIZE = 4
#: What stands for the two dropouts: factors, none of them 1/t, which a sum over the ranks could make up for.
CORE_FACTOR, BLOCK_FACTORS = 0.6, (0.7, 0.3)


class Scaling:
    """In place of dropouts: a factor for each call, so that a missing one shows."""

    def __init__(self) -> None:
        #: How often block was called, and the tokens that it was given last.
        self.blocks, self.tokens = 0, 0

    def core(self, weights: Tensor) -> Tensor:
        return weights * CORE_FACTOR

    def block(self, x: Tensor) -> Tensor:
        self.blocks, self.tokens = self.blocks + 1, x.shape[0]
        return x * BLOCK_FACTORS[(self.blocks - 1) % len(BLOCK_FACTORS)]


def check_parallel_layer(b: Bench) -> str | None:
    t = b.size
    heads, s = 2 * t, 3 * t
    h = HEAD_SIZE * heads
    whole = random_weights(h, heads, seed=30, device=b.device)
    full, upstream = b.random(s, 2, h, seed=31), b.random(s, 2, h, seed=32)
    own = whole.part(b.rank, t)
    calls = []

    def linear(x, weight, bias, group):  # gathering_linear's own names: a learner may call it with keywords
        calls.append(weight)
        return gathering_linear(x, weight, bias, group)

    linear.__qualname__ = "linear"  # what Python says of wrong arguments begins with it

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        w = LayerWeights(heads, *parameters)
        scaling = Scaling()
        try:
            return b["layer"](x, w, scaling, linear, b.group)
        except RuntimeError:
            if t > 1 and scaling.tokens == s:  # too many for the addition, of which torch tells the sizes only
                what = "attention" if scaling.blocks == 1 else "the MLP"
                raise Wrong(
                    f"the result of {what} has all tokens, but x has this rank's: leave each block through g_bar, which sums and keeps this rank's tokens"
                ) from None
            raise

    x = b.shards(full)[b.rank]
    parts = [dict(whole.part(rank, t).named()) for rank in range(t)]
    known = KnownLayer(heads, HEAD_SIZE, CORE_FACTOR, BLOCK_FACTORS)
    block = Block(b.shards(full), parts, b.shards(upstream), known.program, known.variants)
    right = block.right()
    passes = run_passes(
        b,
        function,
        {"x": x, **own.named()},
        (),
        expected=right[b.rank][0],
        upstream=b.shards(upstream)[b.rank],
        mistakes={
            "the result has all tokens: leave each block through g_bar, which keeps this rank's": torch.cat(
                [y for y, _ in right]
            )
        },
        more=block.mistakes(b.rank),
    )
    if len(calls) != 2:
        raise Wrong(
            f"the numbers are right, but linear is called {len(calls)} times: use it for QKV and for h → 4h, so that the lab can replace it"
        )
    exchanged = [Collective("all-gather", full.numel() * 8)] * 2 + [Collective("reduce-scatter", full.numel() * 8)] * 2
    if t > 1:  # first, because a wrong way out of a block shows here before it shows in a gradient
        check_collectives("forward", passes.forward.collectives, exchanged)
    _check_gradients(b, passes, [gradients for _, gradients in right])
    if t > 1:
        check_collectives("backward", passes.backward.collectives, exchanged)
    return _remark(b) if t > 1 and not b.group_name else None


def _check_gradients(b: Bench, passes: Passes, gradients: Sequence[dict[str, Tensor]]) -> None:
    """gradients: every rank's, by name."""
    for name, right in gradients[b.rank].items():
        if name not in PARTIAL:
            check_gradient(passes, name, right, t=b.size)
    for name in PARTIAL:
        found, whole = b.gather(passes.gradients[name]), summed(of_rank[name] for of_rank in gradients)
        if any(gradient is None for gradient in found):
            check_bias_everywhere(b, passes.gradients[name], name)
            raise Wrong(f"the forward is right, but {name} gets no gradient")
        if b.size > 1 and close(found[b.rank], whole):
            continue  # complete already: more than is asked for here
        check_tensor(f"the forward is right; the ranks' gradients of {name}, added up,", sum(found), whole, t=b.size)


def _remark(b: Bench) -> str:
    """What the plain linear costs: bytes in bfloat16, with dropout, counted."""
    t, heads, s = b.size, 2 * b.size, 4 * b.size
    h, micro_batch = 8 * heads, 2
    own = random_weights(h, heads, dtype=torch.bfloat16, device=b.device).part(b.rank, t)
    x = torch.randn(s // t, micro_batch, h, device=b.device).bfloat16()

    def bytes_with(linear) -> int:
        generator = torch.Generator(b.device).manual_seed(1)

        def function(y: Tensor, *parameters: Tensor) -> Tensor:
            return b["layer"](y, LayerWeights(heads, *parameters), Dropouts(0.1, generator, generator), linear, b.group)

        return kept(b, function, x, tuple(own.named().values())).bytes

    more = bytes_with(gathering_linear) - bytes_with(shard_keeping_linear)
    return (
        f"and with gathering_linear it keeps {more:,} B more than 34/t + 5as/(ht) predicts (s={s} b={micro_batch} h={h}): "
        f"{more * t / (s * micro_batch * h * (t - 1)):g}sbh(1 − 1/t), the two gathered inputs. That makes 30/t + 4; exercise 3.5 cures it"
    )
