# %% [markdown]
# # 7 · Time
#
# Bytes were exact. How many seconds do the methods cost and gain, and why don't seconds follow FLOPs?

# %%
import json
from textwrap import fill

import torch

from actmem_course.others import paper
from actmem.config import Parallel
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem_course.others.disagreements import disagreements
from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND, eq7, eq8, eq9, forward_operations, forward_products, hardware_flops, layer_overhead, least_seconds, text_selective
from actmem_course.others.table5 import data_parallel_530b_mfu_percent, table5
from actmem.models import PAPER_MODELS
from actmem.rows import total
from actmem_course.show.controls import slider, steps
from actmem_course.show.live import LiveFigure
from actmem_course.show.text import apart_text, results_text, speed_facts, text_table
from actmem_course.show.times import days_bars, least_times, roofline, table4_bars, training_days, utilisation_bars
from actmem_course.show.widgets import Panel, Prediction, Progress, Reveal, Varies

A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
baseline = paper.TABLE4["baseline, no recompute"]

question = Prediction(
    "Table 4 of the paper times one layer of the 22B model on 8 GPUs. Full recomputation runs the forward pass once more; in FLOPs, forward is a "
    f"third of forward and backward together. Forward takes {baseline.forward_ms} ms and backward {baseline.backward_ms} ms. By how many percent does a second "
    "forward lengthen the layer's time?",
    100 * baseline.forward_ms / baseline.combined_ms,
    "%",
    "Backward does not take twice as long as forward here, so forward is more than a third of the whole.",
)
Reveal(question, LiveFigure(table4_bars()))

# %% [markdown]
# **What you need.** Chapters 3 and 4 (exchanges, sequence parallelism) and chapter 5 (recomputation). About 30 minutes.
#
# **Letters.** `B` sequences of one iteration (the global batch) · `v` vocabulary size · `s`, `h`, `a`, `L`, `t` as before.
# A **FLOP** is one addition or one multiplication. **MFU**, model FLOPs utilisation: the FLOPs that the model needs, over
# what the devices could do in that time. **HFU**, hardware FLOPs utilisation: the FLOPs that actually ran, recomputation
# included, over the same.

# %% [markdown]
# ## FLOPs of an iteration
#
# A product of `[n, k]` by `[k, m]` takes `2nkm` FLOPs. In the forward pass the linears take nearly all of them. Backward needs
# two products for each one in forward: one for the input's gradient, one for the weight's (or the other operand's). Three
# times the forward pass is equation 7,
#
# $$72BLsh^2\left(1 + \frac{s}{6h} + \frac{v}{12hL}\right),$$
#
# the work that the model needs, whatever the hardware runs. Recomputation does not add to it, so running more FLOPs cannot
# raise MFU.

# %% jupyter={"source_hidden": true}
GPT3 = PAPER_MODELS["175B"]
products = forward_products(GPT3.shape, GPT3.global_batch_size)
whole = sum(p.flops for p in products)
print(fill("GPT-3's forward pass: " + ", ".join(f"{p.term} {p.flops / whole:.2%}" for p in products), 96))
print(apart_text("an iteration, three times these products and equation 7", [(3 * whole, eq7(GPT3.shape, GPT3.global_batch_size))], "FLOPs"))

# %% [markdown]
# torch counts every product while a model runs forward and backward on the `meta` device. Here it is the 22B model, cut to 4
# layers to save time:

# %%
from torch.utils.flop_counter import FlopCounterMode

from actmem.layers.gpt import GPT


def count(shape, recompute):
    """FLOPs of one microbatch through the whole model, forward and backward, counted by torch."""
    with torch.device("meta"):
        model = GPT(shape, recompute=recompute, dtype=torch.bfloat16)
    model = model.to("meta")
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return counter.get_total_flops()

# %% jupyter={"source_hidden": true}
cut22 = PAPER_MODELS["22B"].shape.with_sizes(num_layers=4)
counted = {mode: count(cut22, mode) for mode in ("none", "paper-selective", "selective", "full")}

# %% jupyter={"source_hidden": true}
batch = cut22.micro_batch_size
needed = eq7(cut22, batch)
ways = {
    "nothing recomputed, eq. 7": ("none", needed),
    "selective, as the text says": ("paper-selective", text_selective(cut22, batch)),
    "selective, stopped early": ("selective", hardware_flops(cut22, batch, "selective")),
    "full, stopped early": ("full", hardware_flops(cut22, batch, "full")),
}
print(apart_text("models, FLOPs by formula and counted by torch", [(predicted, counted[mode]) for mode, predicted in ways.values()], "FLOPs"))
shares = [f"{name} {predicted / needed:.4f}" for name, (_, predicted) in ways.items() if name != "nothing recomputed, eq. 7"]
print(fill("over equation 7: " + ", ".join(shares), 96))
print(f"but equation 8 as printed {eq8(cut22, batch) / needed:.4f} ({eq8(cut22, batch):,} over {needed:,} FLOPs)")
print(f"and equation 9, as the paper rounds it, {float(eq9(cut22)):.4f}")

# %% [markdown]
# Equation 8 adds the attention core's forward three times, where the text adds it once; chapter 5 has the story.
#
# ## Table 4: one layer, in milliseconds
#
# The paper's times, beside the FLOPs that each variant adds:

# %% jupyter={"source_hidden": true}
again = {"full recompute": "paper-full", "selective": "paper-selective", "selective + sequence parallel": "paper-selective"}
lines, rounded = [], []
for name, row in paper.TABLE4.items():
    printed = "–" if row.overhead_percent is None else str(row.overhead_percent)
    if row.overhead_percent is not None:
        rounded.append((row.overhead_percent, round(100 * (row.combined_ms / baseline.combined_ms - 1))))
    flops = float(100 * layer_overhead(PAPER_MODELS["22B"].shape, again.get(name, "none")))
    lines.append((name, row.forward_ms, row.backward_ms, printed, f"{flops:+.1f}", f"{row.backward_ms / row.forward_ms:.2f}"))
print(text_table(("22B, one layer", "forward ms", "backward ms", "overhead %", "FLOPs added %", "backward/forward"), lines, " rrrrr"))
print()
print(apart_text("overheads, as printed and computed from the printed times, rounded", rounded, "percent"))

# %% [markdown]
# **Why the overhead of full recomputation is above a third.** Look at the last column. By FLOPs backward should be twice
# forward. The baseline's ratio is lower: in backward the all-reduce overlaps the weight gradient's product and costs little
# time, while forward's all-reduce overlaps nothing. A second forward adds all-reduces of its own, and nothing hides them.
#
# **Why selective recomputation costs more than its FLOPs.** The table shows the FLOPs that the paper's text counts; the
# time is several times that. The roofline below shows why.
#
# ## On this machine
#
# Times differ from machine to machine, so this notebook does not store them: run the next cell to see yours. Two processes
# run the five layers of table 4 in turn, so that a slow moment slows all of them, and then the paper's own forms
# (*literal*), which recompute more than backward needs. Each time is a median of its own, so forward and backward do not
# add up to both. No overhead within noise is printed. The layer is tiny; don't expect the paper's ratios from it.

# %% jupyter={"source_hidden": true}
from actmem_course.launch import LABS, results

with Progress("labs/measure_speed.py, two processes"):
    measured = results("measure_speed.py", "--rounds", 8, processes=2)
print(f"{sum(line['held_bytes'] == line['predicted_bytes'] for line in measured)} of {len(measured)} layers hold what their formulas say, to the byte")
Varies(speed_facts(measured))

# %% [markdown]
# On a GPU, `python labs/measure_gpu.py` measures the paper's layer at its real size and writes the results to
# `labs/results`; the next cell prints what is there. It emulates one rank of eight: kernels and memory are real and
# exchanges send nothing, so these are the costs of computation alone.

# %% jupyter={"source_hidden": true}
print(results_text([json.loads(path.read_text(encoding="utf-8")) for path in sorted((LABS / "results").glob("*.json"))]))

# %% [markdown]
# For more rounds, other shapes, a picture and a trace, see `torchrun --nproc-per-node 2 labs/measure_speed.py --help`. On a
# GPU `python labs/measure_speed.py --emulate 8 --device cuda --model 22B` runs one rank of the paper's own layer.
#
# ## Table 5: whole iterations
#
# MFU is equation 7 divided by time, number of devices and the A100's peak rate; HFU uses the FLOPs that ran instead. Table 5
# leaves out one column: the MFU *with* full recomputation, from the other printed time. It shows the gain directly:

# %%
LiveFigure(utilisation_bars())

# %% jupyter={"source_hidden": true}
lines = []
for row in table5():
    printed = paper.TABLE5[row.model]
    lines.append((row.model, printed.mfu_percent, f"{row.mfu_percent:.3f}", printed.hfu_percent, f"{row.hfu_eq8_percent:.3f}", f"{row.hfu_text_percent:.3f}"))
print(text_table(("from the times", "MFU, paper", "MFU, eq. 7", "HFU, paper", "HFU, eq. 8", "HFU, the text"), lines, " rrrrr"))
print("\nstopped early, HFU is", ", ".join(f"{row.hfu_stopped_percent:.3f}" for row in table5()), "and MFU the same")
print("with full recomputation MFU is", ", ".join(f"{row.full_recompute_mfu_percent:.3f}" for row in table5()))
gains = [(printed.gain_percent, round(100 * (printed.full_recompute_seconds / printed.seconds - 1), 1)) for printed in paper.TABLE5.values()]
print(f"gains: {', '.join(str(gain) for gain, _ in gains)}% printed, {', '.join(str(gain) for _, gain in gains)}% from the printed times")
run = paper.DATA_PARALLEL_530B
said = f"530B, {run.data_parallel_size}-way data parallel on {run.num_devices} GPUs: MFU {run.mfu_percent}% printed, "
said += f"{data_parallel_530b_mfu_percent():.3f}% by eq. 7; full recomputation {run.full_recompute_mfu_percent}% printed"
print(fill(said, 96))
print()
print(*(fill(str(place), 96) for place in disagreements() if place.where.startswith("Table 5")))

# %% [markdown]
# ## What it buys
#
# The same times as days of training. Choose the number of tokens.

# %%
Panel(days_bars, billion_tokens=slider("tokens", "billions", 20, 1000, 20, 300))

# %%
for name, model in PAPER_MODELS.items():
    full, both = training_days(name, 300)
    print(f"{name}: {full - both:.1f} days sooner, {model.num_devices * (full - both):,.0f} GPU-days saved")

# %% [markdown]
# ## The roofline: why the core is cheap to run again
#
# An operation computes FLOPs and moves bytes between memory and the chip. At best the two overlap completely, so its least
# time is the longer of
#
# $$\frac{\text{FLOPs}}{\text{peak rate}} \quad\text{and}\quad \frac{\text{bytes}}{\text{bandwidth}}.$$
#
# FLOPs per byte decide which: below the ridge, at peak rate over bandwidth, an operation waits for memory. Each operation
# here reads its inputs and writes its outputs, as eager code does. Point at a marker or a bar for its numbers.

# %%
SMALLEST = PAPER_MODELS["22B"].shape
Panel(
    lambda s, b, t: [draw(SMALLEST.with_sizes(seq_length=s, micro_batch_size=b), Parallel(t, True)) for draw in (roofline, least_times)],
    s=steps("s", "tokens", (256, 512, 1024, 2048, 4096, 8192, 16384), 2048),
    b=slider("b", "sequences", 1, 8, 1, 4),
    t=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
)

# %% jupyter={"source_hidden": true}
forward = forward_operations(SMALLEST, Parallel(8, True))
waiting = [o.name for o in forward if o.bound_by_memory(*A100)]
print(f"{A100_FLOPS_PER_SECOND:,} FLOP/s, {A100_BYTES_PER_SECOND:,} B/s, ridge at {A100_FLOPS_PER_SECOND / A100_BYTES_PER_SECOND:.1f} FLOPs per byte")
print(f"{len(forward)} operations, {sum(o.flops for o in forward):,} FLOPs, {sum(o.bytes for o in forward):,} bytes moved; {len(waiting)} wait for memory, all but")
print(fill(", ".join(f"{o.name} ({float(o.intensity):,.0f} FLOPs per byte)" for o in forward if o.name not in waiting), 96))

# %% [markdown]
# The linears are on the flat roof: they use every weight and every element hundreds of times. The core's products have one
# short side each, the `h/a` elements of a head, so they stay below the ridge or barely reach it; softmax and dropout do a
# few FLOPs for each score they read and write. So the core has few FLOPs and much memory traffic.
#
# Now compare prices: the least time to run again, per GiB freed.

# %% jupyter={"source_hidden": true}
shape, cut = SMALLEST, Parallel(8, True)
operations = {o.name: o for o in forward_operations(shape, cut)}
core = [operations[name] for name in ("QKᵀ", "softmax", "softmax dropout")]
rest = [o for name, o in operations.items() if o not in core and name not in ("4h→h", "MLP dropout and sum")]
rows = layer_rows(shape, cut)
without_product = [operations[name] for name in ("layer norm 1", "layer norm 2", "GeLU")]
their_outputs = ("QKV projection input", "h→4h input", "4h→h input")
freed = {
    "attention core": (core, sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)),
    "layer norms, GeLU": (without_product, sum(row.bytes for row in rows if row.term in their_outputs)),
    "all but the core": (rest, sum(row.bytes for row in rows[1:] if row.term not in CORE_ATTENTION_TERMS)),
}
lines = []
for name, (group, size) in freed.items():
    milliseconds = 1000 * float(least_seconds(group, *A100))
    flop_milliseconds = 1000 * sum(o.flops for o in group if o.product) / A100_FLOPS_PER_SECOND
    lines.append((name, size, f"{flop_milliseconds:.3f}", f"{milliseconds:.3f}", f"{milliseconds / (size / 2**30):.2f}"))
print(text_table(("22B layer, t = 8", "bytes freed", "ms by FLOPs", "least ms", "least ms per GiB freed"), lines, " rrrr"))

# %% [markdown]
# By FLOPs the core looks almost free. By the roofline it takes several times longer, and is still an order of magnitude
# cheaper per byte than everything outside the core. Layer norms and GeLU are as cheap: drop them next, if that is not
# enough. How close is the core's time to table 4?

# %% jupyter={"source_hidden": true}
selective = paper.TABLE4["selective"]
added = selective.combined_ms - baseline.combined_ms
group = [*core, operations["attention over V"]]
by_flops = 1000 * sum(o.flops for o in group if o.product) / A100_FLOPS_PER_SECOND
by_roofline = 1000 * float(least_seconds(group, *A100))
print(f"selective recomputation of one 22B layer adds {by_flops:.2f} ms by FLOPs,")
print(f"at least {by_roofline:.2f} ms by the roofline, and {added:.1f} ms in table 4")
for name, parallel in (("baseline, no recompute", Parallel(8)), ("sequence parallel", Parallel(8, True))):
    forward = 1000 * float(least_seconds(forward_operations(shape, parallel), *A100))
    said = f"at least {forward:.2f} ms by the roofline without exchanges, {paper.TABLE4[name].forward_ms} ms in table 4"
    print(f"{name}: forward {said}")

# %% [markdown]
# The roofline explains most of the milliseconds that FLOPs do not. It also shows what a fused attention kernel gains: the
# scores never go to memory, so the core moves only Q, K, V and its output, and the orange bars shrink to the products' own
# time. The roofline is a lower bound: real kernels, launches and exchanges take more, and the last two lines show how much.
#
# ## Questions
#
# <details><summary><b>1.</b> Two runs have the same HFU. One recomputes everything. Which trains faster?</summary>
#
# The other one. At equal HFU the devices run FLOPs at the same rate, but with full recomputation a quarter of them are
# repeats (a third more than the model needs). Its MFU is three quarters of its HFU.
# </details>
#
# <details><summary><b>2.</b> Why can sequence parallelism make forward <em>faster</em>, although it moves the same bytes between ranks?</summary>
#
# On every rank, layer norms and dropouts run on `s/t` tokens instead of all `s`. In the roofline's terms, the operations
# that wait for memory move fewer bytes. The last two lines above show what that should save, and table 4 what it did.
# </details>
#
# <details><summary><b>3.</b> You double <code>t</code>. Which points of the roofline move left, and why?</summary>
#
# The linears: each rank has half of the weights and half of the FLOPs, but a column-parallel linear still reads the whole
# input and a row-parallel one writes a whole output. FLOPs per byte fall. The core's points stay: each rank has half of the
# heads, so both FLOPs and bytes halve.
# </details>
#
# ## What people get wrong here
#
# - **"Recomputation costs 33%."** In FLOPs, if the second run goes to its end. In time table 4 has more, and that depends
#   on which communication is hidden.
# - **"Selective costs 2.7%, so expect 2.7% more time."** FLOPs are the wrong unit for an operation that waits for memory.
# - **MFU computed with the hardware's FLOPs.** Counting the recomputation makes a slower run look better utilised.
# - **Utilisation against the sparse peak.** The A100's rate for dense 16-bit products is half of the number with sparsity.
# - **Comparing times from different runs.** Clocks, heat and other jobs shift times by more than the effect; run the
#   candidates in turn.
#
# ## The lab
#
# [Lab 6](../labs/lab6_train.py) combines all of it: `python my/labs/lab6_train.py` trains
# a small GPT in every mode and compares memory and speed. To measure: `labs/measure_speed.py` for table 4 on your own
# device, `labs/measure_paper.py` for every table and figure of the paper at once.
#
# **Sources.** 2205.05198 sections 5, 6.2, 6.3 and appendix A, tables 4 and 5 · Chowdhery et al., *PaLM*, 2204.02311, for MFU · Williams,
# Waterman and Patterson, *Roofline*, Communications of the ACM 52(4), 2009 · NVIDIA's A100 data sheet, for rate and bandwidth · code:
# `src/actmem/formulas/flops.py`, `src/actmem_course/others/table5.py`.
#
# ## Now fit your model
#
# Where do the seconds of its step go? A plan has a line for each: products, what runs again, exchanges, the bubble.
#
# ```
# python -m actmem plan 175B --gpus 512 --memory 80 --global-batch 64 --device a100
# ```
#
# Next, [chapter 8](08_after_the_paper.ipynb): the layers that everyone trains today, and why they ask other questions.
