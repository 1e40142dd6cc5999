# %% [markdown]
# # 13 · Long sequences
#
# All activations grow with the tokens. What must go, and in which order, so that a sequence of a million tokens fits?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem_course.figures import (
    Checks, GuessLine, Panel, Prediction, Reveal, choice, play, size_text, steps, worked,
)
from actmem_course.figures import ch12_long_sequences as show
from actmem_course.predicted.long_sequences import long_steps
from actmem_more.llama_shape import llama_shape

checks = Checks()
LLAMA = llama_shape("llama3-8b")

question = Prediction(
    "The figure shows one sequence of 65,536 tokens through Llama 3 8B, beside the weights. Each bar "
    "adds a step to those above "
    "it. At 1,048,576 tokens, how much does one GPU hold with the first four?",
    answer=long_steps(LLAMA.with_sizes(seq_length=2**20))[3].bytes / 2**30,
    unit="GiB",
    because=(
        "Of the 32 layers' inputs, three tensors of that size stay on the GPU. The rest is one layer at "
        "work: nothing grows with the number of layers."
    ),
    line=GuessLine(2**30),
)
Reveal(
    question,
    Panel(
        lambda s, c: show.long_bars(LLAMA.with_sizes(seq_length=s), c),
        s=steps("s", "tokens", [2**k for k in range(13, 21)], 65536),
        c=steps("c", "GPUs in the last bar", (2, 4, 8), 8),
    ),
    s=2**20,
)

# %% [markdown]
# *30 minutes.* **You need:** [05 Recomputation](05_recomputation.ipynb), [08 After the paper](08_todays_layer.ipynb) and [11 The
# ends](10_the_loss.ipynb). **You will** take the figure's five steps: put checkpoints on the host, run an MLP in tiles,
# share a sequence among ranks. Then answer two questions that come up on the way: do eight bits save memory, and why does a
# GPU run out although everything fits?
#
# **Letters used:** $s$ tokens, $b$ sequences, $h$ hidden size, $f$ width of the MLP, $L$ layers, $c$ ranks that share a sequence.
#
# ## Five steps, one bottleneck after the other
#
# Each step removes what is largest *at that point* in a long sequence:
#
# 1. **Recompute all layers** (chapter 5). Each keeps its input alone. The peak is either the loss, or one layer's backward; first it
#    is the loss.
# 2. **The loss in chunks** (chapter 10). The layers' inputs and one layer at work are left.
# 3. **The layers' inputs on the host.** They are the largest part of what is left.
# 4. **The MLP in tiles.** It is the largest part of the layer at work. At 65,536 tokens the peak is then the chunked loss again: $4sbh$
#    and the weight's gradient.
# 5. **More GPUs for one sequence.** They divide all that grows with $s$. The output weight's gradient stays whole.
#
# A step helps only if it lowers the peak. Tiles free nothing while the loss takes more than one layer at work. And in a
# benchmark of accelerate, checkpoints on the host didn't change a short sequence's peak
# ([accelerate#4175](https://github.com/huggingface/accelerate/pull/4175)).
#
# What do the steps cost? Bytes grow with $s$, the work of attention with $s^2$. So chunks and tiles cost a smaller share of a step
# the longer the sequence is. Rerunning the layers costs more, up to a third, because attention reruns too. Move $s$, and read
# each step's own price beside its bar.
#
# ## Step 3: the layers' inputs on the host
#
# Recomputed layers keep their inputs, $2sbhL$, and backward reads these in reverse order. So an input may leave the device when
# its layer has run, and come back while backward works on the layer after it. Write this with chapter 8's actions, one a term:

# %%
from actmem_more.llama_shape import llama_layer_terms

terms = llama_layer_terms(LLAMA)
on_the_host = {term: "recompute" for term in (*(recipe.term for recipe in terms.recipes), *terms.statistics)}
on_the_host[terms.input] = "offload"

# %% jupyter={"source_hidden": true}
import torch
from torch import nn

from actmem.ledger.layer_rows import layer_rows_of
from actmem.rows import total
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LlamaShape
from actmem_more.store import HostMemory


class Stack(nn.Module):
    def __init__(self, shape, layers, recompute, host=None):
        super().__init__()
        host = host or HostMemory(ahead=1)  # one input may be on its way
        self.layers = nn.ModuleList(
            LlamaLayer(shape, recompute=recompute, host=host, seed=i, dtype=torch.bfloat16)
            for i in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


TINY = LlamaShape(24, 1, 64, 4, 2, 160)


def tiny_input():
    return torch.randn(
        24, 1, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()


def gradients(model):
    x = tiny_input()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


one_input = 2 * TINY.seq_length * TINY.hidden_size
for layers in (3, 6):
    stayed = layer_rows_of(Stack(TINY, layers, "full"), tiny_input())
    left = layer_rows_of(Stack(TINY, layers, on_the_host), tiny_input())
    host = total(row for row in left if row.term.endswith(", on the host"))
    checks.add(f"{layers} recomputed layers: on the device", [(layers * one_input, total(stayed))])
    checks.add(
        f"{layers} with inputs on the host: on the device, on the host",
        [(0, total(left) - host), (layers * one_input, host)],
    )

memory, coming = HostMemory(ahead=1), []
stack = Stack(TINY, 6, on_the_host, memory)
for layer in stack.layers:
    layer.register_full_backward_pre_hook(lambda *_: coming.append(len(memory.arriving)))
found = gradients(stack)
checks.add(
    "inputs on their way back when a layer's backward begins", [(1, count) for count in coming[1:]], "inputs"
)
checks.add(
    "gradients with inputs on the host, bit-identical",
    [(True, torch.equal(*pair)) for pair in zip(found, gradients(Stack(TINY, 6, "full")))],
)
checks.show()

# %% [markdown]
# The device holds three tensors of $2sbh$: the input in use, the next one on its way, and the last layer's output, later its
# gradient. The host holds $2sbhL$. transformers has this since September 2026, and on an H100 it freed exactly $2sbhL$: 128 MiB for 8
# layers of $h$ = 1,024 and 8,192 tokens ([#48444](https://github.com/huggingface/transformers/pull/48444)). Its copies don't
# overlap with compute yet.
#
# The copy costs no time if a layer computes for longer. At 50 GB/s and $4 \cdot 10^{14}$ FLOPs a second, a token of Llama 3 8B is
# copied in 0.16 µs, and a layer's forward takes at least 1.09 µs for it: hidden at any length. Below 7.5 GB/s only a long sequence
# hides it, because a layer's FLOPs grow with $s^2$.
#
# **Now write it:** [exercise 10.4](../labs/lab10_keep_less.py), `offloading_checkpoint`: `python my/labs/lab10_keep_less.py --only
# 10.4`.
#
# ## Step 4: the MLP in tiles
#
# An MLP, like the loss, computes each token alone. So run it on some tokens, drop what it made, and recompute it in backward.
# Chapter 5's checkpoint function does it:

# %%
from actmem.parallel.groups import TensorParallel
from actmem_more.llama_modules import GatedMLP


def in_tiles(mlp, x, tile):
    return torch.cat([am.checkpoint(mlp, rows) for rows in x.split(tile)])


mlp = GatedMLP(64, 160, TensorParallel(), seed=1, dtype=torch.bfloat16)
x = torch.randn(48, 1, 64, dtype=torch.bfloat16, requires_grad=True)
for way, run in {"whole": mlp, "in tiles of 8 tokens": lambda x: in_tiles(mlp, x, 8)}.items():
    with am.record(mlp) as ledger:
        y = run(x)
    print(f"{way}: {ledger.total_bytes:,} bytes saved for backward")

# %% jupyter={"source_hidden": true}
from itertools import product

from actmem.torch_private import fake_tensors
from actmem_course.predicted.long_sequences import TILE, mlp_peak_bytes


def gated(h, f, dtype=torch.bfloat16):
    return GatedMLP(h, f, TensorParallel(), seed=1, dtype=dtype)


def kept(module, run, *inputs):
    """Bytes that ``run`` of this module keeps."""
    with am.record(module) as ledger:
        y = run(*inputs)
    del y
    return ledger.total_bytes


def peak(tokens, tile=None):
    """Bytes alive at the peak of an MLP of Llama's sizes, beside its weights."""
    with fake_tensors():
        mlp = gated(LLAMA.hidden_size, LLAMA.ffn_hidden_size)
        x = torch.zeros(tokens, 1, LLAMA.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        upstream = torch.zeros_like(x)
        with am.watch_step(mlp, batch=(x, upstream)) as bill:
            (in_tiles(mlp, x, tile) if tile else mlp(x)).backward(upstream)
    return bill.peak_bytes - 6 * LLAMA.hidden_size * LLAMA.ffn_hidden_size


s, b, h, f, tile = 48, 1, 64, 160, 8
mlp, x = gated(h, f), torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
checks.add("an MLP keeps 2sbh + 6sbf", [(2 * s * b * h + 6 * s * b * f, kept(mlp, mlp, x))])
checks.add(
    "in tiles 2sbh, whatever the tile",
    [(2 * s * b * h, kept(mlp, lambda x: in_tiles(mlp, x, size), x)) for size in (1, 7, 8, s)],
)
for tokens, (size, gradients_there) in product((65536, 131072), ((None, 1), (TILE, 3))):
    wanted = (
        mlp_peak_bytes(tokens, LLAMA.hidden_size, LLAMA.ffn_hidden_size, size)
        + 2 * gradients_there * LLAMA.hidden_size * LLAMA.ffn_hidden_size
    )
    checks.add(
        f"{tokens:,} tokens at the peak, {'in tiles' if size else 'whole'}, and {gradients_there} of "
        "3 weights' gradients",
        [(wanted, peak(tokens, size))],
    )

wide = gated(h, f, torch.float64)
x = torch.randn(s, b, h, dtype=torch.float64, requires_grad=True)
leaves = [x, *wide.parameters()]
found = [
    torch.autograd.grad(run(x).square().sum(), leaves) for run in (wide, lambda x: in_tiles(wide, x, tile))
]
apart = [int((one - other).abs().gt(1e-12 * other.abs().max()).sum()) for one, other in zip(*found)]
checks.add("gradients in tiles", [(0, count) for count in apart], "numbers that differ by more than rounding")
checks.show()

# %% [markdown]
# An MLP keeps $2sbh + 6sbf$; in tiles it keeps its input alone. At the peak of its backward the whole MLP takes $6h + 10f$ bytes
# per token. In tiles $10f$ is there for one tile only. For the whole sequence $10h$ are left, not $6h$, because $x$'s gradient
# exists twice when its tiles are joined. For Llama 3 8B that is a quarter. (The figure counts the output's gradient with step 3's
# tensors, and the output is gone: $2h + 10f$ whole, $6h$ in tiles.) The price is three more products for each tile. And autograd adds up the
# tiles' weight gradients in 16 bits, where each sum rounds; a function of your own can do it in float32.
#
# **Now write it:** [exercise 10.3](../labs/lab10_keep_less.py), `tiled_mlp`: `python my/labs/lab10_keep_less.py --only 10.3`.
#
# ## Step 5: more GPUs for one sequence
#
# At a million tokens the largest part of what is left is one layer's attention. Its queries could run in tiles; its keys and values
# can't, because every later query reads them. Context parallelism (chapter 13) gives each of $c$ ranks $s/c$ tokens of *everything*, the loss and the inputs
# too. There are three ways. With **gather** the ranks exchange K and V. **Ulysses** exchanges tokens for heads. **Ring** attention
# sends K and V around instead of gathering them: it keeps and sends the same bytes, but no rank ever has K and V whole.

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import counts
from actmem.ledger.comms import count_collectives
from actmem_more.context import layer_groups
from actmem_more.llama_terms import context_exchanges, llama_rows

million, eight = LLAMA.with_sizes(seq_length=2**20), am.Parallel(context_parallel_size=8)
for kind in ("gather", "ulysses"):
    with am.emulated_rank(8), count_collectives() as seen:
        tensor, context = layer_groups(8, kind)
        layer = LlamaLayer(million, tensor, context=context, dtype=torch.bfloat16)
        x = torch.zeros(2**20 // 8, 1, LLAMA.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        rows = layer_rows_of(layer, x)
        seen.collectives.clear()
        layer(x).sum().backward()
    checks.add_rows(
        f"1,048,576 tokens, one of 8 ranks, {kind}", llama_rows(million, eight, context_kind=kind), rows
    )
    expected = counts(context_exchanges(million, eight, kind))
    checks.add(
        f"exchanges of a layer, {kind}", [(sum(expected.values()), len(seen.collectives))], "exchanges"
    )
checks.show()

# %% [markdown]
# ## Do eight bits save memory?
#
# FP8 makes products faster. Many expect half the memory as well, and measure more than before
# ([TransformerEngine#257](https://github.com/NVIDIA/TransformerEngine/issues/257),
# [#1429](https://github.com/NVIDIA/TransformerEngine/issues/1429)), or no less
# ([#1764](https://github.com/NVIDIA/TransformerEngine/issues/1764)). Why? Ask what a linear keeps. It has three products:
#
# $$Y = XW, \qquad dX = dY\, W^\top, \qquad dW = X^\top dY$$
#
# Forward reads $X$ by rows, $dW$ by columns; forward reads $W$ one way, $dX$ the other. Hopper's FP8 products take one orientation
# only (Blackwell's take both), and block scales go along one axis. So each tensor is needed in 8 bits *twice*:
#
# - **$X$ in both orientations** takes $2 \cdot sbh$ bytes, as much as in 16 bits. Transformer Engine keeps only the one that $dW$
#   reads: its maintainers say so in #1764.°
# - **$W$ in both**, beside the 16-bit weight: 2 bytes per parameter *more*, unless the weight itself is stored in 8 bits
#   (Megatron's `--fp8-param-gather`).
# - **The 16-bit tensor may be kept anyway**, if another gradient reads it. Flash attention's backward reads its output, which is
#   the projection's input, so there the 8 bits come on top.

# %% jupyter={"source_hidden": true}
import torch.nn.functional as F
from torch.autograd import Function

from actmem_course.predicted.long_sequences import eight_bit_rows
from actmem_more.llama import attend
from actmem_more.llama_modules import rms_norm, swiglu


def narrow(x):
    scale = x.abs().amax().float() / 448  # the largest number of this dtype
    return (x / scale).to(torch.float8_e4m3fn), scale


def widened(codes, scale, dtype=torch.bfloat16):
    return (codes.float() * scale).to(dtype)


class Linear8(Function):
    @staticmethod
    def forward(ctx, x, weight, orientations):
        (x8, x_scale), (w8, w_scale) = narrow(x), narrow(weight)
        turned = [x8.flatten(0, -2).t().contiguous()][: orientations - 1]
        ctx.save_for_backward(x8, x_scale, w8, w_scale, w8.t().contiguous(), *turned)
        return F.linear(widened(x8, x_scale), widened(w8, w_scale))

    @staticmethod
    def backward(ctx, grad):
        x8, x_scale, _, w_scale, w8_turned, *_ = ctx.saved_tensors
        x = widened(x8, x_scale)
        return grad @ widened(w8_turned, w_scale).t(), grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class Layer8(nn.Module):
    """A Llama layer whose four linears compute in 8 bits; not rotated by position: that keeps nothing."""

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
            {
                name: nn.Parameter(0.1 * torch.randn(size, dtype=torch.bfloat16))
                for name, size in sizes.items()
            }
        )

    def linear(self, name, x):
        return Linear8.apply(x, self.weights[name], self.orientations)

    def forward(self, x):
        q, k, v = self.linear("qkv", rms_norm(x, self.norms[0])).split(
            [TINY.query_size, TINY.key_value_size, TINY.key_value_size], -1
        )
        x = x + self.linear(
            "o", attend(*(part.unflatten(-1, (-1, TINY.d)).permute(1, 2, 0, 3) for part in (q, k, v)))
        )
        return x + self.linear(
            "down", swiglu(*self.linear("gate_up", rms_norm(x, self.norms[1])).chunk(2, -1))
        )


torch.manual_seed(0)
for orientations in (1, 2):
    layer = Layer8(orientations)
    checks.add(
        f"a layer with linears in 8 bits, inputs in {('one orientation', 'both')[orientations - 1]}",
        [(total(eight_bit_rows(TINY, orientations)), kept(layer, layer, tiny_input()))],
    )

x, weight = (torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in ((96, 64), (32, 64)))
rounded = [widened(*narrow(tensor.detach())).requires_grad_() for tensor in (x, weight)]
upstream = torch.randn(96, 32, dtype=torch.bfloat16)
in_8, reference, in_16 = (
    torch.autograd.grad(run(*leaves), leaves, upstream)
    for run, leaves in (
        (lambda x, w: Linear8.apply(x, w, 1), (x, weight)),
        (F.linear, rounded),
        (F.linear, (x, weight)),
    )
)
checks.add(
    "gradients in 8 bits, and of a 16-bit linear of the rounded tensors, bit-identical",
    [(True, torch.equal(*pair)) for pair in zip(in_8, reference)],
)
off = max(((one - other).norm() / other.norm()).item() for one, other in zip(in_8, in_16))
print(
    f"gradients in 8 bits are up to {100 * off:.1f}% off those in 16; the same as those of the "
    "rounded tensors, bit for bit"
)
checks.show()

# %% jupyter={"source_hidden": true}
Panel(
    lambda s: show.eight_bit_bars(LLAMA.with_sizes(seq_length=s)),
    s=steps("s", "tokens of a microbatch", [2**k for k in range(12, 18)], 8192),
)

# %% [markdown]
# A layer saves $h + f$ bytes per token, and takes 2 bytes per weight. So with short microbatches FP8 takes more. It also takes
# more if all layers are recomputed, and the weights' copies stay for the next microbatch, as in Megatron: one layer at a time
# saves, but all hold copies.
#
# DeepSeek-V3 (2412.19437, section 3.3)° removes these copies one by one. Each input is kept in one orientation,
# with a scale for each 128 elements, and transposed in backward. The projection's input has 12 bits, and attention's backward
# reads the same. SwiGLU's inputs have 8 bits, and its output is recomputed.
#
# ## It fits, and the GPU still runs out: reserved and allocated
#
# A formula counts tensors; the GPU shows what its allocator *reserved*. torch takes **segments** from the GPU and cuts them
# into **blocks** of multiples of 512 bytes. Tensors up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB. A
# larger one gets its own, rounded up to 2 MiB. A freed block stays reserved, for the next tensor that fits.
#
# Before torch runs out, it gives wholly free segments back, and the GPU stalls. A free piece beside a tensor that stays can't go
# back. Play it: after the first batch Adam makes its states, in segments that were just freed. Each batch is longer than the one
# before:

# %% jupyter={"source_hidden": true}
Panel(
    lambda moment, segments: show.memory_map(moment, segments),
    moment=play("n", "events", show.EVENTS_PLAYED, 18),
    segments=choice("segments", list(show.SEGMENTS), show.SEGMENTS[0]),
)

# %% [markdown]
# Boxes are blocks, with their MiB: purple ones are states, empty ones free. At event 18 torch can give 12 MiB back; 22 are pieces.
# Switch to **expandable segments**. They map pages of 2 or 20 MiB one after another to one range of addresses. Adjacent free blocks merge,
# and a longer batch needs only what is missing.
#
# Here eight batches go through 32 layers, each replayed from one layer's tape (chapter 9). Here no tensor outlives its batch, so torch could give
# back all that is free, for a stall:

# %% jupyter={"source_hidden": true}
Panel(show.reserved_lines, order=choice("batches", list(show.BATCH_ORDERS), "shortest first"))

# %% [markdown]
# So run the longest batch first, or pad, or set `PYTORCH_ALLOC_CONF=expandable_segments:True` (`PYTORCH_CUDA_ALLOC_CONF` before
# torch 2.9; not with Megatron's CUDA graphs).
#
# Can you predict what a real run reserves? Not to the byte: each stream, such as NCCL's, has blocks of its own,
# and ranks of one layout differ. What expandable segments save can be much: a user of torchtune saw QLoRA of Llama 3 8B fall
# from 16.39 GiB to 10.83.° ([torchtune#1185](https://github.com/meta-pytorch/torchtune/issues/1185))
#
# ## Work it out
#
# You train Llama 3 8B by LoRA, with 8 billion 16-bit weights, on one GPU of 80 GiB with a host of 256 GiB. Which steps of the figure
# does a sequence of 262,144 tokens need? Is the copy hidden behind compute, at 50 GB/s and $4 \cdot 10^{14}$ FLOPs a second? And
# how many GPUs does a million tokens take? (Read the sizes off the figure at the top. A layer's forward takes 2 FLOPs per token
# for each of its 218 million weights, and $4sh$ per token for attention; $h$ = 4,096.)

# %% jupyter={"source_hidden": true}
from actmem_more.llama_terms import llama_products

quarter = LLAMA.with_sizes(seq_length=2**18)
left = 80 * 2**30 - 2 * (
    32 * (LLAMA.attention_weights + LLAMA.mlp_weights) + 2 * LLAMA.vocab_size * LLAMA.hidden_size
)
needed = next(step for step in long_steps(quarter) if step.bytes <= left)
copied, flops = 2 * 2**18 * LLAMA.hidden_size, sum(llama_products(quarter).values())
ranks = next(c for c in (2, 4, 8) if long_steps(million, c)[-1].bytes <= left)
worked(
    f"The weights leave {size_text(left)}. After each step the peak is "
    f"{', '.join(size_text(step.bytes) for step in long_steps(quarter)[:4])}: it fits with "
    f"“{needed.name}”.",
    f"A layer's input takes {1000 * copied / 50e9:.0f} ms on the link, and its forward "
    f"{1000 * flops / 4e14:,.0f} ms: hidden. The host holds {size_text(32 * copied)}.",
    f"A million tokens take {size_text(long_steps(million)[3].bytes)} on one GPU: too much. "
    f"{ranks} GPUs share them, {size_text(long_steps(million, ranks)[-1].bytes)} on each.",
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Check yourself
#
# <details><summary><b>1.</b> Why tiles of the MLP, if the whole layer is recomputed anyway?</summary>
#
# Recomputing drops what a layer keeps *between* forward and backward. When the layer's turn comes, the second run makes all of it
# again, and at that moment the MLP of one layer is whole: $6h + 10f$ bytes per token.
# </details>
#
# <details><summary><b>2.</b> Why not offload everything, rather than recompute?</summary>
#
# The host is too small. A layer keeps 17 times its input: at 262,144 tokens that is 1,089 GiB for 32 layers. The link is fast
# enough: at the rates above the copy takes less time than the layer, from about 41,000 tokens on (with attention's FLOPs not
# halved for the causal mask).
# </details>
#
# <details><summary><b>3.</b> <code>nvidia-smi</code> shows 23 GiB, your formula 17. Who is wrong?</summary>
#
# Neither. Compare the formula with `torch.cuda.max_memory_allocated()`. The rest is cached by the allocator (and fragmented if the
# lengths of batches change), or belongs to CUDA's context and NCCL.
# </details>
#
# ## What people get wrong here
#
# - **"FP8 halves activations."** It can halve what linears read. Norms, attention and SwiGLU keep their 16 bits, and the weights'
#   copies come on top.
# - **"A smaller batch later in the run frees memory."** Reserved memory stays reserved, until the allocator would run out.
#
# **Sources.** *Arctic Long Sequence Training*, 2506.13996 · *Mini-sequence Transformer*, 2407.15892 · *Ulysses*, 2309.14509 · *Ring
# Attention*, 2310.01889 · asked for, or merged since, in
# [Megatron-LM#3644](https://github.com/NVIDIA/Megatron-LM/issues/3644),
# [pytorch#158657](https://github.com/pytorch/pytorch/issues/158657),
# [TRL#6846](https://github.com/huggingface/trl/pull/6846) · `src/actmem_course/others/allocator.py`,
# `src/actmem_more/store.py`.
#
# ## Now fit your model
#
# Run `actmem record` on your own model at a long sequence. It names what is largest; take the step that removes it, and
# record again. Exercises 10.3 and 10.4 of **lab 10** are this chapter's: `python my/labs/lab10_keep_less.py`.
#
# Next, [chapter 13](13_experts.ipynb): experts, latents, recurrent states, and a context that several ranks share.
