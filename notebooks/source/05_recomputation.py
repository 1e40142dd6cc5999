# %% [markdown]
# # 5 · Recomputation
#
# You can drop some of what a layer keeps, and recompute it when backward needs it. Which part is worth it, and what does it
# really cost?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import model_shape
from actmem.formulas.flops import layer_overhead
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Progress, Reveal, bar_chart, choice, play,
    slider, steps, worked,
)
from actmem_course.figures import ch05_recomputation as show

GPT3 = model_shape("175B")
checks = Checks()

question = Prediction(
    f"The figure shows 256 tokens. At {GPT3.seq_length:,} the attention core (QKᵀ, softmax, dropout, "
    "attention over V) holds most of GPT-3's bytes. Drop them, and let backward recompute them: "
    "QKᵀ runs once more, attention over V doesn't: its output is the projection's input, which is "
    "kept anyway. By what percentage does that raise the FLOPs of the layer's forward and backward?",
    float(100 * layer_overhead(GPT3, "selective")),
    "%",
    "One product of 2s²bh FLOPs runs again, against 72sbh² + 12s²bh for the whole layer: 2s/(72h + 12s).",
    GuessLine(start=100),
)
Reveal(
    question,
    Panel(
        lambda s, heads: show.recompute_trade(am.ModelShape(s, 1, 128 * heads, heads)),
        s=slider("s", "tokens", 256, 16384, 256, 256),
        heads=slider("a", "heads of 128", 8, 200, 8, 96),
    ),
    s=GPT3.seq_length,
)

# %% [markdown]
# **What you need:** chapter 2 (what a layer keeps, and why); chapters 3 and 4 for the exchanges and the memory ladder.
# About 60 minutes.
#
# The product of an $x \times y$ and a $y \times z$ matrix takes $2xyz$ FLOPs: one multiplication and one addition for each of
# $xyz$ terms.

# %% [markdown]
# ## One step, block by block
#
# Backward frees the tensors in reverse order. Play one step of four GPT-3 layers. Then switch on recomputation: now the core's
# blocks are not kept, and come back for one layer at a time, as a spike.

# %%
from actmem_course.predicted.recomputation import training_moments

STEP = GPT3.with_sizes(num_layers=4)
Panel(
    lambda recompute, moment: show.step_timeline(STEP, moment, recompute),
    recompute=choice("recompute", ("none", "selective", "full"), "none"),
    moment=play("moment", "of the step", lambda recompute: range(len(training_moments(STEP, recompute))), 60),
)

# %% [markdown]
# ## The lopsided trade
#
# A layer keeps $34sbh + 5as^2b$ bytes. The second term belongs to the attention core alone, and at GPT-3's size it is the
# larger. In FLOPs it is the other way round. Forward takes $2sb(3 + 1 + 4 + 4)h^2 = 24sbh^2$ in the linears, and only $4s^2bh$
# in the two attention products. Backward takes twice that: together $72sbh^2$ and $12s^2bh$.
#
# Drag $s$ in the figure at the top. In the upper bars the striped part is what recomputing the core frees; in the lower bars
# the dotted part is what it adds. Longer sequences raise both: the price with $s/h$, the saving with $5as/h$. (Full
# recomputation adds less than a third there; *Recomputing less* says why.)

# %% [markdown]
# ## How a checkpoint function works, in four steps
#
# You checkpoint the attention core, on small tensors. `gradients(run)` runs the core through `run`, each time with the same
# inputs and the same stream of random numbers, and returns the gradients of q, k and v. `kept(run)` returns what autograd keeps.

# %% jupyter={"source_hidden": true}
import torch

from actmem.layers.attention import CoreAttention, causal_mask

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


def kept(run):
    """What autograd keeps when the core runs through ``run``."""
    core, qkv, mask = fresh()
    with am.record(core) as ledger:
        out = run(core, *qkv, mask)
    return ledger


def in_words(ledger):
    return Fold(
        f"kept: {ledger.total_bytes:,} bytes, {len(ledger.saved)} tensors",
        "\n".join(f"{t.op} {list(t.shape)}: {t.bytes:,} B" for t in ledger.saved),
    )


def plainly(core, *inputs):
    return core(*inputs)


# %% [markdown]
# **Step 1: keep the inputs, run without a graph, run again.** The forward of this autograd function saves the inputs and
# computes under `no_grad`, so nothing inside is kept. Its backward runs the region again, this time with a graph, and lets
# autograd differentiate it. (The core has no weights. A region with weights needs `torch.autograd.backward` in place of `grad`,
# or they get no gradient.)


# %%
class RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, core, *inputs):
        ctx.core = core
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return core(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return run_again(ctx.core, ctx.saved_tensors, grad)


def run_again(core, inputs, grad):
    *qkv, mask = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    with torch.enable_grad():
        out = core(*qkv, mask)
    return None, *torch.autograd.grad(out, qkv, grad), None


in_words(kept(RunAgain.apply))

# %% [markdown]
# Only the inputs are left. But are the gradients right?

# %%
try:
    gradients(RunAgain.apply)
except RuntimeError as error:
    print(error)

# %% [markdown]
# **Step 2: draw the same dropout.** They would not be. The second run would draw other masks, and compute the gradient of another
# function. This course's dropout notices and refuses. PyTorch's `nn.Dropout` does not: your model would learn from wrong
# gradients, and no error would say so. So save the state of the random-number generator, and restore it for the second run (the
# recomputation).


# %%
class RunAgainSameDraws(RunAgain):
    @staticmethod
    def forward(ctx, core, *inputs):
        state = core.dropout_mask.generator.get_state()
        out = RunAgain.forward(ctx, core, *inputs)
        ctx.save_for_backward(*inputs, state)  # the state is a tensor like the others, so its bytes count
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, state = ctx.saved_tensors
        generator = ctx.core.dropout_mask.generator
        now = generator.get_state()
        generator.set_state(state)
        found = run_again(ctx.core, inputs, grad)
        generator.set_state(now)  # what comes after must not notice
        return found


checks.add(
    "gradients of q, k and v",
    [(0, int((x != y).sum())) for x, y in zip(gradients(plainly), gradients(RunAgainSameDraws.apply))],
    "elements that differ",
)
display(checks.show())
in_words(kept(RunAgainSameDraws.apply))

# %% [markdown]
# One more tensor is kept: the generator's state, whose size does not depend on the region. Now the gradients are bit-identical.
#
# **Step 3: stop early.** Backward needs the tensors that the region *keeps*, not the region's output. The core's last
# operation is a product with V, and nothing inside the core keeps its output. So the second run can stop just before it.
# The course's own `checkpoint` gives every tensor that autograd wants to save a numbered slot, and stops the second run when
# the last slot is filled (`src/actmem/recompute.py`, five rules at the top). So does `torch.utils.checkpoint` with
# `use_reentrant=False`. Its reentrant form and Megatron's run to the end.
#
# **Step 4: count.** torch's FLOP counter sees every matrix product that runs. Compare the bytes kept with the products run:

# %% jupyter={"source_hidden": true}
from torch.utils.flop_counter import FlopCounterMode

ways = {
    "keep everything": plainly,
    "run again, to the end": lambda core, *inputs: am.checkpoint(
        core, *inputs, generators=[core.dropout_mask.generator], stop_early=False
    ),
    "run again, stop early": lambda core, *inputs: am.checkpoint(
        core, *inputs, generators=[core.dropout_mask.generator]
    ),
}
product = 2 * HEADS * LENGTH * LENGTH * HEAD_SIZE
core_bytes = {}
for name, way in ways.items():
    with FlopCounterMode(display=False) as counter:
        found = gradients(way)
    core_bytes[f"{name}: {counter.get_total_flops() // product} products"] = kept(way).total_bytes
    checks.add(
        f"gradients, {name}",
        [(0, int((x != y).sum())) for x, y in zip(gradients(plainly), found)],
        "elements that differ",
    )
display(checks.show())
LiveFigure(
    bar_chart(
        "Stop early: the same bytes freed, with one fewer product",
        {"kept by the core": core_bytes},
        "measured, this small core",
    )
)

# %% [markdown]
# Two products in forward and four in backward make six; a second run adds two, or one if it stops early.
#
# **Now write it:** [exercises 4.1 to 4.4](../labs/lab4_recompute.py), `checkpoint` (4.1, and 4.2 with dropout),
# `selective_layer` (4.3) and `full_layer` (4.4): `python my/labs/lab4_recompute.py --only 4.1,4.2,4.3,4.4`.
#
# ## What to drop, and why not the MLP
#
# The MLP keeps large tensors too: $8sbh$ before GeLU and $8sbh$ after it. Why not drop those? Ask of each group of tensors: how
# many bytes does recomputing them free, for how many FLOPs?

# %%
Panel(
    lambda s, heads: show.rebuild_price(am.ModelShape(s, 1, 128 * heads, heads)),
    s=slider("s", "tokens", 256, 16384, 256, 2048),
    heads=slider("a", "heads of 128", 8, 200, 8, 96),
)

# %% [markdown]
# Move $s$: the core's bar stays. Its bytes and its FLOPs both grow with $s^2$. Their ratio is
#
# $$\frac{5as^2b}{2s^2bh} = \frac{5a}{2h} \;(QK^\top \text{ reruns}), \qquad \text{and that of a linear with } x \text{ times } h \text{ outputs}\quad \frac{2sbh\,x}{2sbh^2\,x} = \frac{1}{h}.$$
#
# So per FLOP the core frees $5a/2$ times as many bytes, whatever $s$ is. In GPT-3 that is 240 times, so rerunning the MLP's
# linears isn't worth it.
#
# Three groups need no product at all: the outputs of the norms and of GeLU, and the dropout masks. By FLOPs they are
# free (no bars); in time they cost about as much per byte as the core (chapter 7). The paper keeps them. Today's
# Megatron can drop the norms' outputs (`--recompute-modules layernorm`), but not in its default layers: there a norm is
# part of the linear that follows.

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import eq1
from actmem.formulas.flops import layer_products
from actmem_course.predicted.recomputation import core_over_gelu, rebuilds

groups = rebuilds(GPT3)
checks.add(
    "the layer without its input",
    [(sum(r.bytes for r in groups), eq1(GPT3) - am.layer_rows(GPT3)[0].bytes)],
    sides=("in the groups", "equation 1"),
)
forward = sum(flops for name, flops in layer_products(GPT3).items() if name != "4h→h")
checks.add(
    "forward up to 4h→h",
    [(sum(r.flops for r in groups), forward)],
    "FLOPs",
    sides=("in the groups", "by formula"),
)
checks.add(
    "bytes freed per FLOP, core over linear",
    [(5 * GPT3.num_attention_heads // 2, core_over_gelu(groups))],
    "times",
    sides=("5a/2", "from the groups"),
)
checks.show()

# %% [markdown]
# ## Measured: three numbers for one overhead
#
# Section 5 of the paper prints how many FLOPs selective recomputation adds, and its equation 8 gives the same number. But the
# sentence that leads to equation 8 describes less: the core's two products, once more. Which is right? Run the real layer at
# its real size on torch's `meta` device, which has shapes but no data, and let torch count the products.


# %%
def count(shape, recompute):
    """FLOPs of one layer, forward and backward, counted by torch."""
    with torch.device("meta"):
        layer = am.TransformerLayer(shape, recompute=recompute, dtype=torch.bfloat16)
    layer = layer.to("meta")
    x = torch.empty(
        shape.seq_length,
        shape.micro_batch_size,
        shape.hidden_size,
        dtype=torch.bfloat16,
        device="meta",
        requires_grad=True,
    )
    mask = torch.empty(shape.seq_length, shape.seq_length, dtype=torch.bool, device="meta")
    with FlopCounterMode(display=False) as counter:
        layer(x, mask).sum().backward()
    return counter.get_total_flops()


checks.add(
    "GPT-3's layer, nothing recomputed",
    [(3 * sum(layer_products(GPT3).values()), count(GPT3, "none"))],
    "FLOPs",
    sides=("72sbh² + 12s²bh", "counted by torch"),
)
checks.show()

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS

modes = {
    "core, to its end (the text)": "paper-selective",
    "core, stopped early": "selective",
    "everything, to its end": "paper-full",
    "everything, stopped": "full",
}
without = {name: count(model_shape(name), "none") for name in PAPER_MODELS}
by_torch = {(name, mode): count(model_shape(name), mode) for name in PAPER_MODELS for mode in modes.values()}

# %% jupyter={"source_hidden": true}
from actmem_course.others import paper

pairs = [
    (without[name] * (1 + layer_overhead(model_shape(name), mode)), flops)
    for (name, mode), flops in by_torch.items()
]
checks.add("four models, four ways to recompute", pairs, "FLOPs", sides=("by formula", "counted by torch"))
added = {"as printed, and by equation 8": dict(paper.SECTION5_ADDED_FLOPS_PERCENT)}
for name in added["as printed, and by equation 8"]:
    for words, mode in list(modes.items())[:2]:
        added.setdefault(words, {})[name] = 100 * (by_torch[name, mode] / without[name] - 1)
printed, once, stopped = (each["175B"] for each in added.values())
display(checks.show())
LiveFigure(
    bar_chart(
        f"For GPT-3 selective costs {once:.2f}% or {stopped:.2f}%, not the paper's {printed}%",
        added,
        "FLOPs added to a layer",
        "%",
        beside=True,
    )
)

# %% [markdown]
# Equation 8 adds $12s^2bh$ per layer: three forward passes of the core, where only one runs again. So in FLOPs the paper's
# method is even cheaper than it says. (Time: chapter 7.)
#
# **Now write it:** [exercise 4.5](../labs/lab4_recompute.py), `checkpoint_stopping_early`: `python
# my/labs/lab4_recompute.py --only 4.5`.
#
# ## Recomputing less
#
# Full recomputation can stop early, too. The layer's last product is `4h→h`. The only stored tensor after it is the
# dropout mask, which our layer draws before the product. A second run that stops there leaves out $8sbh^2$ FLOPs, a third of a
# layer's linears, and costs about two thirds of a run to the end, which is what the paper and its code do. The last bar of the
# figure at the top is this price.
#
# ### What the second run sends
#
# On $t$ ranks a layer that runs again repeats its exchanges (chapters 3 and 4), up to the point where it stops. The attention
# core has none: each head is on one rank.

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import counts, layer_exchanges, wire_bytes
from actmem.ledger.comms import count_collectives
from actmem.ledger.layer_rows import layer_input

sent, pairs = {"the first run and backward": {}, "the second run": {}}, []
for sequence in (False, True):
    for mode, words in {"selective": "selective", "full": "full", "paper-full": "full, to its end"}.items():
        exchanges = layer_exchanges(GPT3, am.Parallel(8, sequence), mode)
        with am.emulated_rank(8):
            tp = am.tensor_parallel(sequence_parallel=sequence)
            layer = am.TransformerLayer(GPT3, tp, recompute=mode, device="cpu", dtype=torch.bfloat16)
            with count_collectives() as seen:
                layer(layer_input(GPT3, tp, "cpu", torch.bfloat16)).sum().backward()
        pairs += [(counts(exchanges).get(kind, 0), count) for kind, count in seen.counts.items()]
        again = [e for e in exchanges if e.phase == "recompute"]
        bar = f"TP{' + SP' * sequence}, {words}: {sum(e.count for e in again)} more"
        sent["the first run and backward"][bar] = wire_bytes(exchanges) - wire_bytes(again)
        sent["the second run"][bar] = wire_bytes(again)
checks.add("exchanges of GPT-3's layer, by kind", pairs, "exchanges")
display(checks.show())
LiveFigure(
    bar_chart(
        "Selective recomputation sends nothing more, full recomputation does",
        sent,
        "sent by one rank of eight, one GPT-3 layer",
        fills=[show.FILLS["number"], show.FILLS["recomputed"]],
    )
)

# %% [markdown]
# So full recomputation also costs communication that nothing hides (chapter 7 has the time). TP + SP sends more even without a
# second run: backward gathers two inputs again, as in chapter 4.
#
# ## Table 2: six ways to train a layer
#
# You now know every name in the paper's table 2, the bytes that one layer keeps on one device:
#
# - **none**: one device, nothing done about memory.
# - **tensor** (chapter 3): $t$ devices share the layer's matrices and most of its activations.
# - **tensor+sequence** (chapter 4): the rest of the activations is cut along the sequence.
# - **tensor+selective** and **tensor+sequence+selective**: the core of attention is recomputed.
# - **full**: only the layer's input is kept.

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import TABLE2, closed_form
from actmem.rows import total

shapes = [model_shape(name) for name in PAPER_MODELS]
pairs = [
    (closed_form(row, shape, 8), total(am.layer_rows(shape, row.parallel(8), row.recompute)))
    for row in TABLE2
    for shape in shapes
]
checks.add("table 2 for four models", pairs, sides=("equations 1, 2, 4 and 6", "sums over the tensors"))
checks.show()

# %% [markdown]
# Is the table true? `labs/measure_table2.py` starts two processes that share a small layer as two devices would. Each runs it
# in the six ways and counts the tensors that autograd holds after forward. *Extra* is what PyTorch keeps and the paper leaves
# out as small: layer-norm statistics, the causal mask, the random-number states of step 2. It has formulas of its own.
# (In a terminal, run `make measure`.)

# %% jupyter={"source_hidden": true}
from actmem_course.launch import results

with Progress("labs/measure_table2.py, two processes"):
    measured = results("measure_table2.py", "--device", "cpu", processes=2)
checks.add(
    "table 2 on two processes",
    [(r["predicted_bytes"] + r["extra_bytes"], r["measured_bytes"]) for r in measured],
)
checks.show()

# %% jupyter={"source_hidden": true}
first = [r for r in measured if r["rank"] == 0]
names = {
    r[
        "configuration"
    ]: f"{r['configuration'].replace('tensor+', 'TP+').replace('sequence', 'SP')}: {r['formula']}"
    for r in first
}
LiveFigure(
    bar_chart(
        "Table 2, measured: six ways to train a layer",
        {
            "measured, the paper's terms": {
                names[r["configuration"]]: r["measured_bytes"] - r["extra_bytes"] for r in first
            },
            "measured, extra": {names[r["configuration"]]: r["extra_bytes"] for r in first},
        },
        "a small layer, one rank of two",
    )
)

# %% [markdown]
# **Now write it:** [exercise 1.2](../labs/lab1_count_bytes.py), `rank_bytes`, which lab 1 left open: all six ways in one
# function: `python my/labs/lab1_count_bytes.py --only 1.2`.
#
# ## The memory ladder
#
# This is figure 7 of the paper, for any $s$ and $t$: the memory of each method as a share of tensor parallelism alone. From
# which $s$ on does *tensor+selective* need less than *tensor+sequence*?

# %%
Panel(
    show.memory_ladder,
    seq_length=slider("s", "tokens", 512, 8192, 512, 2048),
    tensor_parallel_size=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
)

# %% [markdown]
# Set the two sums equal: $34/t + 5as/(ht) = 10 + 24/t$, so $s = 2h(t-1)/a$. Below that length a rank's part of the
# attention core, $5as/(ht)$, is smaller than what sequence parallelism frees, $10(1 - 1/t)$.
#
# The bars are formulas. Now a layer of each model runs as one rank of eight, and the ledger counts what autograd keeps. (A100s'
# logs are compared as in [chapter 2](02_counting_bytes.ipynb).)

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import layer_extra_rows
from actmem.ledger.layer_rows import measure_layer
from actmem.parallel.groups import TensorParallel
from actmem_course.others.logged_pairs import logged_pairs

pairs = []
for name in PAPER_MODELS:
    shape = model_shape(name)
    with am.emulated_rank(8):
        for row in TABLE2:
            tp = TensorParallel()
            if row.tensor_parallel:
                tp = am.tensor_parallel(sequence_parallel=row.sequence_parallel)
            sizes = shape, row.parallel(8), row.recompute
            predicted = am.layer_rows(*sizes) + layer_extra_rows(*sizes)
            pairs.append((total(predicted), total(measure_layer(shape, tp, row.recompute))))
checks.add("layers of four models, six ways, as one rank of eight", pairs)
logged = logged_pairs()[1]
checks.add(logged.what, [(logged.formula_bytes, logged.logged_bytes)], sides=("predicted", "logged on A100s"))
checks.show()

# %% [markdown]
# ## What it costs in time, on a newer GPU
#
# Table 4 of the paper times one layer ([chapter 7](07_time.ipynb) has all of it). Here is what recomputation adds, on the GPU
# of [chapter 1](01_memory_wall.ipynb) and on the paper's, over tensor parallelism that recomputes nothing. There the second run stops
# early, as in this chapter, or goes to its end, as the paper's does.

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import layer_times, newest, table4_bars

on_gpu = newest("modes")
LiveFigure(table4_bars(on_gpu))

# %% jupyter={"source_hidden": true}
layer_times(on_gpu)

# %% [markdown]
# Hardly any of the second run's time is FLOPs. Softmax and dropout, not fused, read and write the scores at the speed of
# memory. From the A100 to this GPU matmuls gained more than memory did, so this elementwise work weighs more. With
# sequence parallelism the layer norms and dropouts outside the core are divided, which pays for most of it. (The 175B
# model's layer is left out. With one sequence this GPU finishes its kernels before the next ones are started, so its times are
# those of the CPU, and noisy.)
#
# ## Does a larger batch pay for it?
#
# The old argument for recomputing everything: it frees so much memory that the batch can grow, and a larger batch runs
# faster. When is that true? A pass over a microbatch costs a fixed part (starting it), and a part for each sequence. $\varphi$ is
# the first over the second, in the pass that fits with nothing recomputed.
#
# <details><summary>The formula</summary>
#
# Recomputation adds $\varepsilon$ to a sequence's work, and $\rho$ times as many sequences fit, with room for the layer that is
# being rebuilt. So work 1 costs $1 + \varphi$ without it, and $1 + \varepsilon + \varphi/\rho$ with it:
#
# $$\text{throughput over none} = \frac{1 + \varphi}{1 + \varepsilon + \varphi / \rho}, \qquad \text{so it pays above } \varphi = \frac{\varepsilon}{1 - 1/\rho}.$$
# </details>

# %%
Panel(
    lambda phi, s: show.batch_payoff(GPT3.with_sizes(seq_length=s), phi),
    phi=slider("φ", "fixed, percent", 0, 100, 2, 10),
    s=slider("s", "tokens", 512, 8192, 512, 2048),
)

# %% [markdown]
# The title gives each one's break-even $\varphi$. (*Full* runs to its end here, and adds a third.) Full recomputation fits more
# sequences, and still loses wherever the fixed part is small: shared by ever more sequences it vanishes, the overhead stays.
# Assume that one sequence keeps the GPU busy, so $\varphi$ is a few percent: then selective recomputation pays and full does
# not. With a small model, or short sequences, measure before you choose. And if you have a pipeline, larger microbatches
# are fewer, and it idles more (chapter 6).
#
# ## FlashAttention has changed the question
#
# Kernels like FlashAttention never write the $s \times s$ scores to memory. They keep Q, K, V, the output and one number per
# row, and recompute the scores tile by tile in backward. So there is no $5as^2b$ to save, and a checkpoint around such a
# kernel frees next to nothing. The kernel does by itself what the paper selects by hand. [Chapter 8](08_todays_layer.ipynb)
# asks what is left to recompute then. See it with torch's own fused attention:

# %%
from torch.nn import functional as F


class Fused(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


scores = {"core by hand": {}, "fused kernel": {}}
for length in (64, 128, 256):
    q, k, v = (torch.randn(1, HEADS, length, HEAD_SIZE, requires_grad=True) for _ in range(3))
    with am.record(core := CoreAttention(HEAD_SIZE, 0.1, torch.Generator())) as by_hand:
        out = core(*(x.flatten(0, 1) for x in (q, k, v)), causal_mask(length, "cpu"))
    with am.record(fused := Fused()) as by_kernel:
        out = fused(q, k, v)
    scores["core by hand"][f"s = {length}"], scores["fused kernel"][f"s = {length}"] = (
        by_hand.total_bytes,
        by_kernel.total_bytes,
    )
LiveFigure(
    bar_chart(
        "The fused kernel keeps no scores: it grows with s, not with s²",
        scores,
        "measured, kept for backward",
        beside=True,
    )
)

# %% [markdown]
# Double $s$, and the core by hand keeps more than three times as much (four times, for long sequences), the kernel twice as
# much. (Both are float32, and the fused one has no dropout.)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# Each GPU has 12 GiB for the activations of GPT-3's 96 layers, on 8 ranks with sequence parallelism, one microbatch. (So a rank
# keeps 1/8 of a layer's input, which the paper's table doesn't divide.) Which of the three modes fit: keep everything,
# selective, full? Here $sbh$ bytes are 24 MiB, and $5as/h$ is 80. Don't forget the layer that backward is working on.

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import layer_bytes

ranks = 8
layer_of = {mode: layer_bytes(GPT3, am.Parallel(ranks, True), mode) for mode in ("none", "selective", "full")}
factors = {"none": "(34 + 80)", "selective": "34", "full": "2"}
gib = {mode: (GPT3.num_layers * size + (layer_of["none"] - size)) / 2**30 for mode, size in layer_of.items()}
worked(
    *(
        f"{mode}: {factors[mode]} · 24 MiB / {ranks} = {size / 2**20:,.0f} MiB a layer; 96 of them, "
        f"plus one layer that backward rebuilds: {gib[mode]:.1f} GiB."
        for mode, size in layer_of.items()
    ),
    "Keeping everything doesn't fit. Both others do; take selective: it adds "
    f"{float(100 * layer_overhead(GPT3, 'selective')):.2f}% FLOPs where full adds "
    f"{float(100 * layer_overhead(GPT3, 'full')):.1f}%.",
)

# %% [markdown]
# ## Questions
#
# <details><summary><b>1.</b> Why does the checkpoint of the core need no extra memory for Q, K and V?</summary>
#
# They are kept anyway, $6sbh$ of the $34sbh$: the gradients of QKᵀ and of the product with V read them. The checkpoint
# holds the same storages, and a storage counts once. So the inputs of this region cost nothing.
# </details>
#
# <details><summary><b>2.</b> Full recomputation leaves <i>2sbh</i> per layer. Is that also what a GPU needs at its peak?</summary>
#
# No. While backward works on a layer, everything that this layer keeps is in memory again: $34sbh + 5as^2b$ for one layer,
# on top of $2sbh$ for each of the other $L - 1$. The same holds for selective recomputation: one layer's $5as^2b$ comes back
# for a moment.
# </details>
#
# <details><summary><b>3.</b> Your region draws dropout from the default generator and you replay only a generator of your own.
# What do you see?</summary>
#
# Nothing: no error, and wrong gradients. To find it, compare gradients with and without recomputation bit by
# bit, with dropout on.
# </details>
#
# <details><summary><b>4.</b> You double the heads and keep <i>h</i>. What happens to the bytes that selective
# recomputation saves, and to its price?</summary>
#
# The saved bytes double ($5as^2b$). The FLOPs do not change: the products of all heads together are $2s^2bh$ each, however $h$
# is cut into heads. More and smaller heads make the trade better.
# </details>
#
# ## What people get wrong here
#
# - **"The batch doubles, so the throughput doubles."** Sequences a second are bounded by the FLOPs of a sequence, and
#   recomputation raises those. Only the fixed part of a pass is shared by more sequences.
# - **"34sbhL is full checkpointing."** It is the selective case, equation 6. Full recomputation keeps $2sbhL$.
# - **"Selective recomputation recomputes half of the layer."** It recomputes the part with most of the bytes and, at these
#   sizes, adds less than two percent to the FLOPs.
# - **"Full recomputation always adds a third."** In Megatron, whose second run goes to its end. One that stops early adds less.
#
# ## The lab
#
# [Lab 4](../labs/lab4_recompute.py): write the checkpoint function of this chapter yourself, with random numbers that
# repeat and a second run that stops early: `python my/labs/lab4_recompute.py`.
#
# **Sources.** 2205.05198 sections 4.1, 5, 6.1 and appendix A · Chen et al., *Training deep nets with sublinear memory
# cost*, 1604.06174, for checkpointing itself · Dao et al., *FlashAttention*, 2205.14135 · code: `src/actmem/recompute.py`,
# `src/actmem/formulas/flops.py`, `src/actmem_course/figures/recomputation.py`.
#
# ## Now fit your model
#
# Which mode does your model need? Plan one layout with either mode, and compare the seconds of a step and the GiB:
#
# ```
# actmem plan 175B --gpus 64 --memory 80 --global-batch 64 --tensor 8 --pipeline 8 --chunks 6 --micro-batch-size 1 --recompute selective
# actmem plan 175B --gpus 64 --memory 80 --global-batch 64 --tensor 8 --pipeline 8 --chunks 6 --micro-batch-size 1 --recompute full
# ```
#
# Next, [chapter 6](06_pipeline.ipynb): a rank keeps the bytes of this chapter once for each microbatch in flight.
