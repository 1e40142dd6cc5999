# %% [markdown]
# # 4 · Sequence parallelism
#
# Tensor parallelism leaves six tensors whole on every rank. Can they be divided too, without sending more?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem.formulas.activations import eq2, eq4
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Progress, Reveal, bar_chart, choice, play, size_text,
    steps, worked,
)
from actmem_course.figures import ch04_sequence_parallelism as show

GPT3 = PAPER_MODELS["175B"].shape
t = PAPER_MODELS["175B"].parallel.tensor_parallel_size
checks = Checks()

question = Prediction(
    f"With tensor parallelism each of {t} ranks keeps {size_text(eq2(GPT3, t))} of one layer of the 175B model. "
    "How much does it keep with sequence parallelism as well?",
    eq4(GPT3, t) / 2**20,
    "MiB",
    "All 15 tensors are divided now, so it is the whole layer over t.",
    GuessLine(figure=1),
)
by_mode = lambda t, mode: {
    name: size / 2**20
    for name, size in ((show.TENSOR, eq2(GPT3, t)), (show.SEQUENCE, eq4(GPT3, t)))
    if name in (show.TENSOR, mode)
}
Reveal(
    question,
    Panel(
        lambda t, mode: (
            show.rank_parts(GPT3, t, mode),
            bar_chart(f"The same in bars, {t} ranks", {"": by_mode(t, mode)}, "one layer on one rank", "MiB"),
        ),
        t=steps("t", "ranks", (2, 4, 8), 8),
        mode=choice("mode", show.MODES, show.TENSOR),
    ),
    mode=show.SEQUENCE,
)

# %% [markdown]
# **In this chapter** the floor of chapter 3 goes away: the layer norms and dropouts that every rank computed in full are
# cut along the sequence. You take an all-reduce apart on a ring, find the bytes (nearly $4\,sbh$) that obvious code keeps by accident, and
# check what "no extra communication" means. About 50 minutes.
#
# **What you need:** chapter 3: $f$ and $\bar f$, replicated, cut and partial tensors, the floor of ten.
#
# In other papers "sequence parallelism" means that attention itself is cut along $s$ (ring attention, context parallelism,
# Ulysses; [chapter 13](13_experts.ipynb) measures two of them). Here attention is cut by heads as before, and only what lies
# *between* the blocks is cut along $s$.

# %% [markdown]
# ## Between the blocks, tokens are independent
#
# A layer norm takes the mean and variance of one token, over $h$. Dropout, a residual addition and a bias act on one
# element. None of them reads another token; only attention does. So each rank can do this work for $s/t$ tokens alone:

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
ranks = 4
x = torch.randn(16, 2, 8, dtype=torch.float64)  # [s, b, h]


def same(operation, dim):
    """Cut, apply to each part, concatenate: does that equal the operation on the whole?"""
    return torch.allclose(torch.cat([operation(part) for part in x.chunk(ranks, dim)], dim), operation(x))


tried = {
    "layer norm, cut along s": same(lambda part: F.layer_norm(part, part.shape[-1:]), 0),
    "layer norm, cut along h": same(lambda part: F.layer_norm(part, part.shape[-1:]), 2),
    "softmax over s, cut along s": same(lambda part: part.softmax(0), 0),
}
print("; ".join(f"{name}: {'the same' if equal else 'not the same'}" for name, equal in tried.items()))

# %% [markdown]
# ## The ranks, before and after
#
# In the figure at the top a frame is a whole tensor; the filled part is what that rank holds of it: a part along $s$ is a
# horizontal slice, a part along $h$ (or some of the heads) a vertical one. Switch the mode.
#
# Nothing inside the two blocks has changed. The six whole tensors have become slices, and two new operations are at
# the blocks' edges. An **all-gather** puts all ranks' slices together on every rank. A **reduce-scatter** adds up what all
# ranks have, as an all-reduce does, and leaves each rank one slice of the sum:
#
# | | where | forward | backward |
# |---|---|---|---|
# | $g$ | into the block | all-gather along $s$ | reduce-scatter along $s$ |
# | $\bar g$ | out of the block | reduce-scatter along $s$ | all-gather along $s$ |
#
# $g$ forward: the block's first product needs all tokens. $\bar g$ forward: the block's last product leaves a partial sum
# on every rank, and each rank gets the sum for its own tokens only. The backward of each is the forward of the other: every
# rank used all of $X$, so $dX$ is a sum of $t$ terms, as for $f$, and each rank needs only its own tokens of it.
#
# The dropouts between the blocks had to draw the same mask on every rank (chapter 3). Now each rank has tokens of its own, so
# the masks must *differ*, or every stretch of $s/t$ tokens gets the same pattern: `between_blocks` in
# `actmem/layers/transformer.py` draws from the stream that differs from rank to rank.
#
# So $t$ divides every term of equation 2 (equation 4):
#
# $$sbh\left(\frac{10}{t} + \frac{24}{t} + \frac{5as}{ht}\right) = \frac{sbh}{t}\left(34 + \frac{5as}{h}\right)$$
#
# In Megatron-LM you find all this under other names:
#
# | here | Megatron-LM |
# |---|---|
# | $f$, $\bar f$ | `copy_to_tensor_model_parallel_region`, `reduce_from_tensor_model_parallel_region` |
# | $g$, $\bar g$ | `gather_from_sequence_parallel_region`, `reduce_scatter_to_sequence_parallel_region` |
# | the cut along $s$ | `--sequence-parallel` |
# | the sums at this chapter's end | `finalize_model_grads`, for parameters with the attribute `sequence_parallel` |
# | recomputing the core (chapter 5) | `--recompute-granularity selective --recompute-modules core_attn` |
#
# ## An all-reduce, taken apart
#
# A reduce-scatter and an all-gather have replaced one all-reduce. Is that twice the communication? Look at how a ring of
# ranks adds up a tensor. The tensor is cut into $t$ chunks. In each step every rank sends one chunk to its neighbour. A box
# shows how many of the $t$ terms its sum has; an arrow shows who has just sent to whom. Play it. It begins with $\bar f$, whose forward is an all-reduce. Choose another operator; after its forward comes its backward:

# %%
payload = 2 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size
Panel(
    lambda operator, t, step: show.operator_ring(operator, t, step, payload),
    operator=choice("operator", tuple(show.FORWARD_EXCHANGE), "f̄"),
    t=steps("t", "ranks", show.RANKS, 4),
    step=play("step", "forward, then backward", lambda operator, t: show.steps_of_operator(operator, t), 2),
)

# %% [markdown]
# Go back to $\bar f$ and stop halfway, after $t - 1$ steps (step 3 with 4 ranks). Every rank has *one* finished chunk: that is
# a reduce-scatter, $\bar g$. An all-reduce goes on and passes the finished chunks around: an all-gather, $g$. Sequence
# parallelism runs dropout and layer norm between the two halves.
# In each half every rank sends $\frac{t-1}{t}$ of the tensor. So the two halves together send exactly what one all-reduce does.

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import Exchange
from actmem_course.others.ring import ring

sent = {
    kind: ring(kind, t, payload)[-1].sent_bytes for kind in ("all-reduce", "reduce-scatter", "all-gather")
}
checks.add(
    "sent on a ring",
    [(Exchange(kind, "forward", "", t, payload).wire_bytes, size) for kind, size in sent.items()],
    sides=("by formula", "step by step"),
)
checks.add(
    "sent by each rank",
    [(sent["reduce-scatter"] + sent["all-gather"], sent["all-reduce"])],
    sides=("two halves", "one all-reduce"),
)
checks.show()

# %% [markdown]
# **Now write it:** [exercises 3.1, 3.2 and 3.7](../labs/lab3_sequence_parallel.py), `g`, `g_bar` and `dropout_generators`:
# `python my/labs/lab3_sequence_parallel.py --only 3.1,3.2,3.7`.

# %% [markdown]
# ## What plain autograd keeps
#
# Now write it the obvious way: `y = F.linear(g(x), weight)`. The output is right, and so are all gradients. Run one rank of
# the real layer like this, and compare what the ledger counts with equation 4:

# %%
from actmem.formulas.activations import gathered_input_bytes, layer_extra_rows
from actmem.ledger.comms import count_collectives
from actmem.ledger.layer_rows import layer_rows_of
from actmem.ledger.layer_rows import layer_input
from actmem.rows import total


def kept_by(**options):
    """Rows of one layer of the 175B model on one of t ranks, and the exchanges of forward and backward."""
    with am.emulated_rank(t):
        tp = am.tensor_parallel(**options)
        layer = am.TransformerLayer(GPT3, tp, device="cpu", dtype=torch.bfloat16)
        rows = layer_rows_of(layer, layer_input(GPT3, tp, "cpu", torch.bfloat16))
        with count_collectives() as seen:
            layer(layer_input(GPT3, tp, "cpu", torch.bfloat16)).sum().backward()
    return rows, seen


both = am.Parallel(t, sequence_parallel=True)
predicted = am.layer_rows(GPT3, both) + layer_extra_rows(GPT3, both)
plain_rows, plain_seen = kept_by(sequence_parallel=True, keep_gathered_input=True)
checks.add(
    "kept too much by the plain form: 4sbh(1 − 1/t)",
    [(gathered_input_bytes(GPT3, t), total(plain_rows) - total(predicted))],
)
checks.show()

# %% [markdown]
# Two tensors are $t$ times too large: the inputs of the two column-parallel products. The weight's gradient reads the
# product's input. That is the *gathered* tensor, so autograd keeps it. No output or gradient is wrong, so no test of them
# notices; only memory shows it. Equation 4's $34/t$ has become $4 + 30/t$:

# %%
Panel(lambda t: show.gathered_lines(GPT3, t), t=steps("t", "ranks", show.sizes_of_t(GPT3), 8))

# %% [markdown]
# **The cure** is one autograd function that gathers and multiplies, keeps only the shard, and gathers *again* in backward
# (`_ColumnParallel` in `actmem/parallel/linear.py`). That gather need not cost time: the gradient of the input,
# $dY\, A^\top$, does not need $X$, so the two overlap.

# %%
shard_rows, shard_seen = kept_by(sequence_parallel=True)
checks.add_rows(f"one of {t} ranks, which keep their shards", predicted, shard_rows)
checks.show()

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import counts, layer_exchanges, wire_bytes

tensor_rows, tensor_seen = kept_by()
forms = (
    ("tensor", tensor_rows, tensor_seen, layer_exchanges(GPT3, am.Parallel(t))),
    ("+ sequence, plain", plain_rows, plain_seen, layer_exchanges(GPT3, both, keep_gathered_input=True)),
    ("+ sequence, paper", shard_rows, shard_seen, layer_exchanges(GPT3, both)),
)
sizes, pairs = {"sent": {}, "kept": {}}, []
for name, rows, seen, exchanges in forms:
    pairs += [(counts(exchanges).get(kind, 0), count) for kind, count in seen.counts.items()]
    bar = f"{name}: {sum(seen.counts.values())} exchanges"
    sizes["sent"][bar], sizes["kept"][bar] = wire_bytes(exchanges) / 2**20, total(rows) / 2**20
checks.add("exchanges of a layer in three forms, by kind", pairs, "exchanges")
display(checks.show())
LiveFigure(
    bar_chart(
        "Keeping the shard: least memory, two more all-gathers",
        sizes,
        "one rank of eight, one GPT-3 layer",
        "MiB",
        beside=True,
    )
)

# %% [markdown]
# The exchanges are counted on the running layer; the bytes sent are those of a ring.
#
# * The $4 + 4$ exchanges send the **same bytes**, as the paper says. Keeping only the shard adds two gathers in backward, so
#   the layer sends a quarter more. They run while a matrix product runs, so they cost time only where the link is
#   slower than the product. On a GPU they also take some of its SMs, and must be launched before the product: before
#   Blackwell, Megatron wants `CUDA_DEVICE_MAX_CONNECTIONS=1` for that.
# * **Same bytes is not same time.** There are more exchanges, and each has its own start-up cost. On a ring the number of
#   steps is the same: $2(t-1) = (t-1) + (t-1)$. But NCCL has more than rings: between machines it adds up *small* tensors
#   along a tree, in about $2\log_2 t$ steps, and within one machine the NVSwitch can add them (NVLS). In return, layer norm
#   and dropout now run on $s/t$ tokens.
#
# A model shows it. Its three numbers are assumptions; put in your own: 8 µs to start, 1 µs a step of the ring, 300 GB/s.

# %% jupyter={"source_hidden": true}
from actmem_course.others.ring import ring_steps

start_seconds, hop_seconds, bytes_per_second = 8e-6, 1e-6, 300e9


def seconds(exchanges):
    starts = sum(exchange.count for exchange in exchanges)
    return (
        starts * start_seconds
        + ring_steps(exchanges) * hop_seconds
        + wire_bytes(exchanges) / bytes_per_second
    )


times = {"4 all-reduces": {}, "4 + 4 halves": {}, "two more gathers, nothing hidden": {}}
for length in (128, 8192):
    shape = GPT3.with_sizes(seq_length=length)
    whole = seconds(layer_exchanges(shape, am.Parallel(t)))
    halves = seconds(layer_exchanges(shape, both, keep_gathered_input=True))
    gathered = seconds(layer_exchanges(shape, both))
    bar = f"s = {length:,}: {halves / whole - 1:+.1%}, {gathered / whole - 1:+.0%}"
    for name, each in zip(times, (whole, halves, gathered)):
        times[name][bar] = 1e6 * each

# %%
LiveFigure(
    bar_chart(
        "With large tensors two halves cost hardly more than one all-reduce;<br>two more gathers do, "
        "if nothing hides them",
        times,
        "exchanges of one layer",
        "µs",
        beside=True,
    )
)

# %% [markdown]
# **Now write it:** [exercises 3.3, 3.4 and 3.5](../labs/lab3_sequence_parallel.py), `gathering_linear`, `layer` and
# `shard_keeping_linear`: `python my/labs/lab3_sequence_parallel.py --only 3.3,3.4,3.5`.

# %% [markdown]
# ## The same bytes, on the wire
#
# So far the bytes sent were computed. But processes on CPUs communicate over TCP, and Linux counts what each connection has
# sent. The bars predict it for two ranks; two real processes are compared.

# %% jupyter={"source_hidden": true}
from actmem.config import TINY
from actmem_course.others.ring import gloo_header_bytes

TINY_BYTES = 4 * TINY.seq_length * TINY.micro_batch_size * TINY.hidden_size  # float32
predicted = {
    kind: [Exchange(kind, "forward", "", 2, TINY_BYTES)]
    for kind in ("all-reduce", "all-gather", "reduce-scatter")
}
predicted["layer, tensor"] = layer_exchanges(TINY, am.Parallel(2), element_size=4)
predicted["layer, tensor+sequence"] = layer_exchanges(TINY, am.Parallel(2, True), element_size=4)
predicted["layer, tensor+sequence, plain"] = layer_exchanges(
    TINY, am.Parallel(2, True), element_size=4, keep_gathered_input=True
)
on_wire = {
    "data": {name: 2 * wire_bytes(exchanges) for name, exchanges in predicted.items()},
    "headers": {name: 2 * sum(map(gloo_header_bytes, exchanges)) for name, exchanges in predicted.items()},
}
LiveFigure(
    bar_chart(
        "On the wire: two halves send what an all-reduce does", on_wire, "sent by both ranks, predicted"
    )
)

# %% jupyter={"source_hidden": true}
from actmem_course import launch

with Progress("labs/measure_communication.py, two processes"):
    results = launch.results("measure_communication.py", "--device", "cpu", "--rounds", 1, processes=2)
on_sockets = [r for r in results if "on_sockets" in r]
checks.add(
    "exchanges and layers, with headers",
    [(r["predicted_bytes"] + r["header_bytes"], r["sent_bytes"]) for r in on_sockets],
    sides=("predicted", "sent by the sockets"),
)
if not on_sockets:
    print("this system does not count what a socket sends (Linux does)")
checks.show()

# %% [markdown]
# <details><summary>What is on the wire, and why not on GPUs</summary>
#
# torch's backend for CPUs is gloo. It puts a header of 48 bytes on each of its messages, and the prediction counts these. For
# a reduce-scatter it runs an all-reduce and throws most of it away: the two halves would send *1.5 times as much*. The course's
# own reduce-scatter (`actmem/parallel/collectives.py`) sends each rank only what it keeps; on GPUs NCCL's does the same.
# But NCCL doesn't say what it sends, so these two processes run on the CPU even where there are GPUs.
# </details>
#
# ## Partial gradients
#
# One more exchange is needed, and it is easily forgotten. Every rank holds the parameters of the layer norms in full, and the
# biases after $\bar g$. With tensor parallelism alone each rank saw all tokens and computed the whole gradient of these. Now
# each rank sees $s/t$ tokens. Compare two real processes, in float64, with an uncut layer:

# %%
with Progress("labs/measure_parity.py, two processes"):
    results = launch.results("measure_parity.py", "--seq-length", 64, processes=2)
checks.add(
    "forms whose gradients all equal the uncut layer's once they are added up",
    [(r["exact"], True) for r in results],
    "",
)
partial = next(r["partial_gradients"] for r in results if r["form"] == "tensor+sequence")
print(f"{len(partial)} gradients differ until they are added up:", ", ".join(partial))
checks.show()

# %% [markdown]
# One all-reduce of all of them together, once per iteration (`reduce_partial_gradients`), completes them. It includes the
# position table and the final layer norm. All of it is less than a
# thousandth of what the layers send in an iteration.

# %% jupyter={"source_hidden": true}
from actmem_course.predicted.iteration import step_exchanges

model = PAPER_MODELS["175B"]
p, microbatches = model.parallel.pipeline_parallel_size, model.global_batch_size // GPT3.micro_batch_size
in_parts = [e for e in step_exchanges(GPT3, model.parallel) if e.where.startswith("gradients seen in parts")]
layers = GPT3.num_layers // p * microbatches * wire_bytes(layer_exchanges(GPT3, both))
checks.add(
    "of what the first stage's layers send in an iteration, this is under a thousandth",
    [(wire_bytes(in_parts) * 1000 < layers, True)],
    "",
)
checks.show()

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# What two real processes keep with sequence parallelism is in [chapter 5](05_recomputation.ipynb), in the bars that begin with
# *tensor+sequence*.
#
# **Now write it:** [exercise 3.6](../labs/lab3_sequence_parallel.py), `sum_partial_gradients`: `python
# my/labs/lab3_sequence_parallel.py --only 3.6`.

# %% [markdown]
# ## Work it out
#
# How long do the exchanges of one GPT-3 layer take, forward and backward, on 8 ranks whose links carry 300 GB/s each way?
# Count the exchanges, then the bytes that a rank sends: $(t-1)/t$ of a whole tensor of $2sbh$ bytes for each gather or
# scatter.

# %% jupyter={"source_hidden": true}
sent = layer_exchanges(GPT3, am.Parallel(t, True))
whole = 2 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size
number = sum(counts(sent).values())
worked(
    f"Exchanges: {', '.join(f'{count} × {kind}' for kind, count in counts(sent).items())}. That is 4 "
    "forward, 4 backward, and two more gathers in backward, for the two inputs of which each rank "
    "kept a shard.",
    f"Each sends {t - 1}/{t} of {size_text(whole)}: {size_text(wire_bytes(sent) // number)}. Together "
    f"{size_text(wire_bytes(sent))}.",
    f"At 300 GB/s: {1000 * wire_bytes(sent) / 300e9:.1f} ms a layer. Plain tensor parallelism's four "
    f"all-reduces send {size_text(wire_bytes(layer_exchanges(GPT3, am.Parallel(t))))}, which take "
    f"{1000 * wire_bytes(layer_exchanges(GPT3, am.Parallel(t))) / 300e9:.1f} ms.",
)

# %% [markdown]
# ## Questions
#
# **1.** How many bytes does sequence parallelism save on each rank, and why isn't it $2sbh$, as some texts say?
#
# <details><summary>Answer</summary>
#
# $10\,sbh\,(1 - 1/t)$: six tensors, $10\,sbh$ together, were replicated, and $t$ divides them now. $2sbh$ is one of them.
# </details>
#
# **2.** Which rule must $s$ satisfy, and what would you do with a batch of odd lengths?
#
# <details><summary>Answer</summary>
#
# $t$ must divide $s$, because every rank gets equal parts (`actmem.config.check_layer` refuses the rest). Pad to a multiple of
# $t$.
# </details>
#
# **3.** Could the column-parallel product run on each shard as it arrives, without ever holding the gathered tensor?
#
# <details><summary>Answer</summary>
#
# Yes: each of the ring's steps brings $s/t$ tokens, whose part of the product can be computed while the next ones are on
# their way. This hides the exchange, and can save the buffer. The paper does not do it; later systems do (Megatron's
# `--tp-comm-overlap`, with one shared buffer).
# </details>
#
# ## What people get wrong here
#
# * **"Sequence parallelism costs no communication."** The $4 + 4$ exchanges send the same bytes but start more often, and
#   keeping shards adds two gathers.
# * **"With SP everything but the attention core is divided."** The core is divided, too: by heads. The Ultra-Scale Playbook's
#   memory widget drops the $t$ under $5as^2b$ as soon as SP is ticked, and gets the largest term wrong.
# * **"An all-gather in front of the linear is all it takes."** For the output, yes. But autograd then keeps the gathered input.
# * **"The layer norm's weights are replicated, so their gradients are too."** They are partial until they are summed.
#   Without the sum every rank trains a layer norm of its own.
#
# ## The lab
#
# [Lab 3](../labs/lab3_sequence_parallel.py): write $g$, $\bar g$ and the layer under sequence parallelism, see that the plain
# form keeps $(30/t + 4)\,sbh$, and cure it: `python my/labs/lab3_sequence_parallel.py`.
#
# `torchrun --nproc-per-node 2 labs/measure_parity.py` has all three forms of this chapter, with their exchanges and their
# partial gradients. Remove `mark_partial_gradient` from `RowParallelLinear` and see that it notices.
#
# **Sources.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.2, figures 5 and 6,
# equations 3 and 4. The ring: Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009.
#
# ## Now fit your model
#
# The planner tries each layout with sequence parallelism (`+ SP`) and without. Which does it choose, and how much of a step do
# the exchanges take?
#
# ```
# actmem plan llama3-70b --gpus 64 --memory 80 --global-batch 512 --recompute none
# ```
#
# Next, [chapter 5](05_recomputation.ipynb): what is still there, and need not be kept at all.
