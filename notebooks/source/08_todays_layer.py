# %% [markdown]
# # 8 · After the paper
#
# You switch on selective recomputation, and the memory hardly falls. Why? And what does today's layer have to keep?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.rows import total
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, choice, size_text, steps, worked,
)
from actmem_course.figures import ch08_todays_layer as show
from actmem_more.llama_shape import LlamaShape, llama_shape
from actmem_more.llama_terms import llama_rows

LLAMA = llama_shape("llama3-8b")
checks = Checks()

all_kept = total(llama_rows(LLAMA))
share_left = lambda mode: 100 * total(llama_rows(LLAMA, recompute=mode)) / all_kept
question = Prediction(
    "A layer of Llama 3 8B, 8,192 tokens. A flash kernel never stores the scores, so selective "
    f"recomputation of the core frees {100 - share_left('selective'):.1f}%. "
    "What percentage of the layer's bytes goes if you recompute everything that needs no matrix product?",
    100 - share_left("elementwise"),
    "%",
    "The outputs of both norms and silu(gate) · up: 4sbh + 2sbf. No matrix product runs again.",
    GuessLine(-all_kept / 100, all_kept),
)
ALL = "each way"
Reveal(
    question,
    Panel(
        lambda s, k, f, shown: show.kept_today(
            LlamaShape(s, 1, 4096, 32, k, f),
            modes=("none", "selective", "elementwise", "full") if shown == ALL else ("none",),
        ),
        s=steps("s", "tokens", (1024, 2048, 4096, 8192, 16384, 32768), 8192),
        k=steps("k", "key and value heads", (1, 2, 4, 8, 16, 32), 8),
        f=steps("f", "width of the MLP", (8192, 11008, 14336, 16384), 14336),
        shown=choice("run again", ["nothing", ALL], "nothing"),
    ),
    shown=ALL,
)

# %% [markdown]
# **What you need:** chapter 2 (what a layer keeps, and why) and chapter 5 (recomputation). About 30 minutes.
#
# **New letters:** $k$ key and value heads, $d$ elements of a head, $f$ width of the MLP. Here $d = h/a$.

# %% [markdown]
# ## The layer changed
#
# Models changed after 2022. Layer norm lost its mean and biases (RMSNorm). Q and K are rotated by position (RoPE). Several
# query heads share a key and value head (grouped queries). The MLP has a gate (SwiGLU). There is no dropout. And attention
# runs in one fused kernel (end of chapter 5). So $5as^2b$ and the dropout masks are gone. What is left? Ask what each
# gradient reads, as in chapter 2:
#
# - **RMSNorm** reads its input and one number per token: $2sbh + 4sb$.
# - **A product** reads its input: $2sbh$ for Q, K, V together, and for gate and up together; $2sbh$ for the projection; $2sbf$
#   for the down product.
# - **A rotation** is linear: its gradient is the rotation backwards. It reads only the tables.
# - **Flash attention** reads Q, K, V, its output and the log-sum-exp of each row: $2sbh + 4sbkd + 2sbh + 4asb$. Its output
#   is the projection's input: one tensor, counted once.
# - **SwiGLU**, `silu(gate) · up`, reads gate and up: $4sbf$.
#
# Together this is what the layer keeps if it keeps **nothing twice**. (Norms that keep their outputs in place of their inputs
# would save $4sbh$ more, if no weight is 0.) Here is one layer of Llama 3 8B. Point at (or tap) a bar for its bytes and for what
# reads it:

# %% jupyter={"source_hidden": true}
LiveFigure(show.llama_bars(LLAMA))

# %% [markdown]
# ## Measured
#
# The layer in `src/actmem_more/llama.py` keeps exactly these:

# %%
from actmem_more.llama_measured import measure_llama_layer
from actmem_more.llama_shape import TINY_LLAMA

checks.add_rows("a small Llama layer", llama_rows(TINY_LLAMA), measure_llama_layer(TINY_LLAMA))
checks.show()

# %% [markdown]
# Then do it at a real model's size, on an emulated rank with tensor and sequence parallelism. With $t \le k$ everything is
# divided by $t$. With $t > k$, K and V are divided by $k$ only:

# %%
shape = llama_shape("llama3-70b")
for t in (2, 8, 16):
    with am.emulated_rank(t):
        measured = measure_llama_layer(shape, am.tensor_parallel(sequence_parallel=True))
    predicted = llama_rows(shape, am.Parallel(t, True))
    checks.add_rows(f"Llama 3 70B, one of {t} ranks", predicted, measured)
    checks.add(
        f"K is divided, t = {t}",
        [(min(t, shape.num_key_value_heads), next(row.split_by for row in predicted if row.term == "K"))],
        "ranks",
        sides=("min(t, k)", "in the rows"),
    )
checks.show()

# %% [markdown]
# ## More ranks than key heads
#
# A head is never cut: its queries need whole keys. So with $t > k$, $t/k$ neighbouring ranks hold the same key and value head,
# and the same rows of the K and V weights. Rank $i$ reads head $\lfloor i\,k/t \rfloor$.
#
# And the gradients? Each rank's query heads give a part of the gradient of their key head. The gradient that goes on to
# `x` needs nothing new: the exchange at the block's entry sums it over all $t$ ranks anyway. But the weight that makes the head
# is a replica on $t/k$ ranks, and each has only its own part of the gradient. Those ranks must add up their parts after
# backward, as all ranks do with the norms' weights in chapter 4. If you forget it, you train $t/k$ different copies of one head.
#
# **Now write it:** [exercises 7.1, 7.5 and 7.6](../labs/lab7_todays_layer.py), `llama_layer_bytes`,
# `split_grouped_heads` and `sum_shared_gradients`: `python my/labs/lab7_todays_layer.py --only 7.1,7.5,7.6`.

# %% [markdown]
# ## What plain operators keep instead
#
# Hugging Face's models build the same RMSNorm and the same gate from torch's operators. (Megatron-LM's are fused.) Autograd then
# keeps what each operator reads. Here are both forms in 16 bits, with the norm in float32:

# %% jupyter={"source_hidden": true}
import torch
from torch import nn

from actmem_more.llama_modules import rms_norm, swiglu


class PlainNorm(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(h, dtype=torch.bfloat16))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class FusedNorm(PlainNorm):
    def forward(self, x):
        return rms_norm(x, self.weight)


class PlainGate(nn.Module):
    def forward(self, gate, up):
        return nn.functional.silu(gate) * up


class FusedGate(nn.Module):
    def forward(self, gate, up):
        return swiglu(gate, up)


s, b, h = 64, 2, 128


def kept(module, inputs):
    """Bytes for each element of one input."""
    tensors = [torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True) for _ in range(inputs)]
    with am.record(module) as ledger:
        y = module(*tensors)  # it holds the graph, which holds the tensors
        held = ledger
    del y
    return held.total_bytes / (s * b * h)


norms = kept(PlainNorm(h), 1), kept(FusedNorm(h), 1)
gates = kept(PlainGate(), 2), kept(FusedGate(), 2)
more = 2 * (norms[0] - norms[1]) + (gates[0] - gates[1]) * LLAMA.ffn_hidden_size / LLAMA.hidden_size
tokens = LLAMA.seq_length * LLAMA.micro_batch_size
whole = total(llama_rows(LLAMA)) / (tokens * LLAMA.hidden_size)
each = {
    "in plain operators": {"RMSNorm": norms[0], "SwiGLU": gates[0]},
    "in one function": {"RMSNorm": norms[1], "SwiGLU": gates[1]},
}
LiveFigure(
    bar_chart(
        f"In Llama 3 8B plain operators keep {more:.0f} sbh on top of the layer's {whole:.0f}",
        each,
        "measured, for each element of an input",
        "bytes",
        beside=True,
    )
)

# %% [markdown]
# **Now write it:** [exercises 7.2 and 7.3](../labs/lab7_todays_layer.py), `rms_norm` and `swiglu`: `python
# my/labs/lab7_todays_layer.py --only 7.2,7.3`.
#
# Now compare others' layers with the course's, at the size of Llama 3 8B, in 16 bits. (The bars are formulas; `python
# labs/measure_peers.py --today` counts them to the byte.)

# %% jupyter={"source_hidden": true}
LiveFigure(show.others_bars(LLAMA))

# %% [markdown]
# Eager attention also keeps the scores: hundreds of $sbh$. So does `sdpa` with dropout on a CPU.

# %% [markdown]
# ## What needs no product
#
# A norm's output is cheap to compute from its input, and so is `silu(gate) · up` from gate and up. The mode `elementwise` drops
# both, and reruns no matrix product. (FLOPs of attention are the full square's, without a flash kernel's own second QKᵀ; a causal
# kernel does half.)

# %% jupyter={"source_hidden": true}
from actmem_more.llama_terms import llama_products, llama_recomputed_flops

forward = sum(llama_products(LLAMA).values())
trade = {"bytes freed": {}, "FLOPs added": {}}
for mode in ("selective", "elementwise", "full"):
    trade["bytes freed"][mode] = float(100 - share_left(mode))
    trade["FLOPs added"][mode] = float(100 * llama_recomputed_flops(LLAMA, mode) / (3 * forward))
LiveFigure(
    bar_chart(
        "Elementwise frees a third of a Llama layer without rerunning a product",
        trade,
        "of the layer's bytes, and of its FLOPs",
        "%",
        beside=True,
    )
)

# %% [markdown]
# The dropped tensor is always the input of a linear. So one function is enough: a linear that keeps what its input is
# computed from, and computes it again in backward.
#
# **Now write it:** [exercise 7.4](../labs/lab7_todays_layer.py), `recipe_linear`: `python my/labs/lab7_todays_layer.py
# --only 7.4`.
#
# The same works for the paper's own layer. There `elementwise` also drops the attention core and reruns QKᵀ, as selective
# recomputation does. Of the $34sbh/t$ that selective leaves, it drops the two norm outputs, the GeLU's output and the two
# dropout masks, which are drawn again from a seed. That leaves $20sbh/t$, and no further product reruns.

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS, model_shape
from actmem.formulas.activations import layer_bytes

gpt3 = model_shape("175B")
for name, model in PAPER_MODELS.items():
    sbh = model.shape.seq_length * model.shape.micro_batch_size * model.shape.hidden_size
    checks.add(
        f"{name}, elementwise",
        [
            (
                20 * sbh // model.parallel.tensor_parallel_size,
                layer_bytes(model.shape, model.parallel, "elementwise"),
            )
        ],
        sides=("20sbh/t", "sum of the tensors"),
    )
checks.show()

# %% [markdown]
# ## The frontier: recompute, offload or compress
#
# A layer is a table of terms. What can you do with each until backward reads it?
#
# - **keep** it;
# - **recompute** it from other terms, which may cost a product;
# - **offload** it to the host's memory, which costs no time while the copy hides behind the layer's own work;
# - **compress** it to eight bits, which costs accuracy: the gradients change a little.
#
# The figure tries them all for one layer of GPT-3 on an A100. A circle is one set of products to rerun. On each line no other
# choice keeps less for the same time. The axis counts the time of products and of copies that nothing hides. (Other operations
# take some too: chapter 7.) Make the link faster or slower: an A100 has 25 GB/s (PCIe 4.0), Grace Hopper 450, with a faster GPU.

# %%
Panel(
    lambda s, gigabytes: show.frontier_figure(gpt3.with_sizes(seq_length=s), gigabytes),
    s=steps("s", "tokens", (1024, 2048, 4096, 8192), 2048),
    gigabytes=steps("link to the host", "GB/s", (6, 12, 25, 50, 100, 450), 25),
)

# %% [markdown]
# You can run every point: give a layer a set of terms to recompute, or an action for each (`src/actmem/drop.py`,
# `src/actmem_more/store.py`). An offloaded tensor comes back while backward works on the next operation of the forward order:

# %%
from actmem.ledger.layer_rows import layer_rows_of
from actmem_more.store import EightBits, HostMemory

small = model_shape("tiny")
stores = {"offload": HostMemory(), "compress": EightBits()}


def step(recompute):
    """Gradients of one layer, and the bytes that it kept on the device and on the host."""
    layer = am.TransformerLayer(small, recompute=recompute, stores=stores, seed=1)
    x = torch.randn(128, 2, 256, generator=torch.Generator().manual_seed(2)).requires_grad_()
    rows = layer_rows_of(layer, x.detach().clone().requires_grad_())
    host = total(row for row in rows if row.term.endswith(", on the host"))
    layer = am.TransformerLayer(small, recompute=recompute, stores=stores, seed=1)
    layer(x).square().sum().backward()
    return total(rows) - host, host, [x.grad, *(p.grad for p in layer.parameters())]


core = dict.fromkeys(("softmax output", "softmax dropout mask", "softmax dropout output"), "recompute")
whole, _, wanted = step("none")
places = {"on the device": {}, "on the host": {}}
ways = {
    "elementwise": "elementwise",
    "GeLU input offloaded, its output and core again": {
        "GeLU input": "offload",
        "4h→h input": "recompute",
        **core,
    },
    "GeLU input compressed": {"GeLU input": "compress"},
}
for label, recompute in ways.items():
    size, host, gradients = step(recompute)
    furthest = max(((x - y).norm() / y.norm()).item() for x, y in zip(gradients, wanted))
    bar = f"{label}; gradients {'equal' if furthest == 0 else f'up to {furthest:.1%} off'}"
    places["on the device"][bar], places["on the host"][bar] = 100 * size / whole, 100 * host / whole
LiveFigure(
    bar_chart(
        f"Dropped and offloaded: equal bit for bit; compressed: {furthest:.1%} off",
        places,
        "of what the layer keeps",
        "%",
    )
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# All 32 layers of Llama 3 8B read one sequence of 8,192 tokens on one GPU. What do they keep with a flash kernel, and
# what with `elementwise`? What would they keep if attention still stored its scores, at $2as^2b$ a layer (there is no dropout)?

# %% jupyter={"source_hidden": true}
layers = LLAMA.num_layers
fewer = total(llama_rows(LLAMA, recompute="elementwise"))
scores = 2 * LLAMA.num_attention_heads * LLAMA.seq_length**2 * LLAMA.micro_batch_size
worked(
    f"A layer keeps {size_text(all_kept)}; {layers} of them {size_text(layers * all_kept)}.",
    f"Elementwise drops the outputs of norms and of the gate: {size_text(fewer)} a layer, "
    f"{size_text(layers * fewer)} in all, and no product runs again.",
    f"The scores would add {size_text(scores)} a layer, {scores / all_kept:.1f} times all the rest, "
    f"{size_text(layers * scores)} in all. That is why long sequences are trained with fused kernels.",
)

# %% [markdown]
# ## Check your understanding
#
# **1.** A Llama layer with $k = a$ (no grouped queries): which terms grow, and is there an $s^2$?
#
# <details><summary>Answer</summary>
#
# K and V: $4sbh$ instead of $4sbkd$. No $s^2$: the kernel stores no scores, however many heads there are.
#
# </details>
#
# **2.** Why is full recomputation of this layer a worse trade than for the paper's?
#
# <details><summary>Answer</summary>
#
# The layer keeps less to begin with, so the same FLOPs free fewer bytes. What was cheap to free, the scores, is gone already.
#
# </details>
#
# **3.** Dropping K alone frees nothing in the paper's layer, so the code refuses it there. In the Llama layer it frees K's bytes. Why?
#
# <details><summary>Answer</summary>
#
# In the paper's layer Q, K and V are three views of one product's result, and the storage stays as long as one of them does. The
# Llama layer rotates Q and K into tensors of their own.
#
# </details>

# %% [markdown]
# ## What people get wrong here
#
# - **Counting K and V like Q.** They have k heads, not a.
# - **Counting silu(gate).** Only an implementation in two operations keeps it.
#
# ## Now measure it
#
# `python labs/measure_today.py --emulate 8 --model llama3-405b` makes this comparison in 12 configurations; `--paper-layer` for
# the paper's layer.
#
# **Sources.** Meta's Llama 3 report, 2407.21783, table 3, and the models' published config.json · 2305.13245 for grouped queries ·
# 2205.14135 for flash attention · code: `src/actmem/recipes.py`, `src/actmem/drop.py`, `src/actmem/layers/`.
#
# ## Now fit your model
#
# Where attention stores no scores, which recomputation is left? Plan one layout of one of today's models with each of the two,
# at 4,096 tokens, its default. Then add `--seq-length 8192`: which of them still fits? (`full`; `elementwise` lacks 23.6 GiB.)
#
# ```
# actmem plan qwen3-32b --gpus 64 --memory 80 --global-batch 512 --tensor 1 --pipeline 1 --context 1 --zero 3 --micro-batch-size 1 --recompute elementwise
# actmem plan qwen3-32b --gpus 64 --memory 80 --global-batch 512 --tensor 1 --pipeline 1 --context 1 --zero 3 --micro-batch-size 1 --recompute full
# ```
#
# Experts, latent attention and context parallelism come in [chapter 13](13_experts.ipynb). Next, [chapter 9](09_your_model.ipynb): a model that this course did not write.
