# %% [markdown]
# # 2 · Counting bytes
#
# *45 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# A GPT-3 layer reads a sequence of 256 tokens. Then you give it 4,096, sixteen times as many. **How large is the
# largest tensor that it saves for the backward pass now?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem.formulas.activations import CORE_ATTENTION_TERMS, eq1
from actmem_course.figures import (
    Checks, Fold, GuessLine, Panel, Prediction, Reveal, extras_text, play, saved_text, size_text, slider, steps,
    text_table, worked,
)
from actmem_course.figures.layer_picture import layer_picture
from actmem_course.figures.terms import formula_of, term_of

gpt3 = PAPER_MODELS["175B"].shape
checks = Checks()

short, asked = (gpt3.with_sizes(seq_length=s) for s in (256, 4096))
largest_before, largest = (max(am.layer_rows(shape), key=lambda row: row.bytes) for shape in (short, asked))
core_bytes = sum(row.bytes for row in am.layer_rows(asked) if row.term in CORE_ATTENTION_TERMS)

question = Prediction(
    f"At s = {short.seq_length} tokens the largest tensor that a GPT-3 layer saves takes "
    f"{size_text(largest_before.bytes)}: the {largest_before.term}. How large is the largest one at "
    f"s = {asked.seq_length:,}?",
    answer=largest.bytes / 2**20,
    unit="MiB",
    because=(
        f"It's another tensor, the {largest.term}. It has a number for each pair of tokens, so it grew with s². Three "
        f"such tensors are {core_bytes / eq1(asked):.0%} of the layer now."
    ),
    line=GuessLine(per=2**20),
)
Reveal(
    question,
    Panel(
        lambda s, b, h, a: layer_picture(am.ModelShape(s, b, h, a)),
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
    s=asked.seq_length,
)

# %% [markdown]
# **You need** [chapter 1](01_memory_wall.ipynb) and a little calculus.
#
# A microbatch has $b$ sequences of $s$ tokens. Between two layers each token is a vector of $h$ numbers, the hidden
# size, and attention divides these among $a$ heads. Numbers have 16 bits, so a tensor of shape $[s, b, h]$ takes
# $2sbh$ bytes. For a tensor $X$, write $dX$ for the gradient of the loss with respect to it, which has the same
# shape.
#
# ## One rule
#
# The backward pass goes through the operations in reverse. At $Y = \text{op}(X)$ it has $dY$, and must compute $dX$,
# and $dW$ if there are weights $W$. **Autograd saves a tensor if the code that computes one of these gradients reads
# it.** So ask of each operation:
#
# 1. Which tensors does its gradient read?
# 2. Has another operation saved them already? Then they cost nothing more: memory holds a tensor once.
#
# Weights don't count, because they stay in memory anyway.
#
# The forward pass saves one tensor after the other. Before each step, ask the two questions. Point at a box, or tap it,
# to see which gradient reads it. Step $n$ is row $n$ of the headings below.

# %%
Panel(
    lambda step, s: layer_picture(gpt3.with_sizes(seq_length=s), stored=step),
    step=play("step", "saved tensors", range(1, 16), 1),
    s=slider("s", "tokens", 256, 8192, 256, start=gpt3.seq_length),
)

# %% [markdown]
# Now derive with a pencil what each gradient reads.
#
# ### Layer norm: input or output? (rows 1 and 11)
#
# For each token, $\hat x = (x - \mu)/\sigma$ and $y = \gamma \hat x + \beta$. With $g = \gamma\, dy$, and bars for
# means over a token's $h$ elements,
#
# $$dx = \frac{1}{\sigma}\Big(g - \overline{g} - \hat x\, \overline{g \hat x}\Big), \qquad d\gamma = \sum_\text{tokens} \hat x\, dy$$
#
# Both read $\hat x$, which PyTorch computes from $x$. So it saves $x$, **$2sbh$ bytes**, and two numbers per token, the
# mean and $1/\sigma$: $4sb$ bytes on a CPU, $8sb$ on a GPU, which has them in float32. The paper leaves these out; here
# they are counted as *extra*.
#
# ### A linear layer (rows 2, 9, 12 and 14)
#
# $Y = XW$ has the gradients $dX = dY\,W^\top$ and $dW = X^\top dY$. The first reads a weight, the second reads $X$.
# So a linear layer that is trained saves its input, and never its output.
#
# - Row 2: Q, K and V come from three matmuls with the **same** $X$, which is saved once: $2sbh$.
# - Rows 9 and 12: the projection at the end of attention, and the first linear layer of the MLP, $h \to 4h$: $2sbh$
#   each.
# - Row 14: the second linear layer, $4h \to h$. Its input is four times as wide: $8sbh$.
#
# Predict a layer norm and a linear layer with your formulas, then let PyTorch run them. `record` lists what autograd
# saves while a module runs, without its weights:

# %%
from functools import partial

import torch
from torch import nn

from actmem.config import TINY

shape = TINY.with_sizes(micro_batch_size=3)
a, b, h, s = shape.letters()
tensor = partial(torch.randn, dtype=torch.bfloat16, requires_grad=True)


def saved_bytes(run, *sizes, module=nn.Module()):
    inputs = [tensor(*size) for size in sizes]
    with am.record(module) as ledger:
        y = run(*inputs)
    return sum(row.bytes for row in ledger.saved)


norm = nn.LayerNorm(h, dtype=torch.bfloat16)
up = nn.Linear(h, 4 * h, dtype=torch.bfloat16)
with_statistics = 2 * s * b * h + 4 * s * b
checks.add("layer norm", [(with_statistics, saved_bytes(norm, (s, b, h), module=norm))])
checks.add("linear, h→4h", [(2 * s * b * h, saved_bytes(up, (s, b, h), module=up))])
checks.show()

# %% [markdown]
# ### The scores, a matmul without a weight (rows 3 and 4)
#
# $S = QK^\top/\sqrt{h/a}$ has no weight: $dQ$ is $dS\,K$ and reads $K$, and $dK$ is $dS^\top Q$ and reads $Q$ (up to
# the constant). Over all heads $Q$ and $K$ have $sbh$ elements each: $2sbh + 2sbh$. No gradient reads the scores.
#
# ### Softmax: input or output? (row 5)
#
# With $P = \mathrm{softmax}(S)$, row by row, $\partial P_i/\partial S_j = P_i(\delta_{ij} - P_j)$, where $\delta_{ij}$
# is 1 if $i = j$ and 0 elsewhere. So $dS = P \circ \big(dP - \mathrm{sum}(dP \circ P)\big)$, where $\circ$ multiplies
# element by element. It reads $P$, an $s \times s$ matrix for each head and sequence: **$2as^2b$ bytes**, the first
# tensor that is quadratic in $s$.

# %%
head, scores = (b * a, s, h // a), (b * a, s, s)
scores_of = lambda q, k: torch.bmm(q, k.transpose(1, 2))
softmax = partial(torch.softmax, dim=-1)
checks.add("QKᵀ", [(4 * s * b * h, saved_bytes(scores_of, head, head))])
checks.add("softmax", [(2 * a * s**2 * b, saved_bytes(softmax, scores))])
checks.show()

# %% [markdown]
# ### Dropout (rows 6, 10 and 15)
#
# $D = M \circ P/(1 - \text{rate})$, with a mask $M$ of zeros and ones, so $dP = M \circ dD/(1 - \text{rate})$. The
# mask is enough, one byte per element: $as^2b$ for the attention probabilities, $sbh$ at the end of attention and of
# the MLP.
#
# A surprise: on a CPU, PyTorch's own `nn.Dropout` saves the mask in the dtype of its input. The course's layer draws
# a mask of one byte per element on every device, as PyTorch does on GPUs and the paper counts.
#
# ### Attention over V, a matmul again (rows 7 and 8)
#
# $C = DV$, so $dV = D^\top dC$ reads $D$, $2as^2b$, and $dD = dC\,V^\top$ reads $V$, $2sbh$. Why save $D$, when $M$
# and $P$ are saved already? Autograd looks at one operation at a time. One cheap multiplication would recompute $D$:
# a first hint of *selective recomputation*. (Megatron's default today, a fused attention kernel, saves none of rows 5
# to 7: [chapter 5](05_recomputation.ipynb).)

# %%
from actmem.parallel.rng import DropoutMask

mask = DropoutMask(0.1, torch.Generator().manual_seed(1234))
drop = lambda x: mask(x).apply(x)
over_v = 2 * a * s**2 * b + 2 * s * b * h
checks.add("dropout of our layer", [(a * s**2 * b, saved_bytes(drop, scores))])
checks.add("dropout of PyTorch, on a CPU", [(2 * a * s**2 * b, saved_bytes(nn.Dropout(), scores))])
checks.add("attention over V", [(over_v, saved_bytes(torch.bmm, scores, head))])
checks.show()

# %% [markdown]
# ### GeLU (row 13), and adding the residual
#
# $G = \mathrm{gelu}(Z)$ and $dZ = \mathrm{gelu}'(Z) \circ dG$. You can't get $Z$ back from $G$, because GeLU isn't
# monotonic, so $Z$ is saved. It is $4h$ wide: **$8sbh$**. $G$ is the input of the next linear layer, which saves it as
# row 14.
#
# $Y = X + F$ has $dX = dY$ and $dF = dY$. Neither reads $X$ or $F$.

# %%
gelu = partial(nn.functional.gelu, approximate="tanh")
checks.add("GeLU", [(8 * s * b * h, saved_bytes(gelu, (s, b, 4 * h)))])
checks.add("adding the residual", [(0, saved_bytes(torch.add, (s, b, h), (s, b, h)))])
checks.show()

# %% [markdown]
# **Now write it:** [exercise 1.1](../labs/lab1_count_bytes.py), `layer_bytes`:
# `python my/labs/lab1_count_bytes.py --only 1.1`.
#
# ## The sum
#
# Attention (rows 2 to 10) saves $11sbh + 5as^2b$, the MLP (12 to 15) $19sbh$, the layer norms (1 and 11) $4sbh$.
# Together that is the paper's equation 1:
#
# $$34\,sbh + 5\,as^2b \;=\; sbh\Big(34 + 5\,\frac{as}{h}\Big)$$
#
# `layer_rows` has these rows in bytes, in the order of the forward pass:

# %%
rows = am.layer_rows(shape)
lines = [
    (number, row.term, formula_of(row, shape), term_of(row).why)
    for number, row in enumerate(rows, 1)
]
header = ("", "saved tensor", "bytes", "the gradient that reads it")
display(Fold("The 15 rows", text_table(header, lines, "r")))

sides = ("sum of the rows", "equation 1")
checks.add("one layer", [(sum(row.bytes for row in rows), eq1(shape))], sides=sides)
checks.show()

# %% [markdown]
# ## Run the whole layer
#
# Run attention, MLP, norms, dropouts and residuals together, in bfloat16. The *ledger* has a line for each tensor
# that autograd holds after the forward pass, with the module and the operation that saved it:

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
# There are more than 15 lines, because each layer norm adds two statistics. The mask at the end of a block comes first,
# because it's drawn when the block begins. `baddbmm` is $QK^\top$: its arguments 1 and 2 are Q and K. (`_Keep` and
# `_ColumnParallel` are the course's own operations: a saved mask, and a linear layer that ranks can share.)
# `rows_by_term` names each line as the formulas do. Compare term by term:

# %%
from actmem.formulas.activations import layer_extra_rows
from actmem.ledger.measure_layer import rows_by_term

extra = layer_extra_rows(shape)
checks.add_rows("the whole layer", rows + extra, rows_by_term(ledger.saved))
checks.show()

# %% jupyter={"source_hidden": true}
from actmem.rows import total

Fold(
    f"extra: {total(extra) / total(rows):.2%} of the paper's terms at this small size, "
    f"{total(layer_extra_rows(gpt3)) / total(am.layer_rows(gpt3)):.4%} for GPT-3",
    extras_text(extra),
)

# %% [markdown]
# `record` looks when autograd saves a tensor. Could it miss one? `census` doesn't look at saved tensors at all. It
# notes every storage that appears in the forward pass, drops every reference but the graph, and adds up what is still
# alive:

# %%
checks.add(
    "alive after the forward pass",
    [(ledger.total_bytes, am.census(layer, lambda: tensor(s, b, h)))],
    sides=("in the ledger", "found alive"),
)
checks.show()

# %% [markdown]
# ## On your own module
#
# `record` takes any `nn.Module`. Does an MLP save less with ReLU than with GeLU? ReLU's gradient asks only where the
# output is positive. So ReLU saves its *output*, and the next linear layer saves the same tensor. Predict both:

# %%
for activation, of_sbh in ((nn.GELU(), 2 + 8 + 8), (nn.ReLU(), 2 + 8)):
    mlp = nn.Sequential(nn.Linear(h, 4 * h), activation, nn.Linear(4 * h, h)).to(torch.bfloat16)
    name = f"MLP with {type(activation).__name__}, {of_sbh}sbh"
    checks.add(name, [(of_sbh * s * b * h, saved_bytes(mlp, (s, b, h), module=mlp))])
checks.show()

# %% [markdown]
# > **ReLU instead of GeLU. Why do this?** The rule's second question frees $8sbh$, nearly a quarter of the $34sbh$.
# > **Why not?** It's a different model, so you must train it with ReLU from the start.
#
# Today's MLPs have a gate: `down(silu(gate(x)) * up(x))`, where `gate`, `up` and `down` are linear layers. What does
# one of width $f$ save in plain operators?
#
# <details><summary>Answer</summary>
#
# $x$, $2sbh$, and four tensors of $2sbf$: gate's output, its silu, up's output, and the product.
#
# </details>
#
# **Now write it:** [exercise 1.3](../labs/lab1_count_bytes.py), `gated_mlp_bytes`:
# `python my/labs/lab1_count_bytes.py --only 1.3`.
#
# ## Where attention takes over
#
# Of the 15 rows, 12 grow with $s$ and 3 with $s^2$. You know the crossover from chapter 1: set $5as^2b = 34sbh$ and
# solve for $s$.
#
# **Now write it:** [exercise 1.4](../labs/lab1_count_bytes.py), `crossover_seq_length`:
# `python my/labs/lab1_count_bytes.py --only 1.4`.
#
# On paper: one GPT-3 layer reads 8,192 tokens instead of 2,048. Compute the two parts of $34sbh + 5as^2b$ in GiB, and
# say how many times as much the layer saves. ($h$ = 12,288, $a$ = 96, $b$ = 1.)

# %% jupyter={"source_hidden": true}
long = gpt3.with_sizes(seq_length=8192)
a, b, h, s = long.letters()
worked(
    f"sbh is {s:,} · {h:,} = {s * b * h:,}; 34 times that is {size_text(34 * s * b * h)}.",
    f"as²b is {a} · {s:,}² = {a * s * s * b:,}; 5 times that is {size_text(5 * a * s * s * b)}.",
    f"Together {size_text(eq1(long))}, {eq1(long) / eq1(gpt3):.1f} times what it saves at "
    f"{gpt3.seq_length:,}: the linear part grew 4 times, the core 16 times.",
)

# %% [markdown]
# ## Does a GPU agree?
#
# Megatron-LM is the code of the paper's authors. Its repository has 500 logs of tests with the *peak* memory and what
# is *held* between steps (weights, gradients, optimizer states), many of this very layer, fused kernel off:
# $s = 1024$, $b = 4$, $h = 512$, $a = 8$. Peak minus held leaves activations. Take two tests that differ in one
# thing, and shared activations cancel. By hand we picked pairs whose difference saved tensors explain, so their
# number is no success rate: in most others the allocator's blocks or what kernels save inside differ too
# (`python labs/measure_runs.py`).
#
# Here are two pairs:
#
# - The last pipeline stage has three layers in one test, two in the other.
# - One test recomputes nothing, the other everything. Both have their peak at the loss, so its logits cancel.

# %%
from actmem_course.others.logged_pairs import BLOCK_BYTES, logged_pairs

nvidia = am.ModelShape(seq_length=1024, micro_batch_size=4, hidden_size=512, num_attention_heads=8)
float32_statistics = 16 * 1024 * 4  # two norms, two statistics of 4 bytes for each token
one_layer = eq1(nvidia) + float32_statistics
only_its_input = 2 * 1024 * 4 * 512

pairs = logged_pairs()
apart = [abs(pair.apart_bytes) for pair in pairs if pair.apart_bytes]
print(
    f"Of {len(pairs)} pairs {len(pairs) - len(apart)} agree to the byte, including the two below. The others are at most "
    f"{max(apart):,} B apart:\n{max(apart) // BLOCK_BYTES} × {BLOCK_BYTES} B, what torch's allocator takes for "
    f"{max(apart) // BLOCK_BYTES} tensors of one number, such as a loss (the logs don't name them)."
)
for formula, pair in zip((one_layer, 12 * (one_layer - only_its_input)), pairs):
    checks.add(pair.what, [(formula, pair.logged_bytes)], sides=("predicted", "logged on A100s"))
checks.show()

# %% [markdown]
# torch's allocator also counts the bytes that it is asked for, and those that it hands out in blocks of 512. One GPU
# ran a layer of the 22B and one of the 175B model in the six configurations of chapters 3 to 5, and counted between
# forward and backward pass ([chapter 1](01_memory_wall.ipynb) says which GPU, and how):

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import newest

on_gpu = newest("table2")["table2"]
for count in ("ledger", "requested", "allocated"):
    checks.add(
        f"two models' layers, six configurations, on a GPU: {count} bytes",
        [(row["predicted_bytes"], row[f"{count}_bytes"]) for row in on_gpu],
        sides=("formula", count),
    )
checks.show()

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Check yourself
#
# You switch the activations to float32. Which of the 15 rows don't double, and what becomes of the 34?
#
# <details><summary>Answer</summary>
#
# The three dropout masks stay at one byte per element. With $e$ bytes per element the sum is
# $(16e + 2)\,sbh + (2e + 1)\,as^2b$, so the 34 becomes 66 and the 5 becomes 9.
#
# </details>
#
# ## What people get wrong here
#
# - **Multiplying by the element size again.** $34 + 5as/h$ is in bytes already.
# - **Losing the $a$.** Each head has an $s \times s$ matrix of its own: $5as^2b$, not $5s^2b$.
#
# > **Take away**
# >
# > 1. Autograd saves what gradients read: a linear layer its input, a matmul of two activations both, softmax its
# >    output, dropout a mask, a sum nothing.
# > 2. A layer saves 15 tensors, $34sbh + 5as^2b$ bytes. The core attention's three grow with $s^2$.
# > 3. Memory holds a tensor once. Two operations that read the same tensor share it.
# >
# > **At work tomorrow:** run `am.record` around one block of your own model, and find the line that you didn't
# > expect. (`actmem record my_model.py:factory --fake` lists them all: [chapter 9](09_your_model.ipynb).)
#
# **Sources.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198), section 4.1 and equation 1 ·
# PyTorch, [Hooks for autograd saved
# tensors](https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html): how `record`
# sees what it sees.
#
# Now do [lab 1](../labs/lab1_count_bytes.py); its exercise 1.2 comes in chapter 5. Next, [chapter
# 3](03_tensor_parallelism.ipynb): eight GPUs share the layer.
