"""Lab 7's reward: a Llama layer of the learner's functions, at the floor, and out of torch's operators beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.config import Parallel
from actmem.formulas.llama_terms import llama_rows
from actmem.layers.llama import attend
from actmem.layers.llama_parts import product, row_parallel
from actmem.llama_shape import LlamaShape
from actmem.parallel.conjugates import f, f_bar
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import total
from actmem_course.judge.cases.lab7_todays_layer import most_shared
from actmem_course.judge.costs import costs, time_measure
from actmem_course.judge.kept import kept
from actmem_course.judge.reward import BarsReward, Measure, Reward
from actmem_course.judge.solutions import lab7_todays_layer as ours
from actmem_course.judge.workbench import Bench

_EPS = 1e-5
Functions = Mapping[str, Callable[..., Tensor]]


def lab7_reward(b: Bench) -> Reward:
    """The layer with its linears' inputs kept, and with their recipes' sources in place of them."""
    t = b.size
    a = 2 * t * max(1, 4 // t)
    shape = LlamaShape(128, 2, 32 * a, a, most_shared(t), 80 * a)
    tp = tensor_parallel(b.group) if t > 1 else TensorParallel()
    x, weights = b.random(128, 2, shape.hidden_size, seed=40).bfloat16(), _weights(b, shape)
    sides: dict[str, Functions] = {"yours": b.functions, "ours": vars(ours)}
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
