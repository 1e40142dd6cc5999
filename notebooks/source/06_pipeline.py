# %% [markdown]
# # 6 · The pipeline
#
# *40 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# Put GPT-3's 96 layers on 4 pipeline ranks, and send the batch through in parts, *microbatches*. Until the backward
# pass comes back to rank 0, 4 of them are under way, so it holds 4 · 24 layers' saved tensors. To idle less, you now
# give each rank two *chunks* of twelve layers (`--num-layers-per-virtual-pipeline-stage 12` in Megatron): each
# microbatch passes all ranks twice. **How many layers' saved tensors does rank 0 hold?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import model_shape
from actmem.formulas.activations import layer_bytes
from actmem.formulas.stages import in_flight
from actmem_course.figures import Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal, play, steps
from actmem_course.figures import ch06_pipeline as show

GPT3 = model_shape("175B")
SHARDED = am.Parallel(tensor_parallel_size=8, sequence_parallel=True)
CHUNKED = show.with_pipeline(SHARDED, 4, 2)
checks = Checks()

question = Prediction(
    f"GPT-3's {GPT3.num_layers} layers on 4 pipeline ranks, {GPT3.num_layers // 4} on each: rank 0 holds the saved "
    f"tensors of {GPT3.num_layers} layers, the dashed line. Now each rank gets 2 chunks of {GPT3.num_layers // 8} "
    "layers instead, and idles less. How many layers' saved tensors does rank 0 hold?",
    in_flight(CHUNKED) * GPT3.num_layers // 8,
    "layers",
    f"{in_flight(CHUNKED)} passes through a chunk are in flight, of {GPT3.num_layers // 8} layers each. "
    "This chapter shows why.",
    GuessLine(layer_bytes(GPT3, SHARDED), axis="y2"),
)
Reveal(
    question,
    Panel(
        lambda p, m, n: show.pipeline_schedule(GPT3, show.with_pipeline(SHARDED, p, m), n),
        p=steps("p", "pipeline ranks", (1, 2, 3, 4, 6, 8), 4),
        m=steps("m", "chunks per rank", lambda p: show.chunks_that_fit(GPT3.num_layers, p, 4), 1),
        n=steps("n", "microbatches", lambda p: range(p, 17, p), 8),
    ),
    m=2,
)

# %% [markdown]
# **You need** chapter 4 (the bytes of a layer on one rank) and chapter 5 (selective recomputation).
#
# **Letters.** $L$ layers on $p$ pipeline ranks, in $m$ chunks per rank; $n$ microbatches of $b$ sequences with $s$
# tokens; hidden size $h$, $a$ heads, $t$ tensor-parallel ranks. **Rank** $i$ is a *pipeline rank* in this chapter: the
# $t$ GPUs that run stage $i$. Bytes are those of one of these GPUs.

# %% [markdown]
# ## One forward, one backward
#
# Rank 0 sees a microbatch first and gets it back last. Until then the microbatch is **in flight** there. Rather than
# idle, rank 0 starts the next microbatch, and the next, until $p$ are in flight and the
# first comes back. From then on, one backward pass follows each forward pass: **1F1B**.
#
# Rank $i$ has $p - 1 - i$ ranks after it. It runs that many forward passes ahead, plus the current one, so it holds
# $p - i$ microbatches. Press play. A row is a microbatch in flight, in the colours of the tensors saved for it:

# %%
from actmem_course.figures.pipeline_picture import pipeline_moments, pipeline_picture

FOUR = show.with_pipeline(SHARDED, 4, 1)
Panel(
    lambda moment: pipeline_picture(GPT3, FOUR, 6, moment),
    moment=play("moment", "time, in forward passes", pipeline_moments(FOUR, 6), 3),
)

# %% [markdown]
# Multiply: $p$ microbatches × $L/p$ layers × one layer's bytes. As chapter 1 said, $p$ cancels, in
# the paper's equation 5:
#
# $$\frac{sbhL}{t}\left(34 + \frac{5as}{h}\right)$$
#
# > **Why do this?** A rank with $L/p$ layers holds $1/p$ of all parameters, and per microbatch it only sends one
# > activation to the next rank. **Why not?** Ranks idle while the pipeline fills and drains, the *bubble*, and rank 0's
# > activations don't shrink.
#
# A step takes $n + p - 1$ slots of a forward and a backward pass, and each rank works in $n$. So the bubble is
# $(p-1)/(n+p-1)$ of the step; with $m$ chunks per rank, $(p-1)/(nm+p-1)$.

# %% jupyter={"source_hidden": true}
from actmem.formulas.stages import eq5, stage_rows
from actmem.rows import paper_rows, total


def layers_of(rows):
    """Bytes of the layers, without the embedding's and the loss's."""
    return sum(row.bytes for row in paper_rows(rows) if "layer-microbatches" in row.source)


stages = (1, 2, 4, 8, 16, 32)
pairs = [(layers_of(stage_rows(GPT3, show.with_pipeline(SHARDED, p, 1), 0)), eq5(GPT3, 8)) for p in stages]
checks.add("rank 0, p from 1 to 32", pairs, sides=("tensor by tensor", "equation 5"))
checks.show()

# %% [markdown]
# **Now write it:** [exercise 5.1](../labs/lab5_pipeline.py), `one_forward_one_backward`:
# `python my/labs/lab5_pipeline.py --only 5.1`.

# %% [markdown]
# ## Interleaving: less idle time, more bytes
#
# A microbatch now goes around the ranks $m$ times. Compare rank 0's curve for $m = 1$ and 2 in the first figure.
#
# Count what rank $i$ starts before its first backward pass: $(m - 1)p$ forward passes through the earlier chunks,
# $2(p - i - 1)$ to run ahead, and the current one. With more than $p$ microbatches, rank 0 has $pm + p - 1$ passes of
# $L/(pm)$ layers in flight:
#
# $$L\left(1 + \frac{p-1}{pm}\right) \text{ layers' saved tensors.}$$
#
# In the question that's 11 passes of 12 layers. So $m = 2$ costs most, and larger $m$ less, but always more than
# $m = 1$. (By default Megatron needs $n$ to be a multiple of $p$.)

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS
from actmem.formulas.stages import bubble_fraction, interleave_factor
from actmem.formulas.schedule import peak_in_flight
from actmem_course.others.timeline import bubble_of, timeline

in_lists, idle = [], []
for model in PAPER_MODELS.values():
    p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
    n = model.global_batch_size // model.shape.micro_batch_size
    schedule = show.schedule_of(p, m, n)
    in_lists += [(p * m * interleave_factor(p, m), peak_in_flight(schedule)[0])]
    idle += [(bubble_fraction(model.parallel, n) * n * m, bubble_of(timeline(schedule)) * n * m)]
    if model.shape == GPT3:
        first, *_, last = (passes * GPT3.num_layers // (p * m) for passes in peak_in_flight(schedule))
        print(f"GPT-3, {m} chunks per rank: rank 0 holds {first} layers' saved tensors, rank {p - 1} {last}")
sides = ("by formula", "in the schedule")
checks.add("passes in flight on rank 0 of the paper's four models", in_lists, "", sides)
checks.add("bubble of a rank, in passes forward and back", idle, "", sides)
checks.show()

# %% [markdown]
# Why run $2(p - i - 1)$ ahead, and not $p - i - 1$? While a chunk's input is on its way, the rank runs an extra pass
# instead of waiting. The whole schedule takes, in forward passes of one chunk:

# %% jupyter={"source_hidden": true}
from actmem.formulas.schedule import interleaved

for send, words in ((0, "no time"), (1, "half a forward pass")):
    # In halves of a forward pass; a backward pass takes as long as two.
    lists = [interleaved(4, 3, 16, short_warmup=is_short) for is_short in (True, False)]
    short, long = (max(span.end for span in timeline(one, 2, 4, send)) / 2 for one in lists)
    print(
        f"p = 4, m = 3, n = 16, a send takes {words}: {short:g} with p - i - 1 ahead, {long:g} with 2(p - i - 1)"
    )

# %% [markdown]
# Equation 5 saves everything. Equation 6, $34sbhL/t$, recomputes the core attention. Interleaving multiplies both by
# the same factor:

# %% jupyter={"source_hidden": true}
from actmem.formulas.stages import eq6

ways, shares = [], []
for name, model in PAPER_MODELS.items():
    t, m = model.parallel.tensor_parallel_size, model.parallel.num_model_chunks
    factor = interleave_factor(model.parallel.pipeline_parallel_size, m)
    for mode, equation in (("none", eq5), ("selective", eq6)):
        rows = stage_rows(model.shape, model.parallel, 0, mode)
        ways.append((factor * equation(model.shape, t), layers_of(rows)))
    shares.append(ways[-1][0] / ways[-2][0])
checks.add("rank 0's layers, four models", ways, sides=("equations 5 and 6 times the factor", "tensor by tensor"))
display(checks.show())
left = f"{float(min(shares)):.0%} to {float(max(shares)):.0%}"
print(f"Selective recomputation leaves {left} of the bytes that rank 0's layers save.")

# %% [markdown]
# > **Why do this?** With $m$ chunks per rank, filling and draining takes $1/m$ of the time. **Why not?** Rank 0 holds
# > up to 1.5× as much, and each microbatch is sent $m$ times as often.
#
# **Now write it:** [exercise 5.2](../labs/lab5_pipeline.py), `interleaved`:
# `python my/labs/lab5_pipeline.py --only 5.2`.

# %% [markdown]
# ## Measured: four processes, one step
#
# Train a small model for one step on torch's own pipeline runtime, on four processes that send and receive.
# We record each microbatch; a rank's total is their sum.

# %% jupyter={"source_hidden": true}
from actmem_course.figures import Progress
from actmem_course.launch import results

with Progress("labs/measure_pipeline.py, four processes"):
    measured = results("measure_pipeline.py", "--pipeline", 4, "--microbatches", 8, "--free-outputs", processes=4)
checks.add(
    "peak bytes of each of four processes",
    [(r["predicted_bytes"] + r["extra_bytes"], r["measured_bytes"]) for r in measured],
)
checks.add(
    "microbatches in flight on each process",
    [(r["predicted_in_flight"], r["measured_in_flight"]) for r in measured],
    "",
)
checks.add("torch ran the passes in the schedule's order", [(r["order_as_drawn"], True) for r in measured])
checks.show()

# %%
LiveFigure(show.measured_schedule(show.schedule_of(4, 1, 8), measured))

# %% [markdown]
# The curves are measured; the time axis is the schedule's, where a backward pass takes as long as two forward passes.
# Rank 3 holds more than a quarter of rank 0's bytes: it also has the final layer norm's and the output layer's inputs,
# and the logits in 32 bits, for one microbatch. Rank 0 has the embedding's dropout mask for each microbatch in
# flight.
#
# GPT-3's layers are too large for a laptop, so emulate one rank with selective recomputation: real code, on tensors
# without storage. Each chunk has one layer. The rank runs until it holds the most:

# %% jupyter={"source_hidden": true}
import torch

from actmem.formulas.schedule import held
from actmem_tools.measured_parts import measure_parts

model = PAPER_MODELS["175B"]
p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
n, shape = model.global_batch_size, model.shape.with_sizes(num_layers=p * m)
a, b, h, s = shape.letters()
layer, mask = layer_bytes(shape, model.parallel, "selective"), s * b * h // 8
for rank in (0, p - 1):
    chunks = [range(c * p + rank, c * p + rank + 1) for c in range(m)]
    actions = show.schedule_of(p, m, n)[rank]
    curve = held(actions, lambda action: layer + (mask if action.chunk == 0 and rank == 0 else 0))
    until = [(x.kind, x.chunk, x.microbatch) for x in actions[: curve.index(max(curve)) + 1]]
    with am.emulated_rank(8):
        tp = am.tensor_parallel(sequence_parallel=True)
        how = {"recompute": "selective", "dtype": torch.bfloat16}
        rows = measure_parts([am.GPT(shape, tp, layers=layers, **how) for layers in chunks], until)
    predicted = stage_rows(shape, model.parallel, rank, "selective", n)
    checks.add_rows(f"GPT-3, interleaved, pipeline rank {rank} at its peak", predicted, rows)
checks.show()

# %% [markdown]
# ## Outputs that nothing reads any more
#
# When a rank has sent its output, nothing reads these bytes again, but the backward pass starts from the output's
# graph. torch's pipeline keeps the output tensor alive because the pipeline owns the graph: $2sbh/t$ bytes for each microbatch
# in flight, or $2sbh$ without sequence parallelism. The paper's appendix B (figure 9) frees the bytes, and
# Megatron-LM's training script sets `deallocate_pipeline_outputs` for it. For the 530B model:

# %% jupyter={"source_hidden": true}
from actmem.formulas.stages import EMBEDDING_TERM, embeddings_in_flight, stage_output_rows
from actmem_course.figures import bar_chart, size_text
from actmem_course.figures.style import FILLS

MT = PAPER_MODELS["530B"]
fills = {
    "layers": FILLS["activations"],
    "embedding's dropout masks": FILLS["dropout mask"],
    "logits and what the loss reads": FILLS["logits and loss"],
    "outputs, until freed": FILLS["freed"],
}
parts = {part: {} for part in fills}
for rank in (0, 1, 17, 34):
    rows = paper_rows(stage_rows(MT.shape, MT.parallel, rank, "selective", MT.global_batch_size))
    masks = sum(row.bytes for row in rows if row.term == EMBEDDING_TERM)
    outputs = total(stage_output_rows(MT.shape, MT.parallel, rank, MT.global_batch_size))
    sizes = (layers_of(rows), masks, total(rows) - layers_of(rows) - masks, outputs)
    for part, size in zip(fills, sizes):
        parts[part][f"rank {rank}"] = size
saved, thin = parts["outputs, until freed"]["rank 0"], parts["logits and what the loss reads"]["rank 34"]
named = {**dict.fromkeys(parts, ""), "logits and what the loss reads": f" ({size_text(thin)} on rank 34)"}
LiveFigure(
    bar_chart(
        f"The 530B model, four of 35 ranks, 3 chunks each: freed outputs are {size_text(saved)} on rank 0",
        {part + more: parts[part] for part, more in named.items()},
        "one GPU, selective recomputation",
        fills=list(fills.values()),
    )
)

# %% jupyter={"source_hidden": true}
one = 2 * MT.shape.seq_length * MT.shape.micro_batch_size * MT.shape.hidden_size // MT.parallel.tensor_parallel_size
for m in (1, 3):
    parallel, n = show.with_pipeline(MT.parallel, 35, m), MT.global_batch_size
    pair = min(m, 2) * 35, embeddings_in_flight(parallel, n)
    checks.add(f"m = {m}: embedding masks on rank 0", [pair], "", sides=(f"{min(m, 2)}p", "from the schedule"))
sends = [r for r in measured if r["pipeline_rank"] < 3]
small = total(stage_output_rows(am.config.TINY, am.Parallel(pipeline_parallel_size=4), 2, 1))
checks.add(
    "outputs on the four processes' ranks 0, 1 and 2, freed once sent",
    [(small, r["output_bytes"]) for r in sends],
    sides=("one each", "measured"),
)
checks.show()

# %% [markdown]
# The paper counts $p$ embedding masks, which is right for 1F1B. With interleaving, $p$ more forward passes enter the
# first chunk before any backward pass comes back to it: $2p$ masks. Rank 0 also has $pm + p - 1$ outputs, not $p$. On
# the small model, which frees them, each rank that sends has one left: the one just computed.
#
# > **Why do this?** Freeing the bytes costs nothing: the last operation's backward pass doesn't read its output.
# > **Why not?** The graph needs the tensor itself, so you empty it behind autograd's back.
#
# **Now write it:** [exercise 5.3](../labs/lab5_pipeline.py), `free_output`:
# `python my/labs/lab5_pipeline.py --only 5.3`.
#
# ## Recompute only what does not fit
#
# Later ranks have free memory, and rank 0 may have some. So (the paper's appendix C; Megatron-core's `num_microbatches_with_partial_activation_checkpoints`) save everything for as many
# microbatches as fit, and recompute the others' core attention. When a microbatch that saved everything has finished
# its backward pass, the next forward pass takes its place: a moving window.
#
# On the paper's 80 GiB devices, activations get at most what parameters, gradients and Adam leave free. Open the
# line to see how many passes that covers:

# %% jupyter={"source_hidden": true}
from fractions import Fraction

from actmem.formulas.stages import capacity
from actmem.formulas.schedule import moving_window, recomputed_share
from actmem.formulas.states import state_rows
from actmem_course.figures import Fold
from actmem_course.others import paper

lines, again = [], {}
for name, model in PAPER_MODELS.items():
    n = model.global_batch_size // model.shape.micro_batch_size
    p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
    for rank in sorted({0, p - 1}):
        budget = paper.A100_BYTES - total(state_rows(model.shape, model.parallel, rank))
        count, flight = capacity(model.shape, model.parallel, budget, rank, n), in_flight(model.parallel, rank, n)
        kept = moving_window(show.schedule_of(p, m, n)[rank], count)
        again[name, rank, p] = share = 1 - Fraction(len(kept), n * m)
        assert m > 1 or share == recomputed_share(count, flight, n)  # 1F1B needs no schedule
        lines.append(
            f"{name}, rank {rank}: {count} of {flight} passes in flight fit in {size_text(budget)}; "
            f"{n * m - len(kept)} of the step's {n * m} recompute, {float(share):.0%}"
        )
piped = {(name, rank): share for (name, rank, p), share in again.items() if p > 1}
first, last = ([share for (_, rank), share in piped.items() if (rank == 0) == is_first] for is_first in (True, False))
alone = [f"{name}, which has no pipeline, recomputes {float(share):.0%}" for (name, _, p), share in again.items() if p == 1]
Fold(
    f"In a pipeline, last ranks recompute {float(max(last)):.0%} of their passes, and rank 0 recomputes "
    f"{float(min(first)):.0%} to {float(max(first)):.0%}. {', '.join(alone)}.",
    "\n".join(lines),
)

# %% [markdown]
# > **Why do this?** You recompute only what doesn't fit. **Why not?** Each rank needs a plan of its own, and the
# > slowest one still sets the pace.
#
# **Now write it:** [exercise 5.4](../labs/lab5_pipeline.py), `how_many_fit`:
# `python my/labs/lab5_pipeline.py --only 5.4`.

# %% [markdown]
# ## What a rank sends
#
# Which parallelism goes on which links? Compare what one of GPT-3's GPUs sends, laid out as in the paper's table 3:

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import layer_collectives, wire_bytes
from actmem_course.predicted.pipeline_sends import pipeline_sends

model = PAPER_MODELS["175B"]
shape, parallel, count = model.shape, model.parallel, model.global_batch_size // model.shape.micro_batch_size
layers = shape.num_layers // parallel.pipeline_parallel_size
in_layers = count * layers * wire_bytes(layer_collectives(shape, parallel, "selective"))
print(
    f"Rank 1, one iteration: {size_text(wire_bytes(pipeline_sends(shape, parallel, count, 1)))} to other stages, "
    f"{size_text(in_layers)} to the {parallel.tensor_parallel_size - 1} GPUs that share its layers"
)

# %% [markdown]
# So tensor parallelism stays on the fast links inside a machine, and stages go on different machines.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# You train GPT-3 (96 layers) with $p$ = 16 and 64 microbatches. How much of a step is idle under 1F1B, and how many
# layers' saved tensors do ranks 0 and 15 hold? What changes with three chunks per rank?

# %% jupyter={"source_hidden": true}
from actmem_course.figures import worked

p, n, m = 16, 64, 3
idle_share = lambda chunks: Fraction(p - 1, n * chunks) / (1 + Fraction(p - 1, n * chunks))
held_by = lambda rank, chunks: (
    in_flight(show.with_pipeline(SHARDED, p, chunks), rank, n) * GPT3.num_layers // (p * chunks)
)
worked(
    f"1F1B: forward and backward of one microbatch pass {p} ranks, so {p - 1} of {n + p - 1} slots "
    f"are idle: {float(idle_share(1)):.0%}.",
    f"Rank 0 has {p} microbatches in flight through {GPT3.num_layers // p} layers: those of {held_by(0, 1)} "
    f"layers. Rank {p - 1} has one: {held_by(p - 1, 1)}.",
    f"{m} chunks divide the idle slots by {m}: {float(idle_share(m)):.0%}. Rank 0 then holds "
    f"those of {held_by(0, m)} layers, 1 + {p - 1}/{p * m} times as much, and rank {p - 1} "
    f"{held_by(p - 1, m)}.",
)

# %% [markdown]
# ## Question
#
# <details><summary>Why do the logits count once, and not for every microbatch in flight?</summary>
#
# Only the last rank has them, and it runs a microbatch's backward pass right after its forward pass.
# </details>
#
# ## What people get wrong here
#
# - **"All ranks need the same memory."** Under 1F1B rank $i$'s layers need $(p - i)/p$ of rank 0's, and the last rank
#   adds the logits.
#
# > **Take away**
# >
# > 1. Under 1F1B rank 0 holds the saved tensors of $L$ layers, whatever $p$ is.
# > 2. Interleaving divides the idle *time* by $m$ (the bubble becomes $(p-1)/(nm+p-1)$), and multiplies rank
# >    0's bytes by $1 + (p-1)/(pm)$.
# > 3. Free outputs once they are sent, and recompute only the microbatches that don't fit.
# >
# > **At work tomorrow:** look up your job's $p$, $m$ and $n$. Compute its bubble, and
# > compare the peak memory of its first and last stage.
#
# **Lab:** [lab 5](../labs/lab5_pipeline.py), `python my/labs/lab5_pipeline.py`. **Sources:** 2205.05198 sections
# 4.2.3 and 4.3, appendices B and C · Narayanan et al., 2104.04473 · `src/actmem/formulas/schedule.py`.
#
# **Now fit your model.** Plan with `--pipeline 4 --gpus 32`, then `--pipeline 16 --gpus 128`: one replica both times.
# Compare the most loaded rank's weights and activations, and the bubble:
#
# ```
# actmem plan 175B --memory 141 --global-batch 64 --tensor 8 --chunks 3 \
#   --micro-batch-size 1 --recompute selective --pipeline 4 --gpus 32
# ```
#
# **Next:** [chapter 7](07_time.ipynb), what all this costs in seconds.
