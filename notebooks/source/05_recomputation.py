# %% [markdown]
# # 5 · Recomputation
#
# Some of what a layer keeps can be dropped after forward and recomputed when backward needs it. Which part is worth it, and
# what does it really cost?

# %%
from textwrap import fill

import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.formulas import paper
from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.batch import batch_factor, break_even, fullest_bytes
from actmem.formulas.communication import counts, layer_exchanges, wire_bytes
from actmem.formulas.disagreements import disagreements
from actmem.formulas.extras import RNG_STATE_BYTES
from actmem.formulas.flops import eq7, eq8, layer_overhead
from actmem.formulas.first_stage import layer_bytes, selective_saves
from actmem.formulas.rebuild import core_over_gelu, rebuilds
from actmem.models import PAPER_MODELS, model_shape
from actmem.rows import total
from actmem_course.show.added_flops import added_flops
from actmem_course.show.batch_payoff import batch_payoff
from actmem_course.show.choices import choice, play, slider, steps
from actmem_course.show.memory_ladder import memory_ladder
from actmem_course.show.panel import Panel
from actmem_course.show.predict import Prediction
from actmem_course.show.rebuild_price import rebuild_price
from actmem_course.show.recompute_trade import recompute_trade
from actmem_course.show.reveal import Reveal
from actmem_course.show.step_timeline import step_timeline, training_moments
from actmem_course.show.style import size_text
from actmem_course.show.text import saved_text, text_table

GPT3 = model_shape("175B")

question = Prediction(
    "In the GPT-3 layer the attention core (QKᵀ, softmax, dropout, attention over V) holds most of the bytes. Suppose backward runs it "
    "once more, up to the last tensor that it reads. How many percent does that add to the FLOPs of the layer's forward and backward?",
    float(100 * layer_overhead(GPT3, "selective")),
    "%",
    "One product of 2s²bh, against 72sbh² + 12s²bh for the whole layer: 2s/(72h + 12s).",
)
Reveal(
    question,
    Panel(
        lambda s, heads: recompute_trade(ModelShape(s, 1, 128 * heads, heads)),
        s=slider("s", "tokens", 256, 16384, 256, 2048),
        heads=slider("a", "heads of 128", 8, 200, 8, 96),
    ),
)

# %% [markdown]
# **What you need.** Chapter 2 (what a layer keeps, and why); chapters 3 and 4 for the exchanges and the memory ladder.
# About 30 minutes.
#
# **Letters.** `s` sequence length · `b` microbatch · `h` hidden size · `a` heads · `L` layers · `t` tensor-parallel ranks ·
# `B` sequences in a FLOPs formula. A matrix product of `[n, k]` by `[k, m]` takes `2nkm` FLOPs: one multiplication and one
# addition for each of `nkm` terms.

# %% [markdown]
# ## One step, block by block
#
# Forward pushes each tensor that backward will read; backward pops them in reverse. Play one step of four GPT-3 layers.
# Then let it recompute: the core's blocks are never pushed, and come back for one layer at a time, as a spike.

# %%
STEP = GPT3.with_sizes(num_layers=4)
Panel(
    lambda recompute, moment: step_timeline(STEP, moment, recompute),
    recompute=choice("recompute", ("none", "selective", "full"), "none"),
    moment=play("moment", "of the step", lambda recompute: range(len(training_moments(STEP, recompute))), 60),
)

# %% [markdown]
# ## The lopsided trade
#
# A layer keeps `34sbh + 5as²b` bytes. The second term belongs to the attention core alone. In FLOPs it is the other way
# round: forward and backward of a layer take `72sbh²` FLOPs in the linears, and only `12s²bh` in the two attention
# products.
#
# Backward never reads the output of the core's last product, attention over V, so the second run can stop before that
# product (step 3 below). In the same way full recomputation costs less than a third. Drag `s` in the figure at the top: in
# the upper bars the striped part is what recomputing the core frees; in the lower bars the dotted part is what it adds.
#

# The price grows with `s/h`: the longer the sequences, the more of the layer's work is attention. The saving grows too.
# Here is what section 5 of the paper says for two models, and what its formula `5as/h` gives:

# %%
lines = []
for name, coefficient in paper.SECTION5_CORE_COEFFICIENT.items():
    shape = model_shape(name)
    a, b, h, s = shape.letters()
    saved = 100 * selective_saves(shape)
    lines.append((name, coefficient, 5 * a * s // h, paper.SECTION5_SAVED_PERCENT[name], f"{float(saved):.2f}"))
print(text_table(("model", "5as/h, paper", "5as/h, computed", "saved %, paper", "saved %, computed"), lines, " rrrr"))

# %% [markdown]
# ## How a checkpoint function works, in four steps
#
# The region is the attention core. First without a checkpoint: what does autograd keep?

# %%
from actmem.measure import record
from actmem.model.attention import CoreAttention, causal_mask

HEADS, LENGTH, HEAD_SIZE = 4, 64, 16


def fresh(seed=0):
    """The same core, inputs and dropout stream each time."""
    torch.manual_seed(seed)
    core = CoreAttention(HEAD_SIZE, 0.1, torch.Generator().manual_seed(seed))
    q, k, v = (torch.randn(HEADS, LENGTH, HEAD_SIZE, requires_grad=True) for _ in range(3))
    return core, (q, k, v), causal_mask(LENGTH, "cpu")


def gradients(run):
    """Gradients of q, k and v when the core runs through ``run``."""
    core, qkv, mask = fresh()
    run(core, *qkv, mask).square().sum().backward()
    return [x.grad for x in qkv]


core, qkv, mask = fresh()
with record(core) as ledger:
    out = core(*qkv, mask)
print(saved_text(ledger.saved))

# %% [markdown]
# **Step 1: keep the inputs, run without a graph, run again.** This autograd function takes a dozen lines. Its forward saves
# the inputs and computes under `no_grad`, so nothing inside is kept. Its backward runs the region again, this time with a
# graph, and lets autograd differentiate it.

# %%
class RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, region, *inputs):
        ctx.region = region
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return region(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.region(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(found) if x.requires_grad else None for x in inputs)


core, qkv, mask = fresh()
with record(core) as ledger:
    out = RunAgain.apply(core, *qkv, mask)
print(saved_text(ledger.saved))

# %% [markdown]
# Only the inputs are left. But are the gradients right?

# %%
plain = gradients(lambda core, *inputs: core(*inputs))
again = gradients(lambda core, *inputs: RunAgain.apply(core, *inputs))
for name, x, y in zip("qkv", plain, again):
    print(f"gradient of {name}: equal bits {torch.equal(x, y)}, elements that differ {int((x != y).sum()) / x.numel():.0%}")

# %% [markdown]
# **Step 2: draw the same dropout.** The second run drew other masks, so it computed the gradient of another function. No
# error says so; the model just learns from wrong gradients. The cure is to save the state of the random-number generator
# and restore it for the second run.

# %%
class RunAgainSameDraws(RunAgain):
    @staticmethod
    def forward(ctx, region, *inputs):
        state = region.dropout_mask.generator.get_state()
        out = RunAgain.forward(ctx, region, *inputs)
        ctx.save_for_backward(*inputs, state)  # the state is a tensor like the others, so its bytes count
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, state = ctx.saved_tensors
        generator = ctx.region.dropout_mask.generator
        now = generator.get_state()
        generator.set_state(state)
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        with torch.enable_grad():
            out = ctx.region(*inputs)
        generator.set_state(now)  # what comes after must not notice
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(found) if x.requires_grad else None for x in inputs)


again = gradients(lambda core, *inputs: RunAgainSameDraws.apply(core, *inputs))
for name, x, y in zip("qkv", plain, again):
    print(f"gradient of {name}: equal bits {torch.equal(x, y)}")

core, qkv, mask = fresh()
with record(core) as ledger:
    out = RunAgainSameDraws.apply(core, *qkv, mask)
print(saved_text(ledger.saved))
print(f"\nthe generator's state: {RNG_STATE_BYTES['cpu']:,} bytes on a CPU, {RNG_STATE_BYTES['cuda']} on a GPU")

# %% [markdown]
# One more tensor is kept: the generator's state, whose size does not depend on the region.
#
# **Step 3: stop early.** Backward needs the tensors that the region *keeps*, not the region's output. The core's last
# operation is a product with V, and nothing inside the core keeps that product's output. So the second run can stop just
# before it. The course's own `checkpoint` does that: it gives every tensor that autograd wants to save a numbered slot, and
# stops the second run when the last slot is filled (`src/actmem/recompute.py`, four rules at the top).
#
# **Step 4: count.** torch's FLOP counter sees every matrix product that runs:

# %%
from actmem.recompute import checkpoint

ways = {
    "keep everything": lambda core, *inputs: core(*inputs),
    "run again, to the end": lambda core, *inputs: checkpoint(core, *inputs, generators=[core.dropout_mask.generator], stop_early=False),
    "run again, stop early": lambda core, *inputs: checkpoint(core, *inputs, generators=[core.dropout_mask.generator]),
}
product = 2 * HEADS * LENGTH * LENGTH * HEAD_SIZE
lines = []
for name, way in ways.items():
    with FlopCounterMode(display=False) as counter:
        found = gradients(way)
    core, qkv, mask = fresh()
    with record(core) as ledger:
        out = way(core, *qkv, mask)
    flops = counter.get_total_flops()
    lines.append((name, ledger.total_bytes, flops, flops // product, str(all(map(torch.equal, plain, found)))))
print(text_table(("the core", "bytes kept", "FLOPs", "products", "same gradient bits"), lines, " rrr"))

# %% [markdown]
# Two products in forward and four in backward make six; a second run adds two, or one if it stops early.
#
# **Now write it:** [exercises 4.1, 4.2, 4.3 and 4.4](../labs/lab4_recompute.py), `checkpoint`, `selective_layer` and
# `full_layer`: `python my/labs/lab4_recompute.py --only 4.1,4.2,4.3,4.4`.
#
# ## What to drop, and why not the MLP
#
# The inside of the MLP is large too: `8sbh` before GeLU and `8sbh` after it. Why not drop that? For each group of tensors:
# how many bytes does recomputing them free, for how many FLOPs?

# %%
lines = []
for r in rebuilds(GPT3):
    price = f"{float(1000 * r.bytes_per_flop):.3f}" if r.flops else "no product"
    lines.append((r.name, r.how, r.bytes, r.flops, price))
print(text_table(("tensors", "made again by", "bytes", "FLOPs", "bytes per 1,000 FLOPs"), lines, "  rrr"))
assert total(layer_rows(GPT3)) - layer_rows(GPT3)[0].bytes == sum(r.bytes for r in rebuilds(GPT3))

# %%
Panel(
    lambda s, heads: rebuild_price(ModelShape(s, 1, 128 * heads, heads)),
    s=slider("s", "tokens", 256, 16384, 256, 2048),
    heads=slider("a", "heads of 128", 8, 200, 8, 96),
)

# %% [markdown]
# Move `s`: the core's bar stays. Its bytes and its FLOPs both grow with `s²`, and the ratio is `5as²b / 2s²bh = 5a/2h`. A
# linear frees `2sbh·n / 2sbh²·n = 1/h`. So per FLOP the core frees `5a/2` times as many bytes, whatever `s` is.
#
# Three groups need no product at all: layer norm, GeLU and dropout only read and write memory. The paper keeps their
# outputs. Later versions of Megatron can drop some of them (`--recompute-modules layernorm`, for example). They are smaller
# than the core, and cost about as little time per byte (chapter 7).

# %%
print(f"5a/2 for GPT-3: {core_over_gelu(GPT3)}")
free = [r for r in rebuilds(GPT3) if not r.flops]
left = total(layer_rows(GPT3, recompute="selective"))
for r in free:
    print(f"{r.name}: {size_text(r.bytes)}, {r.bytes / left:.0%} of what selective recomputation leaves")

# %% [markdown]
# ## Measured: three numbers for one overhead
#
# Section 5 prints how many FLOPs selective recomputation adds, and equation 8 gives the same number. But the sentence that
# leads to equation 8 describes less: the core's two products, once more. Here the real layer runs at the model's real sizes
# on torch's `meta` device, which has shapes but no data, while torch counts products.

# %%
from actmem.model.layer import TransformerLayer


def count(shape, recompute):
    """FLOPs of one layer, forward and backward, counted by torch."""
    with torch.device("meta"):
        layer = TransformerLayer(shape, recompute=recompute, dtype=torch.bfloat16)
    layer = layer.to("meta")
    x = torch.empty(shape.seq_length, shape.micro_batch_size, shape.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    mask = torch.empty(shape.seq_length, shape.seq_length, dtype=torch.bool, device="meta")
    with FlopCounterMode(display=False) as counter:
        layer(x, mask).sum().backward()
    return counter.get_total_flops()


def percent(share):
    return f"{float(100 * share):.4f}"


lines = []
for name, printed in paper.SECTION5_ADDED_FLOPS_PERCENT.items():
    shape = model_shape(name)
    base = count(shape, "none")
    one_layer = shape.with_sizes(num_layers=1)
    logits = 6 * shape.seq_length * shape.hidden_size * shape.vocab_size * shape.micro_batch_size
    by_eq8 = eq8(one_layer, shape.micro_batch_size) / (eq7(one_layer, shape.micro_batch_size) - logits) - logits / base - 1
    lines.append((f"{name}, as printed", f"{printed}", ""))
    lines.append((f"{name}, eq. 8 over eq. 7, one layer", percent(by_eq8), ""))
    for label, mode in (("the text: core once more", "paper-selective"), ("stopped early", "selective")):
        measured = count(shape, mode) / base - 1
        lines.append((f"{name}, {label}", percent(layer_overhead(shape, mode)), percent(measured)))
print(text_table(("FLOPs added, percent of the layer", "formula", "counted"), lines, " rr"))

# %% [markdown]
# Equation 8 adds `12Bs²h` per layer: three forward passes of the core, where only one runs again. This strengthens the
# paper's conclusion: the price is a third of the printed one, and a sixth if the second run stops early.
#
# **Now write it:** [exercise 4.5](../labs/lab4_recompute.py), `checkpoint_stopping_early`: `python
# my/labs/lab4_recompute.py --only 4.5`.
#
# ## Recomputing less
#
# The same trick works for full recomputation. The layer's last product is `4h→h`. The only stored tensor after it is the
# dropout mask, which our layer draws before the product. So the second run saves `8sbh²` of its FLOPs:

# %%
lines = []
for name in PAPER_MODELS:
    shape = model_shape(name)
    base = count(shape, "none")
    row = [name]
    for mode in ("paper-full", "full"):
        row += [percent(layer_overhead(shape, mode)), percent(count(shape, mode) / base - 1)]
    lines.append(row)
print(text_table(("model", "to its end %", "counted %", "stopped %", "counted %"), lines, " rrrr"))

# %%
Panel(lambda s, h: added_flops(GPT3.with_sizes(seq_length=s, hidden_size=96 * h)),
      s=slider("s", "tokens", 256, 16384, 256, 2048), h=slider("h/a", "elements a head", 32, 256, 32, 128))

# %% [markdown]
# ### What the second run sends
#
# On $t$ ranks a layer that runs again repeats its exchanges as well (chapters 3 and 4), up to the point where it stops. The
# attention core has none: each head is on one rank. The table counts one rank of eight, forward and backward, and asserts
# that the counts are as predicted. `paper-` before a mode means that the second run goes on to its end, as in the paper;
# otherwise it stops early:

# %%
from actmem.measure import count_collectives, emulated_rank
from actmem.measure.one_layer import layer_input
from actmem.parallel.groups import tensor_parallel

lines = []
for sequence in (False, True):
    for mode in ("selective", "full", "paper-full"):
        exchanges = layer_exchanges(GPT3, Parallel(8, sequence), mode)
        with emulated_rank(8):
            tp = tensor_parallel(sequence_parallel=sequence)
            layer = TransformerLayer(GPT3, tp, recompute=mode, device="cpu", dtype=torch.bfloat16)
            with count_collectives() as seen:
                layer(layer_input(GPT3, tp, "cpu", torch.bfloat16)).sum().backward()
        assert counts(exchanges) == {kind: count for kind, count in seen.counts.items() if count}
        again = [e for e in exchanges if e.phase == "recompute"]
        kinds = ", ".join(f"{count} × {kind}" for kind, count in counts(again).items()) or "none"
        lines.append(("tensor+sequence" if sequence else "tensor", mode, sum(seen.counts.values()), kinds, wire_bytes(again), wire_bytes(exchanges)))
print(text_table(("GPT-3's layer", "recompute", "exchanges", "of them by the second run", "bytes it sends", "bytes in all"), lines, "  r rr"))

# %% [markdown]
# So full recomputation also costs communication that nothing hides, and selective recomputation costs none. Chapter 7 finds
# this cost in the paper's milliseconds.
#
# ## The memory ladder
#
# Figure 7 of the paper, for any `s`, and any `t` that divides the heads and the sequence of all four models: the memory of
# each method as a share of tensor parallelism alone.

# %%
Panel(memory_ladder, seq_length=slider("s", "tokens", 512, 8192, 512, 2048), tensor_parallel_size=steps("t", "ranks", (1, 2, 4, 8, 16), 8))

# %% [markdown]
# The bars are formulas. The next table is measured: a layer of each model runs as one rank of eight, and the ledger counts
# what autograd keeps.

# %%
from actmem.formulas.table2 import TABLE2
from actmem_course.ranks import Ranks
from actmem_course.bench.measure_table2 import measure_table2

lines = []
for name in PAPER_MODELS:
    with emulated_rank(8):
        results = {r.configuration: r for r in measure_table2(model_shape(name), Ranks(0, 8, "cpu", emulated=True), torch.bfloat16)}
    base = results["tensor"].measured_bytes - results["tensor"].extra_bytes
    for r in list(results.values())[1:]:
        kept = r.measured_bytes - r.extra_bytes
        lines.append((name, r.configuration, r.predicted_bytes, r.extra_bytes, r.measured_bytes, r.difference_bytes, f"{100 * kept / base:.1f}"))
print(text_table(("model", "configuration", "predicted", "extra", "measured", "diff.", "% of tensor"), lines, "  rrrrr"))

# %% [markdown]
# `extra` is what the paper leaves out on purpose: layer-norm statistics, the causal mask, and the random-number states of
# step 2. For all layers of GPT-3 and one microbatch, equations 1, 2, 4 and 6 give:

# %%
lines = []
for row in TABLE2:
    each = layer_bytes(GPT3, row.parallel(8), row.recompute)
    lines.append((row.name, each, GPT3.num_layers * each, size_text(GPT3.num_layers * each)))
print(text_table(("configuration", "one layer, bytes", f"{GPT3.num_layers} layers, bytes", ""), lines, " rrr"))

# %% [markdown]
# Where the paper's text and its own formulas disagree, here and above:

# %%
for place in disagreements():
    if place.where.startswith(("§5", "§6.1")):
        print(fill(str(place), 110), end="\n\n")

# %% [markdown]
# ## Does a larger batch pay for it?
#
# The old argument for recomputing everything is that it frees so much memory that the batch can grow, and a larger batch
# runs faster. When is that true? Let a step cost a fixed part, the same for every microbatch size, plus a part per
# sequence. Let `φ` be the fixed part over the work of the sequences that fit *without* recomputation. With overhead `o` and
# `f` times the sequences in the same bytes (all layers, plus everything that the layer in backward has recomputed),
#
# $$\text{throughput over none} = \frac{1 + \varphi}{1 + o + \varphi / f}, \qquad \text{so it pays above } \varphi = \frac{o}{1 - 1/f}.$$

# %%
lines = [("none", "", fullest_bytes(GPT3, "none"), "1.00", "")]
for mode in ("selective", "paper-selective", "full", "paper-full"):
    overhead, factor, even = (float(value) for value in (100 * layer_overhead(GPT3, mode), batch_factor(GPT3, mode), 100 * break_even(GPT3, mode)))
    lines.append((mode, f"{overhead:.3f}%", fullest_bytes(GPT3, mode), f"{factor:.2f}", f"{even:.2f}%"))
print(text_table(("recompute", "overhead o", "bytes at the fullest", "sequences f", "pays above φ ="), lines, " rrrr"))

# %%
Panel(
    lambda phi, s: batch_payoff(GPT3.with_sizes(seq_length=s), phi),
    phi=slider("φ", "fixed, percent", 0, 100, 2, 10),
    s=slider("s", "tokens", 512, 8192, 512, 2048),
)

# %% [markdown]
# Full recomputation multiplies the batch by the larger factor, and still loses wherever the fixed part is small. A large
# factor cannot help: as `f` grows, `φ/f` vanishes and `o` stays. Where one sequence of a large model keeps the GPU busy,
# `φ` is a few percent, so selective recomputation pays and full recomputation does not. With a small model, or short
# sequences, `φ` can be large: measure before you choose. And a pipeline pulls the other way: for a fixed global batch,
# larger microbatches are fewer, and fewer microbatches mean more idle time (chapter 6).
#
# ## FlashAttention has changed the question
#
# Kernels like FlashAttention never write the `s×s` scores to memory: they keep Q, K, V, the output and one number per row,
# and recompute the scores tile by tile in backward, inside the kernel. So there is no `5as²b` to save, and a checkpoint
# around such a kernel frees next to nothing. The kernel does by itself what the paper selects by hand. torch's own fused
# attention shows it:

# %%
from torch.nn import functional as F


class Fused(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


lines = []
for length in (64, 128, 256):
    sizes = (1, HEADS, length, HEAD_SIZE)
    torch.manual_seed(0)
    q, k, v = (torch.randn(sizes, requires_grad=True) for _ in range(3))
    core, fused = CoreAttention(HEAD_SIZE, 0.1, torch.Generator()), Fused()
    with record(core) as by_hand:
        out = core(*(x.flatten(0, 1) for x in (q, k, v)), causal_mask(length, "cpu"))
    with record(fused) as by_kernel:
        out = fused(q, k, v)
    lines.append((length, by_hand.total_bytes, by_kernel.total_bytes))
print(text_table(("s", "bytes kept, core by hand", "bytes kept, fused kernel"), lines, "rrr"))

# %% [markdown]
# Double `s`: the left column grows about fourfold, the right one twofold. (Both are float32, and the fused one has no
# dropout.)
#
# ## Questions
#
# <details><summary><b>1.</b> Why does the checkpoint of the core need no extra memory for Q, K and V?</summary>
#
# They are kept anyway: `6sbh` of the `34sbh`, because QKᵀ and the product with V need them in backward. The checkpoint
# holds the same storages, and a storage counts once. This makes the core such a good region: its inputs are free.
# </details>
#
# <details><summary><b>2.</b> Full recomputation leaves <code>2sbh</code> a layer. Is that also what a GPU needs at its peak?</summary>
#
# No. While backward works on a layer, everything that this layer keeps is in memory again: `34sbh + 5as²b` for one layer,
# on top of `2sbh` for each of the other `L − 1`. The same holds for selective recomputation: one layer's `5as²b` comes back
# for a moment.
# </details>
#
# <details><summary><b>3.</b> Your region draws dropout from the default generator and you replay only a generator of your own.
# What do you see?</summary>
#
# Nothing: there is no error, and the gradients are wrong, as after step 1. Only a test that compares gradients with and
# without recomputation bit by bit, with dropout on, finds it.
# </details>
#
# <details><summary><b>4.</b> You double the heads and keep <code>h</code>. What happens to the bytes that selective
# recomputation saves, and to its price?</summary>
#
# The saved bytes double (`5as²b`). The FLOPs do not change: the products of all heads together are `2s²bh` each, however `h`
# is cut into heads. More and smaller heads make the trade better.
# </details>
#
# ## What people get wrong here
#
# - **"The batch doubles, so the throughput doubles."** Sequences a second are bounded by the FLOPs of a sequence, and
#   recomputation raises those. Only the fixed part of a step is shared by more sequences.
# - **"34sbhL is full checkpointing."** It is the selective case, equation 6. Full recomputation keeps `2sbhL`.
# - **"Selective recomputation recomputes half of the layer."** It recomputes the part with most of the bytes and, at these
#   sizes, about one percent of the FLOPs.
# - **"Use it with FlashAttention, too."** There is nothing left to save.
# - **"The checkpoint's second forward costs a third because forward is a third."** Only if it runs to its end.
#
# ## The lab
#
# [Lab 4](../labs/lab4_recompute.py): write the checkpoint function of this chapter yourself, with random numbers that
# repeat and a second run that stops early: `python my/labs/lab4_recompute.py`.
#
# `labs/measure_table2.py` measures every row of the ladder on real processes:
# `torchrun --nproc-per-node 2 labs/measure_table2.py`. Next: chapter 6, where several microbatches are in flight at once.
#
# **Sources.** 2205.05198 sections 4.1, 5, 6.1 and appendix A · Chen et al., *Training deep nets with sublinear memory
# cost*, 1604.06174, for checkpointing itself · Dao et al., *FlashAttention*, 2205.14135 · code: `src/actmem/recompute.py`,
# `src/actmem/formulas/flops.py`, `src/actmem/formulas/rebuild.py`, `src/actmem/formulas/batch.py`.
