"""What labs 2, 3, 4, 7, 9 and 10 measure once they are solved: a layer, its blocks, linears, or the loss, of the learner's functions and of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import RNG_STATE_BYTES, gathered_input_bytes, layer_extra_rows, layer_rows
from actmem.formulas.communication import layer_exchanges
from actmem.formulas.llama_terms import llama_rows
from actmem.layers.llama import attend
from actmem.layers.llama_parts import product, row_parallel
from actmem.llama_shape import LlamaShape
from actmem.parallel.conjugates import f, f_bar
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.recipes import Recompute
from actmem.rows import total
from actmem_course.judge.cases.lab4_recompute import as_block, flops_of, layer_weights
from actmem_course.judge.cases.lab7_todays_layer import most_shared
from actmem_course.judge.cases.lab10_keep_less import CountingHost
from actmem_course.judge.kept import kept
from actmem_course.judge.reward import BarsReward, Measure, Reward, compared, costs, sizes_text, time_measure
from actmem_course.judge.solutions import lab2_tensor_parallel as ours2
from actmem_course.judge.solutions import lab3_sequence_parallel as ours3
from actmem_course.judge.solutions import lab4_recompute as ours4
from actmem_course.judge.solutions import lab7_todays_layer as ours7
from actmem_course.judge.solutions import lab9_the_ends as ours9
from actmem_course.judge.solutions import lab10_keep_less as ours10
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import Dropouts, LayerWeights, layer, random_weights

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


def lab4_reward(b: Bench) -> Reward:
    """One layer without recomputation, with selective, with full: bytes, FLOPs, time."""
    shape, dtype = (
        ModelShape(seq_length=256, micro_batch_size=1, hidden_size=128, num_attention_heads=4),
        torch.bfloat16,
    )
    sizes = (shape.seq_length, shape.micro_batch_size, shape.hidden_size)
    x, weights = b.random(*sizes, seed=30).to(dtype), layer_weights(shape, dtype, b.device)
    modes = {
        "none": (layer, layer),
        "selective": (b["selective_layer"], ours4.selective_layer),
        "full": (b["full_layer"], ours4.full_layer),
    }
    functions = {
        f"{mode} {side}": as_block(function, shape)
        for mode, pair in modes.items()
        for side, function in zip(("yours", "ours"), pair)
    }
    found = costs(b, functions, x, weights)
    kept_bytes, times, notes = [], [], []
    plain = flops_of(as_block(layer, shape), x, *weights)
    for mode, (yours, _) in modes.items():
        own, other = found[f"{mode} yours"], found[f"{mode} ours"]
        formula = total(layer_rows(shape, recompute=mode)) + _extra_bytes(shape, mode, b.device)
        kept_bytes.append(Measure(f"kept, {mode}", "B", {"formula": formula, "yours": own.bytes, "ours": other.bytes}))
        times.append(
            Measure(
                f"time, {mode}",
                "ms",
                {"yours": own.milliseconds, "ours": other.milliseconds},
                max(own.noise, other.noise),
            )
        )
        if mode != "none":
            notes.append(f"{mode} {100 * (flops_of(as_block(yours, shape), x, *weights) / plain - 1):.1f}%")
    remark = (
        f"More FLOPs, by torch's counter: {', '.join(notes)}. The formula has one random-number state for each region."
    )
    return BarsReward(
        f"One layer on {b.device}: {sizes_text(shape)}, bfloat16",
        (*kept_bytes, *times),
        remark,
        one_scale=True,
    )


def _extra_bytes(shape: ModelShape, recompute: str, device: str) -> int:
    """What the paper leaves out, as this lab's layer has it: its mask is made in the core, its dropouts draw from one stream."""
    region = Recompute.of(recompute).region
    if region != "none":
        statistics = [row for row in layer_extra_rows(shape, device_type=device) if "statistics" in row.term]
        return (
            RNG_STATE_BYTES["cpu"]
            + RNG_STATE_BYTES["cuda"] * (device == "cuda")
            + total(statistics) * (region == "core")
        )
    return total(layer_extra_rows(shape, device_type=device))


_EPS = 1e-5
Functions = Mapping[str, Callable[..., Any]]


def lab7_reward(b: Bench) -> Reward:
    """The layer with its linears' inputs kept, and with their recipes' sources in place of them."""
    t = b.size
    a = 2 * t * max(1, 4 // t)
    shape = LlamaShape(128, 2, 32 * a, a, most_shared(t), 80 * a)
    tp = tensor_parallel(b.group) if t > 1 else TensorParallel()
    x, weights = b.random(128, 2, shape.hidden_size, seed=40).bfloat16(), _weights(b, shape)
    sides: dict[str, Functions] = {"yours": b.functions, "ours": vars(ours7)}
    forms = {
        "inputs kept": (lambda functions: functions | {"recipe_linear": _keeps_its_input}, "none"),
        "recipes": (dict, "elementwise"),
    }
    layers = {
        (form, side): _layer(shape, tp, change(dict(functions)))
        for form, (change, _) in forms.items()
        for side, functions in sides.items()
    }
    found = costs(b, {f"{form} {side}": layer for (form, side), layer in layers.items()}, x, weights)
    measures = []
    for form, (_, mode) in forms.items():
        # Whoever keeps a norm's sources keeps no statistics of it: the recipe makes them again.
        terms = llama_rows(shape, Parallel(t), recompute=mode)
        formula = total(row for row in terms if mode == "none" or "statistics" not in row.term)
        own, other = found[f"{form} yours"], found[f"{form} ours"]
        kept_bytes = {"formula": formula, "yours": own.bytes, "ours": other.bytes}
        measures += [Measure(f"kept, {form}", "B", kept_bytes), time_measure(own, other)]
    plain: Functions = {
        "rms_norm": _plain_norm,
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "recipe_linear": _keeps_its_input,
    }
    plain_bytes = kept(b, _layer(shape, tp, plain), x, weights).bytes
    remark = f"The same layer out of torch's operators, with the norm in float32, keeps {plain_bytes:,} B."
    what = f"A Llama layer on rank {b.rank} of {t}: s=128 b=2 h={shape.hidden_size} a={shape.num_attention_heads}"
    what += f" k={shape.num_key_value_heads} f={shape.ffn_hidden_size}, bfloat16, t={t}"
    return BarsReward(what, tuple(measures), remark)


def _layer(shape: LlamaShape, tp: TensorParallel, functions: Functions) -> Callable[..., Tensor]:
    """Under tensor parallelism, without rotation; Q, K and V from one product, gate and up from another."""
    norm, linear, d = functions["rms_norm"], functions["recipe_linear"], shape.d

    def entered(x: Tensor, weight: Tensor) -> Tensor:
        return f(norm(x, weight, _EPS), tp)

    def run(x: Tensor, norm1, qkv, projection, norm2, gate_up, down) -> Tensor:
        y = linear(entered, qkv, x, norm1).unflatten(-1, (-1, d)).permute(1, 2, 0, 3)  # [b, heads, s, d]
        q = shape.num_attention_heads // tp.size
        y = attend(*y.split([q, *[(y.shape[1] - q) // 2] * 2], 1))
        x = x + row_parallel(y, projection, tp)
        gate, up = linear(entered, gate_up, x, norm2).chunk(2, -1)
        return x + f_bar(linear(functions["swiglu"], down, gate, up), tp)

    return run


def _keeps_its_input(recipe: Callable[..., Tensor], weight: Tensor, *sources: Tensor) -> Tensor:
    return product(recipe(*sources), weight)


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _weights(b: Bench, shape: LlamaShape) -> tuple[Tensor, ...]:
    h, own, held = shape.hidden_size, shape.hidden_size // b.size, max(1, shape.num_key_value_heads // b.size) * shape.d
    wide = shape.ffn_hidden_size // b.size
    sizes = ((h,), (own + 2 * held, h), (h, own), (h,), (2 * wide, h), (h, wide))
    return tuple((b.random(*size, seed=50 + i) / h**0.5).bfloat16() for i, size in enumerate(sizes))


def lab9_reward(b: Bench) -> Reward:
    """The loss and the log-probabilities of a vocabulary 32 times as wide as the hidden size, in 16 bits."""
    s, micro_batch, h, chunk = 64, 2, 64, 32
    v, tokens = 32 * h * b.size, s * micro_batch
    x, weight = (b.random(*size, seed=60 + i).bfloat16() for i, size in enumerate(((s, micro_batch, h), (v, h))))
    own, logits = b.shards(weight)[b.rank], F.linear(x, weight)
    targets = torch.arange(tokens, device=b.device).view(s, micro_batch)

    def ends(functions: Functions) -> dict[str, tuple[Callable[..., Tensor], Tensor, tuple[Tensor, ...]]]:
        return {
            "the loss": (lambda z: functions["cross_entropy"](z, targets), logits, ()),
            "the loss in chunks": (lambda y, w: functions["linear_cross_entropy"](y, w, targets, chunk), x, (weight,)),
            f"the loss on {b.size} ranks": (
                lambda y, w: functions["parallel_linear_cross_entropy"](y, w, targets, chunk, b.group), x, (own,)
            ),
            "log-probabilities and entropy": (
                lambda z: torch.add(*functions["log_probs_and_entropy"](z, targets, chunk)), logits, ()
            ),
        }  # fmt: skip

    # Beside its large tensor each keeps ids of 8 bytes and one sum a token, the last one the entropy as well.
    formulas = dict(zip(ends(b.functions), (2 * v + 12, 2 * h + 12, 2 * h + 12, 2 * v + 16)))
    measures = []
    for name, (yours, given, weights) in ends(b.functions).items():
        sides = {"yours": yours, "ours": ends(vars(ours9))[name][0]}
        found = costs(b, sides, given, weights)
        kept_bytes = {"formula": formulas[name] * tokens, "yours": found["yours"].bytes, "ours": found["ours"].bytes}
        measures += [Measure(f"kept, {name}", "B", kept_bytes), time_measure(found["yours"], found["ours"])]
    plain = kept(b, lambda z: F.cross_entropy(z.float().flatten(0, 1), targets.flatten()), logits).bytes
    remark = f"F.cross_entropy of float32 logits keeps {plain:,} B."
    what = f"The loss on rank {b.rank} of {b.size}: s={s} b={micro_batch} h={h} v={v}, bfloat16, {chunk} tokens a chunk"
    return BarsReward(what, tuple(measures), remark)


def lab10_reward(b: Bench) -> Reward:
    """A frozen linear, an adapter, an MLP in tiles, and a checkpoint on the host, in 16 bits."""
    s, micro_batch, h, f, r = 128, 2, 64, 256, 4
    x, up, down = (
        b.random(*size, seed=70 + i).bfloat16() for i, size in enumerate(((s, micro_batch, h), (f, h), (h, f)))
    )
    low, back = b.random(r, h, seed=73).float(), b.random(f, r, seed=74).float()
    codes, scale = up.to(torch.int8), torch.ones_like(up[:, :1])

    def pieces(functions: Functions) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
        return {
            "a frozen linear": (lambda y: functions["frozen_linear"](y, codes, scale), ()),
            "with an adapter": (lambda y, a, c: functions["lora_linear"](y, up, a, c, 8.0), (low, back)),
            "the MLP in tiles": (lambda y, u, d: functions["tiled_mlp"](y, u, d, 16), (up, down)),
            "the MLP from the host": (
                lambda y, u, d: functions["offloading_checkpoint"](lambda z: ours10.mlp(z, u, d), y, CountingHost()),
                (up, down),
            ),
        }

    formulas = dict(zip(pieces(b.functions), (0, 2 * s * micro_batch * (h + r), 2 * s * micro_batch * h, 0)))
    held, measures = (codes, scale, up, down), []
    for name, (yours, weights) in pieces(b.functions).items():
        found = costs(b, {"yours": yours, "ours": pieces(vars(ours10))[name][0]}, x, weights, held)
        kept_bytes = {"formula": formulas[name], "yours": found["yours"].bytes, "ours": found["ours"].bytes}
        measures += [Measure(f"kept, {name}", "B", kept_bytes), time_measure(found["yours"], found["ours"])]
    plain = kept(b, ours10.mlp, x, (up, down)).bytes
    remark = f"The MLP out of torch's operators keeps {plain:,} B, 2sbh + 4sbf."
    what = f"Frozen weights, adapters and MLPs: s={s} b={micro_batch} h={h} f={f} r={r}, bfloat16"
    return BarsReward(what, tuple(measures), remark)
