# %% [markdown]
# # 7 · Time
#
# You can predict bytes exactly. Seconds are another matter. What do the methods cost in time, and why isn't it what the FLOPs say?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Progress, Reveal, Varies, bar_chart, choice,
    in_the_paper, slider, speed_facts, steps, worked,
)
from actmem_course.figures import ch07_time as show
from actmem_course.others import paper

A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
baseline, full = paper.TABLE4["baseline, no recompute"], paper.TABLE4["full recompute"]
checks = Checks()

question = Prediction(
    "Table 4 of the paper times one layer of the 22B model on 8 GPUs. Full recomputation runs "
    "forward once more. Forward has a third of a layer's "
    "FLOPs, so this adds 33% of them. By what percentage did it raise the layer's time?",
    100 * (full.combined_ms / baseline.combined_ms - 1),
    "%",
    f"{full.combined_ms} ms instead of {baseline.combined_ms}. Backward takes {baseline.backward_ms} "
    f"ms, less than twice forward's {baseline.forward_ms}, so forward is more than a third of the "
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
# **What you need:** chapters 3 and 4 (exchanges, sequence parallelism) and chapter 5 (recomputation). About 30 minutes.
#
# **New letter:** $B$ sequences in an iteration: all microbatches together, the global batch. (In chapter 3 $B$ was a matrix.)
#
# A **FLOP** is one addition or one multiplication. **MFU**, model FLOPs utilisation: the FLOPs that the model needs, over
# what the devices could do in that time. **HFU**, hardware FLOPs utilisation: the FLOPs that actually ran, recomputation
# included, over the same.

# %% [markdown]
# ## FLOPs of an iteration
#
# Chapter 5 counted a layer's forward pass: $24sbh^2$ FLOPs in the linears and $4s^2bh$ in the attention products. The logits add
# $2sbhv$ once. Backward needs two products for each one in forward: one for the input's gradient, one for the weight's (or the
# other operand's). So the whole is three times the forward pass, equation 7:
#
# $$72BLsh^2\left(1 + \frac{s}{6h} + \frac{v}{12hL}\right)$$
#
# That is what the model needs. Recomputation does not add to it, so running more FLOPs cannot raise MFU.

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS
from actmem.formulas.flops import eq7, forward_products

GPT3 = PAPER_MODELS["175B"]
products = forward_products(GPT3.shape, GPT3.global_batch_size)
whole = sum(products.values())
checks.add(
    "an iteration",
    [(3 * whole, eq7(GPT3.shape, GPT3.global_batch_size))],
    "FLOPs",
    sides=("three times its forward products", "equation 7"),
)
linears = sum(flops for name, flops in products.items() if name not in ("QKᵀ", "attention over V")) / whole
display(checks.show())
LiveFigure(
    bar_chart(
        f"{linears:.0%} of GPT-3's FLOPs are in its linears",
        {"": {name: 100 * flops / whole for name, flops in products.items()}},
        "share of the forward pass",
        "%",
    )
)

# %% [markdown]
# Let torch count every product while a model runs forward and backward on the `meta` device. To save time this is the 22B model
# with 4 layers:

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


cut22 = PAPER_MODELS["22B"].shape.with_sizes(num_layers=4)
checks.add(
    "nothing recomputed",
    [(eq7(cut22, cut22.micro_batch_size), count(cut22, "none"))],
    "FLOPs",
    sides=("equation 7", "counted by torch"),
)
checks.show()

# %% jupyter={"source_hidden": true}
counted = {mode: count(cut22, mode) for mode in ("none", "paper-selective", "selective", "full")}

# %% jupyter={"source_hidden": true}
from actmem.formulas.flops import hardware_flops, text_selective

batch = cut22.micro_batch_size
needed = eq7(cut22, batch)
ways = {
    "nothing recomputed, eq. 7": ("none", needed),
    "selective, to its end": ("paper-selective", text_selective(cut22, batch)),
    "selective, stopped early": ("selective", hardware_flops(cut22, batch, "selective")),
    "full, stopped early": ("full", hardware_flops(cut22, batch, "full")),
}
checks.add(
    "four layers of the 22B model",
    [(predicted, counted[mode]) for mode, predicted in ways.values()],
    "FLOPs",
    sides=("by formula", "counted by torch"),
)
whole22 = PAPER_MODELS["22B"].shape
by_formula = (
    text_selective(whole22, batch),
    hardware_flops(whole22, batch, "selective"),
    hardware_flops(whole22, batch, "full"),
)
names = list(ways)[1:]
more = {
    "4 layers, counted by torch": {
        name: float(100 * (counted[ways[name][0]] / needed - 1)) for name in names
    },
    f"all {whole22.num_layers} layers, by formula": {
        name: float(100 * (flops / eq7(whole22, batch) - 1)) for name, flops in zip(names, by_formula)
    },
}
display(checks.show())
LiveFigure(
    bar_chart(
        "What recomputation adds to the 22B model's FLOPs", more, "FLOPs over equation 7", "%", beside=True
    )
)

# %% [markdown]
# (With 4 layers the logits are a large share of the FLOPs.)
#
# ## Table 4: one layer, in milliseconds
#
# These are the paper's overheads in time, beside the FLOPs that each variant adds:

# %% jupyter={"source_hidden": true}
from actmem.formulas.flops import layer_overhead

again = {
    "full recompute": "paper-full",
    "selective": "paper-selective",
    "selective + sequence parallel": "paper-selective",
}
overheads, rounded = {"time added, table 4": {}, "FLOPs added": {}}, []
for name, row in paper.TABLE4.items():
    if row.overhead_percent is not None:
        rounded.append((row.overhead_percent, round(100 * (row.combined_ms / baseline.combined_ms - 1))))
    if name in again:
        without = (
            paper.TABLE4["sequence parallel"] if "sequence parallel" in name else baseline
        )  # the same layer, nothing recomputed
        overheads["time added, table 4"][name] = 100 * (row.combined_ms / without.combined_ms - 1)
        overheads["FLOPs added"][name] = float(100 * layer_overhead(PAPER_MODELS["22B"].shape, again[name]))
checks.add(
    "overheads in table 4, in whole percent", rounded, "percent", sides=("printed", "from the printed times")
)
display(checks.show())
LiveFigure(
    bar_chart(
        "Time does not follow FLOPs",
        overheads,
        f"added to a 22B layer, whose backward is {baseline.backward_ms / baseline.forward_ms:.2f} × forward",
        "%",
        beside=True,
    )
)

# %% [markdown]
# **Why does full recomputation cost more than a third?** By FLOPs, backward should take twice as long as forward. Table 4's
# ratio, under the bars, is lower: in backward the all-reduce overlaps the weight gradient's product. In forward nothing hides
# the all-reduces, and a second forward adds more of them.
#
# **Why does selective recomputation cost more than its FLOPs?** The time is nearly four times what the FLOPs say, with
# sequence parallelism or without. The roofline below shows why. (Each bar compares with the same layer that recomputes
# nothing; the paper's table compares all rows with the first.)
#
# ## On this machine
#
# Run the next cell for times of your machine (they are not stored here). Two processes run the five layers of table 4 in turn,
# then the paper's own forms (*literal*), whose second run goes to its end. Each column is its own median, so forward and
# backward need not add up. Overheads below the noise are not printed. The layer is tiny; don't expect the paper's ratios.

# %% jupyter={"source_hidden": true}
from actmem_course.launch import results

with Progress("labs/measure_speed.py, two processes"):
    measured = results("measure_speed.py", "--rounds", 8, processes=2)
checks.add("layers that were timed", [(line["predicted_bytes"], line["held_bytes"]) for line in measured])
display(checks.show())
Varies(speed_facts(measured))

# %% [markdown]
# Have you got a GPU? `python labs/measure_gpu.py` measures the paper's layer at its real size. It emulates one rank of eight:
# kernels and memory are real, exchanges send nothing. `python labs/measure_speed.py --emulate 8 --device cuda --model 22B` times
# the variants of one layer.
#
# ## Table 5: whole iterations
#
# MFU is equation 7 divided by time, number of devices and the A100's peak rate. Table 5 of the paper has it for both methods
# together. From the time that it prints for full recomputation you can compute the MFU that it leaves out. (For the 22B model
# eq. 7 gives a little more than the paper prints: its time has only three digits.)

# %%
LiveFigure(show.utilisation_bars())

# %% [markdown]
# ## What it buys
#
# The same times, as days of training. Choose the number of tokens.

# %%
Panel(show.days_bars, billion_tokens=slider("tokens", "billions", 20, 1000, 20, 300))

# %% [markdown]
# ## The roofline: why the core is cheap to recompute
#
# An operation computes FLOPs and moves bytes between memory and the chip. At best the two overlap completely. Then its least
# time is the longer of
#
# $$\frac{\text{FLOPs}}{\text{peak rate}} \quad\text{and}\quad \frac{\text{bytes}}{\text{bandwidth}}.$$
#
# FLOPs per byte decide which. The two are equal at the *ridge*, peak rate over bandwidth; below it an operation waits for
# memory. Each operation here reads its inputs and writes its outputs, as eager code does. Point at a marker or a bar, or tap it.

# %%
SMALLEST = PAPER_MODELS["22B"].shape
Panel(
    lambda s, b, t: [
        draw(SMALLEST.with_sizes(seq_length=s, micro_batch_size=b), am.Parallel(t, True))
        for draw in (show.roofline, show.least_times)
    ],
    s=steps("s", "tokens", (256, 512, 1024, 2048, 4096, 8192, 16384), 2048),
    b=slider("b", "sequences", 1, 8, 1, 4),
    t=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
)

# %% [markdown]
# The linears are on the flat roof: they use every weight and every element hundreds of times. The core's products have one
# short side each, the $h/a$ elements of a head, so they stay below the ridge. Softmax and dropout do a few FLOPs for each score
# they read and write. So the core has few FLOPs and much memory traffic.
#
# Now compare prices: the least time to recompute, for each GiB freed.

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.formulas.flops import forward_operations, least_seconds

shape, cut = SMALLEST, am.Parallel(8, True)
operations = {o.name: o for o in forward_operations(shape, cut)}
core = [operations[name] for name in ("QKᵀ", "softmax", "softmax dropout")]
rest = [o for name, o in operations.items() if o not in core and name not in ("4h→h", "MLP dropout and sum")]
rows = am.layer_rows(shape, cut)
without_product = [operations[name] for name in ("layer norm 1", "layer norm 2", "GeLU")]
their_outputs = ("QKV projection input", "h→4h input", "4h→h input")
freed = {
    "attention core": (core, sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)),
    "layer norms, GeLU": (without_product, sum(row.bytes for row in rows if row.term in their_outputs)),
    "all but the core": (rest, sum(row.bytes for row in rows[1:] if row.term not in CORE_ATTENTION_TERMS)),
}
prices = {"least time, by the roofline": {}, "by FLOPs alone": {}}
for name, (group, size) in freed.items():
    bar = f"{name}: frees {size / 2**20:,.0f} MiB"
    prices["least time, by the roofline"][bar] = 1000 * float(least_seconds(group, *A100)) / (size / 2**30)
    prices["by FLOPs alone"][bar] = (
        1000 * sum(o.flops for o in group if o.product) / A100_FLOPS_PER_SECOND / (size / 2**30)
    )
LiveFigure(
    bar_chart(
        "A GiB of the attention core takes little time to recompute, and so does one of norms and GeLU",
        prices,
        "time for each GiB that is freed, 22B layer, t = 8",
        "ms",
        beside=True,
    )
)

# %% [markdown]
# By FLOPs the core looks almost free. By the roofline it takes nine times as long, and is still ten times cheaper per byte than
# everything outside the core together. Layer norms and GeLU are as cheap as the core: drop them next, if that is not enough. How much
# of the time in table 4 does the roofline explain?

# %% jupyter={"source_hidden": true}
selective = paper.TABLE4["selective"]
added = selective.combined_ms - baseline.combined_ms
group = [*core, operations["attention over V"]]
by_flops = 1000 * sum(o.flops for o in group if o.product) / A100_FLOPS_PER_SECOND
by_roofline = 1000 * float(least_seconds(group, *A100))
forward = {
    f"forward, {name}": (
        1000 * float(least_seconds(forward_operations(shape, parallel), *A100)),
        paper.TABLE4[key].forward_ms,
    )
    for name, key, parallel in (
        ("TP", "baseline, no recompute", am.Parallel(8)),
        ("TP + SP", "sequence parallel", am.Parallel(8, True)),
    )
}
times = {"the core, run again": (by_roofline, added), **forward}
LiveFigure(
    bar_chart(
        f"The roofline explains {by_roofline:.2f} of the core's {added:.1f} ms, FLOPs {by_flops:.2f}",
        {
            "in table 4": {name: printed for name, (_, printed) in times.items()},
            "at least, by the roofline": {name: least for name, (least, _) in times.items()},
        },
        "one 22B layer",
        "ms",
        beside=True,
    )
)

# %% [markdown]
# The roofline is a lower bound. Real kernels, launches and exchanges take more; the two lower pairs show how much. (A fused
# kernel, [chapter 5](05_recomputation.ipynb), moves no scores, so its core takes no longer than its products.)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# You have now met nearly every number of the paper. Most are right. Two differences are worth knowing: equation 8 counts the core
# three times where once is enough ([chapter 5](05_recomputation.ipynb)), and interleaved stages keep twice as many embedding masks
# as it says ([chapter 6](06_pipeline.ipynb)). The fold has all, roundings too. None changes the paper's conclusions.

# %% jupyter={"source_hidden": true}
in_the_paper()

# %% [markdown]
# ## Gradients of a whole step
#
# This is for lab 6, in which you train a small GPT. Four things make a step on many ranks equal to one on a single device:
#
# - **The batch.** Ranks that share a layer read the same tokens. So draw them from the step's number, never from the rank's.
# - **Microbatches.** Gradients of several backwards add up. Divide each loss by the number of microbatches, and the sum is the
#   gradient of the mean loss.
# - **Partial gradients** ([chapter 4](04_sequence_parallelism.ipynb)). Add them up over the ranks once, after the last backward.
# - **The norm.** Clipping needs the norm of the whole model's gradient. Sum the squares of the cut gradients over the ranks,
#   and count those of the replicated ones once: the ranks exchange a single number. If each rank clipped by its own norm, the
#   replicas would drift apart.

# %% [markdown]
# ## Work it out
#
# How many days do 1,024 A100s need to train the 175B model on 300 billion tokens at 50% MFU? An A100 does 312 TFLOP/s. First
# estimate it with 6 FLOPs for each parameter and token, then with equation 7 ($s$ = 2,048, $h$ = 12,288, $L$ = 96, $v$ = 51,200).

# %% jupyter={"source_hidden": true}
gpt3, gpus, tokens, share = PAPER_MODELS["175B"], 1024, 300 * 10**9, 0.5
rate = gpus * A100_FLOPS_PER_SECOND * share
flops = eq7(gpt3.shape, 1) * tokens / gpt3.shape.seq_length
more = {mode: hardware_flops(gpt3.shape, 1, mode) / eq7(gpt3.shape, 1) - 1 for mode in ("full", "paper-full")}
worked(
    f"6 · 175 billion · 300 billion = {6 * 175e9 * tokens:.3g} FLOPs; {gpus:,} GPUs do {rate:.3g} a "
    f"second: {6 * 175e9 * tokens / rate / 86400:.1f} days.",
    f"Equation 7 counts the products of the attention core and the output layer too: {flops:.3g} "
    f"FLOPs, {flops / rate / 86400:.1f} days.",
    f"With full recomputation the same GPUs run {more['full']:.1%} more FLOPs if the second run stops "
    f"early, {more['paper-full']:.1%} if it goes to its end. At the same HFU the days grow as much.",
)

# %% [markdown]
# ## Questions
#
# <details><summary><b>1.</b> Two runs have the same HFU. One recomputes everything. Which trains faster?</summary>
#
# The other one. At equal HFU the devices run FLOPs at the same rate, but with full recomputation, run to its end, a
# quarter of them are repeats (a third more than the model needs). Its MFU is three quarters of its HFU.
# </details>
#
# <details><summary><b>2.</b> Why can sequence parallelism make forward <em>faster</em>, although it moves the same bytes between ranks?</summary>
#
# On every rank, layer norms and dropouts run on $s/t$ tokens instead of all $s$, so operations that wait for memory move fewer
# bytes. The last figure shows what that should save, and what it saved in table 4.
# </details>
#
# <details><summary><b>3.</b> You double <i>t</i>. Which points of the roofline move left, and why?</summary>
#
# The linears: each rank has half of the weights and half of the FLOPs, but a column-parallel linear still reads the whole
# input and a row-parallel one writes a whole output. FLOPs per byte fall. The core's points stay: each rank has half of the
# heads, so both FLOPs and bytes halve.
# </details>
#
# ## What people get wrong here
#
# - **"Full recomputation costs 33%."** In FLOPs, if the second run goes to its end. In time table 4 shows more, because it depends
#   on which communication is hidden.
# - **"Selective costs 2.7%, so expect 2.7% more time."** FLOPs are the wrong unit for an operation that waits for memory.
# - **MFU computed with the hardware's FLOPs.** Counting the recomputation makes a slower run look better utilised.
# - **Utilisation against the sparse peak.** The A100's rate for dense 16-bit products is half of the number with sparsity.
# - **Comparing times from different runs.** Clocks, heat and other jobs shift times by more than the effect. Run the
#   candidates in turn.
#
# ## The lab
#
# [Lab 6](../labs/lab6_train.py) combines chapters 2 to 6: you train a small GPT in every mode and compare memory and speed:
# `python my/labs/lab6_train.py`. `labs/measure_paper.py` measures every table and figure of the paper at once.
#
# **Sources.** 2205.05198 sections 5, 6.2, 6.3 and appendix A, tables 4 and 5 · Chowdhery et al., *PaLM*, 2204.02311, for MFU · Williams,
# Waterman and Patterson, *Roofline*, Communications of the ACM 52(4), 2009 · NVIDIA's A100 data sheet, for rate and bandwidth · code:
# `src/actmem/formulas/flops.py`, `src/actmem_course/others/paper.py`.
#
# ## Now fit your model
#
# Where do the seconds of a step go? A plan has a line for each: products, what runs again, exchanges, the bubble.
#
# ```
# actmem plan 175B --gpus 512 --memory 80 --global-batch 64 --device a100 --recompute selective
# ```
#
# Next, [chapter 8](08_todays_layer.ipynb): the layers that everyone trains today, and why they ask other questions.
