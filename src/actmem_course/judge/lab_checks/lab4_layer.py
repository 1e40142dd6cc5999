"""Lab 4's layers: the same numbers as without recomputation, other bytes, more FLOPs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations

import torch
from torch import Tensor

from actmem.config import ModelShape
from actmem.formulas.activations import RNG_STATE_BYTES, layer_extra_rows, layer_rows
from actmem.recipes import Recompute
from actmem.rows import total
from actmem_course.judge.compare import check_tensor
from actmem_course.judge.costs import costs
from actmem_course.judge.kept import kept
from actmem_course.judge.lab_checks.lab4_checkpoint import bytes_without_states, check_hides_nothing, flops_of
from actmem_course.judge.lab_checks.lab4_random_numbers import seed_and_draw
from actmem_course.judge.operators import size_of
from actmem_course.judge.passes import reached_once
from actmem_course.judge.reward import BarsReward, Measure, Reward, sizes_text
from actmem_course.judge.solutions import lab4_recompute as ours
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import Dropouts, LayerWeights, core_attention, layer, random_weights

#: What a learner hands to checkpoint.
_ARGUMENTS = {
    "selective_layer": "lambda q, k, v: core_attention(q, k, v, dropout)",
    "full_layer": "lambda y: layer(y, w, dropouts)",
}
_P = 0.17  # no rate that one would write oneself
_SHAPE = ModelShape(seq_length=16, micro_batch_size=2, hidden_size=24, num_attention_heads=4)


def check_selective_layer(b: Bench) -> None:
    _check_same_numbers(b, "selective_layer")
    rows = layer_rows(_SHAPE, recompute="selective", element_size=8)
    extras = layer_extra_rows(_SHAPE, element_size=8, device_type=b.device)
    enough = total(rows) + total(row for row in extras if "statistics" in row.term)
    found = _kept(b, "selective_layer")
    if found == enough + _core_bytes():
        raise Wrong(
            f"it keeps {found:,} B, as without recomputation: the three tensors of the core attention, 5as²b, are still there"
        )
    if found > enough:
        raise Wrong(
            f"it keeps {found:,} B where {enough:,} B are enough: all but the three tensors of the core attention"
        )
    if found == size_of(b.random(*_sizes())):
        raise Wrong(
            f"it keeps the layer's input only ({found:,} B): that is full recomputation; selective recomputes only the core attention and keeps 34sbh"
        )
    if found < enough:
        raise Wrong(
            f"it keeps {found:,} B, less than the {enough:,} B of selective recomputation: more than the core attention is dropped and recomputed"
        )
    s, micro_batch, h = _sizes()
    q = b.random(micro_batch * _SHAPE.num_attention_heads, s, h // _SHAPE.num_attention_heads)
    plain, core = _flops(b, layer), flops_of(core_attention, q, q, q) // 3  # forward is a third of it
    again = _flops(b, b["selective_layer"]) - plain
    if again > core:
        raise Wrong(f"the second run takes {again:,} FLOPs, the core attention {core:,}: something else is recomputed")


def check_full_layer(b: Bench) -> None:
    _check_same_numbers(b, "full_layer")
    x = b.random(*_sizes())
    found, enough = _kept(b, "full_layer"), size_of(x)
    if found > enough:
        raise Wrong(
            f"it keeps {found:,} B where the layer's input, {enough:,} B, is enough: run the whole layer under checkpoint"
        )


def _core_bytes() -> int:
    """What the core attention keeps beside Q, K and V: its three tensors."""
    return total(layer_rows(_SHAPE, element_size=8)) - total(layer_rows(_SHAPE, recompute="selective", element_size=8))


def _sizes() -> tuple[int, int, int]:
    return _SHAPE.seq_length, _SHAPE.micro_batch_size, _SHAPE.hidden_size


def _weights(b: Bench, shape: ModelShape = _SHAPE, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(
        random_weights(shape.hidden_size, shape.num_attention_heads, seed=5, dtype=dtype, device=b.device)
        .named()
        .values()
    )


def _as_block(function: Callable, shape: ModelShape = _SHAPE) -> Callable[..., Tensor]:
    """A layer function as a function of x and the twelve parameters, with dropout from the default generator."""
    return lambda x, *parameters: function(x, LayerWeights(shape.num_attention_heads, *parameters), Dropouts(_P))


def _check_same_numbers(b: Bench, name: str) -> None:
    x, upstream = b.random(*_sizes(), seed=20), b.random(*_sizes(), seed=21)

    outside = (
        "what checkpoint runs again takes a tensor from outside that still has its graph, so its backward continues into what came "
        f"before: take every such tensor as an argument, {_ARGUMENTS[name]}"
    )

    def run(function: Callable) -> tuple:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, *_weights(b))]
        inputs = [leaves[0] * 1, *leaves[1:]]
        seed_and_draw(5, b.device)
        result = function(*inputs)
        if isinstance(result, Tensor) and result.requires_grad and result.shape == x.shape:
            torch.rand(3, device=b.device)
            with reached_once(inputs[:1], outside):
                result.backward(upstream)
        return result, [leaf.grad for leaf in leaves]

    plain, wanted = run(_as_block(layer))
    with _tensors_only(name):
        result, found = run(_as_block(b[name]))
    mistakes: dict[str, Callable[..., Tensor]] = {
        "the core attention runs without its dropout: layer calls core(q, k, v, dropout), so pass dropout on to core_attention":
            lambda x, w, dropouts: layer(x, w, dropouts, lambda q, k, v, dropout: core_attention(q, k, v)),
        "the core attention's result is dropped, not its weights: pass dropout on to core_attention":
            lambda x, w, dropouts: layer(x, w, dropouts, lambda q, k, v, dropout: dropout(core_attention(q, k, v))),
        "it runs without dropout: pass dropouts on to layer": lambda x, w, dropouts: layer(x, w, Dropouts(0.0)),
        "it draws with a rate of its own, 0.1: pass on the dropouts that it is given": lambda x, w, dropouts: layer(x, w, Dropouts(0.1)),
    }  # fmt: skip
    for order in list(permutations("QKV"))[1:]:
        mistakes[f"core_attention gets {', '.join(order)}; it takes Q, K, V, as core does"] = _layer_with(order)
    check_tensor(
        "the result",
        result,
        plain.detach(),
        {what: run(_as_block(mistake))[0].detach() for what, mistake in mistakes.items()},
    )
    names = ["x", *random_weights(4, 2).named()]
    for what, gradient, right in zip(names, found, wanted):
        if gradient is None:
            raise Wrong(f"the forward is right, but {what} gets no gradient")
        check_tensor(f"the forward is right; the gradient of {what}", gradient, right)


def _layer_with(order: Sequence[str]) -> Callable[..., Tensor]:
    """The layer whose core attention gets Q, K and V in another order."""

    def core(q: Tensor, k: Tensor, v: Tensor, dropout: Callable[[Tensor], Tensor]) -> Tensor:
        first, second, third = ({"Q": q, "K": k, "V": v}[letter] for letter in order)
        return core_attention(first, second, third, dropout)

    return lambda x, w, dropouts: layer(x, w, dropouts, core)


@contextmanager
def _tensors_only(name: str) -> Iterator[None]:
    """Raise Wrong where something else than a tensor is taken for one: it was handed to checkpoint as an input."""
    closing = {
        "selective_layer": "dropout is not one: close over it",
        "full_layer": "w and dropouts are not: close over them",
    }
    try:
        yield
    except (TypeError, AttributeError) as error:
        missing = re.search(r"'(?:method|function|LayerWeights|Dropouts)' object has no attribute '(\w+)'", str(error))
        if "save_for_backward can only save variables" in str(error) or missing and hasattr(Tensor, missing[1]):
            raise Wrong(f"checkpoint takes tensors only, and {closing[name]}, {_ARGUMENTS[name]}") from None
        raise


def _kept(b: Bench, name: str) -> int:
    found = kept(b, _as_block(b[name]), b.random(*_sizes(), seed=20), _weights(b))
    check_hides_nothing(found)
    return bytes_without_states(found)


def _flops(b: Bench, function: Callable, shape: ModelShape = _SHAPE, dtype: torch.dtype = torch.float64) -> int:
    x = b.random(shape.seq_length, shape.micro_batch_size, shape.hidden_size).to(dtype)
    return flops_of(_as_block(function, shape), x, *_weights(b, shape, dtype))


def lab4_reward(b: Bench) -> Reward:
    """One layer without recomputation, with selective, with full: bytes, FLOPs, time."""
    shape, dtype = (
        ModelShape(seq_length=256, micro_batch_size=1, hidden_size=128, num_attention_heads=4),
        torch.bfloat16,
    )
    sizes = (shape.seq_length, shape.micro_batch_size, shape.hidden_size)
    x, weights = b.random(*sizes, seed=30).to(dtype), _weights(b, shape, dtype)
    modes = {
        "none": (layer, layer),
        "selective": (b["selective_layer"], ours.selective_layer),
        "full": (b["full_layer"], ours.full_layer),
    }
    functions = {
        f"{mode} {side}": _as_block(function, shape)
        for mode, pair in modes.items()
        for side, function in zip(("yours", "ours"), pair)
    }
    found = costs(b, functions, x, weights)
    kept_bytes, times, notes = [], [], []
    plain = _flops(b, layer, shape, dtype)
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
            notes.append(f"{mode} {100 * (_flops(b, yours, shape, dtype) / plain - 1):.1f}%")
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
