# %% [markdown]
# # 4 · Sequence parallelism
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# With tensor parallelism (TP), six of a layer's 15 saved tensors are still whole on every rank: the replicated
# part. Shard those too, by sequence parallelism (SP). **How much does each rank save for backward now?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem.formulas.activations import eq2, eq4
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Progress, Reveal, choice, play, size_text, steps,
    text_table, worked,
)
from actmem_course.figures import ch04_sequence_parallelism as show
from actmem_course.figures.layer_picture import layer_picture

GPT3 = PAPER_MODELS["175B"].shape
t = PAPER_MODELS["175B"].parallel.tensor_parallel_size
checks = Checks()
question = Prediction(
    f"With tensor parallelism each of {t} ranks saves {size_text(eq2(GPT3, t))} for one layer of GPT-3. "
    "How much does it save with sequence parallelism as well?",
    eq4(GPT3, t) / 2**20,
    "MiB",
    "All 15 tensors are sharded now: it's the whole layer over t.",
    GuessLine(axis="y"),
)
Reveal(
    question,
    Panel(
        lambda t, sp: show.saved_lines(GPT3, t, sp == "shown"),
        t=steps("t", "ranks", show.sizes_of_t(GPT3), t),
        sp=choice("sequence parallelism", ("hidden", "shown"), "hidden"),
    ),
    sp="shown",
)

# %% [markdown]
# **You need** chapter 3: $f$, $\bar f$ and the replicated part. As there, $t$ ranks share a layer with $a$ heads and hidden
# size $h$, which reads $b$ sequences of $s$ tokens.
#
# Elsewhere "sequence parallelism" can mean that attention itself is sharded along $s$ ([chapter
# 12](12_long_sequences.ipynb): ring attention, Ulysses). Here attention is sharded by heads as before, and only what
# lies *between* the blocks is sharded along $s$.

# %% [markdown]
# ## Between the blocks, tokens are independent
#
# A layer norm takes the mean and variance of one token. Dropout, bias and residual addition act on one element. Only
# attention reads other tokens. So a rank can do all this for $s/t$ tokens alone:

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
ranks = 4
x = torch.randn(16, 2, 8, dtype=torch.float64)  # [s, b, h]


def same(operation, dim):
    """Apply to each shard, concatenate: is that the operation on the whole?"""
    shards = [operation(shard) for shard in x.chunk(ranks, dim)]
    return torch.allclose(torch.cat(shards, dim), operation(x))


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


tried = {
    "layer norm, sharded along s": same(layer_norm, 0),
    "layer norm, sharded along h": same(layer_norm, 2),
    "softmax over s, sharded along s": same(lambda x: x.softmax(0), 0),
}
for name, equal in tried.items():
    print(f"{name}: {'the same' if equal else 'not the same'}")

# %% [markdown]
# ## The ranks, before and after
#
# Switch the picture from TP to TP + SP. Each *copy on every rank* becomes a shard along $s$:

# %%
Panel(
    lambda t, form: layer_picture(GPT3, am.Parallel(t, form == "TP + SP"), collectives="forward"),
    t=steps("t", "ranks", (2, 4, 8), 4),
    form=choice("the ranks share the layer by", ("TP", "TP + SP"), "TP"),
)

# %% [markdown]
# Inside the blocks nothing has changed. Two new operators are at their edges. $g$ is an **all-gather**: put all
# shards together on every rank. $\bar g$ is a **reduce-scatter**: add up as an all-reduce does, but leave each rank
# only its shard of the sum.

# %% jupyter={"source_hidden": true}
from actmem_course.figures.operators import operators

LiveFigure(operators(("g", "ḡ"), GPT3))

# %% [markdown]
# | | forward pass | backward pass | in Megatron-LM |
# |---|---|---|---|
# | $g$ | all-gather | reduce-scatter | `gather_from_sequence_parallel_region` |
# | $\bar g$ | reduce-scatter | all-gather | `reduce_scatter_to_sequence_parallel_region` |
#
# Forward pass: the block's first matmul needs all tokens, so $g$ gathers them. Its last matmul leaves a partial sum
# on every rank, and $\bar g$ gives each rank the sum for its own tokens. Backward pass: every rank used all of $X$,
# so $dX$ is a sum of $t$ terms, as for $f$, of which each rank needs only its own tokens.
#
# So $t$ divides every term (equation 4):
#
# $$sbh\left(\frac{10}{t} + \frac{24}{t} + \frac{5as}{ht}\right) = \frac{sbh}{t}\left(34 + \frac{5as}{h}\right)$$
#
# One trap: in chapter 3, dropout between the blocks had to draw one mask on all ranks. Now the masks must *differ* (Megatron: `get_cuda_rng_tracker`),
# or every shard gets the same pattern.
#
# **Now write it:** [exercises 3.1, 3.2 and 3.7](../labs/lab3_sequence_parallel.py), `g`, `g_bar` and
# `dropout_generators`:
# `python my/labs/lab3_sequence_parallel.py --only 3.1,3.2,3.7`.
#
# ## An all-reduce, taken apart
#
# Each all-reduce has become a reduce-scatter and an all-gather. Is that twice the communication? Look at how a ring
# of ranks adds up a tensor of $t$ chunks. In each step every rank sends one chunk to the next: follow the arrows. A
# box shows how many of the $t$ terms its sum has so far. Play it:

# %%
payload = 2 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size
Panel(
    lambda kind, t, step: show.ring_step(kind, t, step, payload),
    kind=choice("collective", show.KINDS, "all-reduce"),
    t=steps("t", "ranks", show.RANKS, 4),
    step=play("step", "chunks sent by each rank", show.steps_of_ring, 2),
)

# %% [markdown]
# Stop halfway, after $t - 1$ steps. Every rank has *one* finished chunk: that's a reduce-scatter. The all-reduce goes
# on and passes the finished chunks around: that's an all-gather. Sequence parallelism runs dropout and layer norm
# between the two halves. In each half a rank sends $\frac{t-1}{t}$ of the tensor, so together they send exactly what
# one all-reduce does.

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import PredictedCollective
from actmem_course.others.ring import ring

sent = {
    kind: ring(kind, t, payload)[-1].sent_bytes for kind in ("all-reduce", "reduce-scatter", "all-gather")
}
checks.add(
    "sent on a ring by an all-reduce, a reduce-scatter, an all-gather",
    [(PredictedCollective(kind, "forward", t, payload).wire_bytes, size) for kind, size in sent.items()],
    sides=("by formula", "step by step"),
)
checks.add(
    "sent by each rank",
    [(sent["reduce-scatter"] + sent["all-gather"], sent["all-reduce"])],
    sides=("two halves", "one all-reduce"),
)
checks.show()

# %% [markdown]
# ## What plain autograd saves
#
# Now write the column-parallel linear the obvious way: `y = F.linear(g(x), weight)`. Output and gradients are right.
# Run one rank of the real layer like this, and compare what it saves with equation 4:

# %%
from actmem.formulas.activations import gathered_input_bytes, layer_extra_rows
from actmem.ledger.comms import count_collectives
from actmem.ledger.measure_layer import layer_input, layer_rows_of
from actmem.rows import total


def run_layer(**options):
    """One of t ranks of a GPT-3 layer: the rows it saves, its collectives."""
    with am.emulated_rank(t):
        tp = am.tensor_parallel(**options)
        layer = am.TransformerLayer(GPT3, tp, device="cpu", dtype=torch.bfloat16)
        rows = layer_rows_of(layer, layer_input(GPT3, tp, "cpu", torch.bfloat16))
        with count_collectives() as seen:
            layer(layer_input(GPT3, tp, "cpu", torch.bfloat16)).sum().backward()
    return rows, seen


both = am.Parallel(t, sequence_parallel=True)
predicted = am.layer_rows(GPT3, both) + layer_extra_rows(GPT3, both)
plain_rows, plain_seen = run_layer(sequence_parallel=True, keep_gathered_input=True)
too_much = total(plain_rows) - total(predicted)
pair = (gathered_input_bytes(GPT3, t), too_much)
checks.add("saved beyond equation 4: 4sbh(1 − 1/t)", [pair])
checks.show()

# %% [markdown]
# Two tensors are $t$ times too large. Find them, on 4 ranks:

# %%
LiveFigure(layer_picture(GPT3, am.Parallel(4, True), keeps_gathered=True))

# %% [markdown]
# They are the inputs of the two column-parallel matmuls. The weight's gradient reads the matmul's input, which is the
# *gathered* tensor, so autograd saves that. Two tensors of $2sbh$ bytes are no longer divided: $34/t$ becomes
# $4 + 30/t$. No test of outputs or gradients notices; only memory shows it.
#
# ## Gather again in the backward pass
#
# The fix is one autograd function that gathers and multiplies (`_ColumnParallel` in `actmem/parallel/linear.py`). It
# saves only its shard, and gathers the others *again* in the backward pass. Read the picture from the bottom up, as
# its arrows point:

# %%
LiveFigure(layer_picture(GPT3, am.Parallel(4, True), collectives="backward"))

# %% [markdown]
# The grey boxes are there only for a moment. Do the two extra gathers cost time? The gradient of the input,
# $dY\,A^\top$, doesn't need $X$, so it's computed while the shards travel. Then the gradient of the weight,
# $X^\top dY$, is computed while $dX$ is reduced and scattered. On one of 8 ranks:

# %%
LiveFigure(show.backward_timeline(GPT3, t))

# %% [markdown]
# The ideal rates are 312 TFLOP/s, and 300 GB/s each way over NVLink (NVIDIA's data sheet).

# %%
shard_rows, shard_seen = run_layer(sequence_parallel=True)
checks.add_rows(f"one of {t} ranks, shard saved", predicted, shard_rows)
checks.show()

# %% [markdown]
# ## What it costs
#
# Count the collectives of one layer, forward and backward pass, in all three configurations:

# %%
from actmem.formulas.communication import counts, layer_collectives, wire_bytes

tensor_rows, tensor_seen = run_layer()
alone = layer_collectives(GPT3, am.Parallel(t))
plain = layer_collectives(GPT3, both, keep_gathered_input=True)
again = layer_collectives(GPT3, both)
lines, pairs = [], []
for form, rows, seen, expected in (
    ("TP", tensor_rows, tensor_seen, alone),
    ("TP + SP, input saved", plain_rows, plain_seen, plain),
    ("TP + SP, shard saved", shard_rows, shard_seen, again),
):
    for kind, count in seen.counts.items():
        pairs.append((counts(expected).get(kind, 0), count))
    lines.append((form, sum(seen.counts.values()), size_text(wire_bytes(expected)), size_text(total(rows))))
print(text_table((f"each of {t} ranks", "collectives", "sends", "saves"), lines, " rrr"))
checks.add("collectives of a layer in three configurations, by kind", pairs, "")
checks.show()

# %% [markdown]
# With the gathered input saved, 4 all-gathers and 4 reduce-scatters send the **same bytes** as TP's 4 all-reduces, as
# the paper says. With the shard saved you add two all-gathers: a quarter more bytes, overlapped with a matmul. And
# **same bytes is not same time**: you start more collectives, and each start takes some microseconds.
#
# > **Why do this?** $t$ divides all of a layer's activations, and layer norm and dropout run on $s/t$ tokens. If you
# > use TP anyway, there's hardly a reason to leave SP off. **Why not?** With small tensors the latency of the extra
# > collectives matters. Backward's gather overlaps only if it starts before the matmul. So on GPUs before Blackwell,
# > Megatron-LM wants `CUDA_DEVICE_MAX_CONNECTIONS=1` (not with FSDP): with one hardware queue, kernels start in the
# > order in which they were launched. Pad $s$ to a multiple of $t$.
#
# **Now write it:** [exercises 3.3, 3.4 and 3.5](../labs/lab3_sequence_parallel.py), `gathering_linear`, `layer` and
# `shard_keeping_linear`: `python my/labs/lab3_sequence_parallel.py --only 3.3,3.4,3.5`.
#
# ## Partial gradients
#
# One more collective is easily forgotten. Every rank holds in full the layer norms' parameters, and the biases of the
# output projection and of $4h \to h$: you add these after $\bar g$, when the sum is complete. With TP alone each rank
# saw all tokens and computed their whole gradient. Now it sees $s/t$ tokens. Compare two real processes, in float64,
# with an unsharded layer:

# %%
from actmem_course import launch

with Progress("labs/measure_parity.py, two processes"):
    results = launch.results("measure_parity.py", "--seq-length", 64, processes=2)
checks.add(
    "three configurations, both ranks: added up, all gradients equal the unsharded layer's",
    [(result["exact"], True) for result in results],
    "",
)
partial = {result["form"]: result["partial_gradients"] for result in results}
names = partial["tensor+sequence"]
print(f"{len(names)} gradients differ until they are added up:", ", ".join(names))
checks.show()

# %% [markdown]
# One all-reduce of all of them, once per iteration, completes them: `reduce_partial_gradients`.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# **Now write it:** [exercise 3.6](../labs/lab3_sequence_parallel.py), `sum_partial_gradients`: `python
# my/labs/lab3_sequence_parallel.py --only 3.6`.
#
# ## Work it out
#
# How long do the collectives of one GPT-3 layer take, both passes, on 8 ranks whose links carry 300 GB/s each way?
# For each, a rank sends $(t-1)/t$ of a tensor of $2sbh$ bytes. Compare it with the layer's matmuls at 312 TFLOP/s:
# the forward pass has $24sbh^2 + 4s^2bh$ FLOPs (chapter 5), both passes three times that, and each rank a $t$-th.
# ($s$ = 2,048, $b$ = 1, $h$ = 12,288.)

# %% jupyter={"source_hidden": true}
from actmem.formulas.flops import layer_matmuls

number, sent = sum(counts(again).values()), wire_bytes(again)
compute = 3 * sum(layer_matmuls(GPT3).values()) / t / show.FLOPS_PER_SECOND
worked(
    f"Collectives: {', '.join(f'{count} × {kind}' for kind, count in counts(again).items())}. That is 4 "
    "in the forward pass, 4 in the backward pass, and the two gathers of saved shards.",
    f"Each sends {t - 1}/{t} of {size_text(payload)}: {size_text(sent // number)}. Together {size_text(sent)}.",
    f"At 300 GB/s: {1000 * sent / 300e9:.1f} ms per layer. Tensor parallelism's four all-reduces send "
    f"{size_text(wire_bytes(alone))}, which take {1000 * wire_bytes(alone) / 300e9:.1f} ms.",
    f"The layer's matmuls: 3 · (24sbh² + 4s²bh) / {t} = {compute * show.FLOPS_PER_SECOND:.3g} FLOPs on each rank, "
    f"{1000 * compute:.1f} ms.",
)

# %% [markdown]
# ## A question
#
# By how many bytes does sequence parallelism lower what each rank saves, and why not by $2sbh$, as some texts say?
#
# <details><summary>Answer</summary>
#
# $10\,sbh\,(1 - 1/t)$: six tensors, $10\,sbh$ together, were replicated, and $t$ divides them now. $2sbh$ is one of
# them.
# </details>
#
# ## What people get wrong here
#
# * **"Sequence parallelism costs no communication."** Same bytes, more collectives, and two gathers for the shards.
# * **"It divides everything but the core attention."** Tensor parallelism divides the core, by heads. The Ultra-Scale
#   Playbook's memory widget stops dividing $5as^2b$ by $t$ when SP is on.
# * **"The layer norm's weights are replicated, so their gradients are too."** They are partial. Without the sum every
#   rank trains a layer norm of its own.
#
# > **Take away**
# > 1. Between the blocks tokens are independent: shard along $s$, and nothing is replicated.
# > 2. An all-reduce is a reduce-scatter and an all-gather. $\bar g$ and $g$ are its halves, and together send as much.
# > 3. Save the shard and gather again in the backward pass: a quarter more bytes sent, or $4\,sbh$ stay on every rank.
# >
# > **At work tomorrow:** if your job uses tensor parallelism, check that sequence parallelism is on (Megatron-LM:
# > `--sequence-parallel`). If the code is your own, run it under `am.record` and look for a saved $[s, b, h]$ of full
# > width.
#
# **The lab:** [lab 3](../labs/lab3_sequence_parallel.py). Next, [chapter 5](05_recomputation.ipynb): recompute the
# core attention.
#
# **Sources.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.2, figures 5 and
# 6, equation 4.
