# %% [markdown]
# # 3 · Tensor parallelism
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# Eight GPUs share one layer of GPT-3, and each does an eighth of its matmuls. **How much does each save for
# backward: an eighth of the layer's activations, or more?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem.formulas.activations import eq1, eq2
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Progress, Reveal, choice, size_text, steps, worked,
)
from actmem_course.figures import ch03_tensor_parallelism as show
from actmem_course.figures.layer_picture import layer_picture

GPT3 = PAPER_MODELS["175B"].shape
checks = Checks()
t = PAPER_MODELS["175B"].parallel.tensor_parallel_size
question = Prediction(
    f"On one GPU a layer of GPT-3 saves {size_text(eq1(GPT3))} for backward. If two GPUs share the layer by tensor "
    f"parallelism, each saves {size_text(eq2(GPT3, 2))}. How much does each of {t} GPUs save?",
    eq2(GPT3, t) / 2**20,
    "MiB",
    "That is more than an even share, because "
    f"{size_text(10 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size)} are there in full on every GPU.",
    GuessLine(axis="y"),
)
Reveal(
    question,
    Panel(lambda t: show.floor_lines(GPT3, t), t=steps("t", "ranks", show.sizes_of_t(GPT3), 2)),
    t=t,
)

# %% [markdown]
# **You need** chapter 2 and its letters: $s$ tokens, $b$ sequences, $h$ the hidden size, $a$ heads.
#
# A **rank** is one process with one GPU. A tensor is **replicated** if every rank holds all of it, **sharded** if
# each holds a part (its shard), and **partial** if each holds one full-size term of a sum that isn't added up yet.
# GPT-3 has $t = 8$; most pictures show 4 ranks.

# %% [markdown]
# ## Columns, then rows
#
# The MLP is two matmuls with a GeLU between them: $Z = \mathrm{GeLU}(XA)\,B$. You can shard a matmul $XA$ over two
# ranks in two ways:
#
# * **by columns**, $A = [A_1\; A_2]$: then $XA = [XA_1\; XA_2]$. Each rank needs all of $X$ and gets finished
#   *columns* of the result.
# * **by rows**, $A = \begin{bmatrix}A_1\\A_2\end{bmatrix}$ and $X = [X_1\; X_2]$: then $XA = X_1A_1 + X_2A_2$. Each
#   rank needs only its columns of $X$ and gets a *partial* result.
#
# Which comes first? GeLU decides. It acts on each element alone, so a rank can apply it to its finished columns. But it
# isn't linear:
#
# $$\mathrm{GeLU}(U + V) \ne \mathrm{GeLU}(U) + \mathrm{GeLU}(V)$$
#
# So nobody can apply it to a partial sum. Shard the first matmul by columns and the second by rows, and the ranks add
# up once, at the end.
#
# Try it with four "ranks" in one process:

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
ranks = 4
sizes = ((6, 8), (8, 32), (32, 8))
X, A, B = (torch.randn(*size, dtype=torch.float64) for size in sizes)
Z = F.gelu(X @ A) @ B


def shards(whole, dim):
    return whole.chunk(ranks, dim)


columns = [F.gelu(X @ A_i) @ B_i for A_i, B_i in zip(shards(A, 1), shards(B, 0))]
rows = [F.gelu(X_i @ A_i) for X_i, A_i in zip(shards(X, 1), shards(A, 0))]

tried = {
    "columns, then rows, summed at the end": sum(columns),
    "one rank's term alone": columns[0],
    "rows first, GeLU before the sum": sum(rows) @ B,
}
for name, result in tried.items():
    print(f"{name}: {'equal' if torch.allclose(result, Z) else 'wrong'}")

# %% [markdown]
# Rank 0's shards are filled: weights pink, saved tensors blue. A tensor marked *all* is replicated, a hatched one
# partial. GeLU's input is counted, not drawn. Switch the order: GeLU must wait for a **collective**, an exchange
# among all ranks, and its input and output, $16\,sbh$ bytes, become replicated.

# %%
Panel(
    lambda t, order: show.mlp_shards(t, order),
    t=steps("t", "ranks", (2, 4, 8), 4),
    order=choice("shard by", show.ORDERS, show.COLUMNS_FIRST),
)

# %% [markdown]
# ## f and f̄
#
# A layer has two blocks, attention and MLP. The paper puts an operator at each end of a block: $f$ at its input,
# $\bar f$ at its output. Each is an autograd function: one thing in the forward pass, another in the backward pass.
# One of the two is an **all-reduce**: add up what all ranks hold, and give every rank the sum. On two ranks:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.operators import operators

LiveFigure(operators(("f", "f̄"), GPT3))

# %% [markdown]
# The two are **conjugate**: the backward pass of one is the forward pass of the other. $\bar f$ takes the sum that
# you saw above. $f$ is its mirror image: every rank used all of $X$ for its own columns, so the gradient of $X$ is a
# sum of $t$ terms, $dX = \sum_i dY_i A_i^\top$. Forget that sum and nothing crashes, but each rank trains on a wrong
# gradient of its own:

# %%
dY = torch.randn(6, 32, dtype=torch.float64)
dX = dY @ A.T
terms = [dY_i @ A_i.T for dY_i, A_i in zip(shards(dY, 1), shards(A, 1))]
tried = {"rank 0's own term": terms[0], "sum of all terms": sum(terms)}
for name, result in tried.items():
    print(f"{name}: {'equal' if torch.allclose(result, dX) else 'wrong'}")

# %% [markdown]
# **Now write it:** [exercises 2.1 to 2.4 and 2.6](../labs/lab2_tensor_parallel.py), `f`, `f_bar`, both linears and
# the MLP:
# `python my/labs/lab2_tensor_parallel.py --only 2.1,2.2,2.3,2.4,2.6`.

# %% [markdown]
# ## Attention: whole heads
#
# Attention follows the same plan: the projection to Q, K and V is column-parallel, the output projection
# row-parallel. Between them each head works alone. One trap: a rank must get the Q, K and V of the *same* heads. One
# matmul computes all three. Its weight has $3h$ rows (torch stores one row per output), and each rank gets a $t$-th
# of them. So the *order of the rows* decides:

# %%
heads = range(8)
row_orders = {
    "head by head": [f"{kind}{head}" for head in heads for kind in "QKV"],
    "all Q, then all K, then all V": [f"{kind}{head}" for kind in "QKV" for head in heads],
}
for order, blocks in row_orders.items():
    each = len(blocks) // ranks
    print(f"{order}:")
    for rank in range(ranks):
        print(f"  rank {rank} has {' '.join(blocks[rank * each : (rank + 1) * each])}")

# %% [markdown]
# In the second order no rank has Q, K and V of any head. Load a checkpoint of that order, and nothing fails: the
# layer computes nonsense. Whole heads are also why $t$ must divide $a$.
#
# **Now write it:** [exercises 2.5 and 2.7](../labs/lab2_tensor_parallel.py), `split_attention` and `attention`: `python
# my/labs/lab2_tensor_parallel.py --only 2.5,2.7`.

# %% [markdown]
# ## What divides and what does not
#
# Layer norms, dropouts and residual additions are between the blocks. There every rank has the whole output of
# $\bar f$, so all repeat the same work and save the same six tensors.

# %%
Panel(
    lambda t, phase: layer_picture(GPT3, am.Parallel(t), collectives=phase),
    t=steps("t", "ranks", (1, 2, 4, 8), 4),
    phase=choice("collectives of the pass", ("forward", "backward"), "forward"),
)

# %% [markdown]
# Look for *a copy on every rank*: the inputs of both layer norms ($4\,sbh$ bytes), the inputs of QKV and $h \to 4h$,
# which $f$ passes on whole ($4\,sbh$), two dropout masks ($2\,sbh$). Together that's $10\,sbh$, whatever $t$ is: the
# **replicated part**. The other 24 of the layer's $34\,sbh$ are divided, and so is the core
# attention. This is the paper's equation 2:
#
# $$sbh\left(10 + \frac{24}{t} + \frac{5as}{ht}\right)$$
#
# *Sent* in the figure: to all-reduce $2sbh$ bytes, each rank sends $2(t-1)/t$ times as many (chapter 4 shows why).

# %% jupyter={"source_hidden": true}
from actmem.rows import total

parts = {size: [total(rows) for rows in show.divided_and_whole(GPT3, size)] for size in show.sizes_of_t(GPT3)}
checks.add(
    f"bytes of a layer on one rank, t from {min(parts)} to {max(parts)}",
    [(sum(each), eq2(GPT3, size)) for size, each in parts.items()],
    sides=("divided + replicated part", "equation 2"),
)
checks.show()

# %% [markdown]
# > **Why do this?** Each rank holds a $t$-th of the weights and does a $t$-th of the matmuls, for one collective per
# > block and pass. **Why not?** The matmuls wait for that collective, and it carries a whole tensor. So the ranks
# > should share NVLink: the 8 GPUs of most machines, or the 72 of an NVL72 rack. And doubling $t$ never halves the
# > memory: the replicated part stays.
#
# ## The loss, sharded
#
# The output layer is sharded by columns too: each rank has the logits $z_v$ of its part of the vocabulary. With the
# target $y$, a token's loss is
#
# $$m + \log \sum_v e^{z_v - m} - z_y, \qquad m = \max_v z_v.$$
#
# So three numbers per token are all-reduced: the maximum, the sum, and $z_y$, which one rank has. The gradient,
# softmax less 1 at the target, needs no further all-reduce.
#
# **Now write it:** [exercise 2.8](../labs/lab2_tensor_parallel.py), `vocab_parallel_cross_entropy`: `python
# my/labs/lab2_tensor_parallel.py --only 2.8`.
#
# ## Measured: one rank of eight
#
# Run one of GPT-3's eight ranks, and compare what autograd saves with the formula, term by term (with the layer
# norms' statistics, which the paper leaves out). In `am.emulated_rank(t)` your process acts as rank 0 of $t$, on
# tensors with shapes and no data. A collective is counted, and its result has the right shape. Q, K and V should have
# $a/t$ heads; K is transposed, as it enters $QK^\top$.

# %%
from actmem.formulas.activations import layer_extra_rows
from actmem.ledger.measure_layer import layer_input, rows_by_term, term_name

with am.emulated_rank(t):
    tp = am.tensor_parallel()
    layer = am.TransformerLayer(GPT3, tp, device="cpu", dtype=torch.bfloat16)
    with am.record(layer) as ledger:
        y = layer(layer_input(GPT3, tp, "cpu", torch.bfloat16))

shared = am.Parallel(t)
predicted = am.layer_rows(GPT3, shared) + layer_extra_rows(GPT3, shared)
counted = rows_by_term(ledger.saved)
checks.add_rows(f"GPT-3's layer, one of {t} ranks", predicted, counted)

saved = {term_name(tensor): list(tensor.shape) for tensor in ledger.saved}
heads, length, size = GPT3.num_attention_heads // t, GPT3.seq_length, GPT3.head_size
shapes = {
    "Q": [heads, length, size],
    "K": [heads, size, length],
    "V": [heads, length, size],
}
pairs = [(shape, saved[term]) for term, shape in shapes.items()]
checks.add("shapes of Q, K and V", pairs, "")
checks.show()

# %% [markdown]
# ## Counted: the collectives
#
# Two blocks, each with an $f$ and an $\bar f$. How many all-reduces do you expect in each pass?

# %%
from actmem.formulas.communication import layer_collectives
from actmem.ledger.comms import count_collectives

with am.emulated_rank(t):
    tp = am.tensor_parallel()
    layer = am.TransformerLayer(GPT3, tp, device="cpu", dtype=torch.bfloat16)
    with count_collectives() as forward:
        y = layer(layer_input(GPT3, tp, "cpu", torch.bfloat16))
    with count_collectives() as backward:
        y.sum().backward()
collectives = layer_collectives(GPT3, shared)
for phase, seen in (("forward", forward), ("backward", backward)):
    expected = sum(each.count for each in collectives if each.phase == phase)
    counted = seen.counts["all-reduce"]
    checks.add(f"all-reduces in the {phase} pass", [(expected, counted)], "")
whole = 2 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size
one = forward.collectives[0].payload_bytes
checks.add("one all-reduce carries the whole [s, b, h] tensor", [(whole, one)])
checks.show()

# %% [markdown]
# ## Two real processes: the same numbers as one GPU
#
# `torchrun` starts two processes, $t = 2$. They compare the output and every gradient, in float64, with an unsharded
# layer that has the same weights.

# %% jupyter={"source_hidden": true}
from actmem_course import launch

with Progress("labs/measure_parity.py, two processes"):
    results = launch.results("measure_parity.py", "--seq-length", 64, processes=2)
ran = [result for result in results if result["form"] == "tensor"]
checks.add(
    "on both ranks, output and all gradients are within 1e-12 of the unsharded layer's",
    [(result["exact"], True) for result in ran],
    "",
)
for phase in ("forward", "backward"):
    counted = [(2, result[phase]["all-reduce"]) for result in ran]
    checks.add(f"all-reduces of rank 0 and of rank 1, {phase} pass", counted, "")
checks.show()

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# You go from 8 to 16 ranks with GPT-3. How much less does each rank save for a layer, and what is the total over all
# ranks? ($sbh$ bytes are 24 MiB here, and $5as/h$ is 80.)

# %% jupyter={"source_hidden": true}
sbh = GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size
each = {ranks: eq2(GPT3, ranks) for ranks in (8, 16)}
worked(
    *(
        f"t = {ranks}: {sbh >> 20} MiB · (10 + 24/{ranks} + 80/{ranks}) = {size_text(size)} on each "
        f"rank, {size_text(ranks * size)} on all."
        for ranks, size in each.items()
    ),
    f"Each rank saves {1 - each[16] / each[8]:.0%} less, not half. The total over all ranks is "
    f"{16 * each[16] / eq1(GPT3):.1f} times the layer ({size_text(eq1(GPT3))}), because the replicated part is "
    "there 16 times.",
)

# %% [markdown]
# ## Questions
#
# **1.** Two of the replicated tensors are inputs of column-parallel matmuls. Each rank has a shard of the weight. Why
# doesn't it save a shard of the input?
#
# <details><summary>Answer</summary>
#
# The weight's gradient is $X^\top dY_i$: each rank has its columns of $dY$ but needs *all* of $X$. Chapter 4 saves a
# shard and gathers the rest in the backward pass.
# </details>
#
# **2.** After the attention block every rank draws a dropout mask for its own copy. What if the masks differed?
#
# <details><summary>Answer</summary>
#
# The ranks would compute with different inputs, and $f$ would add gradients of different functions. So they need one
# common random stream for replicated tensors, and separate streams for sharded ones (`actmem/parallel/rng.py`).
# </details>
#
# ## What people get wrong here
#
# * **"Tensor parallelism divides activations by t."** All but the replicated part, $10\,sbh$.
# * **"torch's weights are A."** torch stores $A^\top$: a *column*-parallel weight is sharded along dimension **0**, a
#   row-parallel one along dimension 1. With a square weight, no shape tells you that you mixed them up.
#
# > **Take away**
# > 1. Shard the first matmul by columns and the second by rows: one all-reduce per block and pass.
# > 2. $f$ and $\bar f$ are conjugate: identity one way, all-reduce the other.
# > 3. $10\,sbh$ stay on every rank, whatever $t$ is.
# >
# > **At work tomorrow:** find your job's tensor-parallel size and check that each group sits within one machine. Then
# > compare one of 4 ranks with one of 8, `python labs/measure_table2.py --emulate 4 --model 22B` and `--emulate 8`:
# > the line *tensor* does not halve.
#
# **The lab:** [lab 2](../labs/lab2_tensor_parallel.py). Next, [chapter 4](04_sequence_parallelism.ipynb): the
# replicated part goes away.
#
# **Sources.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.1, figure 4,
# equation 2. Sharding MLP and attention this way is from Shoeybi et al., *Megatron-LM*, [arXiv
# 1909.08053](https://arxiv.org/abs/1909.08053).
