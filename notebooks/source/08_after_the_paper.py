# %% [markdown]
# # 8 · After the paper
#
# Selective recomputation is on, and the memory hardly falls. Why? And what does today's layer have to keep?

# %%
import torch
from torch import nn

from actmem.config import Parallel
from actmem.formulas.activations import layer_bytes
from actmem.formulas.llama_terms import llama_products, llama_recomputed_flops, llama_rows
from actmem.llama_shape import TINY_LLAMA, LlamaShape, llama_shape
from actmem.models import PAPER_MODELS, model_shape
from actmem.rows import total
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.controls import choice, steps
from actmem_course.show.folded import Agreement, worked
from actmem_course.show.live import LiveFigure
from actmem_course.show.marks import GuessLine
from actmem_course.show.style import size_text
from actmem_course.show.today import frontier_figure, kept_today, llama_bars, others_bars
from actmem_course.show.widgets import Panel, Prediction, Reveal

LLAMA = llama_shape("llama3-8b")
agree = Agreement()

all_kept = total(llama_rows(LLAMA))
share_left = lambda mode: 100 * total(llama_rows(LLAMA, recompute=mode)) / all_kept
question = Prediction(
    "A layer of Llama 3 8B with flash attention, 8,192 tokens. Someone turns selective recomputation of the attention core on. How many "
    "percent of the layer's activation bytes go?",
    100 - share_left("selective"),
    "%",
    "A flash kernel never stores the scores. All that the core keeps for itself is one number for each query and head: 4asb bytes.",
    GuessLine(-all_kept / 100, all_kept),
)
ALL = "each way"
Reveal(
    question,
    Panel(
        lambda s, k, f, shown: kept_today(LlamaShape(s, 1, 4096, 32, k, f), modes=("none", "selective", "elementwise", "full") if shown == ALL else ("none",)),
        s=steps("s", "tokens", (1024, 2048, 4096, 8192, 16384, 32768), 8192),
        k=steps("k", "key and value heads", (1, 2, 4, 8, 16, 32), 8),
        f=steps("f", "width of the MLP", (8192, 11008, 14336, 16384), 14336),
        shown=choice("run again", ["nothing", ALL], "nothing"),
    ),
    shown=ALL,
)

# %% [markdown]
# **What you need.** Chapter 2 (what a layer keeps, and why) and chapter 5 (recomputation). About 25 minutes.
#
# **Letters.** As before `s`, `b`, `h`, `a`, `t`; new: `k` key and value heads · `d = h/a` elements of a head · `f` width of
# the MLP, or of one expert · `E` experts, of which each token takes `κ`.

# %% [markdown]
# ## The layer changed
#
# Since 2022 models dropped layer norm's mean and biases (RMSNorm), rotate Q and K by position (RoPE), let several query heads
# share a key and value head (grouped queries), gate the MLP (SwiGLU), and train without dropout. And attention runs in one
# kernel that never writes the scores. So the two large terms of the paper's formula are gone: no `5as²b`, no masks. What is
# left? Ask each operation what its gradient reads, as chapter 2 does:
#
# - **RMSNorm** reads its input and one number a token: `2sbh + 4sb`.
# - **A product** reads its input: `2sbh` for Q, K, V together, and for gate and up together; `2sbh` for the projection; `2sbf`
#   for the down product.
# - **A rotation** is linear: its gradient is the rotation backwards. It reads the tables, and nothing of its input.
# - **Flash attention** reads Q, K, V, its output and the log-sum-exp of each row: `2sbh + 4sbkd + 2sbh + 4asb`. Its output
#   is the projection's input: one tensor, counted once.
# - **SwiGLU**, `silu(gate) · up`, reads gate and up: `4sbf`.
#
# One layer of Llama 3 8B; hover for bytes and for who reads them:

# %% jupyter={"source_hidden": true}
LiveFigure(llama_bars(LLAMA))

# %% [markdown]
# ## Measured
#
# The layer in `src/actmem/layers/llama.py` keeps exactly these, and a ledger of real autograd says so:

# %%
from actmem.measure.parts import measure_layer

agree.add_rows("a small Llama layer", llama_rows(TINY_LLAMA), measure_layer(TINY_LLAMA))

# %% [markdown]
# At a real model's size an emulated rank does the same, with tensor and sequence parallelism. With `t <= k` everything is
# divided by `t`. With `t > k` K and V are divided by `k` only:

# %%
from actmem.measure import emulated_rank
from actmem.parallel.groups import tensor_parallel

shape = llama_shape("llama3-70b")
for t in (2, 8, 16):
    with emulated_rank(t):
        measured = measure_layer(shape, tensor_parallel(sequence_parallel=True))
    predicted = llama_rows(shape, Parallel(t, True))
    agree.add_rows(f"Llama 3 70B, one of {t} ranks", predicted, measured)
    agree.add(f"K is divided by t or by its heads, t = {t}", [(min(t, shape.num_key_value_heads), next(row.split_by for row in predicted if row.term == "K"))], "ranks")

# %% [markdown]
# ## More ranks than key heads
#
# A head is never cut: its queries need whole keys. So with `t > k` neighbouring ranks, `t/k` of them, hold the same key and
# value head, and the same rows of the K and V weights. Rank `r` reads head `r·k // t`.
#
# And the gradients? Each rank's query heads give a part of the gradient of their key head. The gradient that goes on to
# `x` needs nothing new: f (or g) sums it over all `t` ranks anyway. But the weight that makes the head is a replica on `t/k`
# ranks, and each has only its own part of the gradient. Those ranks must add theirs up after backward, as all ranks do with
# the norms' weights under sequence parallelism. If you forget it, you train `t/k` different copies of one head.
#
# **Now write it:** [exercises 7.1, 7.5 and 7.6](../labs/lab7_todays_layer.py), `llama_layer_bytes`,
# `split_grouped_heads` and `sum_shared_gradients`: `python my/labs/lab7_todays_layer.py --only 7.1,7.5,7.6`.

# %% [markdown]
# ## Context parallelism
#
# Tensor parallelism stops dividing K and V at `k` heads, and sequence parallelism divides only what lies between the blocks.
# For long sequences `c` more ranks cut the sequence from end to end, attention too: each keeps `1/c` of everything, K and V
# included, for any `k`. A rank's queries still need all keys before them. Two ways to get them:
#
# - **Gather** K and V along the sequence, as Llama 3 does, keep only the shard, and gather again in backward: it is `g`. *Plain*
#   keeps what it gathered: K and V whole on every rank. Rank `i` holds chunks `i` and `2c − 1 − i` of `2c`, one that sees few
#   keys and one that sees many, so that all ranks have the same work.
# - **Ulysses** exchanges tokens for heads: an all-to-all before attention, another after it. The kernel keeps its output by
#   heads, the projection by tokens: one copy more, which *elementwise* drops. A head isn't cut, so `t·c` must divide `k`.
#
# None of this divides a weight. Llama 3 70B, on 8 ranks and on 16 (`k = 8`):

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import wire_bytes
from actmem.formulas.llama_terms import context_exchanges, context_rows
from actmem.layers.context import layer_groups

ways = {}
for t, c, kind in ((8, 1, ""), (4, 2, "gather"), (4, 2, "gather-plain"), (4, 2, "ulysses"), (16, 1, ""), (8, 2, "gather")):
    given = (shape, Parallel(t, True), c, kind or "gather")
    ways[f"t = {t}, c = {c}{kind and ', ' + kind}: {wire_bytes(context_exchanges(*given)) / 2**20:.0f} MiB sent"] = total(context_rows(*given))
with emulated_rank(16):
    tensor, context = layer_groups(2, sequence_parallel=True)
    agree.add_rows("Llama 3 70B, t = 8, c = 2", context_rows(shape, Parallel(8, True), 2), measure_layer(shape, tensor, context=context))
LiveFigure(bar_chart("16 ranks: c = 2 keeps less than t = 16, since K has 8 heads", {"kept": ways}, "kept by one rank; sent among its c ranks"))

# %% [markdown]
# ## What everyone keeps instead
#
# Most models build the same RMSNorm and the same gate from torch's operators. Autograd then keeps what each operator reads.
# In 16 bits, with the norm computed in float32:

# %%
from actmem.measure import record
from actmem.layers.llama_parts import rms_norm, swiglu


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

# %% jupyter={"source_hidden": true}
s, b, h = 64, 2, 128


def kept(module, inputs):
    """Bytes for each element of one input."""
    tensors = [torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True) for _ in range(inputs)]
    with record(module) as ledger:
        y = module(*tensors)  # it holds the graph, which holds the tensors
        held = ledger
    del y
    return held.total_bytes / (s * b * h)


norms = kept(PlainNorm(h), 1), kept(FusedNorm(h), 1)
gates = kept(PlainGate(), 2), kept(FusedGate(), 2)
more = 2 * (norms[0] - norms[1]) + (gates[0] - gates[1]) * LLAMA.ffn_hidden_size / LLAMA.hidden_size
tokens = LLAMA.seq_length * LLAMA.micro_batch_size
whole = total(llama_rows(LLAMA)) / (tokens * LLAMA.hidden_size)
each = {"in plain operators": {"RMSNorm": norms[0], "SwiGLU": gates[0]}, "in one function": {"RMSNorm": norms[1], "SwiGLU": gates[1]}}
LiveFigure(bar_chart(f"Plain operators keep {more:.0f} sbh more in Llama 3 8B, beside the layer's own {whole:.0f}", each, "measured, for each element of an input", "bytes", beside=True))

# %% [markdown]
# **Now write it:** [exercises 7.2 and 7.3](../labs/lab7_todays_layer.py), `rms_norm` and `swiglu`: `python
# my/labs/lab7_todays_layer.py --only 7.2,7.3`.
#
# Compare Hugging Face's blocks with ours. `python labs/measure_peers.py --today` builds them and counts; every formula holds
# to the byte. At the size of Llama 3 8B, in 16 bits:

# %% jupyter={"source_hidden": true}
LiveFigure(others_bars(LLAMA))

# %% [markdown]
# Eager attention keeps the scores as well, and on a CPU so does dropout in `sdpa`: hundreds of `sbh`.

# %% [markdown]
# ## Norms over heads, and experts
#
# Two more changes. Qwen3 normalises the query and the key of each head before it rotates them, so the layer keeps them once
# more, before the norm. And many models send each token to a few of many MLPs: `κ` of `E` **experts**. A router scores the
# experts, the tokens are sorted by expert and dispatched, and the results are weighed and added up.
#
# What does backward read? Per pair of a token and an expert: gate, up and the down product's input (`6sbκf`), as in one MLP.
# Not the dispatched token: backward dispatches it again, as sequence parallelism gathers again. Not the expert's output either:
# the down product is linear, so the weight may multiply before it. What is left of the routing is who goes where, a few bytes a pair.

# %% jupyter={"source_hidden": true}
EXPERTS = llama_shape("qwen3-30b-a3b")
LiveFigure(llama_bars(EXPERTS))

# %% [markdown]
# The ranks of the layer share the experts, whole. Under sequence parallelism each routes its own tokens, and an all-to-all
# brings every pair to its expert's rank. So a rank holds as much as the routers send to it: with an even router `sbκ/t` pairs;
# if every token wants the same experts, one rank gets all of them. Every rank must have room for that, or drop tokens:

# %% jupyter={"source_hidden": true}
from actmem.formulas.llama_terms import expert_mlp_rows, forced_routed_tokens

held = {"experts": {}, "the rest": {}}
for t, routing in ((1, "even"), (8, "even"), (8, "one-sided")):
    parallel = Parallel(t, True)
    tokens_held = forced_routed_tokens(EXPERTS, parallel, routing, 0)
    predicted = llama_rows(EXPERTS, parallel, routed_tokens=tokens_held)
    with emulated_rank(t):
        agree.add_rows(f"Qwen3 30B-A3B, t = {t}, {routing}", predicted, measure_layer(EXPERTS, tensor_parallel(sequence_parallel=True), routing=routing))
    bar = f"t = {t}, {routing} router: {tokens_held:,} pairs"
    held["experts"][bar] = total(expert_mlp_rows(EXPERTS, parallel, routed_tokens=tokens_held))
    held["the rest"][bar] = total(predicted) - held["experts"][bar]
LiveFigure(bar_chart("One-sided routers bring one rank all the tokens", held, "kept by the fullest rank"))

# %% [markdown]
# ## Latent attention
#
# DeepSeek-V3 makes the keys and values of its 128 heads from one narrow latent a token, and the queries from another. At
# inference only the latent is cached, beside one small key with positions that all heads share. Does training save as
# much? No: a flash kernel reads whole keys and values, so backward wants them too, for every head, and the latents come
# on top. Which of them to keep is again a set of terms. `recompute={"K", "V"}` keeps the latent and makes keys and
# values again: one product, so it is no part of `elementwise`.

# %% jupyter={"source_hidden": true}
from actmem.recipes import Recompute

LATENT = llama_shape("deepseek-v3")
rows = {row.term: row.bytes for row in llama_rows(LATENT)}
products = llama_products(LATENT)
tokens = LATENT.seq_length * LATENT.micro_batch_size
latent = {"nothing again": sum(rows.values())}
for terms in ({"K", "V"}, {"Q", "K", "V"}):
    again = Recompute.of(terms)
    flops = llama_recomputed_flops(LATENT, again)
    latent[f"{', '.join(sorted(terms))} again: {flops / (3 * sum(products.values())):.1%} more FLOPs"] = total(llama_rows(LATENT, recompute=again))
with emulated_rank(8):
    agree.add_rows("DeepSeek-V3, one of 8 ranks", llama_rows(LATENT, Parallel(8, True)), measure_layer(LATENT, tensor_parallel(sequence_parallel=True)))
LiveFigure(bar_chart(
    f"Cached at inference: {rows['KV latent'] // tokens:,} bytes a token; kept to train: {(rows['K'] + rows['V']) // tokens:,} of keys and values",
    {"kept": latent}, "kept by one layer of DeepSeek-V3",
))

# %% [markdown]
# ## What needs no product
#
# A norm's output is cheap to compute from its input, and so is `silu(gate) · up` from gate and up: no matrix product runs
# again. The mode `elementwise` drops both, a third of the layer:

# %% jupyter={"source_hidden": true}
forward = sum(llama_products(LLAMA).values())
trade = {"bytes freed": {}, "FLOPs added": {}}
for mode in ("selective", "elementwise", "full"):
    trade["bytes freed"][mode] = float(100 - share_left(mode))
    trade["FLOPs added"][mode] = float(100 * llama_recomputed_flops(LLAMA, mode) / (3 * forward))
LiveFigure(bar_chart("Elementwise frees a third of a Llama layer for no product", trade, "of the layer's bytes, and of its FLOPs", "%", beside=True))

# %% [markdown]
# The dropped tensor is always the input of a linear. So one function is enough: a linear that keeps what its input is
# computed from, and computes it again when backward needs it.
#
# **Now write it:** [exercise 7.4](../labs/lab7_todays_layer.py), `recipe_linear`: `python my/labs/lab7_todays_layer.py
# --only 7.4`.
#
# The same works for the paper's own layer. Of the `34sbh/t` that selective recomputation leaves, the two norm outputs, the
# GeLU's output and the two dropout masks go: `20sbh/t`. Masks are drawn again from a seed.

# %% jupyter={"source_hidden": true}
gpt3 = model_shape("175B")
for name, model in PAPER_MODELS.items():
    sbh = model.shape.seq_length * model.shape.micro_batch_size * model.shape.hidden_size
    agree.add(f"{name}, elementwise: 20 sbh/t", [(20 * sbh // model.parallel.tensor_parallel_size, layer_bytes(model.shape, model.parallel, "elementwise"))])

# %% [markdown]
# ## The frontier: make it again, put it elsewhere, or make it smaller
#
# A layer is a table of terms, and backward reads each of them once. Until then you can do one of four things with each:
# **keep** it, **recompute** it from other terms, **offload** it to the host's memory, or **compress** it to eight bits.
# Recomputing costs products. Offloading costs nothing as long as the copy hides behind the layer's own work: out while
# forward runs, back while backward does. Compressing costs accuracy: gradients are then those of a slightly different
# backward pass.
#
# The figure tries them all for one layer of GPT-3 on an A100. Each line joins the choices that nothing beats. Make the link
# faster or slower: 25 GB/s is PCIe 4.0, and a faster link lets you offload more for free.

# %%
Panel(
    lambda s, gigabytes: frontier_figure(gpt3.with_sizes(seq_length=s), gigabytes),
    s=steps("s", "tokens", (1024, 2048, 4096, 8192), 2048),
    gigabytes=steps("link to the host", "GB/s", (6, 12, 25, 50, 100, 450), 25),
)

# %% [markdown]
# Every point is code that runs. Give a layer a set of terms to make again, or an action for each term (`src/actmem/drop.py`,
# `src/actmem/store.py`). An offloaded tensor leaves the device, and comes back while backward still works on the one before
# it:

# %%
from actmem.layers.transformer import TransformerLayer
from actmem.measure import layer_rows_of

small = model_shape("tiny")


def step(recompute):
    """Gradients of one layer, and the bytes that it kept on the device and on the host."""
    layer = TransformerLayer(small, recompute=recompute, seed=1)
    x = torch.randn(128, 2, 256, generator=torch.Generator().manual_seed(2)).requires_grad_()
    rows = layer_rows_of(layer, x.detach().clone().requires_grad_())
    host = total(row for row in rows if row.term.endswith(", on the host"))
    layer = TransformerLayer(small, recompute=recompute, seed=1)
    layer(x).square().sum().backward()
    return total(rows) - host, host, [x.grad, *(p.grad for p in layer.parameters())]


core = dict.fromkeys(("softmax output", "softmax dropout mask", "softmax dropout output"), "recompute")
whole, _, wanted = step("none")
places = {"on the device": {}, "on the host": {}}
for recompute in ("elementwise", {"GeLU input": "offload", "4h→h input": "recompute", **core}, {"GeLU input": "compress"}):
    size, host, gradients = step(recompute)
    furthest = max(((x - y).norm() / y.norm()).item() for x, y in zip(gradients, wanted))
    label = recompute if isinstance(recompute, str) else f"GeLU input: {recompute['GeLU input']}"
    bar = f"{label}; gradients {'equal' if furthest == 0 else f'up to {furthest:.1%} off'}"
    places["on the device"][bar], places["on the host"][bar] = 100 * size / whole, 100 * host / whole
LiveFigure(bar_chart("Dropped and offloaded: equal bit for bit; compressed: nearly", places, "of what the layer keeps", "%"))

# %% jupyter={"source_hidden": true}
agree

# %% [markdown]
# ## Work it out
#
# All 32 layers of Llama 3 8B read one sequence of 8,192 tokens on one GPU. What do they keep with a flash kernel, and
# what with `elementwise`? What would they keep if attention still stored its scores, at $5as^2b$ a layer?

# %% jupyter={"source_hidden": true}
layers = LLAMA.num_layers
fewer = total(llama_rows(LLAMA, recompute="elementwise"))
scores = 5 * LLAMA.num_attention_heads * LLAMA.seq_length**2 * LLAMA.micro_batch_size
worked(
    f"A layer keeps {size_text(all_kept)}; {layers} of them {size_text(layers * all_kept)}.",
    f"Elementwise drops the outputs of norms and of the gate: {size_text(fewer)} a layer, {size_text(layers * fewer)} in all, and no product runs again.",
    f"The scores would add {size_text(scores)} a layer, {scores / all_kept:.0f} times all the rest, {size_text(layers * scores)} in all. That is why nobody stores them any more.",
)

# %% [markdown]
# ## Check your understanding
#
# **1.** A Llama layer with `k = a` (no grouped queries): which terms grow, and does the floor still have no `s²`?
#
# <details><summary>Answer</summary>
#
# K and V: `4sbh` in place of `4sbkd`. Nothing with `s²`: the kernel stores no scores, however many heads there are.
#
# </details>
#
# **2.** Why is full recomputation of this layer a worse trade than for the paper's?
#
# <details><summary>Answer</summary>
#
# The layer keeps less to begin with, so the same FLOPs free fewer bytes; and what was cheap to free, the scores, is gone
# already.
#
# </details>
#
# **3.** The set {K} alone is refused for the paper's layer, but not for the Llama layer. Why?
#
# <details><summary>Answer</summary>
#
# In the paper's layer Q, K and V are three views of one product's result: the storage stays while one of them stays. The Llama
# layer rotates Q and K into tensors of their own.
#
# </details>

# %% [markdown]
# ## What people get wrong here
#
# - **"Selective recomputation is on, so the `5as²b` is gone."** With a flash kernel it was never there.
# - **Counting K and V like Q.** They have k heads, not a.
# - **Counting silu(gate).** Only an implementation in two operations keeps it.
#
# ## Now measure it
#
# `python labs/measure_today.py --emulate 8 --model llama3-405b` makes this comparison in 12 configurations; `--paper-layer` for
# the paper's layer, `--context 2` for half of each sequence on a rank.
#
# **Sources.** Meta's Llama 3 report, 2407.21783, table 3, and the models' published config.json · 2305.13245 for grouped queries ·
# 2205.14135 for flash attention · 2309.14509 for Ulysses · 2512.14080, SonicMoE, for
# experts that keep only their inputs and the up-projection's outputs · code: `src/actmem/recipes.py`, `src/actmem/drop.py`, `src/actmem/layers/`.
#
# ## Now fit your model
#
# Where attention stores no scores, which recomputation is left? Plan one of today's models with each:
#
# ```
# python -m actmem plan qwen3-32b --gpus 64 --memory 80 --global-batch 512 --recompute elementwise
# python -m actmem plan qwen3-32b --gpus 64 --memory 80 --global-batch 512 --recompute full
# ```
#
# Next, [chapter 9](09_your_model.ipynb): a model that this course did not write.
