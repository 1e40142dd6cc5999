# %% [markdown]
# # 14 · The allocator and eight bits
#
# *25 minutes. Write your guess below (in a notebook: Shift+Enter first).*
#
# You switch on FP8, 8 bits per element, and expect half the memory. Users measured more
# ([TransformerEngine#1429](https://github.com/NVIDIA/TransformerEngine/issues/1429)) or no less
# ([#1764](https://github.com/NVIDIA/TransformerEngine/issues/1764), where a maintainer doubts it). **How many GiB does one layer of Llama 3 8B hold
# for backward, with FP8's copies of its weights, for 8,192 tokens?**

# %%
# Setup: imports, and the numbers of the question
from actmem.rows import total
from actmem_course.figures import Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal
from actmem_course.figures import choice, play, size_text, steps
from actmem_course.figures import ch14_allocator_and_eight_bits as show
from actmem_course.predicted.eight_bits import break_even_tokens, eight_bit_rows
from actmem_more.llama_shape import llama_shape

checks = Checks()
LLAMA = llama_shape("llama3-8b").with_sizes(seq_length=8192)

question = Prediction(
    "The figure shows a layer in 16 bits. How many GiB does it hold for backward, with FP8's copies of its weights, if its "
    "four linears compute in FP8?",
    answer=total(eight_bit_rows(LLAMA)) / 2**30,
    unit="GiB",
    because="It saves its linears' inputs in half the bytes, and in addition two 8-bit copies of each weight.",
    line=GuessLine(2**30),
)
Reveal(
    question,
    Panel(
        lambda shown, s: show.eight_bit_bars(LLAMA.with_sizes(seq_length=s), shown),
        shown=choice("show", list(show.SHOWN), show.IN_16_BITS),
        s=steps("s", "tokens of a microbatch", [2**k for k in range(12, 18)], 8192),
    ),
    shown=show.IN_BOTH,
)

# %% [markdown]
# **You need** chapter 5. The layer is Llama's: a gated MLP, no dropout, no saved scores.
#
# ## Two orientations of each tensor
#
# A linear has three matmuls: $Y = XW$, $dX = dY\,W^\top$ and $dW = X^\top dY$. $Y$ reads $X$ by rows, $dW$ by
# columns, and it's the same with $W$. On Hopper an FP8 matmul reads a tensor in one orientation only.
#
# - **$W$ in both**, beside the 16-bit weight, adds 2 bytes per parameter (not with Megatron's `--fp8-param-gather`,
#   which needs its distributed optimizer or FSDP). Megatron caches both copies for a step, so all microbatches in
#   flight share them.
# - **$X$ in both**: two 8-bit copies take as much as one of 16. Transformer Engine saves the one for $dW$ (#1764).
# - **Attention's backward** reads its output in 16 bits. The next linear's 8 bits come on top.

# %%
import torch
import torch.nn.functional as F


def quantize(x):
    scale = x.abs().amax().float() / 448  # the largest number of this dtype
    return (x / scale).to(torch.float8_e4m3fn), scale


def dequantize(codes, scale):
    return (codes.float() * scale).bfloat16()


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, orientations):
        (x8, x_scale), (w8, w_scale) = quantize(x), quantize(weight)
        transposed = [x8.flatten(0, -2).t().contiguous()][: orientations - 1]
        # Both copies of the weight are there until the backward pass, which reads the transposed one.
        ctx.save_for_backward(x8, x_scale, w8, w_scale, w8.t().contiguous(), *transposed)
        return F.linear(dequantize(x8, x_scale), dequantize(w8, w_scale))

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, _, w_scale, w8_transposed, *_ = ctx.saved_tensors
        x = dequantize(x8, x_scale)
        dx = grad @ dequantize(w8_transposed, w_scale).t()
        return dx, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


torch.manual_seed(0)
x, weight = (
    torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in ((96, 64), (32, 64))
)
rounded = [dequantize(*quantize(tensor.detach())).requires_grad_() for tensor in (x, weight)]
upstream = torch.randn(96, 32, dtype=torch.bfloat16)
in_8 = torch.autograd.grad(Linear8.apply(x, weight, 1), (x, weight), upstream)
reference, in_16 = (
    torch.autograd.grad(F.linear(*pair), pair, upstream) for pair in (rounded, (x, weight))
)
off = max(((one - other).norm() / other.norm()).item() for one, other in zip(in_8, in_16))
print(f"gradients are up to {100 * off:.1f}% off those in 16 bits")
checks.add(
    "gradients, compared with those of a 16-bit linear of the rounded tensors",
    [(0, int((one != other).sum())) for one, other in zip(in_8, reference)],
    "elements that differ",
)
checks.show()

# %% jupyter={"source_hidden": true}
from torch import nn

import actmem as am
from actmem_more.llama import attend
from actmem_more.llama_modules import rms_norm, swiglu
from actmem_more.llama_shape import LlamaShape

TINY = LlamaShape(24, 1, 64, 4, 2, 160)


class Layer8(nn.Module):
    """A Llama layer whose four linears compute in 8 bits; not rotated by position: that saves nothing."""

    def __init__(self, orientations):
        super().__init__()
        h, f, self.orientations = TINY.hidden_size, TINY.ffn_hidden_size, orientations
        sizes = {
            "qkv": (TINY.query_size + 2 * TINY.key_value_size, h),
            "o": (h, TINY.query_size),
            "gate_up": (2 * f, h),
            "down": (h, f),
        }
        self.norms = nn.Parameter(torch.ones(2, h, dtype=torch.bfloat16))
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(0.1 * torch.randn(size, dtype=torch.bfloat16)) for name, size in sizes.items()}
        )

    def linear(self, name, x):
        return Linear8.apply(x, self.weights[name], self.orientations)

    def forward(self, x):
        q, k, v = self.linear("qkv", rms_norm(x, self.norms[0])).split(
            [TINY.query_size, TINY.key_value_size, TINY.key_value_size], -1
        )
        heads = (part.unflatten(-1, (-1, TINY.d)).permute(1, 2, 0, 3) for part in (q, k, v))
        x = x + self.linear("o", attend(*heads))
        gate, up = self.linear("gate_up", rms_norm(x, self.norms[1])).chunk(2, -1)
        return x + self.linear("down", swiglu(gate, up))


def random_input():
    return torch.randn(TINY.seq_length, 1, TINY.hidden_size, dtype=torch.bfloat16, requires_grad=True)


for orientations in (1, 2):
    layer = Layer8(orientations)
    with am.record(layer) as ledger:
        y = layer(random_input())
    checks.add(
        f"a small layer, inputs in {('one orientation', 'both')[orientations - 1]}",
        [(total(eight_bit_rows(TINY, orientations)), ledger.total_bytes)],
    )
display(checks.show())
print(f"Llama 3 8B's layer: 8 bits free memory from {break_even_tokens(LLAMA):,} tokens in flight on, inputs in one orientation")

# %% [markdown]
# > **Why do this?** FP8 matmuls are faster, and with many tokens in flight they free memory.
# > **Why not?** With few, the weights' copies take more than they free.
#
# ## Store in eight bits
#
# For memory alone, compute in 16 bits, and store saved tensors in 8: 260 bytes for 256 elements and their scale. Only
# the backward pass reads what was rounded. Try it on gate and up:

# %%
from actmem.ledger.measure_layer import layer_rows_of
from actmem_more.llama import LlamaLayer
from actmem_more.llama_terms import llama_rows

stored = {"gate": "compress", "up": "compress"}
layer = LlamaLayer(TINY, recompute=stored, seed=1, dtype=torch.bfloat16)
predicted, counted = llama_rows(TINY, recompute=stored), layer_rows_of(layer, random_input())
checks.add_rows("gate and up in 8 bits", predicted, counted)

x, exact = random_input(), LlamaLayer(TINY, seed=1, dtype=torch.bfloat16)
outputs = [each(x) for each in (exact, layer)]
wanted, found = (
    torch.autograd.grad(y.float().square().sum(), each.mlp.gate)[0].float() for y, each in zip(outputs, (exact, layer))
)
checks.add("the layer's output, bit-identical to the one in 16 bits", [(True, torch.equal(*outputs))])
print(f"the gradient of gate's weight is {100 * ((found - wanted).norm() / wanted.norm()).item():.1f}% off")
checks.show()

# %%
from actmem_course.figures.layer_picture import layer_picture

before, after = (total(llama_rows(LLAMA, recompute=mode)) / 2**30 for mode in ("none", stored))
LiveFigure(
    layer_picture(LLAMA, recompute=stored, title=f"Gate and up in 8 bits: {after:.2f} instead of {before:.2f} GiB")
)

# %% [markdown]
# ## It fits, and the GPU still runs out
#
# Formulas count tensors. Your GPU shows what torch's allocator *reserved*: **segments**, split into **blocks**. A
# freed block stays reserved. Play three batches. A row is a segment, in MiB; tap a block to see its tensor. Adam's
# states are made after the first batch, and freed blocks are dotted:

# %%
Panel(
    show.memory_map,
    moment=play("n", "events", show.EVENTS_PLAYED, 18),
    segments=choice("segments", list(show.SEGMENTS), show.SEGMENTS[0]),
    order=choice("batches", list(show.ORDERS), "shortest first"),
)

# %% [markdown]
# Before torch runs out, it gives wholly free segments back. A free block beside a live tensor keeps its segment.
# *Expandable* segments grow in pages of 20 MiB, and torch gives free pages back: only whole pages inside a free block
# are unmapped. So run the longest batch first, or set `PYTORCH_ALLOC_CONF=expandable_segments:True` (older torch:
# `PYTORCH_CUDA_ALLOC_CONF`).
#
# Now a real GPU and growing batches. From the sizes that torch asked for, our model of the allocator predicts what it
# reserved:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import newest

on_gpu = newest("allocator")
checks.add(
    "reserved after each batch",
    [(row["model_reserved_bytes"], row["reserved_bytes"]) for row in on_gpu["allocator"][0]["rows"]],
)
display(checks.show())
last = on_gpu["allocator"][0]["rows"][-1]
print(f"after the last: {size_text(last['reserved_bytes'])} reserved for at most {size_text(last['peak_allocated_bytes'])} of tensors")

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# > **Take away**
# > 1. On Hopper, FP8 linears free memory only with many tokens in flight. With fewer, the copies of weights take more.
# > 2. A tensor stored in 8 bits takes half the bytes, and only gradients feel the rounding.
# > 3. What is *reserved* must fit, not just what is allocated.
# >
# > **At work tomorrow:** print `torch.cuda.max_memory_allocated()` and `max_memory_reserved()` after 100 steps. If
# > they are far apart, try expandable segments.
#
# **No lab here.** Next: record your model ([chapter 9](09_your_model.ipynb)).
#
# **Sources.** PyTorch, [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), memory management ·
# `src/actmem_course/others/allocator.py` · `src/actmem_more/store.py`.
