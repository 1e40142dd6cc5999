"""Lab 3's layer unsharded, and what comes out of it with each common mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.lab_checks.operators import ACTIVATIONS
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import LayerWeights, core_attention, gelu, layer_norm, merge_heads, split_heads

#: Divisible by 2 and 4 ranks, so that a rank's part can be split into all heads by mistake, and be told.
HEAD_SIZE = 4
#: What stands for the two dropouts: factors, none of them 1/t, which a sum over the ranks could make up for.
CORE_FACTOR, BLOCK_FACTORS = 0.6, (0.7, 0.3)


class Scaling:
    """In place of dropouts: a factor for each call, so that a missing one shows."""

    def __init__(self, core: float = CORE_FACTOR, block: tuple[float, ...] = BLOCK_FACTORS):
        self._core, self._block = core, block
        #: How often block was called, and the tokens that it was given last.
        self.blocks, self.tokens = 0, 0

    def core(self, weights: Tensor) -> Tensor:
        return weights * self._core

    def block(self, x: Tensor) -> Tensor:
        self.blocks, self.tokens = self.blocks + 1, x.shape[0]
        return x * self._block[(self.blocks - 1) % len(self._block)]


def attended(y: Tensor, w: LayerWeights, scaling: Scaling, heads: int) -> Tensor:
    """The heads' results side by side, before the projection."""
    q, k, v = split_heads(F.linear(y, w.qkv_weight, w.qkv_bias), heads)
    return merge_heads(core_attention(q, k, v, scaling.core), y.shape[1])


def added(x: Tensor, y: Tensor, normed: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
    """The end of a block.  x: what it began with, normed: the same after the layer norm, y: what it gives."""
    return x + block(y)


def no_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x


def dense(
    x: Tensor,
    w: LayerWeights,
    scaling: Scaling,
    *,
    norms=(layer_norm, layer_norm),
    attention=None,
    products=(F.linear, F.linear),
    biases: int = 1,
    activation=gelu,
    ends=(added, added),
    second_norm_of_x: bool = False,
) -> Tensor:
    """The unsharded layer, or one with a mistake in it.  Of a pair, the first is attention's, the second the MLP's."""
    normed = norms[0](x, w.norm1_weight, w.norm1_bias)
    y = attention(normed) if attention else attended(normed, w, scaling, w.num_attention_heads)
    between = ends[0](x, products[0](y, w.projection_weight) + biases * w.projection_bias, normed, scaling.block)
    normed = norms[1](x if second_norm_of_x else between, w.norm2_weight, w.norm2_bias)
    y = activation(F.linear(normed, w.up_weight, w.up_bias))
    return ends[1](between, products[1](y, w.down_weight) + biases * w.down_bias, normed, scaling.block)


def layer_mistakes(b: Bench, x: Tensor, w: LayerWeights, right: Tensor) -> dict[str, Tensor]:
    """Diagnosis -> this rank's tokens of what comes out.  right: the right result, all tokens."""

    def not_added(x, y, normed, block):
        return block(y)

    wrong = {
        "the biases after g_bar are added on every rank before it, so the result holds them t times": dense(
            x, w, Scaling(), biases=b.size
        ),
        "the biases of the projection and of 4h → h are missing": dense(x, w, Scaling(), biases=0),
        "x is not added to attention's result": dense(x, w, Scaling(), ends=(not_added, added)),
        "x is not added to the MLP's result": dense(x, w, Scaling(), ends=(added, not_added)),
        "x is added neither to attention's result nor to the MLP's": dense(
            x, w, Scaling(), ends=(not_added, not_added)
        ),
        "gelu is missing between the two linears of the MLP": dense(x, w, Scaling(), activation=lambda y: y),
        "the first layer norm is missing": dense(x, w, Scaling(), norms=(no_norm, layer_norm)),
        "the second layer norm is missing": dense(x, w, Scaling(), norms=(layer_norm, no_norm)),
        "dropouts.core is not used: it is core_attention's fourth argument": dense(x, w, Scaling(core=1)),
        "dropouts.block is not used: apply it to the results of attention and the MLP, before adding x": dense(
            x, w, Scaling(block=(1,))
        ),
        "dropouts.block is used once: apply it to attention's result and to the MLP's": dense(
            x, w, Scaling(block=(BLOCK_FACTORS[0], 1))
        ),
        "neither of the dropouts is used": dense(x, w, Scaling(core=1, block=(1,))),
        **{
            f"between the two linears of the MLP, {diagnosis}": dense(x, w, Scaling(), activation=other)
            for diagnosis, other in ACTIVATIONS.items()
        },
        **_of_ranks(b, x, w),
        **_of_order(x, w),
    }
    shards = {text: b.shards(value)[b.rank] for text, value in wrong.items()}
    return {"the result has all tokens: leave each block through g_bar, which keeps this rank's": right, **shards}


def _of_ranks(b: Bench, x: Tensor, w: LayerWeights) -> dict[str, Tensor]:
    """Mistakes that show on several ranks only."""
    t, heads = b.size, w.num_attention_heads

    def not_summed(y: Tensor, weight: Tensor) -> Tensor:
        parts = zip(y.chunk(t, -1), weight.chunk(t, 1))
        return torch.cat([F.linear(own, of_rank).chunk(t)[rank] for rank, (own, of_rank) in enumerate(parts)])

    wrong = {
        "the MLP's result is this rank's part only: the ranks' products must leave through g_bar": dense(
            x, w, Scaling(), products=(F.linear, not_summed)
        ),
        "attention's result is this rank's part only: the ranks' products must leave through g_bar": dense(
            x, w, Scaling(), products=(not_summed, F.linear)
        ),
        "the results of attention and the MLP are this rank's part only: the ranks' products must leave through g_bar": dense(
            x, w, Scaling(), products=(not_summed, not_summed)
        ),
    }
    if HEAD_SIZE % t == 0:
        parts = [w.part(rank, t) for rank in range(t)]
        wrong[
            "a rank's part is split into a heads; it holds a/t: divide w.num_attention_heads by the number of ranks"
        ] = dense(
            x, w, Scaling(), attention=lambda y: torch.cat([attended(y, part, Scaling(), heads) for part in parts], -1)
        )
    return wrong


def _of_order(x: Tensor, w: LayerWeights) -> dict[str, Tensor]:
    """Right parts in a wrong place."""
    exchanged = replace(
        w, norm1_weight=w.norm2_weight, norm1_bias=w.norm2_bias, norm2_weight=w.norm1_weight, norm2_bias=w.norm1_bias
    )

    def normed_after(weight, bias):
        return lambda x, y, normed, block: layer_norm(x + block(y), weight, bias)

    def dropped_too(x, y, normed, block):
        return block(x + y)

    def added_to_normed(x, y, normed, block):
        return normed + block(y)

    return {
        "the second layer norm is applied to the layer's input; apply it to x after attention's result is added": dense(
            x, w, Scaling(), second_norm_of_x=True
        ),
        "the weights of the two layer norms are swapped: norm1 comes before attention, norm2 before the MLP": dense(
            x, exchanged, Scaling()
        ),
        "norm1 is used before the MLP too; the layer norm there has norm2's weights": dense(
            x, replace(w, norm2_weight=w.norm1_weight, norm2_bias=w.norm1_bias), Scaling()
        ),
        "the layer norms come after the additions; apply them to the inputs of attention and the MLP, not to the residual x": dense(
            x,
            w,
            Scaling(),
            norms=(no_norm, no_norm),
            ends=(normed_after(w.norm1_weight, w.norm1_bias), normed_after(w.norm2_weight, w.norm2_bias)),
        ),
        "dropouts.core and dropouts.block are swapped: core is for the attention weights": dense(
            x, w, Scaling(core=BLOCK_FACTORS[0], block=(CORE_FACTOR,))
        ),
        **{
            f"dropouts.block is applied to the sum with x{where}: apply it to what is added, then add x": dense(
                x, w, Scaling(), ends=ends
            )
            for where, ends in _pairs(dropped_too)
        },
        **{
            f"the sum is with the layer norm's result{where}: add to x from before the norm": dense(
                x, w, Scaling(), ends=ends
            )
            for where, ends in _pairs(added_to_normed)
        },
    }


def _pairs(wrong) -> list[tuple[str, tuple]]:
    """A wrong end in both blocks, or in one."""
    return [("", (wrong, wrong)), (" in attention", (wrong, added)), (" in the MLP", (added, wrong))]
