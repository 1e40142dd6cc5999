# %% [markdown]
# # 6 · The pipeline
#
# However many stages the pipeline has, its first one holds all layers' worth of activations (chapter 1). Why? And what does it
# cost to keep the stages busier?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import model_shape
from actmem.formulas.activations import layer_bytes
from actmem.formulas.first_stage import in_flight
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Progress, Reveal, bar_chart, play, size_text,
    slider, steps, worked,
)
from actmem_course.figures import ch06_pipeline as show

GPT3 = model_shape("175B")
CUT = am.Parallel(tensor_parallel_size=8, sequence_parallel=True)
checks = Checks()

question = Prediction(
    f"GPT-3's {GPT3.num_layers} layers on 8 pipeline ranks, {GPT3.num_layers // 8} in one piece on "
    f"each: rank 0 holds {GPT3.num_layers} layers' worth, the dashed line. "
    f"Now each rank gets 3 chunks of {GPT3.num_layers // 24} layers instead, and idles less. How many "
    "layers' worth does rank 0 hold?",
    in_flight(show.with_pipeline(CUT, 8, 3)) * GPT3.num_layers // 24,
    "layers' worth",
    f"pm + p − 1 = {in_flight(show.with_pipeline(CUT, 8, 3))} chunks are in flight, of L/(pm) = "
    f"{GPT3.num_layers // 24} layers each. This chapter shows why.",
    GuessLine(layer_bytes(GPT3, CUT), axis="y2"),
)
Reveal(
    question,
    Panel(
        lambda p, m, n, moment: show.pipeline_schedule(GPT3, show.with_pipeline(CUT, p, m), n, moment),
        p=steps("p", "pipeline ranks", show.ranks_that_fit(GPT3.num_layers, 8), 8),
        m=steps("m", "chunks a rank", lambda p: show.chunks_that_fit(GPT3.num_layers, p, 4), 1),
        n=steps("n", "microbatches", lambda p: show.microbatches_that_fit(p, 16), 16),
        moment=play("time", "played so far (0: the whole step)", show.moments_of, 0),
    ),
    m=3,
)

# %% [markdown]
# **What you need:** chapter 4 (bytes of one layer on one rank) and chapter 5 (selective recomputation). About 50 minutes.
#
# **New letter:** $n$ microbatches. In this chapter *rank* $i$ is the one that runs stage $i$. (2104.04473, where the schedules
# come from, writes $m$ for microbatches and $v$ for our $m$ chunks.)

# %% [markdown]
# ## One forward, one backward
#
# A microbatch goes forward through the ranks, then back. Rank 0 sees it first and finishes it last. Until then it keeps what
# this microbatch needs for backward: the microbatch is **in flight**. Rank 0 could wait, but then it would be idle. So it starts
# the next microbatches, until $p$ are in flight and the first comes back. From then on one backward follows each forward: 1F1B.
#
# Until rank $i$'s first microbatch is back, it has started one for itself and one for each of the $p - 1 - i$ ranks behind it.
# So it holds $p - i$. Press play and watch the curves climb, each to its own height:

# %%
Panel(
    lambda moment: show.pipeline_schedule(GPT3, show.with_pipeline(CUT, 4, 1), 6, moment),
    moment=play("time", "in passes", lambda: show.moments_of(4, 1, 6), 0),
)

# %% [markdown]
# Bytes of rank 0: $p$ microbatches × $L/p$ layers × one layer's bytes. $p$ cancels. That is equation 5,
#
# $$\frac{sbhL}{t}\left(34 + \frac{5as}{h}\right),$$
#
# the same for every $p$. The figure at the top shows GPT-3's layers, $t = 8$ with sequence parallelism, nothing recomputed.
# Move $p$: the first rank's curve keeps touching the dashed line. Move $m$: the curve rises above it, and the idle time
# falls. ($p \cdot m$ must divide the layers, and $p$ the microbatches.)

# %% jupyter={"source_hidden": true}
from actmem.formulas.first_stage import eq5, stage_rows
from actmem.rows import paper_rows, total

pairs = []
for p in (1, 2, 4, 8, 16, 32):
    rows = [
        row
        for row in paper_rows(stage_rows(GPT3, show.with_pipeline(CUT, p, 1), 0))
        if "layer-microbatches" in row.source
    ]
    pairs.append((total(rows), eq5(GPT3, 8)))
checks.add("rank 0, p from 1 to 32", pairs, sides=("tensor by tensor", "equation 5"))
checks.show()

# %% [markdown]
# **Now write it:** [exercise 5.1](../labs/lab5_pipeline.py), `one_forward_one_backward`: `python
# my/labs/lab5_pipeline.py --only 5.1`.

# %% [markdown]
# ## Interleaving: less idle time, more bytes
#
# Give each rank $m$ chunks with fewer layers instead of one: each microbatch goes around the ranks $m$ times, and rank 0 has the
# first chunk of every round. A pass through a chunk takes $1/m$ of the time, and so does filling and emptying the pipeline. Idle
# time falls, and a rank runs further ahead:

# %%
Panel(
    lambda n: show.interleaving(
        GPT3, show.with_pipeline(CUT, 8, 1), n, show.chunks_that_fit(GPT3.num_layers, 8, 4)
    ),
    n=steps("n", "microbatches", (8, 16, 32, 64), 16),
)

# %% [markdown]
# If $n > p$, $m = 2$ needs the most memory. Larger $m$ needs less, but always more than $m = 1$.
#
# Before its first backward rank $i$ runs $(m - 1)p$ forwards for the earlier chunks, $2(p - i - 1)$ more to be ahead, and the
# current one. If $n > p$, rank 0 has $pm + p - 1$ passes of $L/(pm)$ layers in flight:
#
# $$L\left(1 + \frac{p-1}{pm}\right) \text{ layers' worth.}$$
#
# (With $n = p$ there are only $pm$ passes, so $L$ layers' worth.) The paper has the same factor, and a count over a real list of
# actions gives it for all four models. (2104.04473 gives idle time as a share of the working time; here it is a share of the
# whole step.)

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS
from actmem.formulas.first_stage import interleave_factor
from actmem.formulas.schedule import interleaved, one_forward_one_backward, peak_in_flight

ways = []
for model in PAPER_MODELS.values():
    p, m, n = (
        model.parallel.pipeline_parallel_size,
        model.parallel.num_model_chunks,
        model.global_batch_size // model.shape.micro_batch_size,
    )
    schedule = interleaved(p, m, n) if m > 1 else one_forward_one_backward(p, n)
    ways.append((in_flight(model.parallel, 0, n), peak_in_flight(schedule)[0]))
    ways.append((in_flight(model.parallel, 0, n), p * m * interleave_factor(p, m)))
checks.add("in flight on rank 0", ways, "chunks", sides=("by formula", "other ways"))
checks.show()

# %% [markdown]
# Why does rank $i$ run $2(p - i - 1)$ forwards ahead, and not $p - i - 1$ as in 1F1B? The extra forwards hide the sends. If
# sends took no time, the shorter warm-up would be as fast, and rank 0 would hold $pm$ chunk passes instead of $pm + p - 1$.
# Exercise 5.2 takes either.
#
# Now in bytes, for the layers of the first stage. Equation 5 keeps everything, equation 6 recomputes the attention core. Full
# recomputation keeps $2sbhL$, or $1/t$ of it if each rank keeps a part of every layer's input. If a model interleaves, the
# factor multiplies all of them.

# %% jupyter={"source_hidden": true}
from actmem.formulas.first_stage import eq6, first_stage_bytes, full_recompute_bytes

first, ways = {"none, eq. 5": {}, "selective, eq. 6": {}, "full": {}, "full, inputs cut": {}}, []
for name, model in PAPER_MODELS.items():
    t, p = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
    n, factor = (
        model.global_batch_size // model.shape.micro_batch_size,
        interleave_factor(p, model.parallel.num_model_chunks),
    )
    each = [first_stage_bytes(model.shape, model.parallel, mode) for mode in ("none", "selective")]
    ways += zip(each, (factor * eq5(model.shape, t), factor * eq6(model.shape, t)))
    for mode, size in zip(("none", "selective"), each):
        rows = paper_rows(stage_rows(model.shape, model.parallel, 0, mode, n))
        ways.append((size, sum(row.bytes for row in rows if "layer-microbatches" in row.source)))
    full = [int(factor * full_recompute_bytes(model.shape, t, cut)) for cut in (False, True)]
    for part, size in zip(first.values(), each + full):
        part[name] = size
checks.add("rank 0's layers", ways, sides=("equations 5 and 6 times the factor", "sums over the tensors"))
everything, core = list(first.values())[:2]
shares = [core[name] / everything[name] for name in core]
display(checks.show())
LiveFigure(
    bar_chart(
        f"Rank 0 of the paper's models: selective recomputation leaves {min(shares):.0%} to {max(shares):.0%}",
        first,
        "activations of rank 0's layers",
        beside=True,
    )
)

# %% [markdown]
# And on A100s ([chapter 2](02_counting_bytes.ipynb)'s logs)? Two tests run 12 layers on four ranks and log the last one: with
# one chunk of three layers, and with three chunks of one, of which $(m - 1)p + 1$ = 9 are in flight:

# %%
from actmem_course.others.logged_pairs import logged_pairs

chunks = in_flight(am.Parallel(pipeline_parallel_size=4, num_model_chunks=3), 3, 4)
logged = logged_pairs()[2]
Fold(
    f"Interleaving holds {chunks - 3} more layers, less 3 inputs that are held anyway: "
    f"{size_text(logged.formula_bytes)}. A100s logged the same to {logged.apart_bytes:,} B",
    f"{logged.what}: {logged.formula_bytes:,} B by formula, {logged.logged_bytes:,} B in what A100s logged; "
    "six more scalars, each in a block of 512 B",
    prose=True,
)

# %% [markdown]
# **Now write it:** [exercise 5.2](../labs/lab5_pipeline.py), `interleaved`: `python my/labs/lab5_pipeline.py --only
# 5.2`.

# %% [markdown]
# ## Measured: four processes, one step
#
# `labs/measure_pipeline.py` trains a small model for one step on torch's own pipeline runtime, with four processes that really
# send and receive: `torchrun --nproc-per-node 4 labs/measure_pipeline.py --pipeline 4 --microbatches 8 --free-outputs`. Every
# microbatch in flight has its own ledger. What a rank holds after each action is the sum of its ledgers, with each storage
# counted once.

# %% jupyter={"source_hidden": true}
from actmem_course.launch import results

with Progress("labs/measure_pipeline.py, four processes"):
    measured = results(
        "measure_pipeline.py", "--pipeline", 4, "--microbatches", 8, "--free-outputs", processes=4
    )
checks.add(
    "at the fullest, on four processes",
    [(r["predicted_bytes"] + r["extra_bytes"], r["measured_bytes"]) for r in measured],
)
checks.add(
    "microbatches in flight on each process",
    [(r["predicted_in_flight"], r["measured_in_flight"]) for r in measured],
    "microbatches",
)
checks.add("actions in the order of the schedule", [(r["order_as_drawn"], True) for r in measured], "")
checks.show()

# %%
LiveFigure(show.measured_schedule(one_forward_one_backward(4, 8), measured))

# %% [markdown]
# The curves are measured. The time axis is the schedule's, where a backward takes as long as two forwards. Rank 3 holds more
# than a quarter of rank 0's bytes, because it also holds the logits, in 32 bits. The paper's section 4.3 counts both ends. Rank 0
# holds the embedding's dropout mask for each microbatch in flight. The last rank holds the final layer norm's input, the output
# layer's input and the logits, for one microbatch.
#
# GPT-3's layers are too large for a laptop, but you can emulate one rank: real code, on tensors without storage. The model
# is cut as in the paper, but has only $p \cdot m$ layers, one in each chunk. The rank runs until it holds the most bytes. A
# pass through the first chunk also keeps the embedding's mask.

# %% jupyter={"source_hidden": true}
from actmem.formulas.schedule import held
from actmem_tools.measured_parts import measure_stage

model = PAPER_MODELS["175B"]
p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
n, shape = model.global_batch_size, model.shape.with_sizes(num_layers=p * m)
a, b, h, s = shape.letters()
layer, mask = layer_bytes(shape, model.parallel, "selective"), s * b * h // 8
for rank in (0, p - 1):
    chunks = [range(c * p + rank, c * p + rank + 1) for c in range(m)]
    actions = interleaved(p, m, n)[rank]
    curve = held(actions, lambda action: layer + (mask if action.chunk == 0 and rank == 0 else 0))
    fullest = curve.index(max(curve)) + 1
    with am.emulated_rank(8):
        tp = am.tensor_parallel(sequence_parallel=True)
        rows = measure_stage(
            shape,
            tp,
            chunks,
            [(x.kind, x.chunk, x.microbatch) for x in actions[:fullest]],
            recompute="selective",
        )
    predicted = stage_rows(shape, model.parallel, rank, "selective", n)
    checks.add_rows(f"GPT-3, interleaved, pipeline rank {rank} when it holds most", predicted, rows)
checks.show()

# %% [markdown]
# ## Figure 9: every rank, and the outputs that nothing reads
#
# Once a rank has sent its output, it no longer needs the bytes: backward through the last operation does not read its output.
# But the runtime needs the output's *graph*, so plain code keeps the tensor alive, bytes included. Appendix B frees those:
# $2sbh/t$ bytes for each microbatch in flight ($2sbh$ if sequence parallelism is off).

# %%
MT = PAPER_MODELS["530B"]
Panel(
    lambda m: show.rank_memory(
        MT.shape, show.with_pipeline(MT.parallel, MT.parallel.pipeline_parallel_size, m), MT.global_batch_size
    ),
    m=steps("m", "chunks a rank", (1, 3), 3),
)

# %% [markdown]
# With $m = 3$, the kink at rank 0 is the embedding's dropout masks. How many are there? (This model's layers can't be cut into two chunks a
# rank.)

# %% jupyter={"source_hidden": true}
from actmem.formulas.first_stage import embeddings_in_flight, stage_output_rows

for m in (1, 3):
    parallel, n = show.with_pipeline(MT.parallel, 35, m), MT.global_batch_size
    checks.add(
        f"m = {m}: embedding masks on rank 0",
        [(min(m, 2) * 35, embeddings_in_flight(parallel, n))],
        "masks",
        sides=(f"{min(m, 2)}p", "from the schedule"),
    )
    one = (
        2
        * MT.shape.seq_length
        * MT.shape.micro_batch_size
        * MT.shape.hidden_size
        // parallel.tensor_parallel_size
    )
    checks.add(
        f"m = {m}: outputs on rank 0",
        [(in_flight(parallel, 0, n) * one, total(stage_output_rows(MT.shape, parallel, 0, n)))],
        sides=("2sbh/t each", "tensor by tensor"),
    )
checks.show()

# %% [markdown]
# The paper counts $p$ masks, which is right for 1F1B. If stages are interleaved, $p$ more forwards enter the first chunk before
# any backward comes back to it, so rank 0 holds $2p$. The paper counts $p$ outputs on rank 0, too; here it has $pm + p - 1$.
#
# Now look at the small model above, which ran with `--free-outputs`. No ledger contains an output, because no graph keeps it.
# The lab counts outputs separately, at the moment when the rank holds most.

# %% jupyter={"source_hidden": true}
from actmem.config import TINY

names = {
    r["pipeline_rank"]: f"rank {r['pipeline_rank']}" + ", its logits" * (r["pipeline_rank"] == 3)
    for r in measured
}
plain = {
    names[rank]: total(stage_output_rows(TINY, am.Parallel(pipeline_parallel_size=4), rank, 8))
    for rank in names
}
left = {names[r["pipeline_rank"]]: r["output_bytes"] for r in measured}
LiveFigure(
    bar_chart(
        "Freed: one output is left on each rank that sends",
        {"measured": left, "if none were freed": plain},
        "outputs held at the fullest moment",
        beside=True,
    )
)

# %% [markdown]
# One output is left on each sending rank: the one just computed and not yet sent. The last rank sends nothing.
#
# **Now write it:** [exercise 5.3](../labs/lab5_pipeline.py), `free_output`: `python my/labs/lab5_pipeline.py --only
# 5.3`.
#
# ## Appendix C: recompute only what does not fit
#
# With $p - i$ microbatches in flight, later ranks have memory to spare, and even rank 0 may have some. So let each rank
# keep everything for as many microbatches as fit, and recompute only the others. After the backward of a microbatch that
# kept everything its place is free, and the next forward takes it: a moving window. The figure has the sizes of the
# paper's figure 10, and you choose the memory. At its lowest, all ranks but the last recompute every microbatch.

# %%
from actmem_course.others import paper

FIGURE10 = show.with_pipeline(CUT, paper.FIGURE10_PIPELINE_PARALLEL_SIZE, 1)
Panel(
    lambda gib: show.moving_window_chart(GPT3, FIGURE10, paper.FIGURE10_NUM_MICROBATCHES, gib * 2**30),
    gib=slider(
        "memory",
        "GiB a rank",
        -(-show.least_budget_bytes(GPT3, FIGURE10, paper.FIGURE10_NUM_MICROBATCHES) // 2**30),
        40,
        1,
        20,
    ),
)

# %% [markdown]
# What would fit on the paper's 80 GiB devices? The bars give activations everything that parameters, gradients and Adam (18
# bytes per parameter) leave free. A real device has less, because workspaces, buffers and fragmentation take some, so this is
# an upper bound. With $m$ chunks a rank, each microbatch counts once for each chunk that it passes.

# %% jupyter={"source_hidden": true}
from fractions import Fraction

from actmem.formulas.first_stage import capacity
from actmem.formulas.schedule import moving_window, recomputed_share
from actmem.formulas.states import state_rows

again = {}
for name, model in PAPER_MODELS.items():
    n = model.global_batch_size // model.shape.micro_batch_size
    for rank in sorted({0, model.parallel.pipeline_parallel_size - 1}):
        budget = paper.A100_BYTES - total(state_rows(model.shape, model.parallel, rank))
        count = capacity(model.shape, model.parallel, budget, rank, n)
        flight = in_flight(model.parallel, rank, n)
        p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
        actions = (interleaved(p, m, n) if m > 1 else one_forward_one_backward(p, n))[rank]
        share = 1 - Fraction(len(moving_window(actions, count)), n * m)
        assert m > 1 or share == recomputed_share(count, flight, n)  # 1F1B needs no list of actions
        again[f"{name}, rank {rank}: {count} of {flight} fit in {size_text(budget)}"] = float(100 * share)
LiveFigure(
    bar_chart(
        "Last ranks of a pipeline keep everything; rank 0 can't",
        {"recomputed": again},
        "passes that recompute",
        "%",
    )
)

# %% [markdown]
# The 22B model has no pipeline: its one rank is the first and the last.
#
# **Now write it:** [exercises 5.4 and 5.5](../labs/lab5_pipeline.py), `how_many_fit` and `microbatches_to_keep`:
# `python my/labs/lab5_pipeline.py --only 5.4,5.5`.

# %% [markdown]
# ## What a rank sends
#
# Why use tensor and pipeline parallelism together? Look at what the first and the last rank of GPT-3 send in one iteration,
# with the layout of table 3:

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import wire_bytes
from actmem_course.predicted.iteration import iteration_exchanges

model = PAPER_MODELS["175B"]
sends = {"to other stages": {}, "to the ranks that share its layers": {}}
for rank in (0, model.parallel.pipeline_parallel_size - 1):
    exchanges = iteration_exchanges(model.shape, model.parallel, model.global_batch_size, rank, "selective")
    stages, bar = wire_bytes([e for e in exchanges if e.kind == "send"]), f"rank {rank}"
    sends["to other stages"][bar], sends["to the ranks that share its layers"][bar] = (
        stages,
        wire_bytes(exchanges) - stages,
    )
LiveFigure(
    bar_chart(
        "Nearly all of it goes to the ranks that share a layer", sends, "sent in one iteration", beside=True
    )
)

# %% [markdown]
# That is why tensor parallelism stays on fast links (in a machine, or an NVL72 rack), and pipeline stages go on different
# machines.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# You train GPT-3 (96 layers) with $p$ = 16 and 64 microbatches. How much of a step is idle under 1F1B, and how many layers'
# worth do ranks 0 and 15 hold? What changes with three chunks a
# rank?

# %% jupyter={"source_hidden": true}
p, n, m = 16, 64, 3
idle = lambda chunks: Fraction(p - 1, n * chunks) / (1 + Fraction(p - 1, n * chunks))
held_by = lambda rank, chunks: (
    in_flight(show.with_pipeline(CUT, p, chunks), rank, n) * GPT3.num_layers // (p * chunks)
)
worked(
    f"1F1B: forward and backward of one microbatch pass {p} ranks, so {p - 1} of {n + p - 1} slots "
    f"are idle: {float(idle(1)):.0%}.",
    f"Rank 0 has {p} microbatches in flight through {GPT3.num_layers // p} layers: {held_by(0, 1)} "
    f"layers' worth. Rank {p - 1} has one: {held_by(p - 1, 1)}.",
    f"{m} chunks divide the idle slots by {m}: {float(idle(m)):.0%}. Rank 0 then holds "
    f"{held_by(0, m)} layers' worth, 1 + {p - 1}/{p * m} times as much, and rank {p - 1} "
    f"{held_by(p - 1, m)}.",
)

# %% [markdown]
# ## Questions
#
# <details><summary><b>1.</b> You double <i>p</i> and keep the model. What happens to rank 0's parameters, and to its
# activations?</summary>
#
# Half of the layers' parameters (the embedding's stay); the same activations of the layers. Twice as many microbatches are in
# flight, each through half as many layers. Try it with the slider at the top.
# </details>
#
# <details><summary><b>2.</b> There are fewer microbatches than ranks. Does equation 5 still hold?</summary>
#
# It becomes an upper bound. Rank 0 can't have more microbatches in flight than there are: $\min(p, n)$, each of $L/p$
# layers. With n = 2 and p = 8 that is 2 · L/8 layers' worth. And the pipeline idles most of the time.
# </details>
#
# <details><summary><b>3.</b> Why is the logits' memory counted once and not for every microbatch in flight?</summary>
#
# Only the last rank has them, and there a microbatch's backward follows its forward immediately: one is in flight (in its
# last chunk).
# </details>
#
# <details><summary><b>4.</b> With <i>m = 1</i> the factor <i>1 + (p − 1)/(pm)</i> is almost two. Why does 1F1B not
# hold twice equation 5?</summary>
#
# The factor counts the interleaved schedule's longer warm-up, $2(p - i - 1)$ forwards. 1F1B runs $p - i - 1$ ahead.
# </details>
#
# ## What people get wrong here
#
# - **"Pipeline parallelism divides activation memory by $p$."** It divides the parameters. On rank 0 the activations stay.
# - **$m$ and $n$ mixed up.** In many blogs $m$ is microbatches. Check the definition before you put numbers into a formula.
# - **"All ranks need the same memory."** With 1F1B the layers of rank $i$ need $(p - i)/p$ of what rank 0's need;
#   interleaved in three chunks, the last rank's still need about half. And the last rank adds the logits.
# - **"Freeing an output frees the graph."** Its bytes go, the graph stays. Backward starts from the graph.
#
# ## The lab
#
# [Lab 5](../labs/lab5_pipeline.py): write the orders of 1F1B and of the interleaved schedule, free the outputs, choose which
# microbatches keep everything: `python my/labs/lab5_pipeline.py`.
#
# To measure: `torchrun --nproc-per-node 4 labs/measure_pipeline.py --pipeline 2 --tensor 2` combines both cuts, and
# `--chunks 2` interleaves; `--html FILE` writes the figure.
#
# **Sources.** 2205.05198 sections 4.2.3 and 4.3, appendices B and C · Narayanan et al., 2104.04473, for both schedules · code:
# `src/actmem/formulas/schedule.py`, `src/actmem/pipeline.py`, `src/actmem/formulas/first_stage.py`.
#
# ## Now fit your model
#
# How many stages should your pipeline have? Plan 4, then 16, with everything else equal. Only the replicas (DP) change: they
# take the GPUs that are left. Compare the fullest rank's bill and the idle time (*bubble*):
#
# ```
# actmem plan 175B --gpus 128 --memory 80 --global-batch 64 --tensor 8 --chunks 3 --micro-batch-size 1 --recompute selective --pipeline 4
# actmem plan 175B --gpus 128 --memory 80 --global-batch 64 --tensor 8 --chunks 3 --micro-batch-size 1 --recompute selective --pipeline 16
# ```
#
# Next, [chapter 7](07_time.ipynb): what all this costs in seconds.
