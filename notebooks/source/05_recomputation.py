# %% [markdown]
# # 5 · Recomputation
#
# *50 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# Your layers still save too much. So don't save the core attention's tensors: recompute them when the backward pass
# needs them. That takes QKᵀ once more, but not attention over V, whose output is saved as the input of the next linear.
# You pay in **FLOPs**, multiplications and additions. **By what percentage do the layer's FLOPs rise?**
#
# <details><summary>Bytes and FLOPs of a layer</summary>
#
# The matmul of an $x \times y$ and a $y \times z$ matrix takes $2xyz$ FLOPs. For $b$ sequences of $s$ tokens, a hidden
# size of $h$ and $a$ heads:
#
# | in a layer | bytes saved | FLOPs, forward pass |
# |---|---|---|
# | the linears (QKV, projection, h→4h, 4h→h), and what's between | $34sbh$ | $2sb(3 + 1 + 4 + 4)h^2 = 24sbh^2$ |
# | the **core attention** (QKᵀ, softmax, dropout, attention over V) | $5as^2b$ | $2s^2bh$ for each of two matmuls |
#
# The backward pass has two matmuls for each of these. Forward and backward together: $72sbh^2 + 12s^2bh$. At GPT-3's
# size the core has more of the bytes.
# </details>

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import model_shape
from actmem.formulas.flops import layer_overhead
from actmem_course.figures import Checks, GuessLine, Panel, Prediction, Reveal
from actmem_course.figures import choice, play, slider, steps
from actmem_course.figures import ch05_recomputation as show

GPT3 = model_shape("175B")
checks = Checks()

question = Prediction(
    f"The figure shows 256 tokens. GPT-3 has {GPT3.seq_length:,}, and h = {GPT3.hidden_size:,}. Recompute the "
    "core attention: QKᵀ once more, then softmax and dropout. By what percentage do the layer's FLOPs rise?",
    float(100 * layer_overhead(GPT3, "selective")),
    "%",
    "2s²bh more FLOPs, of 72sbh² + 12s²bh for the layer: 2s/(72h + 12s).",
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
# **You need** chapter 2, and chapters 3 and 4 for the collectives.
#
# Drag $s$: the cost grows with $s/h$, the bytes freed with $5as/h$. This is **selective recomputation**. *Full
# recomputation* saves only the layer's input, and recomputes up to the last tensor that backward reads.
#
# > **Why do this?** The core has most of the bytes and few of the FLOPs. **Why not?** A fused attention kernel has no
# > such tensors (see FlashAttention below). And it costs more in time than in FLOPs, because softmax and dropout are
# > memory-bound ([chapter 7](07_time.ipynb)).
#
# ## One step, block by block
#
# The backward pass frees tensors in reverse order. Play one step of four GPT-3 layers, 0 to 3: you see the layer at
# work, and the bytes of all four. Then choose *selective* and play it again. The forward pass no longer saves the
# core's three tensors (hatched), and they come back for one layer at a time, as a spike:

# %%
from actmem_course.predicted.recomputation import training_moments

STEP = GPT3.with_sizes(num_layers=4)
Panel(
    lambda recompute, moment: show.training_step(STEP, moment, recompute),
    recompute=choice("recompute", ("none", "selective", "full"), "none"),
    moment=play("moment", "place in the step", lambda recompute: range(len(training_moments(STEP, recompute))), 60),
)

# %% [markdown]
# **Rule:** saved tensors peak at no more than what all layers save, plus what you recompute for one layer. (Gradients
# come on top: [chapter 9](09_your_model.ipynb).)
#
# ## How a checkpoint function works, in four steps
#
# Write one for the core attention, on small tensors. `gradients(run)` runs the core through `run`, each time with the
# same inputs and the same dropout, and returns the gradients of q, k and v. `saved(run)` returns what autograd saves.

# %% jupyter={"source_hidden": true}
import torch

from actmem.layers.attention import CoreAttention, causal_mask
from actmem_course.figures import Fold

HEADS, LENGTH, HEAD_SIZE = 4, 64, 16


def fresh(seed=0):
    """The same core, inputs and dropout each time."""
    torch.manual_seed(seed)
    core = CoreAttention(HEAD_SIZE, 0.1, torch.Generator().manual_seed(seed))
    q, k, v = (torch.randn(HEADS, LENGTH, HEAD_SIZE, requires_grad=True) for _ in range(3))
    return core, (q, k, v), causal_mask(LENGTH, "cpu")


def gradients(run):
    """Gradients of q, k and v when the core runs through ``run``."""
    core, qkv, mask = fresh()
    run(core, *qkv, mask).square().sum().backward()
    return [x.grad for x in qkv]


def saved(run):
    """What autograd saves when the core runs through ``run``."""
    core, qkv, mask = fresh()
    with am.record(core) as ledger:
        out = run(core, *qkv, mask)
    return ledger


def in_words(ledger):
    return Fold(
        f"saved for backward: {ledger.total_bytes:,} bytes, {len(ledger.saved)} tensors",
        "\n".join(f"{t.op} {list(t.shape)}: {t.bytes:,} B" for t in ledger.saved),
    )


def plainly(core, *inputs):
    return core(*inputs)


in_words(saved(plainly))

# %% [markdown]
# **Step 1: save the inputs, and recompute.** In the forward pass of an autograd function gradients are off, so autograd
# saves nothing inside. Its backward pass runs the core with a graph and differentiates it. (With weights in the region,
# call `torch.autograd.backward` in place of `grad`, or they get no gradient.)


# %%
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, core, *inputs):
        ctx.core = core
        ctx.save_for_backward(*inputs)
        return core(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return recomputed_gradients(ctx.core, ctx.saved_tensors, grad)


def recomputed_gradients(core, inputs, grad):
    *qkv, mask = inputs
    qkv = [x.detach().requires_grad_() for x in qkv]
    with torch.enable_grad():
        out = core(*qkv, mask)
    return None, *torch.autograd.grad(out, qkv, grad), None


in_words(saved(Recompute.apply))

# %% [markdown]
# Autograd saves only the inputs now. But are the gradients right?

# %%
try:
    gradients(Recompute.apply)
except RuntimeError as error:
    print(error)

# %% [markdown]
# **Step 2: draw the same dropout.** The gradients would be wrong: with another dropout mask you differentiate another
# function. This course's dropout notices; in a checkpoint written by hand, like this one, `nn.Dropout` doesn't.
# `torch.utils.checkpoint` is safe: it restores torch's default generators (`preserve_rng_state=True`). Do the same:
# save the generator's state, and restore it before you recompute.


# %%
class RecomputeSameDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, core, *inputs):
        ctx.core = core
        state = core.dropout_mask.generator.get_state()
        ctx.save_for_backward(*inputs, state)  # a tensor like the others: its bytes count
        return core(*inputs)

    @staticmethod
    def backward(ctx, grad):
        *inputs, state = ctx.saved_tensors
        generator = ctx.core.dropout_mask.generator
        now = generator.get_state()
        generator.set_state(state)
        found = recomputed_gradients(ctx.core, inputs, grad)
        generator.set_state(now)  # later draws must not change
        return found


wanted, found = gradients(plainly), gradients(RecomputeSameDropout.apply)
differ = [(0, int((x != y).sum())) for x, y in zip(wanted, found)]
checks.add("elements that differ in the gradients of q, k and v", differ, "")
display(checks.show())
in_words(saved(RecomputeSameDropout.apply))

# %% [markdown]
# You save one more tensor, the generator's state: a few thousand bytes on a CPU (open the line above), 16 bytes on a
# CUDA GPU. The gradients are bit-identical.
#
# **Step 3: stop early.** The backward pass needs the tensors that the core *saves*, not its output. Its last
# operation is the matmul with V, and nothing in the core saves that matmul's output. So stop before it, and recompute
# only QKᵀ, softmax and dropout: *the core, stopped early*. This course's `checkpoint` puts a numbered slot in place
# of each tensor that autograd wants to save (`saved_tensors_hooks`), and stops when the last slot is filled
# (`src/actmem/recompute.py` begins with its rules). So does `torch.utils.checkpoint` with `use_reentrant=False`.
# torch's reentrant form and Megatron-LM's checkpoint recompute to the end.
#
# **Step 4: count.** torch's FLOP counter sees every matmul:

# %% jupyter={"source_hidden": true}
from torch.utils.flop_counter import FlopCounterMode

from actmem_course.figures import text_table

ways = {
    "save everything": plainly,
    "recompute to the end": lambda core, *inputs: am.checkpoint(
        core, *inputs, generators=[core.dropout_mask.generator], stop_early=False
    ),
    "recompute, stop early": lambda core, *inputs: am.checkpoint(
        core, *inputs, generators=[core.dropout_mask.generator]
    ),
}
matmul = 2 * HEADS * LENGTH * LENGTH * HEAD_SIZE
lines, differ = [], []
for name, way in ways.items():
    with FlopCounterMode(display=False) as counter:
        found = gradients(way)
    lines.append((name, counter.get_total_flops() // matmul, saved(way).total_bytes))
    differ += [(0, int((x != y).sum())) for x, y in zip(gradients(plainly), found)]
checks.add("elements that differ in three gradients, three ways", differ, "")
print(text_table(("", "matmuls", "bytes saved"), lines, " rr"))
checks.show()

# %% [markdown]
# Two matmuls forward and four backward make six. Recompute to the end, and you add two; stop early, and you add one,
# for the same bytes.
#
# ## Why not the MLP?
#
# The MLP saves large tensors too: $8sbh$ bytes before GeLU and $8sbh$ after it. Why not recompute those? Ask of each
# group of tensors how many bytes one FLOP frees:

# %% jupyter={"source_hidden": true}
from fractions import Fraction
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.formulas.flops import layer_matmuls

# What is recomputed together: its terms, and the matmul that this takes.
GROUPS = {
    "Q, K, V": (("Q", "K", "V"), "QKV projection"),
    "core, stopped early": (CORE_ATTENTION_TERMS, "QKᵀ"),
    "projection input": (("attention projection input",), "attention over V"),
    "layer-norm 2 input": (("layer-norm 2 input",), "attention projection"),
    "GeLU input": (("GeLU input",), "h→4h"),
}
lines, frees = [], {}
for name, (terms, matmul) in GROUPS.items():
    size, flops = sum(row.bytes for row in am.layer_rows(GPT3) if row.term in terms), layer_matmuls(GPT3)[matmul]
    frees[name] = Fraction(size, flops)
    lines.append((name, matmul, f"{1000 * float(frees[name]):.3f}"))
lines.sort(key=lambda line: -frees[line[0]])
print(text_table(("recomputed", "by", "bytes/kFLOP"), lines, "  r"))
ratio = frees["core, stopped early"] / frees["GeLU input"]
checks.add(
    "bytes per FLOP, the core over h→4h", [(Fraction(5 * GPT3.num_attention_heads, 2), ratio)], "", ("5a/2", "of the table")
)
checks.show()

# %% [markdown]
# The core's number (stopped early) is the same for any $s$, since its bytes and its FLOPs both grow with $s^2$.
# Compare it with a linear that has $x$ times $h$ outputs:
#
# $$\frac{5as^2b}{2s^2bh} = \frac{5a}{2h}, \qquad \frac{2sbh\,x}{2sbh^2\,x} = \frac{1}{h}.$$
#
# Per FLOP, the core frees $5a/2$ times as many bytes. Each line below the core's recomputes one matmul to free what
# comes out of it. The outputs of the norms and of GeLU take no matmul. In time they cost about as much per byte as
# the core (chapter 7). The paper saves them. Megatron-LM can drop the norms' outputs
# (`--recompute-granularity selective --recompute-modules layernorm`), but not in its default dense layer, where
# Transformer Engine fuses the norms with the linears.

# %% [markdown]
# ## One cost, three numbers
#
# In a layer's FLOPs, $72\,bsh^2(1 + s/6h)$, the paper's equation 8 turns $s/6h$ into $s/3h$: three more forward
# passes of the core. But the sentence before it recomputes the core once. Which is right? Run the real layer on torch's
# `meta` device, which has shapes but no data, and let torch count the matmuls.

# %%
from actmem.formulas.flops import layer_matmuls


def count(shape, recompute):
    """FLOPs of one layer, forward and backward, counted by torch."""
    s, b, h = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    with torch.device("meta"):
        layer = am.TransformerLayer(shape, recompute=recompute, dtype=torch.bfloat16)
        x = torch.empty(s, b, h, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(s, s, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter:
        layer.to("meta")(x, mask).sum().backward()
    return counter.get_total_flops()


checks.add(
    "GPT-3's layer, nothing recomputed",
    [(3 * sum(layer_matmuls(GPT3).values()), count(GPT3, "none"))],
    "FLOPs",
    sides=("72sbh² + 12s²bh", "counted by torch"),
)
checks.show()

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS
from actmem_course.others import paper

modes = {
    "core, to its end (the text)": "paper-selective",
    "core, stopped early": "selective",
    "everything, to its end": "paper-full",
    "everything, stopped early": "full",
}
without = {name: count(model_shape(name), "none") for name in PAPER_MODELS}
by_torch = {(name, mode): count(model_shape(name), mode) for name in PAPER_MODELS for mode in modes.values()}
pairs = [
    (without[name] * (1 + layer_overhead(model_shape(name), mode)), flops)
    for (name, mode), flops in by_torch.items()
]
checks.add("FLOPs of four models' layers, four ways to recompute", pairs, sides=("by formula", "counted by torch"))
display(checks.show())
printed = paper.SECTION5_ADDED_FLOPS_PERCENT["175B"]
once, stopped = (100 * (by_torch["175B", mode] / without["175B"] - 1) for mode in list(modes.values())[:2])
print(f"GPT-3: the paper prints {printed}%, torch counts {once:.2f}%, or {stopped:.2f}% if you stop early")

# %% [markdown]
# Equation 8 adds $12s^2bh$ per layer: three forward passes of the core, where you recompute one.
#
# ## Full recomputation
#
# Save only the layer's input, $2sbh$ bytes. You can stop early here, too. The last matmul is `4h→h`, and the only
# tensor saved after it is a dropout mask, which our layer draws before that matmul. So you leave out $8sbh^2$ FLOPs,
# a third of the linears. The paper and its code recompute to the end, which adds a third to the layer's FLOPs.
#
# On $t$ ranks you also recompute the layer's collectives (chapters 3 and 4), up to the point where you stop. The core
# has none: each head is on one rank. Choose *full*, and see what the ranks send once more:

# %%
from actmem_course.figures.layer_picture import layer_picture

MODES = {"selective": "selective", "full": "full", "full, to its end": "paper-full"}
Panel(
    lambda recompute, shared_by: layer_picture(
        GPT3, am.Parallel(4, shared_by == "TP + SP"), MODES[recompute], collectives="recompute"
    ),
    recompute=choice("recompute", list(MODES), "selective"),
    shared_by=choice("4 ranks", ["TP", "TP + SP"], "TP"),
)

# %% [markdown]
# > **Why do this?** The fewest bytes stay: $2sbh$ per layer. **Why not?** You add 22 to 33% to the layer's FLOPs, and
# > its collectives once more, not overlapped.
#
# ## Table 2: six ways to train a layer
#
# You now know all six rows of the paper's Table 2, the bytes that one layer saves on one of $t$ devices: **none**;
# **tensor** (TP, chapter 3); **tensor+sequence** (TP + SP, chapter 4); each of these two with **selective**
# recomputation; and **full**.
#
# Is the table true? Two processes share a small layer, and count what autograd saves. *Extra* is the part that the
# paper leaves out as small: statistics of the layer norms, the causal mask, the generator's states of step 2.

# %% jupyter={"source_hidden": true}
from actmem.config import TINY
from actmem.formulas.activations import TABLE2, closed_form
from actmem.rows import total
from actmem_course.figures import Progress
from actmem_course.launch import results

with Progress("labs/measure_table2.py, two processes"):
    measured = results("measure_table2.py", "--device", "cpu", processes=2)
a, b, h, s = TINY.letters()
print(f"a = {a}, b = {b}, h = {h}, s = {s}, t = 2")
print(f"sbh = {s * b * h:,} bytes, 5as/h = {5 * a * s / h:g}\n")
print(
    text_table(
        ("", "formula, × sbh", "counted", "extra"),
        [
            (
                each["configuration"].replace("tensor", "TP").replace("sequence", "SP"),
                each["formula"],
                each["measured_bytes"],
                each["extra_bytes"],
            )
            for each in measured
            if each["rank"] == 0
        ],
        "  rr",
    )
)
checks.add(
    "Table 2 on two processes, six rows each",
    [(each["predicted_bytes"] + each["extra_bytes"], each["measured_bytes"]) for each in measured],
)
checks.show()

# %% [markdown]
# **Now write it:** [exercise 1.2](../labs/lab1_count_bytes.py), `rank_bytes`, all six ways in one function: `python
# my/labs/lab1_count_bytes.py --only 1.2`.
#
# ## The memory ladder
#
# The paper's figure 7, for any $s$ and $t$: each method's bytes as a share of tensor parallelism alone. From which
# $s$ on does *tensor+selective* need less than *tensor+sequence*?

# %%
Panel(
    show.memory_ladder,
    seq_length=slider("s", "tokens", 512, 8192, 512, 2048),
    tensor_parallel_size=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Set the two sums equal: $34/t + 5as/(ht) = 10 + 24/t$, so $s = 2h(t-1)/a$. In shorter sequences a rank's share of
# the core, $5as/(ht)$, is smaller than what sequence parallelism frees, $10(1 - 1/t)$.
#
# </details>
#
# Now run a layer of each model as one rank of eight, and count:

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import layer_extra_rows
from actmem.ledger.measure_layer import measure_layer
from actmem.parallel.groups import TensorParallel

pairs = []
for name in PAPER_MODELS:
    shape = model_shape(name)
    with am.emulated_rank(8):
        for row in TABLE2:
            tp = TensorParallel()
            if row.tensor_parallel:
                tp = am.tensor_parallel(sequence_parallel=row.sequence_parallel)
            extra = layer_extra_rows(shape, row.parallel(8), row.recompute)
            predicted = closed_form(row, shape, 8) + total(extra)
            pairs.append((predicted, total(measure_layer(shape, tp, row.recompute))))
checks.add("bytes of a layer of four models, six configurations, as one rank of eight", pairs)
checks.show()

# %% [markdown]
# ## FlashAttention has changed the question
#
# Kernels like FlashAttention never write the $s \times s$ scores to memory. They save Q, K, V, the output and one
# number per row, and recompute the scores tile by tile in the backward pass. See it with torch's own fused attention,
# in float32 on the CPU. (The core by hand has dropout, the kernel has none.)

# %%
from torch.nn import functional as F


class Fused(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


lines = []
for length in (64, 128, 256):
    q, k, v = (torch.randn(1, HEADS, length, HEAD_SIZE, requires_grad=True) for _ in range(3))
    with am.record(core := CoreAttention(HEAD_SIZE, 0.1, torch.Generator())) as by_hand:
        out = core(*(x.flatten(0, 1) for x in (q, k, v)), causal_mask(length, "cpu"))
    with am.record(fused := Fused()) as by_kernel:
        out = fused(q, k, v)
    lines.append((length, by_hand.total_bytes, by_kernel.total_bytes))
print(text_table(("s", "core by hand saves", "fused kernel saves"), lines, "rrr"))

# %% [markdown]
# Double $s$, and the core by hand saves more than three times as much (four times, for long sequences), the kernel
# twice. So there is no $5as^2b$ to free, and a checkpoint around such a kernel frees next to nothing. The kernel does
# by itself what the paper selects by hand. [Chapter 8](08_todays_layer.ipynb) asks what is left to recompute.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# Each GPU has 12 GiB for the activations of GPT-3's 96 layers, on 8 ranks with sequence parallelism, one microbatch.
# (With SP, *full* saves $2sbh/t$; Table 2 prints $2sbh$.) Which of the three modes fit: save everything, selective,
# full? Here $sbh$ bytes are 24 MiB, and $5as/h$ is 80. Use the rule for the peak.

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import layer_bytes
from actmem_course.figures import worked

ranks = 8
layer_of = {mode: layer_bytes(GPT3, am.Parallel(ranks, True), mode) for mode in ("none", "selective", "full")}
factors = {"none": "(34 + 80)", "selective": "34", "full": "2"}
gib = {mode: (GPT3.num_layers * size + (layer_of["none"] - size)) / 2**30 for mode, size in layer_of.items()}
worked(
    *(
        f"{mode}: {factors[mode]} · 24 MiB / {ranks} = {size / 2**20:,.0f} MiB per layer; 96 of them, "
        f"plus what you recompute for one layer: {gib[mode]:.1f} GiB."
        for mode, size in layer_of.items()
    ),
    "Saving everything doesn't fit. Both others do; take selective: it adds "
    f"{float(100 * layer_overhead(GPT3, 'selective')):.2f}% FLOPs where full adds "
    f"{float(100 * layer_overhead(GPT3, 'full')):.1f}%.",
)

# %% [markdown]
# ## Check yourself
#
# <details><summary><b>Question:</b> why does the checkpoint of the core need no extra memory for Q, K and V?</summary>
#
# They are saved anyway, $6sbh$ of the $34sbh$: the gradients of QKᵀ and of the matmul with V read them. The
# checkpoint saves the same storages, and a storage counts once.
# </details>
#
# ## What people get wrong here
#
# - **"34sbhL bytes for L layers are full recomputation."** They're selective, on one rank (equation 6). Full saves
#   $2sbhL$.
#
# > **Take away**
# > 1. Recompute what needs no matmul, or where a matmul's FLOP frees the most bytes: the core attention, $5a/2$ times
# >    a linear's.
# > 2. Restore the random-number state, or your gradients are wrong without an error. Stop when the last saved tensor
# >    is back.
# > 3. Saved tensors peak at what all layers save, plus what you recompute for one, or less. Gradients come on top.
# >
# > **At work tomorrow:** look up your training script's recompute setting. If it says full, work out $34sbh/t$ bytes
# > for each layer (this layer with SP). That's selective, or with FlashAttention no recomputation at all. Does it
# > fit?
#
# **The lab:** [lab 4](../labs/lab4_recompute.py). Write `checkpoint` (4.1, and 4.2 with dropout), `selective_layer` and
# `full_layer`: `python my/labs/lab4_recompute.py`.
#
# **Next:** in [chapter 6](06_pipeline.ipynb) a rank holds this chapter's bytes once for each microbatch in flight.
#
# **Sources.** 2205.05198 sections 4.1, 5, 6.1 and appendix A · Chen et al., *Training deep nets with sublinear memory
# cost*, 1604.06174 · Dao et al., *FlashAttention*, 2205.14135 · code: `src/actmem/recompute.py`,
# `src/actmem/formulas/flops.py`.
