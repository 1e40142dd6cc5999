"""Chapter 12: its figure shows the formulas' numbers."""

import pytest
import torch

import actmem as am
from actmem.parallel.groups import TensorParallel
from actmem.rows import total
from actmem.torch_private import fake_tensors
from actmem_course.figures.ch12_long_sequences import cost, long_bars
from actmem_course.predicted.long_sequences import TILE, everything_kept, long_steps, mlp_peak_bytes
from actmem_more.llama_modules import GatedMLP
from actmem_more.llama_shape import llama_shape
from actmem_more.loss_peak import loss_peak_rows

LLAMA = llama_shape("llama3-8b")
H, F, V, L = LLAMA.hidden_size, LLAMA.ffn_hidden_size, LLAMA.vocab_size, 32


def at(tokens):
    return LLAMA.with_sizes(seq_length=tokens)


@pytest.mark.parametrize("tokens", [2**k for k in range(13, 21)])
def test_bars_are_the_steps_and_each_step_takes_less(tokens):
    drawing, held = long_bars(at(tokens)), {}
    for trace in drawing.traces:
        for name, size in zip(trace["y"], trace["x"]):
            held[name] = held.get(name, 0) + size * drawing.axis.unit
    steps = long_steps(at(tokens))
    # Four GPUs' memory: longer bars would make the others too thin to see.
    assert list(held.values()) == pytest.approx([step.bytes if step.bytes <= 320 * 2**30 else 0 for step in steps])
    sizes = [everything_kept(at(tokens)), *(step.bytes for step in steps)]
    assert sizes == sorted(sizes, reverse=True) and max(held.values()) / drawing.axis.unit < drawing.axis.end


def test_a_million_tokens_step_by_step():
    s = 2**20
    recomputed, chunks, host, tiles, shared = long_steps(at(s))
    x = 2 * s * H
    assert recomputed.bytes == 33 * x + total(loss_peak_rows("16 bits", s, H, V))
    attention = (
        2 * s * (H + H + 2 * H // 4 + H + H) + 4 * s * 32 + 8 * s
    )  # norm 1's output, Q, K and V, O, norm 2's input
    assert chunks.bytes == 33 * x + attention + s * (2 * H + 10 * F)
    assert host.bytes == chunks.bytes - 30 * x
    assert tiles.bytes == 3 * x + attention + 3 * x
    assert shared.bytes == tiles.bytes // 8  # of 131,072 tokens each; a tile is small beside them
    assert [cost(step) for step in (recomputed, host)] == ["+33% FLOPs", "copies 256 GiB"]


@pytest.mark.parametrize("tile, gradients_there", [(None, 1), (TILE, 3)])
def test_the_mlps_peak_is_what_a_step_allocates(tile, gradients_there):
    """Without the weights; gradients_there: of the three weights, those that exist at the peak."""
    tokens = 65536
    with fake_tensors():
        mlp = GatedMLP(H, F, TensorParallel(), seed=1, dtype=torch.bfloat16)
        x = torch.zeros(tokens, 1, H, dtype=torch.bfloat16, requires_grad=True)
        upstream = torch.zeros_like(x)
        with am.watch_step(mlp, batch=(x, upstream)) as bill:
            y = torch.cat([am.checkpoint(mlp, rows) for rows in x.split(tile)]) if tile else mlp(x)
            y.backward(upstream)
    weight = 2 * H * F
    assert bill.peak_bytes == mlp_peak_bytes(tokens, H, F, tile) + (3 + gradients_there) * weight
