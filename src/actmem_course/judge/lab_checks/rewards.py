"""What labs 2 and 3 measure once they are solved."""

from __future__ import annotations

import torch
from torch import Tensor

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import gathered_input_bytes, layer_extra_rows, layer_rows
from actmem.formulas.communication import layer_exchanges
from actmem.rows import total
from actmem_course.judge.costs import compared, costs
from actmem_course.judge.reward import BarsReward, Reward, sizes_text
from actmem_course.judge.solutions import lab2_tensor_parallel as ours2
from actmem_course.judge.solutions import lab3_sequence_parallel as ours3
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import Dropouts, LayerWeights, random_weights

#: What attention and MLP keep, in the rows of the formulas; lab 2 has no dropout and leaves out the layer norms.
_BLOCK_TERMS = (
    "QKV projection input", "Q", "K", "softmax output", "V", "attention projection input",
    "h→4h input", "GeLU input", "4h→h input",
)  # fmt: skip


def shape_for(b: Bench) -> ModelShape:
    """Small enough for laptops, with heads for every rank."""
    return ModelShape(
        seq_length=128, micro_batch_size=2, hidden_size=64 * max(4, b.size), num_attention_heads=2 * max(4, b.size)
    )


def _describe(shape: ModelShape, b: Bench, what: str) -> str:
    return f"{what} on rank {b.rank} of {b.size}: {sizes_text(shape)}, bfloat16, t={b.size}"


def lab2_reward(b: Bench) -> Reward:
    """Attention and MLP under tensor parallelism."""
    shape, t = shape_for(b), b.size
    weights, x = _weights_and_input(b, shape, shape.seq_length)

    def block(functions: dict):
        def run(y: Tensor, *parameters: Tensor) -> Tensor:
            w = LayerWeights(shape.num_attention_heads, *parameters)
            y = functions["attention"](
                y, w.qkv_weight, w.qkv_bias, w.projection_weight, w.projection_bias, w.num_attention_heads, b.group
            )
            return functions["mlp"](y, w.up_weight, w.up_bias, w.down_weight, w.down_bias, b.group)

        return run

    rows = layer_rows(shape, Parallel(t)) + layer_extra_rows(shape, Parallel(t), device_type=b.device)
    formula = total(row for row in rows if row.term in _BLOCK_TERMS)
    found = costs(b, {"yours": block(b.functions), "ours": block(vars(ours2))}, x, weights)
    measures = compared(found["yours"], found["ours"], formula, layer_exchanges(shape, Parallel(t)))
    remark = "Divided by t: all but the inputs of the two column-parallel linears. Lab 3 is about those."
    return BarsReward(_describe(shape, b, "Attention and MLP, without dropout,"), measures, remark)


def lab3_reward(b: Bench) -> Reward:
    """The layer under tensor and sequence parallelism, with the linear that keeps its shard."""
    shape, t = shape_for(b), b.size
    weights, x = _weights_and_input(b, shape, shape.seq_length // t)

    def layer(functions: dict, linear: str = "shard_keeping_linear"):
        generators = [torch.Generator(b.device).manual_seed(seed) for seed in (1, 2)]

        def run(y: Tensor, *parameters: Tensor) -> Tensor:
            w = LayerWeights(shape.num_attention_heads, *parameters)
            return functions["layer"](y, w, Dropouts(0.1, *generators), functions[linear], b.group)

        return run

    parallel = Parallel(t, sequence_parallel=True)
    formula = total(layer_rows(shape, parallel) + layer_extra_rows(shape, parallel, device_type=b.device))
    functions = {
        "yours": layer(b.functions),
        "ours": layer(vars(ours3)),
        "plain": layer(b.functions, "gathering_linear"),
    }
    found = costs(b, functions, x, weights)
    measures = compared(found["yours"], found["ours"], formula, layer_exchanges(shape, parallel))
    plain = found["plain"]
    remark = (
        f"(sbh/t)(34 + 5as/h) and what the paper leaves out, to the byte. With your gathering_linear it was {plain.bytes:,} B: "
        f"{gathered_input_bytes(shape, t):,} B more are predicted, {plain.bytes - formula:,} B more were kept."
    )
    return BarsReward(_describe(shape, b, "Your layer"), measures, remark if t > 1 else "")


def _weights_and_input(b: Bench, shape: ModelShape, tokens: int) -> tuple[tuple[Tensor, ...], Tensor]:
    h = shape.hidden_size
    weights = random_weights(h, shape.num_attention_heads, dtype=torch.bfloat16, device=b.device).part(b.rank, b.size)
    x = b.random(tokens, shape.micro_batch_size, h, seed=90).bfloat16()
    return tuple(weights.named().values()), x
