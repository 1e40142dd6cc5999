"""How much of a layer's time its matrix products alone would take: one process, no exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import TransformerLayer
from actmem.measure.parts import layer_input
from actmem.parallel.groups import TensorParallel
from actmem_course.bench.clock import Work
from actmem_course.bench.race import Race, Runner, race_of
from actmem_course.ranks import Ranks
from actmem_course.results import TimedPair

#: A large and a small layer, in one run.
SHAPES = (ModelShape(512, 1, 1024, 16), ModelShape(128, 2, 256, 8))
_P = {"with dropout": 0.1, "without dropout": 0.0}


def measure_products(
    shapes: tuple[ModelShape, ...] = SHAPES,
    *,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    cpu_time: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[TimedPair]:
    """A pair for each shape, with and without dropout: the layer, and its matrix products alone.  All take turns."""
    ranks = Ranks(0, 1, device, False)
    work: dict[tuple, Work] = {}
    for shape in shapes:
        work[shape, "products"] = products_of(shape, dtype, device)
        mask = causal_mask(shape.seq_length, device, dtype)
        for name, p in _P.items():
            layer = TransformerLayer(shape, p=p, dtype=dtype, device=device)
            leaf = layer_input(shape, TensorParallel(), device, dtype)
            timed = Runner(layer, leaf).work()
            work[shape, name] = Work(partial(layer, leaf, mask), timed.backward, timed.finish)
    found = race_of(
        work, (shapes[0], "with dropout"), ranks, rounds=rounds, cpu_time=cpu_time,
        on_round=lambda n: on_progress(f"timing: round {n} of {rounds + 2}"),
    )  # fmt: skip
    return [_pair(shape, name, found) for shape in shapes for name in _P]


def _pair(shape: ModelShape, name: str, found: Race) -> TimedPair:
    a, b, h, s = shape.letters()
    layer, products = (shape, name), (shape, "products")
    return TimedPair(
        f"s={s} b={b} h={h} a={a}, {name}", "matrix products alone",
        found.spread(layer).median, found.spread(products).median, found.over(products, layer),
    )  # fmt: skip


def products_of(shape: ModelShape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Work:
    """The six products of a layer's forward pass and the twelve of its backward pass, on tensors of their own."""
    a, b, h, s = shape.letters()

    def random(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    heads, tokens = (b * a, s, h // a), s * b
    linears = [
        (random(tokens, of), random(to, of), random(tokens, to))
        for of, to in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
    ]
    q, k, v, grad_context = (random(*heads) for _ in range(4))
    weights, grad_scores = (random(b * a, s, s) for _ in range(2))

    def forward() -> None:
        for x, weight, _ in linears:
            torch.mm(x, weight.t())
        torch.bmm(q, k.transpose(1, 2))
        torch.bmm(weights, v)

    def backward(_: object) -> None:
        for x, weight, grad in linears:
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)
        torch.bmm(grad_context, v.transpose(1, 2))
        torch.bmm(weights.transpose(1, 2), grad_context)
        torch.bmm(grad_scores, k)
        torch.bmm(grad_scores.transpose(1, 2), q)

    return Work(forward, backward)
