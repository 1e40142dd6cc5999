# %% [markdown]
# # 12 · Long sequences
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# A sequence of 1,048,576 tokens goes through Llama 3 8B on one GPU. You recompute every layer, compute the loss a
# chunk of tokens at a time, store the layers' inputs in the host's memory, and run each MLP a tile (a chunk of the
# sequence) at a time. **How many GiB does the GPU hold at its peak, besides the layers' weights, their gradients and
# optimizer states?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal, choice, size_text, steps, text_table,
    worked,
)
from actmem_course.figures import ch12_long_sequences as show
from actmem_course.predicted.long_sequences import TILE, long_steps, mlp_peak_bytes
from actmem_more.llama_shape import LlamaShape, input_on_host, llama_layer_terms, llama_shape

checks = Checks()
LLAMA = llama_shape("llama3-8b")

question = Prediction(
    "The figure shows 65,536 tokens. Each bar adds one step to those above it. How much does one GPU hold "
    "with the first four steps at 1,048,576 tokens?",
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
# *An elective: chapters 1 to 5 are enough.* Find the largest tensor, get rid of it, and repeat. [Chapter
# 5](05_recomputation.ipynb) has the first of five steps, [chapter 10](10_the_loss.ipynb) the second, this one the
# others.
#
# **Letters:** $s$ tokens, $b$ sequences, $h$ hidden size, $f$ width of the MLP, $v$ vocabulary, $L$ layers, $a$ query
# heads, $k$ key and value heads, $d = h/a$, $c$ ranks that share a sequence.
#
# **A Llama layer** has RMSNorm, $k < a$ heads for keys and values, a gated MLP,
# $\mathrm{down}(\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up})$, and no dropout. The MLP is fused: it saves gate and
# up, and computes `silu(gate)` again in backward. The flash kernel saves one number per query and head instead of the
# scores.
#
# ## Five steps, one bottleneck after the other
#
# 1. **Recompute all layers.** Each saves only its input. The loss is largest now, because the logits have 128,256
#    columns.
# 2. **The loss in chunks.** Compute 1,024 tokens' logits and losses, drop the logits, go on. The backward pass
#    recomputes them, with one more logits matmul. The layers' inputs are largest now.
# 3. **The layers' inputs on the host.** One layer at work is largest now, and most of it is the MLP.
# 4. **The MLP in tiles.** One layer's attention is largest now, or the chunked loss if the sequence is shorter. Of
#    that loss $6hv$ bytes, at any $s$, are gradients of the output layer's weight: a float32 sum, $4hv$, and the
#    16-bit part of one chunk, $2hv$.
# 5. **More GPUs for one sequence.** They divide all that grows with $s$.
#
# Move $s$ in the first figure, and read each step's own cost. A step helps only if it lowers the *peak*: tiles free
# nothing while the loss is larger than a layer. The pictures below have 65,536 tokens.
#
# ## Step 3: the layers' inputs on the host
#
# Nobody reads a recomputed layer's input until the backward pass reaches this layer. So copy it to the host when the
# layer has run. Start to copy it back while the layer after it runs backward.

# %% jupyter={"source_hidden": true}
LiveFigure(show.input_on_the_host(LLAMA.with_sizes(seq_length=65536)))

# %% [markdown]
# Try it with six layers:

# %%
import torch
from torch import nn

from actmem.ledger.measure_layer import layer_rows_of
from actmem.rows import total
from actmem_more.llama import LlamaLayer
from actmem_more.store import HostMemory

TINY = LlamaShape(24, 1, 64, 4, 2, 160)  # s, b, h, a, k, f
on_host = input_on_host(llama_layer_terms(TINY))  # offload the input, recompute the rest


def layers(recompute, host=None):
    options = dict(recompute=recompute, host=host, dtype=torch.bfloat16)
    return nn.Sequential(*(LlamaLayer(TINY, seed=i, **options) for i in range(6)))


def tiny_input():
    torch.manual_seed(3)
    return torch.randn(24, 1, 64, dtype=torch.bfloat16, requires_grad=True)


one_input = 2 * 24 * 64  # 2sbh
host = HostMemory(ahead=1)  # at most one input is on its way
rows = layer_rows_of(layers(on_host, host), tiny_input())
saved_on_host = total(row for row in rows if row.term.endswith(", on the host"))
full = total(layer_rows_of(layers("full"), tiny_input()))
checks.add("6 layers recomputed", [(6 * one_input, full)])
checks.add("inputs on the host: saved on the device", [(0, total(rows) - saved_on_host)])
checks.add("inputs on the host: saved there", [(6 * one_input, saved_on_host)])
checks.show()

# %% jupyter={"source_hidden": true}
from actmem_more.llama_terms import llama_matmuls


def gradients(model):
    x = tiny_input()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


memory, coming = HostMemory(ahead=1), []
model = layers(on_host, memory)
for layer in model:
    layer.register_full_backward_pre_hook(lambda *_: coming.append(len(memory.arriving)))
found = gradients(model)
checks.add(
    "inputs on their way back when a layer's backward pass begins",
    [(1, count) for count in coming[1:]],
    "inputs",
)
checks.add(
    "gradients with inputs on the host, bit-identical",
    [(True, torch.equal(*pair)) for pair in zip(found, gradients(layers("full")), strict=True)],
)
copied = 2 * LLAMA.hidden_size  # bytes per token
per_token = sum(llama_matmuls(LLAMA.with_sizes(seq_length=1)).values())  # FLOPs, the shortest sequence
print(
    f"one token of Llama 3 8B: at 50 GB/s it takes {1e6 * copied / 50e9:.2f} µs to copy its input\n"
    f"at 4·10¹⁴ FLOPs/s, a layer's forward pass takes at least {1e6 * per_token / 4e14:.2f} µs for it\n"
    f"so on a link of {copied / per_token * 4e5:.1f} GB/s the copy is overlapped at any length"
)
checks.show()

# %% [markdown]
# So the GPU holds three tensors of $2sbh$, for any $L$: the input in use, the one on its way, and the last layer's
# output, later its gradient.
#
# > **Why do this?** $2sbhL$ bytes leave the GPU, at no FLOPs, and on a fast link the copies are overlapped at any
# > length. **Why not?** On a slower link, only a long sequence overlaps them. And a machine's GPUs share the host's
# > memory. (Megatron's `--cpu-offloading-num-layers` is for layers that recompute nothing, without a pipeline. With
# > pipelines and recomputed modules, `--fine-grained-activation-offloading --offload-modules core_attn attn_proj`,
# > with `NVTE_CPU_OFFLOAD_V1=1` set, offloads those modules' inputs.)
#
# ## Step 4: the MLP in tiles
#
# While a recomputed layer runs backward, all its tensors are there. But an MLP treats each token alone, so run it on
# a few at a time:

# %% jupyter={"source_hidden": true}
Panel(
    lambda mlp: show.layer_at_work(LLAMA.with_sizes(seq_length=65536), TILE if mlp == "in tiles" else 0),
    mlp=choice("the MLP", ["whole", "in tiles"], "whole"),
)

# %% [markdown]
# Chapter 5's checkpoint does the rest:

# %%
from actmem.parallel.groups import TensorParallel
from actmem_more.llama_modules import GatedMLP


def in_tiles(mlp, x, tile):
    return torch.cat([am.checkpoint(mlp, rows) for rows in x.split(tile)])


s, b, h, f = 48, 1, 64, 160
mlp = GatedMLP(h, f, TensorParallel(), seed=1, dtype=torch.bfloat16)
x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
with am.record(mlp) as whole:
    y = mlp(x)
with am.record(mlp) as tiled:
    z = in_tiles(mlp, x, 8)
checks.add("the whole MLP saves 2sbh + 6sbf", [(2 * s * b * h + 6 * s * b * f, whole.total_bytes)])
checks.add("in tiles of 8 tokens it saves 2sbh", [(2 * s * b * h, tiled.total_bytes)])
checks.show()

# %% jupyter={"source_hidden": true}
exact = GatedMLP(h, f, TensorParallel(), seed=1, dtype=torch.float64)
x = torch.randn(s, b, h, dtype=torch.float64, requires_grad=True)
leaves = [x, *exact.parameters()]
found, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (in_tiles(exact, x, 8), exact(x)))
apart = [int((one - other).abs().gt(1e-12 * other.abs().max()).sum()) for one, other in zip(found, wanted)]
checks.add("gradients in tiles, equal but for rounding", [(True, count == 0) for count in apart])
llamas = 65536, LLAMA.hidden_size, LLAMA.ffn_hidden_size
left = mlp_peak_bytes(*llamas, TILE) / mlp_peak_bytes(*llamas)
print(f"at the peak of Llama 3 8B's MLP on 65,536 tokens, tiles of {TILE:,} leave {left:.1%} of the whole")
checks.show()

# %% [markdown]
# <details><summary>The backward pass's peak, in bytes per token</summary>
#
# The whole MLP takes $6h + 10f$: $x$, $y$ and $y$'s gradient, then
# gate, up, their gradients and that of down's input (itself freed by then). In tiles there are two moments: the last
# tile's $6h + 10f$ beside $8h$ for all other tokens, $2h$ each for $x$, $y$ and their gradients; then $10h$, while
# $x$'s gradient exists twice, in parts and concatenated. Inside a layer it's $4h$ less: $y$ is gone, and its gradient
# counts among the layers' inputs. Attention takes $9h + 136$: $2h$ each for Q and the inputs of QKV, projection and
# norm 2, $h$ for K and V, and 4 bytes for each of 32 heads and two norms.
# </details>
#
# The opening's sum:

# %% jupyter={"source_hidden": true}
width, at_work = LLAMA.hidden_size, long_steps(LLAMA.with_sizes(seq_length=2**20))[3]
for part, size in at_work.parts.items():
    times, rest = divmod(size // 2**20, width)
    print(f"{part}: {times}h{f' + {rest}' if rest else ''} bytes per token, {size_text(size)}")
print(f"together {size_text(at_work.bytes)}")
# The second moment takes 10h per token.
longer = next(
    s for s in range(TILE, 2**20, 1024) if mlp_peak_bytes(s, width, LLAMA.ffn_hidden_size, TILE) == 10 * s * width
)
print(f"In tiles of {TILE:,} tokens, the second moment is the larger one from {longer:,} tokens on.")

# %% [markdown]
# > **Why do this?** The largest tensors of the layer never exist whole. **Why not?** Three more matmuls per tile: its
# > checkpoint recomputes gate and up, and the layer's own recomputation can't stop before down any more. And autograd
# > sums the tiles' weight gradients in 16 bits, so each sum rounds.
#
# **Write it:** [exercise 10.3](../labs/lab10_keep_less.py), `tiled_mlp`:
# `python my/labs/lab10_keep_less.py --only 10.3`.
#
# ## Step 5: more GPUs for one sequence
#
# Attention's queries can run in tiles, but every query reads all keys and values before it. **Context parallelism**
# gives each of $c$ ranks $s/c$ tokens through the whole model, so it divides everything, the loss and K and V too.
# Tensor parallelism doesn't: beyond $k$ ranks, several hold the same key head. Only attention needs the other ranks'
# tokens. There are three ways to get them (Megatron: `--context-parallel-size`, with `--cp-comm-type` as named here;
# before Blackwell it wants `CUDA_DEVICE_MAX_CONNECTIONS=1`, as for [TP](04_sequence_parallelism.ipynb)):
#
# - **Gather** (`all_gather`). All-gather K and V, save your own shard, and gather again in the backward pass.
# - **Ring** (`p2p`). Send your K and V to the next rank, and attend to those that arrive, $c - 1$ times. No rank ever
#   has K and V whole.
# - **Ulysses** (`a2a`). An all-to-all trades tokens for heads, so each rank attends to all tokens with $1/c$ of the
#   heads. A second one trades back. $c$ must divide $a$; beyond $k$, DeepSpeed repeats the key heads, Transformer
#   Engine refuses.

# %% jupyter={"source_hidden": true}
Panel(
    lambda way: show.shared_sequence(LLAMA.with_sizes(seq_length=65536), way),
    way=choice("K and V travel by", ["gather", "ring", "ulysses"], "ring"),
)

# %% [markdown]
# In a ring no rank sees a whole row of scores: it adds up the softmax's numerators and denominators as keys come in.
#
# With a causal mask, late tokens read many keys and early ones few. So split the sequence into $2c$ chunks and give
# rank $i$ chunks $i$ and $2c - 1 - i$: now all have the same work. Compare layouts for Llama 3 70B ($k = 8$) at 8,192
# tokens. Ulysses sends Q and the output too, and saves the output twice:

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import counts, wire_bytes
from actmem.ledger.comms import count_collectives
from actmem_more.context import layer_groups
from actmem_more.llama_terms import context_collectives, llama_collectives, llama_rows

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
    expected = counts(context_collectives(million, eight, kind))
    checks.add(
        f"collectives of a layer, {kind}", [(sum(expected.values()), len(seen.collectives))], "collectives"
    )

large, lines = llama_shape("llama3-70b"), []
for t, c, kind in ((8, 1, ""), (4, 2, "gather"), (4, 2, "ulysses"), (16, 1, ""), (8, 2, "gather")):
    parallel = am.Parallel(t, True, context_parallel_size=c)
    layout, kind = f"t = {t}, c = {c}  {kind}", kind or "gather"
    saved = total(llama_rows(large, parallel, context_kind=kind))
    sent = wire_bytes([*llama_collectives(large, parallel), *context_collectives(large, parallel, kind)])
    lines.append((layout, t * c, size_text(saved), size_text(sent)))
print(text_table((f"Llama 3 70B, s = {large.seq_length:,}", "ranks", "a layer saves", "sends"), lines, " rrr"))
checks.show()

# %% [markdown]
# > **Why do this?** Everything that grows with $s$ is divided by $c$ (for any number of heads, with gather and ring),
# > and a rank sends less than with TP of the same degree. **Why not?** Tensor parallelism divides the weights, this
# > doesn't: $t = 4$, $c = 2$ has twice the weights per GPU of $t = 8$. And their gradients must be summed over the
# > $c$ ranks, like those of data-parallel ones.
#
# ## Work it out
#
# You fine-tune Llama 3 8B with frozen 16-bit weights on one GPU of 80 GiB, with a host of 512 GiB. Which steps does a
# sequence of 262,144 tokens need? Are the copies overlapped on a link of 50 GB/s, at $4 \cdot 10^{14}$ FLOPs per
# second? How many GPUs do a million tokens take? (A layer's forward pass takes $2 \cdot 218 \cdot 10^6 + 4sh$ FLOPs
# per token, all scores counted; a causal kernel computes half of $4sh$.)

# %% jupyter={"source_hidden": true}
quarter = LLAMA.with_sizes(seq_length=2**18)
left = 80 * 2**30 - 2 * (
    32 * (LLAMA.attention_weights + LLAMA.mlp_weights) + 2 * LLAMA.vocab_size * LLAMA.hidden_size
)
needed = next(step for step in long_steps(quarter) if step.bytes <= left)
copied, flops = 2 * 2**18 * LLAMA.hidden_size, sum(llama_matmuls(quarter).values())
ranks = next(c for c in (2, 4, 8) if long_steps(million, c)[-1].bytes <= left)
worked(
    f"The weights leave {size_text(left)}. After each step the peak is "
    f"{', '.join(size_text(step.bytes) for step in long_steps(quarter)[:4])}: it fits with "
    f"“{needed.name}”.",
    f"A layer's input takes {1000 * copied / 50e9:.0f} ms on the link, and its forward pass "
    f"{1000 * flops / 4e14:,.0f} ms: overlapped. The host holds {size_text(32 * copied)}.",
    f"A million tokens take {size_text(long_steps(million)[3].bytes)} on one GPU: too much. "
    f"{ranks} GPUs share them, {size_text(long_steps(million, ranks)[-1].bytes)} on each, and if both use this host, "
    f"it holds {size_text(4 * 32 * copied)}.",
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# > **Take away**
# > 1. Find what is largest at the peak; only a step that removes *that* helps.
# > 2. Offload saved inputs, and run MLPs in tiles: the peak doesn't grow with $L$.
# > 3. Keys and values need ranks that share the sequence: gather, ring or Ulysses.
# >
# > **At work tomorrow:** `actmem record` your model at its longest sequence. Remove the largest tensor, and record
# > again.
#
# **Sources.** *Arctic Long Sequence Training*, 2506.13996 · *Ulysses*, 2309.14509 · *Ring Attention*, 2310.01889 ·
# gather: 2407.21783, section 3.3.2; in the first figure, point at a bar to see who wrote the step or asked for it.
#
# **Lab 10** has exercise 10.3. Next: [chapter 13](13_experts.ipynb), experts and latent
# attention.
