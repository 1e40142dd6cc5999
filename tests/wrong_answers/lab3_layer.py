"""Wrong answers to lab 3: the layer."""

from dataclasses import replace
from types import SimpleNamespace

import torch.distributed as dist
import torch.nn.functional as F

from actmem_course.judge.solutions.lab2_tensor_parallel import f_bar
from actmem_course.judge.solutions.lab3_sequence_parallel import g_bar
from actmem_course.pieces import core_attention, gelu, layer_norm, merge_heads, split_heads
from tests.wrong_answers.planted import planted

LAB = "lab3_sequence_parallel"


def faulty(**faults):
    """A layer with faults: what is left out or put elsewhere."""

    def layer(x, w, dropouts, linear, group):
        rank, t = dist.get_rank(group), dist.get_world_size(group)

        def leave(where, y, weight, bias):
            if faults.get("bias") == "on rank 0":
                return g_bar(F.linear(y, weight, bias if rank == 0 else None), group)
            if faults.get("bias") == "before":
                return g_bar(F.linear(y, weight, bias), group)
            if faults.get("bias") == "none":
                return g_bar(F.linear(y, weight), group)
            if faults.get("leave") == "f_bar":
                return f_bar(F.linear(y, weight), group).chunk(t)[rank] + bias
            if faults.get("leave") == f"{where}, all tokens":
                return F.linear(y, weight) + bias
            if faults.get("leave") in (where, "none"):
                return F.linear(y, weight).chunk(t)[rank] + bias
            return g_bar(F.linear(y, weight), group) + bias

        def join(where, x, y, normed):
            if faults.get("residual") == where:
                return dropouts.block(y)
            if faults.get("drop_sum") in (where, "both"):
                return dropouts.block(x + y)
            if faults.get("add_to_normed") in (where, "both"):
                return normed + dropouts.block(y)
            return x + (y if faults.get("block") == "none" else dropouts.block(y))

        core = (lambda weights: weights) if faults.get("core") == "none" else dropouts.core
        first = x
        normed = x if faults.get("norm") == "none" else layer_norm(x, w.norm1_weight, w.norm1_bias)
        y = linear(normed, w.qkv_weight, w.qkv_bias, group)
        q, k, v = split_heads(y, w.num_attention_heads if faults.get("heads") == "all" else w.num_attention_heads // t)
        y = leave(
            "attention", merge_heads(core_attention(q, k, v, core), x.shape[1]), w.projection_weight, w.projection_bias
        )
        x = join("attention", x, y, normed)
        normed = layer_norm(first if faults.get("norm") == "old x" else x, w.norm2_weight, w.norm2_bias)
        y = faults.get("activation", gelu)(linear(normed, w.up_weight, w.up_bias, group))
        return join("mlp", x, leave("mlp", y, w.down_weight, w.down_bias), normed)

    return layer


@planted(
    LAB,
    "3.4",
    r"^the row-parallel linear's bias comes before g_bar, in all places: it belongs after the sum over the ranks, once",
)
def layer_with_biases_before_g_bar(x, w, dropouts, linear, group):
    return faulty(bias="before")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"projection_bias is used on rank 0 only")
def layer_with_biases_on_rank_0(x, w, dropouts, linear, group):
    return faulty(bias="on rank 0")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"the row-parallel linear's bias is missing, in all places: it belongs after the sum")
def layer_without_biases(x, w, dropouts, linear, group):
    return faulty(bias="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"forward runs 2 all-gathers, 2 all-reduces; expected 2 all-gathers, 2 reduce-scatters")
def layer_that_leaves_through_f_bar(x, w, dropouts, linear, group):
    return faulty(leave="f_bar")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"dropouts\.block is missing, in all places: it belongs after the bias, before x is added")
def layer_without_block_dropout(x, w, dropouts, linear, group):
    return faulty(block="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"dropouts.core is not used")
def layer_without_core_dropout(x, w, dropouts, linear, group):
    return faulty(core="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"the addition of x to attention's result is missing")
def layer_without_the_first_addition(x, w, dropouts, linear, group):
    return faulty(residual="attention")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"gelu is missing")
def layer_without_gelu(x, w, dropouts, linear, group):
    return faulty(activation=lambda y: y)(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"first layer norm is missing")
def layer_without_the_first_norm(x, w, dropouts, linear, group):
    return faulty(norm="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"linear is called 0 times")
def layer_with_its_own_linear(x, w, dropouts, linear, group):
    from actmem_course.judge.solutions.lab3_sequence_parallel import shard_keeping_linear

    return faulty()(x, w, dropouts, shard_keeping_linear, group)


@planted(LAB, "3.4", r"split into a heads; it holds a/t")
def layer_with_all_heads_on_each_rank(x, w, dropouts, linear, group):
    return faulty(heads="all")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"second layer norm is applied to the layer's input")
def layer_with_the_second_norm_of_the_old_x(x, w, dropouts, linear, group):
    return faulty(norm="old x")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"norm1's and norm2's weight and bias are swapped: norm1's come first")
def layer_with_the_norms_weights_exchanged(x, w, dropouts, linear, group):
    w = replace(
        w, norm1_weight=w.norm2_weight, norm1_bias=w.norm2_bias, norm2_weight=w.norm1_weight, norm2_bias=w.norm1_bias
    )
    return faulty()(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"norm1's weight and bias also stand where norm2's belong")
def layer_with_the_first_norms_weights_twice(x, w, dropouts, linear, group):
    return faulty()(x, replace(w, norm2_weight=w.norm1_weight, norm2_bias=w.norm1_bias), dropouts, linear, group)


@planted(LAB, "3.4", r"the layer norm comes after the addition of x, in all places: .*x from before the norm")
def layer_with_norms_at_the_end(x, w, dropouts, linear, group):
    heads = w.num_attention_heads // dist.get_world_size(group)
    context = merge_heads(
        core_attention(*split_heads(linear(x, w.qkv_weight, w.qkv_bias, group), heads), dropouts.core), x.shape[1]
    )
    y = g_bar(F.linear(context, w.projection_weight), group) + w.projection_bias
    x = layer_norm(x + dropouts.block(y), w.norm1_weight, w.norm1_bias)
    y = g_bar(F.linear(gelu(linear(x, w.up_weight, w.up_bias, group)), w.down_weight), group) + w.down_bias
    return layer_norm(x + dropouts.block(y), w.norm2_weight, w.norm2_bias)


@planted(LAB, "3.4", r"dropouts\.core and dropouts\.block are swapped")
def layer_with_the_dropouts_exchanged(x, w, dropouts, linear, group):
    return faulty()(x, w, SimpleNamespace(core=dropouts.block, block=dropouts.core), linear, group)


@planted(LAB, "3.4", r"the MLP's g_bar gives this rank's share of its own part; .*must reduce-scatter")
def layer_that_keeps_its_part_of_the_mlp(x, w, dropouts, linear, group):
    return faulty(leave="mlp")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"attention's g_bar gives this rank's share of its own part; .*must reduce-scatter")
def layer_that_keeps_its_part_of_attention(x, w, dropouts, linear, group):
    return faulty(leave="attention")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"^every g_bar gives this rank's share of its own part; .*must reduce-scatter")
def layer_without_g_bar(x, w, dropouts, linear, group):
    return faulty(leave="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"^the result of the MLP has all tokens, but x has this rank's: leave each block through g_bar")
def layer_that_adds_all_tokens_of_the_mlp(x, w, dropouts, linear, group):
    return faulty(leave="mlp, all tokens")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"^the result of attention has all tokens, but x has this rank's: leave each block through g_bar")
def layer_that_adds_all_tokens_of_attention(x, w, dropouts, linear, group):
    return faulty(leave="attention, all tokens")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"the addition of x to the MLP's result is missing")
def layer_without_the_second_addition(x, w, dropouts, linear, group):
    return faulty(residual="mlp")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"^dropouts\.block comes after the addition of x, in all places: it belongs .* before x is added")
def layer_that_drops_x_too(x, w, dropouts, linear, group):
    return faulty(drop_sum="both")(x, w, dropouts, linear, group)


@planted(
    LAB,
    "3.4",
    r"^attention's dropouts\.block comes after the addition of x to attention's result: .* before x is added",
)
def layer_that_drops_x_too_in_attention(x, w, dropouts, linear, group):
    return faulty(drop_sum="attention")(x, w, dropouts, linear, group)


@planted(
    LAB, "3.4", r"^the MLP's dropouts\.block comes after the addition of x to the MLP's result: .* before x is added"
)
def layer_that_drops_x_too_in_the_mlp(x, w, dropouts, linear, group):
    return faulty(drop_sum="mlp")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"the layer norm comes before the residual branch, in all places: .* x from before the norm")
def layer_that_adds_to_the_norms_result(x, w, dropouts, linear, group):
    return faulty(add_to_normed="both")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r'without approximate="tanh"')
def layer_with_the_exact_gelu(x, w, dropouts, linear, group):
    return faulty(activation=F.gelu)(x, w, dropouts, linear, group)
