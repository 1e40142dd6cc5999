# %% [markdown]
# # 7 · Time
#
# *40 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# The paper's full recomputation runs every layer's forward pass twice. The forward pass has a third of a layer's
# FLOPs (additions and multiplications), so this adds 33%. The paper timed one layer of its 22B model on 8 A100s. **By
# what percentage did full recomputation raise the layer's time?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND
from actmem_course.figures import Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal, choice, slider, steps
from actmem_course.figures import ch07_time as show
from actmem_course.others import paper

A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
baseline, full = paper.TABLE4["baseline, no recompute"], paper.TABLE4["full recompute"]
checks = Checks()

question = Prediction(
    "Table 4 of the paper times one layer of the 22B model on 8 GPUs. Full recomputation adds 33% of its FLOPs. "
    "By what percentage did it raise the layer's time?",
    100 * (full.combined_ms / baseline.combined_ms - 1),
    "%",
    f"{full.combined_ms} ms instead of {baseline.combined_ms}. The backward pass takes {baseline.backward_ms} "
    f"ms, less than twice the forward pass's {baseline.forward_ms}. So the forward pass is more than a third of the "
    "whole.",
    GuessLine(baseline.combined_ms / 100, baseline.combined_ms),
)
ALL = "every way that the paper times"
Reveal(
    question,
    Panel(
        lambda shown: show.table4_bars(len(paper.TABLE4) if shown == ALL else 1),
        shown=choice("recomputed", ["nothing", ALL], "nothing"),
    ),
    shown=ALL,
)

# %% [markdown]
# **You need** chapters 3 and 4 (collectives) and chapter 5 (recomputation).
#
# **Letters.** $s$ tokens, $h$ hidden size, $a$ heads, $L$ layers, $v$ vocabulary, $t$ tensor-parallel ranks; $b$
# sequences in a microbatch, and $B$ in an iteration, all microbatches together.

# %% [markdown]
# ## FLOPs of an iteration
#
# Chapter 5 counted a layer's forward pass: $24sbh^2$ FLOPs in the linears, $4s^2bh$ in the two attention matmuls. The
# logits add $2sbhv$ once. The backward pass needs two matmuls for each of these: one for the input's gradient, one
# for the weight's (or the other operand's). So an iteration takes three times its forward pass, the paper's equation
# 7:
#
# $$72BLsh^2\left(1 + \frac{s}{6h} + \frac{v}{12hL}\right)$$
#
# That is what the *model* needs. **MFU** (model FLOPs utilisation) is this number over what the devices could do in
# the time that an iteration takes. **HFU** (hardware) counts the FLOPs that really ran, recomputation included.
# So at the same batch, recomputing more can raise HFU, never MFU. (Equation 7 counts all $s^2$ scores. Megatron's log
# counts half of them, those that the causal mask leaves.)
#
# Check it: let torch count the matmuls of a whole model, four layers of the 22B on the `meta` device (shapes, no
# data), forward and backward:

# %%
import torch
from torch.utils.flop_counter import FlopCounterMode


def count(shape, recompute):
    """FLOPs of one microbatch through the whole model, forward and backward, counted by torch."""
    with torch.device("meta"):
        model = am.GPT(shape, recompute=recompute, dtype=torch.bfloat16)
    model = model.to("meta")
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return counter.get_total_flops()


from actmem.config import PAPER_MODELS
from actmem.formulas.flops import eq7, hardware_flops, text_selective

SMALLEST = PAPER_MODELS["22B"].shape
four, batch = SMALLEST.with_sizes(num_layers=4), SMALLEST.micro_batch_size
sides = ("by formula", "counted by torch")
checks.add("nothing recomputed", [(eq7(four, batch), count(four, "none"))], "FLOPs", ("equation 7", sides[1]))
stopped, to_its_end = hardware_flops(four, batch, "selective"), text_selective(four, batch)
pairs = [(stopped, count(four, "selective")), (to_its_end, count(four, "paper-selective"))]
checks.add("selective, stopped early and to its end", pairs, "FLOPs", sides)
checks.add("full", [(hardware_flops(four, batch, "full"), count(four, "full"))], "FLOPs", sides)
checks.show()

# %% [markdown]
# ## Table 4: one layer, in milliseconds
#
# Now put time beside FLOPs:

# %% jupyter={"source_hidden": true}
from actmem.formulas.flops import layer_overhead

rounded = [
    (row.overhead_percent, round(100 * (row.combined_ms / baseline.combined_ms - 1)))
    for row in paper.TABLE4.values()
    if row.overhead_percent is not None
]
checks.add("overheads of table 4, rounded", rounded, "%", sides=("printed", "from the printed times"))
display(checks.show())
print(f"The backward pass takes {baseline.backward_ms / baseline.forward_ms:.2f} times the forward pass.")
for way, mode in {"full recompute": "paper-full", "selective": "paper-selective"}.items():
    time, more = paper.TABLE4[way].combined_ms / baseline.combined_ms - 1, float(layer_overhead(SMALLEST, mode))
    print(f"{way}: {more:.1%} more FLOPs, {time:.1%} more time")

# %% [markdown]
# **Why does full recomputation cost more than a third?** The paper's answer: its backward pass overlaps the
# all-reduce with the weight gradient's matmul. The forward pass overlaps nothing, and full recomputation repeats it.
#
# **Why does selective recomputation cost nearly four times its FLOPs?** The roofline below answers that. First, a
# newer GPU:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import layer_times, newest, table4_bars

on_gpu = newest("modes")
LiveFigure(table4_bars(on_gpu))

# %% jupyter={"source_hidden": true}
layer_times(on_gpu)

# %% [markdown]
# Why does selective recomputation *alone* cost more than on the A100? Three reasons. Matmuls have sped up more than
# memory since, so softmax and dropout weigh more. This course's layer runs dropout as two
# kernels, where Megatron has one. And without communication the baseline is shorter, so every percentage is larger.
# (Full recomputation repeats the forward pass, and that takes nearly half of this layer's time.) Sequence parallelism
# divides the norms and dropouts outside the core, which wins back most of selective's cost.
#
# In a notebook, run the next cell to time the same five layers on two processes of your machine, and
# others that recompute to the end. The layer is tiny, so don't expect the paper's ratios.

# %% jupyter={"source_hidden": true}
from actmem_course.figures import Progress, Varies, speed_facts
from actmem_course.launch import results

with Progress("labs/measure_speed.py, two processes"):
    measured = results("measure_speed.py", "--rounds", 8, processes=2)
checks.add("bytes of the layers that were timed", [(line["predicted_bytes"], line["held_bytes"]) for line in measured])
display(checks.show())
Varies(speed_facts(measured))

# %% [markdown]
# ## Does a larger batch pay for it?
#
# > **Why do this?** Recompute, and more sequences fit. They share the fixed cost of a pass. **Why not?** Each
# > sequence carries the recomputation.
#
# Recomputation frees bytes, so $\rho$ times as many sequences fit: compare the peaks, all layers plus one recomputed
# ([chapter 5](05_recomputation.ipynb)). Call $\varphi$ the fixed part of a pass (launching kernels, small matmuls),
# relative to the work of its sequences with nothing recomputed. Recomputation adds $\varepsilon$ to a sequence's
# work. So the same work costs $1 + \varphi$ without it and $1 + \varepsilon + \varphi/\rho$ with it. It pays above
# $\varphi = \varepsilon / (1 - 1/\rho)$:

# %% jupyter={"source_hidden": true}
from actmem_course.predicted.recomputation import fullest_bytes

GPT3 = PAPER_MODELS["175B"].shape
print("The 22B model, 8 ranks without sequence parallelism, as table 4 times it:")
for way, mode in (("selective", "selective"), ("full recompute", "paper-full")):
    factor = fullest_bytes(SMALLEST, "none", am.Parallel(8)) / fullest_bytes(SMALLEST, mode, am.Parallel(8))
    slower = paper.TABLE4[way].combined_ms / baseline.combined_ms - 1
    print(f"{way}: ρ = {factor:.1f}, ε = {slower:.0%}, pays if φ is above {slower / (1 - 1 / factor):.0%}")

# %% [markdown]
# **Rule:** measure $\varphi$: if $b$ sequences take $T_b$ and $2b$ take $T_{2b}$, it's
# $(2T_b - T_{2b})/(T_{2b} - T_b)$. If one sequence keeps the GPU busy, it's near 0. By table 4's times, neither full nor selective
# recomputation pays then: use them to fit, not to be faster. And in a pipeline, larger microbatches are fewer, so the
# bubble grows (chapter 6).
#
# ## The roofline: why the core is cheap to recompute
#
# An operation computes FLOPs and moves bytes between memory and the chip. At best the two overlap. Then it takes the
# longer of
#
# $$\frac{\text{FLOPs}}{\text{peak rate}} \quad\text{and}\quad \frac{\text{bytes}}{\text{bandwidth}}.$$
#
# They are equal at the *ridge*. An operation with fewer FLOPs per byte is *memory-bound*. Each operation here reads
# its inputs from memory and writes its outputs back, as unfused kernels do:

# %%
Panel(
    lambda s, b, t: show.roofline(SMALLEST.with_sizes(seq_length=s, micro_batch_size=b), am.Parallel(t, True)),
    s=steps("s", "tokens", (256, 512, 1024, 2048, 4096, 8192, 16384), 2048),
    b=slider("b", "sequences", 1, 8, 1, 4),
    t=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
)

# %% [markdown]
# (Orange, from the left: softmax's dropout, softmax, then $QK^\top$ and attention over V on one point.) The linears
# are on the flat roof: they use every weight and every element hundreds of times. The core's matmuls have one short
# side, the $h/a$ elements of a head, so they stay below the ridge. Softmax and dropout do a few FLOPs for each score.
# Compare the time for each GiB freed:

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.formulas.flops import forward_operations, least_seconds
from actmem_course.figures import bar_chart

sharded = am.Parallel(8, True)
operations = {o.name: o for o in forward_operations(SMALLEST, sharded)}
in_core, flops = [o for o in operations.values() if o.core], lambda some: sum(o.flops for o in some if o.matmul)
time = least_seconds(operations.values(), *A100)
print(
    f"By the roofline the forward pass takes at least {1000 * float(time):.2f} ms. The core attention, all of it (QKᵀ, "
    f"softmax,\ndropout, attention over V), takes {float(least_seconds(in_core, *A100) / time):.0%} of that, with "
    f"{flops(in_core) / flops(operations.values()):.0%} of the matmuls' FLOPs."
)
core = [operations[name] for name in ("QKᵀ", "softmax", "softmax dropout")]
rest = [o for name, o in operations.items() if o not in core and name not in ("4h→h", "MLP dropout and sum")]
rows = am.layer_rows(SMALLEST, sharded)
without_matmul = [operations[name] for name in ("layer norm 1", "layer norm 2", "GeLU")]
their_outputs = {"QKV projection input", "h→4h input", "4h→h input"}
freed = {
    "core, stopped early": (core, sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)),
    "layer norms, GeLU": (without_matmul, sum(row.bytes for row in rows if row.term in their_outputs)),
    "all but the core": (rest, sum(row.bytes for row in rows[1:] if row.term not in CORE_ATTENTION_TERMS)),
}
costs = {"least time, by the roofline": {}, "by FLOPs alone": {}}
for name, (group, size) in freed.items():
    bar, by_flops = f"{name}: frees {size / 2**20:,.0f} MiB", sum(o.flops for o in group if o.matmul) / A100[0]
    costs["least time, by the roofline"][bar] = 1000 * float(least_seconds(group, *A100)) / (size / 2**30)
    costs["by FLOPs alone"][bar] = 1000 * by_flops / (size / 2**30)
LiveFigure(
    bar_chart(
        "A GiB of the core's tensors takes little time to recompute, and so does one of norms and GeLU",
        costs,
        "time for each GiB that is freed, 22B layer, t = 8",
        "ms",
        beside=True,
    )
)

# %% [markdown]
# **Surprise:** by FLOPs the core is almost free. By the roofline, the core stopped early (chapter 5: without
# attention over V) takes nine times as long as its FLOPs would. It's still ten times cheaper per byte than everything
# outside the core together. Norms and GeLU cost as little. If selective recomputation isn't enough, drop them next:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.layer_picture import layer_picture

LiveFigure(layer_picture(SMALLEST, am.Parallel(8, True), recompute={*CORE_ATTENTION_TERMS, *their_outputs}))

# %% jupyter={"source_hidden": true}
added = paper.TABLE4["selective"].combined_ms - baseline.combined_ms
group = [*core, operations["attention over V"]]
by_flops = 1000 * sum(o.flops for o in group if o.matmul) / A100_FLOPS_PER_SECOND
print(
    "The whole core attention, which the paper recomputes: "
    f"{by_flops:.2f} ms by FLOPs, at least {1000 * float(least_seconds(group, *A100)):.2f} by the roofline, "
    f"{added:.1f} in table 4."
)
for name, parallel in (("baseline, no recompute", am.Parallel(8)), ("sequence parallel", sharded)):
    least = 1000 * float(least_seconds(forward_operations(SMALLEST, parallel), *A100))
    print(f"Forward pass, {name}: at least {least:.2f} ms by the roofline, {paper.TABLE4[name].forward_ms} in table 4.")

# %% [markdown]
# Memory traffic explains most of the core's time. The rest is launches and kernels that don't reach the roof, and in
# the whole pass the collectives. (A fused kernel, [chapter 5](05_recomputation.ipynb), moves no scores.)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# How many days do 1,024 A100s (312 TFLOP/s) need to train the 175B model on 300 billion tokens at 50% MFU? Estimate
# with 6 FLOPs for each parameter and token, then use equation 7 ($s$ = 2,048, $h$ = 12,288, $L$ = 96, $v$ = 51,200).

# %% jupyter={"source_hidden": true}
from actmem_course.figures import worked

gpus, tokens, share = 1024, 300 * 10**9, 0.5
rate = gpus * A100_FLOPS_PER_SECOND * share
flops = eq7(GPT3, 1) * tokens / GPT3.seq_length
more = {mode: hardware_flops(GPT3, 1, mode) / eq7(GPT3, 1) - 1 for mode in ("full", "paper-full")}
worked(
    f"6 · 175 billion · 300 billion = {6 * 175e9 * tokens:.3g} FLOPs; {gpus:,} GPUs do {rate:.3g} "
    f"per second: {6 * 175e9 * tokens / rate / 86400:.1f} days.",
    f"Equation 7 counts the core attention's matmuls too, which have no parameters: {flops:.3g} "
    f"FLOPs, {flops / rate / 86400:.1f} days.",
    f"With full recomputation the same GPUs run {more['full']:.1%} more FLOPs if it stops "
    f"early, {more['paper-full']:.1%} if it goes to its end. At the same HFU the days grow as much.",
)

# %% [markdown]
# ## Question
#
# <details><summary>Two runs have the same HFU. One recomputes everything. Which trains faster?</summary>
#
# The other one. With full recomputation, run to its end, a quarter of the FLOPs are repeats: its MFU is three
# quarters of its HFU.
# </details>
#
# ## Gradients of a whole step
#
# [Lab 6](../labs/lab6_train.py) puts chapters 2 to 6 together: you train a small GPT in every mode
# (`python my/labs/lab6_train.py`). A step on many ranks equals one on a single device if
#
# - ranks that share a layer read the same tokens: seed the sampler with the step number;
# - you divide each loss by the number of microbatches;
# - you add up partial gradients ([chapter 4](04_sequence_parallelism.ipynb)) over the ranks once, after the last
#   backward pass;
# - the norm for clipping sums the squares of sharded gradients over the ranks, and counts those of replicated ones
#   once.
#
# ## What people get wrong here
#
# - **"Selective costs 2.7%, so expect 2.7% more time."** FLOPs are the wrong unit for a memory-bound operation.
# - **MFU from the hardware's FLOPs, or against NVIDIA's headline rate with 2:4 sparsity.** The first flatters slow
#   runs. The second, twice the dense rate, halves the number.
#
# > **Take away**
# >
# > 1. Time isn't FLOPs: softmax, dropout and norms are memory-bound, and collectives wait for links.
# > 2. Per GiB freed, the core, the norms and GeLU are cheap to recompute. Linears aren't.
# > 3. On a busy GPU, a larger batch pays for neither full nor selective recomputation.
# >
# > **At work tomorrow:** compute your job's MFU: FLOPs over (seconds per iteration × devices × dense peak rate).
# > Equation 7 is for this layer; Llama 3 8B's linears take $26sbh^2$, not 24, and experts differ more. Megatron's
# > `--log-throughput` counts your layer.
#
# **Sources:** 2205.05198 sections 5, 6.2, 6.3, appendix A, table 4 · *PaLM*, 2204.02311 (MFU) · Williams et al.,
# *Roofline*, CACM 52(4), 2009 · NVIDIA's A100 data sheet · `src/actmem/formulas/flops.py`.
#
# **Now fit your model.** A plan has a line for each part of a step's seconds:
#
# ```
# actmem plan 175B --gpus 512 --memory 80 --global-batch 64 \
#   --device a100 --recompute selective
# ```
#
# **Next:** [chapter 8](08_todays_layer.ipynb), the layers that everyone trains today.
#
# ## The paper's errata

# %% jupyter={"source_hidden": true}
from actmem_course.figures import Fold
from actmem_course.others.disagreements import disagreements

places = disagreements()
title = f"Where the paper's text, its formulas and our counts differ: {len(places)} places"
Fold(title, "\n\n".join(map(str, places)), prose=True)
