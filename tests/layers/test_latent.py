"""Latent attention: the bytes of each way to keep its heads, what torch's own attention keeps, and wrong sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actmem.config import Parallel
from actmem.formulas.llama_terms import (
    llama_rows,
)
from actmem.layers.latent import attend_uneven
from actmem.llama_shape import LatentHeads, LlamaShape
from actmem.measure import record
from actmem.rows import total

SHAPE = LlamaShape(12, 3, 32, 8, 8, 40, latent=LatentHeads(20, 14, 6, 4, 8))
EXPERTS = SHAPE.with_sizes(num_experts=8, experts_per_token=3, num_shared_experts=1, sigmoid_router=True)


def test_closed_form():
    s, b, h, a, f = 12, 3, 32, 8, 40
    q, c, n, r, v = 20, 14, 6, 4, 8
    latents = 4 * s * b * q + 4 * s * b * c + 2 * s * b * r + 8 * s * b
    heads = 4 * s * b * a * (n + r) + 2 * s * b * a * v
    rest = 8 * s * b * h + 8 * s * b + 4 * a * s * b + 2 * s * b * a * v + 6 * s * b * f
    for t in (1, 2, 4):
        of_heads = [row for row in llama_rows(SHAPE, Parallel(t)) if row.term[0] in "QKV" and "QKV" not in row.term]
        assert total(of_heads) == latents + heads // t
        assert total(llama_rows(SHAPE, Parallel(t, True))) == (latents + heads + rest) // t
        # Elementwise drops the latents' norms' outputs as well.
        kept = 4 * s * b * h + 2 * s * b * (q + c) + 2 * s * b * f
        assert total(llama_rows(SHAPE, Parallel(t, True), "elementwise")) == (latents + heads + rest - kept) // t


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, *heads):
        return self.attend(*(x * 1 for x in heads))  # results of an operation: a module's inputs are the caller's


def padded(q, k, v):
    return F.scaled_dot_product_attention(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), is_causal=True)[
        ..., : v.shape[-1]
    ]


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def kept(attend, dtype):
    widths = (24, 24, 16)
    module = Attention(attend)
    heads = [torch.randn(2, 4, 32, width, dtype=dtype, requires_grad=True) for width in widths]
    with record(module) as ledger:
        y = module(*heads)
    del y
    return ledger.total_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_torch_keeps_of_values_narrower_than_queries(dtype):
    a, s, b, e = 4, 32, 2, dtype.itemsize
    ours = e * b * a * s * (2 * 24 + 2 * 16) + 4 * a * s * b
    assert kept(attend_uneven, dtype) == ours
    assert kept(padded, dtype) == ours + e * b * a * s * 2 * (24 - 16)  # zeros beside V and beside the result
    assert kept(plain, dtype) >= 4 * a * s * s * b  # no kernel for it on CPUs: the scores are back, in float32


@pytest.mark.parametrize("widths", [(6, 10), (10, 6), (4, 4)])
def test_attention_of_two_widths(widths):
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, 3, 7, width) for width in (widths[0], *widths)]
    heads = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]

    def run(attend):
        q, k, v = (x.clone().requires_grad_() for x in heads)
        y = attend(q, k, v)
        (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
        return y, q.grad, k.grad, v.grad

    wanted = run(lambda q, k, v: plain(q, k, v).permute(2, 0, 1, 3).flatten(2))
    for ours, theirs in zip(run(attend_uneven), wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-12
