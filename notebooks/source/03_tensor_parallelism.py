# %% [markdown]
# # 3 · Tensor parallelism
#
# Give a layer to eight GPUs instead of one, and each computes an eighth of it. Does each also keep an eighth?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem.formulas.activations import eq1, eq2
from actmem_course.figures import (
    Checks, GuessLine, Panel, Prediction, Progress, Reveal, choice, size_text, steps, worked,
)
from actmem_course.figures import ch03_tensor_parallelism as show

GPT3 = PAPER_MODELS["175B"].shape
checks = Checks()
t = PAPER_MODELS["175B"].parallel.tensor_parallel_size
question = Prediction(
    f"One layer of the 175B model keeps {size_text(eq1(GPT3))} on one GPU. When two ranks share it, "
    f"each keeps {size_text(eq2(GPT3, 2))}. "
    f"How much does each of {t} ranks keep?",
    eq2(GPT3, t) / 2**20,
    "MiB",
    "That is more than an even share: the "
    f"{size_text(10 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size)} of the lower bar "
    "are whole on every rank.",
    GuessLine(2**20 / 2**30, axis="y"),
)
Reveal(
    question,
    Panel(
        lambda t: (show.floor_lines(GPT3, t), show.floor_bars(GPT3, t)),
        t=steps("t", "ranks", show.sizes_of_t(GPT3), 2),
    ),
    t=t,
)

# %% [markdown]
# **In this chapter** you cut one transformer layer into $t$ pieces that work in parallel. You see which exchanges (collectives)
# they need, check that they compute the same numbers, and find the part of the memory that no $t$ divides. About 35 minutes.
#
# **What you need:** chapter 2 (the 15 tensors that a layer keeps), and that a matrix product can be computed in blocks.
#
# A **rank** is one process with one GPU. A tensor is **replicated** if every rank holds all of it, **cut** (or sharded) if
# each holds a part, and **partial** if each holds one term, of full size, of a sum that is still to be taken.

# %% [markdown]
# ## Columns, then rows
#
# The MLP is two products with a GeLU between them: $Z = \mathrm{GeLU}(XA)\,B$. There are two ways to cut a product $XA$
# over two ranks:
#
# * **by columns**, $A = [A_1\; A_2]$: then $XA = [XA_1\; XA_2]$. Each rank needs all of $X$ and computes some *columns* of
#   the result, finished.
# * **by rows**, $A = \begin{bmatrix}A_1\\A_2\end{bmatrix}$ and $X = [X_1\; X_2]$: then $XA = X_1A_1 + X_2A_2$. Each rank
#   needs only its columns of $X$ and computes a *partial* result of full size.
#
# GeLU decides. It acts on each element alone, so each rank can apply it to its finished columns. But it is not linear, so
# no rank can apply it to a partial sum: $\mathrm{GeLU}(U + V) \ne \mathrm{GeLU}(U) + \mathrm{GeLU}(V)$. So cut the first
# product by columns and the second by rows. Then the ranks communicate only once, after the second product.
#
# Try it on numbers, all "ranks" in one process:

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
ranks = 4
X, A, B = (torch.randn(*sizes, dtype=torch.float64) for sizes in ((6, 8), (8, 32), (32, 8)))
Z = F.gelu(X @ A) @ B

columns = [F.gelu(X @ A_i) @ B_i for A_i, B_i in zip(A.chunk(ranks, dim=1), B.chunk(ranks, dim=0))]
rows = [F.gelu(X_i @ A_i) for X_i, A_i in zip(X.chunk(ranks, dim=1), A.chunk(ranks, dim=0))]

tried = {
    "columns, then rows, summed at the end": sum(columns),
    "one rank's term alone": columns[0],
    "rows first, GeLU before the sum": sum(rows) @ B,
}
print(
    "; ".join(f"{name}: {'equal' if torch.allclose(found, Z) else 'wrong'}" for name, found in tried.items())
)

# %%
Panel(
    lambda t, order: show.mlp_cut(t, order),
    t=steps("t", "ranks", (2, 4, 8), 4),
    order=choice("cut by", show.ORDERS, show.COLUMNS_FIRST),
)

# %% [markdown]
# Try the other order. It needs a second exchange and more memory: GeLU needs whole sums, so its input and its output,
# $16\,sbh$ bytes, are on every rank.
#
# ## f and f̄
#
# What happens at the two ends of such a block? An **all-reduce** adds up what all ranks have, and gives every rank the whole
# sum. The paper names two operations, $f$ and $\bar f$. Each does one thing forward and another backward
# (`actmem/parallel/conjugates.py` has them on one screen):
#
# | | where | forward | backward |
# |---|---|---|---|
# | $f$ | into the block | nothing | all-reduce |
# | $\bar f$ | out of the block | all-reduce | nothing |
#
# $\bar f$ forward is the sum from above. $f$ backward is its mirror image: every rank used all of $X$ for its own columns,
# so the gradient of $X$ is a sum of $t$ terms, $dX = \sum_i dY_i A_i^\top$. If you forget it, nothing
# crashes. Each rank just trains on a wrong gradient of its own:

# %%
dY = torch.randn(6, 32, dtype=torch.float64)
dX = dY @ A.T
terms = [dY_i @ A_i.T for dY_i, A_i in zip(dY.chunk(ranks, dim=1), A.chunk(ranks, dim=1))]
print(
    "; ".join(
        f"{name}: {'equal' if torch.allclose(found, dX) else 'wrong'}"
        for name, found in {"rank 0's own term": terms[0], "sum of all terms": sum(terms)}.items()
    )
)

# %% [markdown]
# **Now write it:** [exercises 2.1, 2.2, 2.3, 2.4 and 2.6](../labs/lab2_tensor_parallel.py), `f`, `f_bar`,
# `column_parallel_linear`, `row_parallel_linear` and `mlp`: `python my/labs/lab2_tensor_parallel.py --only
# 2.1,2.2,2.3,2.4,2.6`.

# %% [markdown]
# ## Attention: whole heads
#
# Attention follows the same pattern. The projection to Q, K and V is the column-parallel product. Heads are independent of
# each other. The output projection is the row-parallel product. But no rank may get the Q of one head and the K of another.
# All three come from one product, whose weight has $3h$ rows (torch stores a linear's weight with one row per output) and is
# cut into $t$ equal blocks. So the *order of the rows* decides:

# %%
Panel(
    lambda t, order: show.qkv_cut(t, order),
    t=steps("t", "ranks", (1, 2, 4, 8), 4),
    order=choice("order of the rows", show.ROW_ORDERS, show.BY_HEAD),
)

# %% [markdown]
# If you load weights whose rows have another order, nothing fails: the layer just computes nonsense. Whole heads are also why
# $t$ must divide $a$; the code refuses anything else.
#
# Does the real layer? The cell below runs one of the 175B model's ranks and looks at what autograd keeps: Q, K and V
# of shape $[b \cdot a/t,\; s,\; h/a]$ (K transposed, as it enters the product $QK^\top$).

# %%
from actmem.ledger.layer_rows import layer_input, term_name

with am.emulated_rank(t):
    tp = am.tensor_parallel()
    layer = am.TransformerLayer(GPT3, tp, device="cpu", dtype=torch.bfloat16)
    with am.record(layer) as ledger:
        y = layer(layer_input(GPT3, tp, "cpu", torch.bfloat16))
kept = {term_name(saved): saved for saved in ledger.saved}
heads, length, size = GPT3.num_attention_heads // t, GPT3.seq_length, GPT3.head_size
shapes = {
    "Q": [heads, length, size],
    "K": [heads, size, length],
    "V": [heads, length, size],
    "softmax output": [heads, length, length],
}
checks.add(
    "shapes of Q, K, V and the softmax on a rank: its a/t heads",
    [(shapes[term], list(kept[term].shape)) for term in shapes],
    "",
)
checks.show()

# %% [markdown]
# **Now write it:** [exercises 2.5 and 2.7](../labs/lab2_tensor_parallel.py), `split_attention` and `attention`: `python
# my/labs/lab2_tensor_parallel.py --only 2.5,2.7`.

# %% [markdown]
# ## What divides and what does not
#
# Between the two blocks are layer norms, dropouts and residual additions. There every rank holds the same tensor, the
# output of $\bar f$, and all of them repeat the same work. The lower bar of the figure at the top has, from left
# to right:
#
# | whole on every rank | bytes |
# |---|---|
# | input of layer norm 1 | $2\,sbh$ |
# | input of the QKV projection, which $f$ passes to every rank | $2\,sbh$ |
# | dropout mask after attention | $sbh$ |
# | input of layer norm 2 | $2\,sbh$ |
# | input of $h \to 4h$, also passed by $f$ | $2\,sbh$ |
# | dropout mask after the MLP | $sbh$ |
#
# Together $10\,sbh$, which no $t$ divides. Call it the **floor**. Equation 2 has it as its first term:
#
# $$sbh\left(10 + \frac{24}{t} + \frac{5as}{ht}\right)$$
#
# The 24 are $34 - 10$: Q, K, V, the projection's input ($2$ each), GeLU's input and output ($8$ each).

# %% jupyter={"source_hidden": true}
from actmem.rows import total

parts = {size: [total(rows) for rows in show.divided_and_whole(GPT3, size)] for size in show.sizes_of_t(GPT3)}
checks.add(
    "one layer on one rank, for each t",
    [(sum(each), eq2(GPT3, size)) for size, each in parts.items()],
    sides=("divided part and floor", "equation 2"),
)
checks.show()

# %% [markdown]
# So doubling $t$ halves the divided part only, and helps less and less. And $t$ has a limit of its own: with more
# ranks than share fast links (8 in most machines, 72 in an NVL72 rack), every all-reduce has to use slow ones.
#
# The output layer is cut by columns too: each rank has the logits $z$ of $v/t$ entries of the vocabulary. The loss then needs
# three numbers per token from all ranks: the largest logit, the sum of exponentials, and the logit of the target. Backward
# needs no more: $dz$ is the softmax, less 1 at the target, and each rank computes its own columns.
#
# **Now write it:** [exercise 2.8](../labs/lab2_tensor_parallel.py), `vocab_parallel_cross_entropy`: `python
# my/labs/lab2_tensor_parallel.py --only 2.8`.
#
# ## Measured: one rank of many
#
# Take everything that the layer above kept, and compare it with the formula, term by term. (The statistics of the layer norms,
# which the paper leaves out, are counted too.)

# %%
from actmem.formulas.activations import layer_extra_rows
from actmem.ledger.layer_rows import rows_by_term

predicted = am.layer_rows(GPT3, am.Parallel(t)) + layer_extra_rows(GPT3, am.Parallel(t))
checks.add_rows(f"GPT-3's layer, one of {t} ranks", predicted, rows_by_term(ledger.saved))
checks.show()

# %% [markdown]
# ## Counted: the exchanges
#
# Two blocks, each with an $f$ and an $\bar f$: how many all-reduces do you expect, forward and backward? Count them:

# %%
from actmem.formulas.communication import layer_exchanges
from actmem.ledger.comms import count_collectives

with am.emulated_rank(t):
    tp = am.tensor_parallel()
    layer = am.TransformerLayer(GPT3, tp, device="cpu", dtype=torch.bfloat16)
    with count_collectives() as forward:
        y = layer(layer_input(GPT3, tp, "cpu", torch.bfloat16))
    with count_collectives() as backward:
        y.sum().backward()
exchanges = layer_exchanges(GPT3, am.Parallel(t))
for phase, seen in (("forward", forward), ("backward", backward)):
    checks.add(
        f"all-reduces {phase}",
        [(sum(e.count for e in exchanges if e.phase == phase), seen.counts["all-reduce"])],
        "exchanges",
    )
checks.add(
    "bytes of one all-reduce: the whole tensor",
    [
        (
            2 * GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size,
            forward.payload_bytes("all-reduce") // forward.counts["all-reduce"],
        )
    ],
)
checks.show()

# %% [markdown]
# Two and two. Each carries the whole $[s, b, h]$ tensor, however many ranks there are: $t$ divides the work and most of the
# memory, but not the tensors exchanged.
#
# ## Real processes: the same numbers as one GPU
#
# An emulated rank runs real code at real sizes, but has no neighbours. So now two processes exchange data, started by
# `torchrun`. They compare the output and every gradient, in float64, with those of an uncut layer
# that has the same weights.

# %%
from actmem_course import launch

with Progress("labs/measure_parity.py, two processes"):
    results = launch.results("measure_parity.py", "--seq-length", 64, processes=2)
ran = [r for r in results if r["form"] == "tensor"]
checks.add(
    "ranks whose output and all gradients are within 1e-12 of the uncut layer's",
    [(r["exact"], True) for r in ran],
    "",
)
checks.add(
    "all-reduces on each rank, forward and backward",
    [(2, r[phase]["all-reduce"]) for r in ran for phase in ("forward", "backward")],
    "exchanges",
)
checks.show()

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# The memory of two such processes is in [chapter 5](05_recomputation.ipynb): its figure of table 2 has the bars *none* and
# *tensor*, measured on both ranks.

# %% [markdown]
# ## Work it out
#
# You go from 8 to 16 ranks with the 175B model. How much less does each rank keep of a layer, and what do all ranks
# together keep? Use equation 2: here $sbh$ bytes are 24 MiB, and $5as/h$ is 80.

# %% jupyter={"source_hidden": true}
sbh = GPT3.seq_length * GPT3.micro_batch_size * GPT3.hidden_size
each = {ranks: eq2(GPT3, ranks) for ranks in (8, 16)}
worked(
    *(
        f"t = {ranks}: {sbh >> 20} MiB · (10 + 24/{ranks} + 80/{ranks}) = {size_text(size)} on each "
        f"rank, {size_text(ranks * size)} on all."
        for ranks, size in each.items()
    ),
    f"Each rank saves {1 - each[16] / each[8]:.0%}, not half. And all ranks together hold "
    f"{16 * each[16] / eq1(GPT3):.1f} times the layer ({size_text(eq1(GPT3))}), because the floor is "
    "there 16 times.",
)

# %% [markdown]
# ## Questions
#
# **1.** Two of the floor's six tensors are inputs of column-parallel products. Why doesn't each rank keep just a part of them, when
# each has only a part of the weight?
#
# <details><summary>Answer</summary>
#
# The weight's gradient is $X^\top dY_i$: each rank has its columns of $dY$ but needs *all* of $X$. It
# could keep a part and gather the rest in backward, as chapter 4 does.
# </details>
#
# **2.** Dropout after the attention block draws random numbers, and every rank does so for its own copy. What if they drew
# different ones?
#
# <details><summary>Answer</summary>
#
# The replicas would no longer be equal: from then on the ranks compute with different inputs, and $f$'s backward adds
# gradients of different functions. So the ranks need a common stream of random numbers for replicated tensors, and different
# streams for cut tensors, such as the softmax dropout: `actmem/parallel/rng.py`.
# </details>
#
# **3.** Could layer norms be cut along $h$, to remove a part of the floor?
#
# <details><summary>Answer</summary>
#
# Yes: each rank would sum over its part of $h$, and the ranks would have to exchange mean and variance forward, and two more sums
# backward, for every layer norm. Along $s$ each token is normalised alone, without an exchange; only the gradients of the norm's
# weights must be added up (chapter 4).
# </details>
#
# **4.** A row-parallel linear has a bias. Why is it added after $\bar f$, and not on each rank before the sum?
#
# <details><summary>Answer</summary>
#
# Before the sum it would be added $t$ times. (Divided by $t$ it would give the right output, but its gradient would be
# wrong by a factor.)
# </details>
#
# ## What people get wrong here
#
# * **"Tensor parallelism divides activations by t."** All but the floor, $10\,sbh$.
# * **"torch's weights are A."** torch stores $A^\top$, so a *column*-parallel weight is cut along dimension **0** and a
#   row-parallel one along dimension 1. With a square weight, no shape shows that you mixed them up.
# * **"The floor is layer norms and dropouts."** Those are 6 of the 10. The other 4 are the inputs of the two column-parallel
#   products.
# * **"f does nothing, so I can leave it out."** In forward it does nothing, so every output is right; every gradient below
#   it is wrong.
# * **"Q, K and V each store their input."** They share one input: $2\,sbh$, once.
#
# ## The lab
#
# [Lab 2](../labs/lab2_tensor_parallel.py): write $f$, $\bar f$, both linears, the MLP, attention and the loss. A judge says
# what is wrong: `python my/labs/lab2_tensor_parallel.py`.
#
# `torchrun --nproc-per-node 2 labs/measure_parity.py` compares every gradient with the uncut layer, and `make measure` the bytes
# of table 2. Break something in `src/actmem/parallel/linear.py` and see which of the two notices.
#
# **Sources.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4.2.1, figure 4, equation 2, table 2.
# The cut of MLP and attention is from Shoeybi et al., *Megatron-LM*, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053).
#
# ## Now fit your model
#
# How many ranks should share a layer of your model? Compare what fits, and what the exchanges cost, with two and with eight:
#
# ```
# actmem plan llama3-70b --gpus 64 --memory 80 --global-batch 512 --tensor 2
# actmem plan llama3-70b --gpus 64 --memory 80 --global-batch 512 --tensor 8
# ```
#
# Next, [chapter 4](04_sequence_parallelism.ipynb): the floor goes away.
