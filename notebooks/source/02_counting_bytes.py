# %% [markdown]
# # 2 · Counting bytes
#
# Which tensors does a transformer layer keep for backward, and which take up the space?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem.formulas.activations import CORE_ATTENTION_TERMS, eq1
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, extras_text, kept_text,
    saved_text, size_text, slider, steps, worked,
)
from actmem_course.figures import ch02_counting_bytes as show
from actmem_course.figures.terms import term_of

gpt3 = PAPER_MODELS["175B"].shape
checks = Checks()

short = gpt3.with_sizes(seq_length=256)
of_attention = lambda shape: sum(
    row.bytes for row in am.layer_rows(shape) if term_of(row).block == "attention"
)
core_of_gpt3 = sum(row.bytes for row in am.layer_rows(gpt3) if row.term in CORE_ATTENTION_TERMS)

question = Prediction(
    f"At s = {short.seq_length} the attention block of a GPT-3 layer keeps "
    f"{size_text(of_attention(short))} for backward. How much does it "
    f"keep at s = {gpt3.seq_length:,}, {gpt3.seq_length // short.seq_length} times as many tokens?",
    answer=of_attention(gpt3) / 2**30,
    unit="GiB",
    because=(
        f"Three of the block's tensors grow with s². Now they are {core_of_gpt3 / of_attention(gpt3):.0%} "
        f"of the block, and {core_of_gpt3 / eq1(gpt3):.0%} of the whole layer."
    ),
    line=GuessLine(per=2**30),
)
Reveal(
    question,
    Panel(
        lambda s, b, h, a: show.layer_bars(
            am.layer_rows(am.ModelShape(s, b, h, a)), am.ModelShape(s, b, h, a)
        ),
        s=slider("s", "tokens", 256, 8192, 256, start=short.seq_length),
        b=slider("b", "sequences", 1, 8, 1, start=gpt3.micro_batch_size),
        h=slider("h", "hidden size", 1024, 25600, 1024, start=gpt3.hidden_size),
        a=steps(
            "a",
            "heads",
            lambda h: [heads for heads in range(8, 161, 8) if h % heads == 0],
            start=gpt3.num_attention_heads,
        ),
    ),
    s=gpt3.seq_length,
)

# %% [markdown]
# *45 minutes.* **You need:** [00 Start here](01_memory_wall.ipynb), a little calculus. **You will** derive the 15 tensors
# that a transformer layer keeps for its backward pass, predict their bytes, and find each of them among what PyTorch keeps.
#
# Elements have 16 bits, so a tensor of shape $[s, b, h]$ takes $2sbh$ bytes. For a tensor $X$, write $dX$ for the gradient of
# the loss with respect to it: same shape as $X$.

# %% [markdown]
# ## One rule
#
# Backward goes through the operations in reverse. At an operation $Y = \text{op}(X)$ it holds $dY$ and must compute $dX$, and $dW$
# if there are weights. **A tensor is kept if the formula for one of these gradients reads it**: the formula that the code
# uses. (Often there is a choice, and then there are bytes to save.) So ask of each operation:
#
# 1. Which tensors does its gradient formula read?
# 2. Does another operation keep them already? Then they cost nothing more: memory holds a tensor once.
#
# Weights don't count. They stay in memory anyway.
#
# Guess first, as a game; the derivations come after the next figure. The layer has eight kinds of operation. What does
# backward need from each? A right answer earns its bytes, a wrong one nothing, and you can change your mind. ("Attention over
# V" is the product of the attention probabilities, after their dropout, with V.)

# %%
from functools import partial

Panel(partial(show.keep_game, gpt3), **show.keep_controls())

# %% [markdown]
# This is the whole layer, operations from top to bottom: first the attention block, then the MLP. Beside each operation is what
# it keeps, as wide as its bytes. Follow the forward pass with the arrow keys, one tensor at a time. Before each step, ask the
# two questions above. Point at a tensor (or tap it) to see the gradient that reads it.

# %%
Panel(
    lambda step, s: show.layer_drawing(
        am.layer_rows(gpt3.with_sizes(seq_length=s)), gpt3.with_sizes(seq_length=s), step
    ),
    step=slider("step", "stored tensors", 1, 15, 1, start=1),
    s=slider("s", "tokens", 256, 8192, 256, start=gpt3.seq_length),
)

# %% [markdown]
# Now derive them one by one, with a pencil. Then PyTorch runs them all.
#
# ### Layer norm keeps its input (row 1, and row 11)
#
# For each token, $\hat x = (x - \mu)/\sigma$ and $y = \gamma \hat x + \beta$. Write $\delta = \gamma\, dy$. The gradient is
#
# $$dx = \frac{1}{\sigma}\Big(\delta - \overline{\delta} - \hat x\, \overline{\delta \hat x}\Big), \qquad d\gamma = \sum_\text{tokens} \hat x\, dy$$
#
# (bars are means over the $h$ elements of a token). Both read $\hat x$, which PyTorch computes from $x$, so $x$ is kept:
# **$2sbh$ bytes**. ($y$, row 2, would do as well, unless a $\gamma$ is 0.) The mean and $1/\sigma$ are kept too, two numbers a
# token. The paper leaves them out; here they are counted as *extra*.
#
# ### A linear keeps its input (rows 2, 9, 12 and 14)
#
# A **product** in this course is a matrix product (matmul, GEMM). $Y = XW$ has the gradients $dX = dY\,W^\top$ and
# $dW = X^\top dY$. The first reads a weight, the second reads $X$. So a linear that is trained keeps its input, and never
# its output.
#
# - Row 2: Q, K and V come from three products with the **same** $X$. It is kept once: $2sbh$.
# - Row 9: the projection at the end of attention: $2sbh$.
# - Row 12: the first linear of the MLP, $h \to 4h$: $2sbh$.
# - Row 14: the second, $4h \to h$. Its input is four times as wide: $8sbh$.
#
# ### Scores: a product of two activations keeps both (rows 3 and 4)
#
# In $S = QK^\top/\sqrt{h/a}$ there is no weight: $dQ = dS\,K$ reads $K$, and $dK = dS^\top Q$ reads $Q$ (each times the same
# constant). Over all heads, $Q$ and $K$ have $sbh$ elements each: $2sbh + 2sbh$. Neither gradient reads the scores
# themselves, $as^2b$ elements.
#
# ### Softmax keeps its output (row 5)
#
# With $P = \mathrm{softmax}(S)$, row by row, $\partial P_i/\partial S_j = P_i(\delta_{ij} - P_j)$, so
# $dS = P \circ \big(dP - \mathrm{sum}(dP \circ P)\big)$. It reads $P$ and not $S$, so $P$ is kept: **$2as^2b$** bytes. Each head keeps an $s \times s$ matrix, the first tensor that is
# quadratic in $s$.
#
# ### Dropout keeps which elements it dropped (rows 6, 10 and 15)
#
# $D = M \circ P/(1 - \text{rate})$, with a mask $M$ of zeros and ones, so $dP = M \circ dD/(1 - \text{rate})$: the mask is
# enough, at one byte per element. Row 6, on the attention probabilities: $as^2b$. Rows 10 and 15, at the end of attention and of
# the MLP: $sbh$ each.
#
# A surprise: on a CPU, PyTorch's own `nn.Dropout` keeps the mask in the dtype of its input. The course's layer draws a mask of
# one byte per element on every device, as on GPUs and in the paper.
#
# ### Attention over V: both factors again (rows 7 and 8)
#
# $C = DV$, so $dV = D^\top dC$ reads the dropout's output, $2as^2b$, and $dD = dC\,V^\top$ reads $V$, $2sbh$.
#
# Why is $D$ kept, when $D = M \circ P/(1 - \text{rate})$ and both factors are kept already? Because autograd looks at one operation
# at a time. Recomputing $D$ would take one cheap multiplication: a first hint of *selective recomputation*.
#
# ### GeLU keeps its input (row 13)
#
# $G = \mathrm{gelu}(Z)$ and $dZ = \mathrm{gelu}'(Z) \circ dG$. The slope depends on $Z$, and $Z$ can't be recovered from
# $G$, because GeLU is not monotonic. $Z$ is $4h$ wide: **$8sbh$**. $G$ is the input of the next linear, which keeps it: row 14.
#
# ### Adding the residual keeps nothing
#
# $Y = X + F$ has $dX = dY$ and $dF = dY$. No formula reads $X$ or $F$.
#
# ### Run them
#
# `record` lists the tensors that autograd saves for backward while a block runs.
# The weights of the module that you pass are left out. The sizes here are small and all differ, so you recognise them in the
# shapes.

# %%
import torch
from torch import nn

from actmem.config import TINY
from actmem.parallel.rng import DropoutMask

shape = TINY.with_sizes(micro_batch_size=3)
a, b, h, s = shape.letters()
tensor = partial(torch.randn, dtype=torch.bfloat16, requires_grad=True)
tokens, wide, head, scores = (s, b, h), (s, b, 4 * h), (b * a, s, h // a), (b * a, s, s)


def keeps(run, *sizes, module=nn.Module()):
    inputs = [tensor(*size) for size in sizes]
    with am.record(module) as ledger:
        y = run(*inputs)
    return ledger.saved


norm, up = nn.LayerNorm(h, dtype=torch.bfloat16), nn.Linear(h, 4 * h, dtype=torch.bfloat16)
mask = DropoutMask(0.1, torch.Generator().manual_seed(1234))
seen = {
    "layer norm": keeps(norm, tokens, module=norm),
    "linear, h→4h": keeps(up, tokens, module=up),
    "QKᵀ": keeps(lambda q, k: torch.bmm(q, k.transpose(1, 2)), head, head),
    "softmax": keeps(lambda x: torch.softmax(x, dim=-1), scores),
    "dropout of PyTorch, on a CPU": keeps(nn.Dropout(0.1), scores),
    "dropout of our layer": keeps(lambda x: mask(x).drop(x), scores),
    "attention over V": keeps(torch.bmm, scores, (b * a, s, h // a)),
    "GeLU": keeps(lambda z: torch.nn.functional.gelu(z, approximate="tanh"), wide),
    "adding the residual": keeps(torch.add, tokens, tokens),
}
LiveFigure(
    bar_chart(
        "Each operation keeps what its gradient reads",
        {"kept": {name: sum(t.bytes for t in saved) for name, saved in seen.items()}},
        f"measured at s = {s}, b = {b}, h = {h}, a = {a}",
        about={name: kept_text(saved).replace("\n", "<br>") for name, saved in seen.items()},
    )
)

# %% [markdown]
# Point at a bar (or tap it) to see its tensors. The linear's output, four times as large as its input, is not kept.
#
# **Now write it:** [exercise 1.1](../labs/lab1_count_bytes.py), `layer_bytes`: `python my/labs/lab1_count_bytes.py
# --only 1.1`.

# %% [markdown]
# ## The sum
#
# In the order of the forward pass:
#
# | | stored tensor | bytes | the gradient that reads it |
# |---|---|---|---|
# | 1 | layer-norm 1 input | $2sbh$ | $dx$, $d\gamma$ through $\hat x$ |
# | 2 | QKV projection input | $2sbh$ | $dW = X^\top dY$ |
# | 3 | Q | $2sbh$ | $dK = dS^\top Q$ |
# | 4 | K | $2sbh$ | $dQ = dS\,K$ |
# | 5 | softmax output | $2as^2b$ | $dS = P \circ (dP - \mathrm{sum}(dP \circ P))$ |
# | 6 | softmax dropout mask | $as^2b$ | $dP = M \circ dD/(1 - \text{rate})$ |
# | 7 | softmax dropout output | $2as^2b$ | $dV = D^\top dC$ |
# | 8 | V | $2sbh$ | $dD = dC\,V^\top$ |
# | 9 | attention projection input | $2sbh$ | $dW = C^\top dY$ |
# | 10 | attention dropout mask | $sbh$ | $dX = M \circ dY/(1 - \text{rate})$ |
# | 11 | layer-norm 2 input | $2sbh$ | as 1 |
# | 12 | h→4h input | $2sbh$ | $dW = X^\top dY$ |
# | 13 | GeLU input | $8sbh$ | $dZ = \mathrm{gelu}'(Z) \circ dG$ |
# | 14 | 4h→h input | $8sbh$ | $dW = G^\top dY$ |
# | 15 | MLP dropout mask | $sbh$ | $dX = M \circ dY/(1 - \text{rate})$ |
#
# Attention (2–10) keeps $11sbh + 5as^2b$, the MLP (12–15) $19sbh$, the layer norms (1, 11) $4sbh$. Together that is the paper's equation 1:
#
# $$34\,sbh + 5\,as^2b \;=\; sbh\Big(34 + 5\,\frac{as}{h}\Big)$$
#
# `layer_rows` is exactly this table, in bytes:

# %%
predicted = am.layer_rows(shape)
checks.add(
    "one layer", [(sum(row.bytes for row in predicted), eq1(shape))], sides=("sum of the rows", "equation 1")
)
checks.show()

# %% [markdown]
# ## At the size of GPT-3
#
# In the figure at the top each segment is one of the 15 tensors; point at it for its formula, bytes and reason. Which slider changes the length of the bars, but not how they are divided? What does doubling $h$ do?
#
# <details><summary>Answer</summary>
#
# $b$: doubling it doubles every tensor. Doubling $h$ doubles the $34sbh$ part and leaves the core as it is, as long as $a$
# stays. (The slider changes $a$ where it doesn't divide $h$.)
# </details>

# %% [markdown]
# ## Measure it
#
# Now run the whole layer, in bfloat16, with attention, MLP, norms, dropouts and residuals. This is the raw ledger: every line
# is a tensor that autograd holds after forward, with the module and the operation that saved it.

# %%
torch.manual_seed(0)
layer = am.TransformerLayer(shape, dtype=torch.bfloat16)
x = tensor(s, b, h)
with am.record(layer) as ledger:
    y = layer(x)
Fold(
    f"{len(ledger.saved)} tensors, {ledger.total_bytes:,} bytes: {ledger.total_bytes / (s * b * h):.1f} sbh",
    saved_text(ledger.saved),
)

# %% [markdown]
# There are more than 15 lines, because each layer norm adds two statistics. (`_Keep` and `_ColumnParallel` are
# the course's own operations: a kept dropout mask, and a linear that can be shared among devices.) `rows_by_term` names each
# line as the formulas do, by its module and operation and never by its size. Then each term is compared with its formula:

# %%
from actmem.formulas.activations import layer_extra_rows
from actmem.ledger.layer_rows import rows_by_term

extra = layer_extra_rows(shape)
checks.add_rows("the whole layer", predicted + extra, rows_by_term(ledger.saved))
checks.show()

# %% [markdown]
# What the paper leaves out has rows of its own, with reasons:

# %% jupyter={"source_hidden": true}
from actmem.rows import total

Fold(
    f"extra: {total(extra) / total(predicted):.2%} of the paper's terms at this small size, "
    f"{total(layer_extra_rows(gpt3)) / total(am.layer_rows(gpt3)):.4%} for GPT-3",
    extras_text(extra),
)

# %% [markdown]
# ### A second opinion
#
# `record` sees a tensor when autograd saves it. Could one escape it? `census` doesn't look at saved tensors at all. It notes
# every storage that appears during forward, drops every reference but the graph, and adds up what is still alive:

# %%
checks.add(
    "alive after forward",
    [(ledger.total_bytes, am.census(layer, lambda: tensor(s, b, h)))],
    sides=("in the ledger", "found by the census"),
)
checks.show()

# %% [markdown]
# ## On your own module
#
# `record` takes any `nn.Module`. Compare an MLP with GeLU and one with ReLU:

# %%
mlps = {}
for activation in (nn.GELU(), nn.ReLU()):
    mlp = nn.Sequential(nn.Linear(h, 4 * h), activation, nn.Linear(4 * h, h)).to(torch.bfloat16)
    with am.record(mlp) as ledger:
        y = mlp(tensor(*tokens))
    mlps[f"{type(activation).__name__}: {len(ledger.saved)} tensors"] = ledger.total_bytes / (s * b * h)
LiveFigure(
    bar_chart("ReLU keeps nothing that its linear doesn't keep anyway", {"": mlps}, "kept by an MLP", "sbh")
)

# %% [markdown]
# ReLU's gradient needs to know only where the output is positive. So ReLU keeps its *output*, which the next linear keeps
# anyway: one storage, counted once. The rule's second question saves $8sbh$.
#
# **Now write it:** [exercise 1.3](../labs/lab1_count_bytes.py), `gated_mlp_bytes`: `python my/labs/lab1_count_bytes.py
# --only 1.3`.

# %% [markdown]
# ## Where attention takes over
#
# Of the 15 rows, 12 grow with $s$ and 3 with $s^2$. You know the crossover from chapter 1: set $5as^2b = 34sbh$ and solve for $s$.
#
# **Now write it:** [exercise 1.4](../labs/lab1_count_bytes.py), `crossover_seq_length`: `python
# my/labs/lab1_count_bytes.py --only 1.4`.

# %% [markdown]
# ## Work it out
#
# On paper: one GPT-3 layer reads 8,192 tokens instead of 2,048. Compute the two parts of $34sbh + 5as^2b$ in GiB, and say
# how many times as much the layer keeps. ($h$ = 12,288, $a$ = 96, $b$ = 1.)

# %% jupyter={"source_hidden": true}
long = gpt3.with_sizes(seq_length=8192)
a, b, h, s = long.letters()
worked(
    f"sbh is {s:,} · {h:,} = {s * b * h:,}; 34 times that is {size_text(34 * s * b * h)}.",
    f"as²b is {a} · {s:,}² = {a * s * s * b:,}; 5 times that is {size_text(5 * a * s * s * b)}.",
    f"Together {size_text(eq1(long))}, {eq1(long) / eq1(gpt3):.1f} times what it keeps at "
    f"{gpt3.seq_length:,}: the linear part grew 4 times, the core 16 times.",
)

# %% [markdown]
# ## Check yourself
#
# **1.** You switch the activations to float32. Which of the 15 rows don't double, and what becomes of the 34?
#
# <details><summary>Answer</summary>
#
# The three dropout masks stay at one byte per element. With $e$ bytes per element the sum is $(16e + 2)\,sbh + (2e +
# 1)\,as^2b$, so the 34 becomes 66 and the 5 becomes 9.
#
# </details>
# <br>
#
# **2.** You set the dropout rate to 0. What remains of $5as^2b$?
#
# <details><summary>Answer</summary>
#
# $2as^2b$. The mask is gone, and the "dropout output" is then the softmax output itself: softmax and the product with $V$ keep the same storage.
#
# </details>
# <br>
#
# **3.** Why is there no row for the scores $QK^\top$, or for the input of the causal masking?
#
# <details><summary>Answer</summary>
#
# No gradient reads them. Softmax reads its own output $P$, and where a score was masked with $-\infty$, $P$ is 0, and so is
# the gradient $P \circ (\dots)$ that softmax returns: masking it again changes nothing. The course's layer adds the
# $-\infty$ within the matrix product and keeps no mask. `masked_fill` keeps a mask of $s \times s$ bytes, to write zeros
# over zeros.
#
# </details>
# <br>
#
# ## The same layer on NVIDIA's GPUs
#
# Megatron-LM is the code of the paper's authors. Its repository holds the memory that its tests logged on A100s, and half of
# these logs are of this very layer: $s = 1024$, $b = 4$, $h = 512$, $a = 8$, dropout on, scores kept. Two tests differ only in
# how many layers the last pipeline stage has, three or two. Two others recompute nothing or everything; both peaks are at the loss,
# before backward rebuilds a layer. Subtract their logs, and all else cancels:

# %%

nvidia = am.ModelShape(seq_length=1024, micro_batch_size=4, hidden_size=512, num_attention_heads=8)
float32_statistics = 16 * 1024 * 4  # two norms, two statistics of 4 bytes for each token
layer = eq1(nvidia) + float32_statistics
only_its_input = 2 * 1024 * 4 * 512

from actmem_course.others.logged_pairs import logged_pairs

for formula, pair in zip((layer, 12 * (layer - only_its_input)), logged_pairs()):
    checks.add(pair.what, [(formula, pair.logged_bytes)], sides=("predicted", "logged on A100s"))
checks.show()

# %% [markdown]
# Both differences equal the formula, to the byte. Most other pairs of tests don't, because the allocator's blocks, for
# instance, change what is logged. `python labs/measure_runs.py` has more pairs that a formula explains.
#
# ## Bytes by the allocator
#
# The ledger says what autograd holds. Does the GPU's memory hold as much? torch's allocator counts the bytes that it is asked for, and
# those that it hands out, in blocks of 512. One GPU ran a layer of the 22B and one of the 175B model in the six ways that
# chapters 3 to 5 explain, and counted between forward and backward ([chapter 1](01_memory_wall.ipynb) says which GPU, and how).
# Formula, ledger, requested and allocated bytes are one number, in each row:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import newest

on_gpu = newest("table2").get("table2", [])
for count in ("ledger", "requested", "allocated"):
    checks.add(
        "layers of two models, six ways, on a GPU",
        [(row["predicted_bytes"], row[f"{count}_bytes"]) for row in on_gpu],
        sides=("formula", count),
    )
checks.show()

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## What people get wrong here
#
# - **Multiplying by the element size again.** $34 + 5as/h$ is in bytes already.
# - **Losing the $a$.** Each head has an $s \times s$ matrix of its own: $5as^2b$, not $5s^2b$.
# - **Counting outputs.** Backward keeps what gradients read, mostly inputs. Adding up outputs counts residual sums and the
#   outputs of the last dropouts, which nothing keeps, and misses the masks.
# - **Counting a storage twice.** Q, K and V share one input. A view is not a copy.
#
# ## The lab
#
# [Lab 1](../labs/lab1_count_bytes.py): write down the bytes of the 15 terms, predict an MLP that you have not seen, find
# the crossover. A judge compares each with what a real layer keeps, and names the letter that is wrong. (Exercise 1.2 comes in chapter 5.)
#
# `python labs/measure_table2.py --emulate 8 --model 175B` makes this comparison for all of Table 2 at GPT-3's real sizes.
#
# **Sources.** V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, MLSys 2023,
# [arXiv 2205.05198](https://arxiv.org/abs/2205.05198), section 4.1 and equation 1 · PyTorch, [Hooks for autograd saved
# tensors](https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html): how `record` sees what
# it sees (`src/actmem/ledger/recorder.py`).
#
# ## Now fit your model
#
# The rule holds for any module. Write a file with a function that returns your model and its inputs. This lists what it keeps,
# and which of it is waste:
#
# ```
# actmem record my_model.py:factory --fake
# ```
#
# [Chapter 9](09_your_model.ipynb) does that with a Llama. Next, [chapter 3](03_tensor_parallelism.ipynb): eight GPUs share the layer.
