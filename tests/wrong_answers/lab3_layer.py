"""Wrong answers to lab 3: the layer."""

import torch.distributed as dist
import torch.nn.functional as F

from actmem.lab.pieces import core_attention, gelu, layer_norm, merge_heads, split_heads
from actmem.lab.solutions.lab2_tensor_parallel import f_bar
from actmem.lab.solutions.lab3_sequence_parallel import g_bar
from tests.wrong_answers.planted import planted

LAB = "lab3_sequence_parallel"


def faulty(**faults):
    """A layer with faults: what is left out or put elsewhere."""

    def layer(x, w, dropouts, linear, group):
        def leave(y, weight, bias):
            if faults.get("bias") == "before":
                return g_bar(F.linear(y, weight, bias), group)
            if faults.get("bias") == "none":
                return g_bar(F.linear(y, weight), group)
            if faults.get("leave") == "f_bar":
                return f_bar(F.linear(y, weight), group).chunk(dist.get_world_size(group))[dist.get_rank(group)] + bias
            return g_bar(F.linear(y, weight), group) + bias

        def block(y):
            return y if faults.get("block") == "none" else dropouts.block(y)

        def norm(y, weight, bias):
            return y if faults.get("norm") == "none" else layer_norm(y, weight, bias)

        core = (lambda weights: weights) if faults.get("core") == "none" else dropouts.core
        y = linear(norm(x, w.norm1_weight, w.norm1_bias), w.qkv_weight, w.qkv_bias, group)
        q, k, v = split_heads(y, w.num_attention_heads // dist.get_world_size(group))
        y = leave(merge_heads(core_attention(q, k, v, core), x.shape[1]), w.projection_weight, w.projection_bias)
        x = block(y) if faults.get("residual") == "none" else x + block(y)
        y = linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)
        y = y if faults.get("gelu") == "none" else gelu(y)
        return x + block(leave(y, w.down_weight, w.down_bias))

    return layer


@planted(LAB, "3.4", r"holds them t times")
def layer_with_biases_before_g_bar(x, w, dropouts, linear, group):
    return faulty(bias="before")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"biases of the projection and of 4h → h are missing")
def layer_without_biases(x, w, dropouts, linear, group):
    return faulty(bias="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"forward runs 2 all-gathers, 2 all-reduces; asked for: 2 all-gathers, 2 reduce-scatters")
def layer_that_leaves_through_f_bar(x, w, dropouts, linear, group):
    return faulty(leave="f_bar")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"dropouts.block is not used")
def layer_without_block_dropout(x, w, dropouts, linear, group):
    return faulty(block="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"dropouts.core is not used")
def layer_without_core_dropout(x, w, dropouts, linear, group):
    return faulty(core="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"not added to what attention gives")
def layer_without_the_first_addition(x, w, dropouts, linear, group):
    return faulty(residual="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"gelu is missing")
def layer_without_gelu(x, w, dropouts, linear, group):
    return faulty(gelu="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"first layer norm is missing")
def layer_without_the_first_norm(x, w, dropouts, linear, group):
    return faulty(norm="none")(x, w, dropouts, linear, group)


@planted(LAB, "3.4", r"linear is called 0 times")
def layer_with_its_own_linear(x, w, dropouts, linear, group):
    from actmem.lab.solutions.lab3_sequence_parallel import shard_keeping_linear

    return faulty()(x, w, dropouts, shard_keeping_linear, group)
