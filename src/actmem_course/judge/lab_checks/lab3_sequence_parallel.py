"""Lab 3's operators, linears and layer."""

from __future__ import annotations

import torch
from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.kept import check_keeps, kept
from actmem_course.judge.lab_checks.block_checks import check_gradients, check_result
from actmem_course.judge.lab_checks.blocks import Block
from actmem_course.judge.lab_checks.known_blocks import KnownLayer, column_program
from actmem_course.judge.lab_checks.operators import G_BAR_OPERATOR, G_OPERATOR, check_operator, size_of
from actmem_course.judge.solutions.lab3_sequence_parallel import gathering_linear, shard_keeping_linear
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import Dropouts, LayerWeights, random_weights

#: Parameters that meet s/t tokens on each rank, so that each rank finds a part of their gradient.
PARTIAL = ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias")

#: Divisible by 2 and 4 ranks, so that a rank's part can be split into all heads by mistake, and be told.
LAYER_HEAD_SIZE = 4
#: What stands for the two dropouts: factors, none of them 1/t, which a sum over the ranks could make up for.
CORE_FACTOR, BLOCK_FACTORS = 0.6, (0.7, 0.3)


def check_g(b: Bench) -> None:
    check_operator(b, G_OPERATOR, b.random_by_rank(2, 3, 5, seed=1), b.random_by_rank(2 * b.size, 3, 5, seed=2))


def check_g_bar(b: Bench) -> None:
    check_operator(b, G_BAR_OPERATOR, b.random_by_rank(2 * b.size, 3, 5, seed=3), b.random_by_rank(2, 3, 5, seed=4))


def _gathering_block(b: Bench, seed: int) -> tuple[Block, Collective]:
    """A column-parallel linear that begins with g, and the exchange of a second gathering."""
    t, x = b.size, b.random_by_rank(2, 3, 6, seed=seed)
    weights, biases = b.shards(b.random(5 * t, 6, seed=seed + 1)), b.shards(b.random(5 * t, seed=seed + 2))
    everyone = [{"weight": w, "bias": c} for w, c in zip(weights, biases)]
    block = Block(x, everyone, b.random_by_rank(2 * t, 3, 5, seed=seed + 3), column_program(G_OPERATOR))
    return block, Collective("all-gather", t * size_of(x[0]))


def check_gathering_linear(b: Bench) -> None:
    block, again = _gathering_block(b, seed=10)
    passes = check_result(b, block, b["gathering_linear"], b.group)
    # Whoever gathers again here has already found what exercise 3.5 is after.
    check_gradients(b, block, passes, again=[again] * (len(passes.backward.collectives) == 2))


def check_shard_keeping_linear(b: Bench) -> None:
    block, again = _gathering_block(b, seed=20)
    function, x, own = b["shard_keeping_linear"], block.x[b.rank], tuple(block.weights[b.rank].values())
    passes = check_result(b, block, function, b.group)
    gathers = any(c.kind == "all-gather" for c in passes.backward.collectives)
    check_gradients(b, block, passes, again=[again] * gathers)
    more = "save the shard and gather it again in backward"
    check_keeps(b, size_of(x), "x, this rank's tokens", lambda y, w, c: function(y, w, c, b.group), x, own, more)
    check_gradients(b, block, passes, again=[again])


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
    h = LAYER_HEAD_SIZE * heads
    calls = []

    def linear(x, weight, bias, group):  # gathering_linear's own names: a learner may call it with keywords
        calls.append(weight)
        return gathering_linear(x, weight, bias, group)

    linear.__qualname__ = "linear"  # what Python says of wrong arguments begins with it

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        scaling = Scaling()
        try:
            return b["layer"](x, LayerWeights(heads, *parameters), scaling, linear, b.group)
        except RuntimeError:
            if t > 1 and scaling.tokens == s:  # too many for the addition, of which torch tells the sizes only
                what = "attention" if scaling.blocks == 1 else "the MLP"
                raise Wrong(
                    f"the result of {what} has all tokens, but x has this rank's: leave each block through g_bar, which sums and keeps this rank's tokens"
                ) from None
            raise

    whole = random_weights(h, heads, seed=30, device=b.device)
    known = KnownLayer(heads, LAYER_HEAD_SIZE, t, CORE_FACTOR, BLOCK_FACTORS)
    block = Block(
        b.shards(b.random(s, 2, h, seed=31)),
        [dict(whole.part(rank, t).named()) for rank in range(t)],
        b.shards(b.random(s, 2, h, seed=32)),
        known.program(),
        known.variants(),
        "leave each block through g_bar, which keeps this rank's tokens",
    )
    passes = check_result(b, block, function)
    if len(calls) != 2:
        raise Wrong(
            f"the numbers are right, but linear is called {len(calls)} times: use it for QKV and for h → 4h, so that the lab can replace it"
        )
    check_gradients(b, block, passes, PARTIAL)
    return _remark(b) if t > 1 and not b.group_name else None


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
