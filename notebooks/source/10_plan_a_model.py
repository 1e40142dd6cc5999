# %% [markdown]
# # 10 · Plan a model
#
# You have a model and a number of GPUs. Which layout do you choose, and how do you know that it fits?

# %%
# Setup: imports, and the numbers of the question
from actmem.formulas.states import ADAM
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, choice, size_text,
    text_table, worked,
)
from actmem_course.figures import ch09_your_model as show
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import find_plans
from actmem_tools.plan.step_time import GIBIBYTE, Cluster

model = planned_model_of("llama3-70b")
checks = Checks()
cluster = Cluster(64, 80 * GIBIBYTE)
found = find_plans(model, cluster, 512)
parts, _, _ = show.stored_plan("llama3-70b", 80, 16)
states = sum(parts[part] for part in ("weights", "gradients", "optimizer states"))
question = Prediction(
    "Llama 3 70B, sequences of 8,192 tokens, 512 of them in a step. The bars are the fastest plans on 64 and on 256 GPUs of 80 GiB. Now you have 16. "
    f"It has {model.num_parameters / 1e9:.1f} billion parameters, each with {sum(state.bytes_per_parameter for state in ADAM['float32 gradients'])} bytes of states. "
    "How many GiB per GPU do weights, gradients and optimizer states take?",
    states / GIBIBYTE,
    "GiB",
    f"All states, divided by 16. {size_text(80 * GIBIBYTE - states)} are left for activations and everything else, so the fastest plan that fits "
    "recomputes every layer.",
    GuessLine(),
)
Reveal(
    question,
    Panel(
        lambda fewest: show.plan_wall("llama3-70b", 80, [gpus for gpus in (16, 64, 256) if gpus >= fewest]),
        fewest=choice("GPUs, from", (64, 16), 64),
    ),
    fewest=16,
)

# %% [markdown]
# **In this chapter** you plan a training job. You find the layouts that fit, read the fullest GPU's bill line by line, and
# emulate that GPU on your machine to check the bill. About 30 minutes.
#
# **What you need:** chapters 3 to 8.
#
# ## What fits, and which is fastest
#
# Besides tensor (TP) and pipeline parallelism (PP) there are data parallelism, ZeRO and context parallelism:
#
# | | each rank holds a part of | ranks exchange |
# |---|---|---|
# | data parallelism (DP) | the sequences | gradients once a step |
# | ZeRO-1 | optimizer states too | gradients and new weights once a step |
# | ZeRO-2 | gradients too | gradients in every microbatch, new weights once a step |
# | ZeRO-3 (PyTorch: FSDP) | weights too | gradients and weights in every microbatch |
# | context parallelism (CP) | each sequence | keys and values in every layer |
#
# In a plan's name
#
# - TP, PP, CP and DP count ranks;
# - `b 1` is one sequence in a microbatch;
# - *none* recomputes nothing;
# - *2 microbatches whole* keeps everything for two of the microbatches in flight, and recomputes the others;
# - *hidden* are seconds of exchanges that must run while the GPU computes.

# %%
from actmem_tools.plan.plan_report import plan_text

LiveFigure(bar_chart(
    f"{found.fitting:,} of {found.counted:,} layouts fit; the fastest six",
    {"a step": {f"{plan_text(plan)}: {plan.bytes / GIBIBYTE:.1f} GiB, {plan.seconds.hidden:.1f} s hidden": plan.seconds.total for plan in found.plans[:6]}},
    "time of a step", "s",
))

# %% [markdown]
# The seconds come from counts (FLOPs, bytes moved, bytes sent, the bubble), divided by stated rates. Two numbers
# are guesses, the same for every plan: the share of peak FLOP/s that a product reaches, and the share of peak bandwidth that a link
# reaches. Seven of the paper's eight own times come out within 10%. The times of the six plans differ by less than that, so choose among the first plans by memory,
# simplicity and what must hide. `actmem plan --help` lists what you can fix.
#
# Change the model and the memory. From how many GPUs on are activations the largest part? (For the 70B with 80 GiB from 64 on.
# *Transient* is what backward holds only at the fullest moment. The line is the GPU's memory; a plan must stay 4 GiB below it.)

# %%
Panel(
    show.plan_wall,
    name=choice("model", ("llama3-8b", "llama3-70b", "qwen3-32b", "175b"), "llama3-70b"),
    memory=choice("GiB per GPU", (40, 80, 141), 80),
)

# %% [markdown]
# ## It doesn't fit: what do you do first?
#
# Here is a plan that is far too large. Each bar adds one change to those above it: the one that frees a GiB for the least time
# at that point. It also says how much longer a step takes than at the start. Stop at the first bar that ends before the line:

# %%
LiveFigure(show.first_aid("llama3-70b", 80))

# %% [markdown]
# So for this plan you ask, in this order:
#
# 1. **Is sequence parallelism off?** Switch it on wherever you use tensor parallelism. It frees bytes and usually saves time (the
#    paper's table 4: 3%).
# 2. **Are the bytes activations?** Recompute the elementwise operations (`elementwise`). If your attention stores its scores, recompute
#    the core first, or better: use a kernel that doesn't store them.
# 3. **Is there more than one sequence in a microbatch?** Take one, unless the GPU then waits for small products.
# 4. **Do you have replicas?** Here half of them become pipeline stages, then two ranks on each sequence. If each replica has few
#    microbatches, ZeRO-2 is better (it exchanges gradients in each): the fastest plan at the top does that.
# 5. **Still too much?** Recompute everything, if the bytes are activations. (In the figure no replicas are left by then. While
#    there are some, ZeRO-2 is cheaper.) Divide weights (ZeRO-3), if the bytes are states.
# 6. **Nothing helps?** Run the planner: if nothing fits, its last lines say how much memory or how many GPUs would be enough.
#
# Prices change with every step, model and length. So plan again after each change.

# %% [markdown]
# ## The bill, line by line
#
# Take the plan of the six that hides least: it is 2% slower than the first. Its fullest rank, when it holds most:

# %%
from actmem_tools.plan.search import bill_of

chosen = min(found.plans[:6], key=lambda plan: plan.seconds.hidden)
bill = bill_of(model, chosen)
lines = sorted(((row.bytes, part, row.term) for part, rows in bill.parts.items() for row in rows), reverse=True)
shown = {f"{part}: {term}": size for size, part, term in lines[:8]}
shown[f"{len(lines) - 8} smaller lines"] = sum(size for size, *_ in lines[8:])
shown["left for CUDA, NCCL and the allocator"] = cluster.memory_bytes - bill.bytes
LiveFigure(bar_chart(f"{size_text(bill.bytes)} of {size_text(cluster.memory_bytes)}: {bill.moment}", {"": shown}, "lines of the bill"))

# %% [markdown]
# The last line is an allowance, not a prediction: at least 4 GiB for CUDA's context, NCCL's buffers and what the allocator
# reserves beyond what it hands out. (Chapter 12 is about the allocator.)
#
# **Now write it:** [exercises 8.1 and 8.2](../labs/lab8_plan.py), `rank_state_bytes` and `largest_micro_batch_size`: what ZeRO
# leaves of the states, and the largest microbatch that still fits: `python my/labs/lab8_plan.py --only 8.1,8.2`.
#
# ## Is the bill right?
#
# Count every line of it. The cell runs the fullest rank of a plan on fake tensors, which have no storage: the real layers, every
# forward that would be in flight, one step of Adam. Here are three plans of a small model; `plan … --verify` does it for large
# ones.

# %%
from actmem.config import TINY
from actmem_tools.plan.planned_models import PlannedGPT
from actmem_tools.verify import verify_plan

tiny = PlannedGPT("tiny", TINY)
fitting = find_plans(tiny, Cluster(8, 5 * GIBIBYTE), 16, 10_000).plans
for pipeline in (1, 2, 4):
    plan = next(plan for plan in fitting if plan.layout.pipeline_parallel_size == pipeline and plan.layout.tensor_parallel_size > 1)
    checked = verify_plan(tiny, plan)
    checks.add(plan_text(plan), [(term.predicted or 0, term.measured or 0) for term in checked.matches])
checks.show()

# %% [markdown]
# And what did real GPUs hold? Public runs of a 1.1B Llama under nanotron logged their peak. The bill of each follows from what
# nanotron's code keeps, line by line. No constant is fitted to the logs, but we had seen them when we wrote the formula.

# %%
from actmem_course.others.nanotron import nanotron_runs

LiveFigure(show.runs_figure(nanotron_runs()))

# %% [markdown]
# ## What if
#
# What happens with half the GPUs, or with sequences twice as long? And why was the nearest layout refused?

# %%
from textwrap import fill

from actmem_tools.plan.plan_report import refusal_text

for gpus, length in ((32, model.seq_length), (64, 2 * model.seq_length)):
    best = find_plans(model.with_sizes(seq_length=length), Cluster(gpus, 80 * GIBIBYTE), 512, 1).plans[0]
    print(fill(f"{gpus} GPUs, {length:,} tokens: {best.seconds.total:.2f} s a step by {plan_text(best)}", 96))
for refused in found.nearest[:1]:
    print(fill("refused: " + refusal_text(model, refused, cluster), 96))

# %% [markdown]
# **Now write it:** [exercise 8.3](../labs/lab8_plan.py), `plan_of`: plans for three models under three limits. If one doesn't
# fit, the judge says at which line of the bill, and by how much: `python my/labs/lab8_plan.py --only 8.3`.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# You train a model of 13 billion parameters on 8 GPUs of 80 GiB, with data parallelism alone. A parameter takes 2 bytes as a
# weight, 4 as a gradient and 12 as optimizer states. Activations and everything else take 20 GiB per GPU. Which ZeRO stage do
# you need?

# %% jupyter={"source_hidden": true}
weight, gradient, *rest = (state.bytes_per_parameter for state in next(iter(ADAM.values())))
gpus, parameters, optimizer = 8, 13 * 10**9, sum(rest)
stages = {0: weight + gradient + optimizer, 1: weight + gradient + optimizer / gpus, 2: weight + (gradient + optimizer) / gpus, 3: (weight + gradient + optimizer) / gpus}
worked(
    *(f"Stage {stage}: {size:g} bytes a parameter, {parameters * size / GIBIBYTE:.0f} GiB{'' if parameters * size / GIBIBYTE <= 60 else ', too much'}." for stage, size in stages.items()),
    "Stage 2 is the first that leaves 20 GiB. Stage 3 would leave more, but gathers every weight again in each pass.",
)

# %% [markdown]
# ## Questions
#
# <details><summary><b>1.</b> When does the planner choose full recomputation?</summary>
#
# When memory is short, as on 16 GPUs in the figure at the top. It frees nearly all of a layer and costs about a quarter more
# FLOPs, or a third where the second run goes to its end, as in Megatron (chapter 5). Otherwise something else is cheaper:
# elementwise recomputation frees a third of a 70B layer for no matrix product, and ZeRO or another pipeline stage frees states,
# which are often larger than activations.
# </details>
#
# <details><summary><b>2.</b> A plan fits with 0.2 GiB to spare beyond the allowance. Would you run it?</summary>
#
# Its held bytes are counted, and so is the transient of the code that this course runs. Another code has another transient,
# and the allocator's share changes from run to run. Take the next plan if it costs a percent, or watch the first steps.
# </details>
#
# **Lab 8**: once all three exercises pass, your first plan runs on an emulated rank, and you see its bill beside what was
# counted: `python my/labs/lab8_plan.py`.
#
# ## What people get wrong here
#
# - **"It fits on average."** One GPU that runs out ends the job: plan for the fullest rank, first or last.
# - **A factor for overhead.** 1.2 times everything: then you can't tell which part of the prediction was wrong.
# - **Saving memory that you have.** If a plan leaves memory free, recompute less.
#
# **Sources.** 2205.05198 sections 4 to 6 and appendices B and C · Rajbhandari et al., *ZeRO*, 1910.02054 · huggingface/nanotron and its published logs · code: `src/actmem_tools/plan/`, `src/actmem_tools/verify.py`.
#
# ## Now fit your model
#
# `actmem plan llama3-70b --gpus 64 --memory 80 --global-batch 512` prints a plan with the settings to paste, for
# Megatron-LM and torchtitan. Hugging Face's Trainer can't run a plan with pipeline stages; `--pipeline 1` finds one without.
#
# All of this was the course's Llama. Another code's Llama keeps more (chapter 9). The same command takes a function that makes
# *your* model, or a `config.json` of Hugging Face. It runs the model at tiny sizes, with one to five layers. Then it says
# what the real one takes, the largest microbatch that fits, and which blocks to recompute if it doesn't fit, with the code to
# paste:
#
# ```
# actmem plan config.json --at s=8192,b=1 --gpus 8 --memory 80 --again mlp
# ```
#
# The bill in this chapter is the first stage's. The last stage holds logits and the loss as well, and recomputing layers doesn't
# shrink these. [Chapter 10](10_the_loss.ipynb) takes them apart.
