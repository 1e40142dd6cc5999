# %% [markdown]
# # 10 · The loss
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# You recompute the layers, you shard the weights, and training runs out of memory at the last line: the loss. Llama 3
# 8B has a vocabulary of 128,256 entries. It reads 131,072 tokens, and every layer is recomputed. **How many GiB
# does `F.cross_entropy` take at its peak?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.rows import total
from actmem_course.figures import Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal
from actmem_course.figures import choice, size_text, steps, worked
from actmem_course.figures import ch10_the_loss as show
from actmem_more import llama_shape, llama_terms, loss_peak

checks = Checks()
LLAMA = llama_shape.llama_shape("llama3-8b")
tokens, h, v = 131072, LLAMA.hidden_size, LLAMA.vocab_size

question = Prediction(
    f"The figure has a vocabulary of 32,000; Llama 3 8B has {v:,}. It reads {tokens:,} tokens on one GPU. All "
    f"{LLAMA.num_layers} layers are recomputed, so each saves its input alone: "
    f"{size_text(2 * tokens * h * LLAMA.num_layers)} together. How much does F.cross_entropy of the 16-bit logits take "
    "at its peak?",
    answer=total(loss_peak.loss_peak_rows("16 bits", tokens, h, v)) / 2**30,
    unit="GiB",
    because=f"Each token has {v:,} logits, and at the peak three tensors of that size are alive, beside the input.",
    line=GuessLine(2**30),
)
Reveal(
    question,
    Panel(
        lambda s, v, t, layers: show.loss_bars(LLAMA.with_sizes(seq_length=s, vocab_size=v), t, layers),
        s=steps("s", "tokens", [2**k for k in range(12, 21)], tokens),
        v=steps("v", "size of the vocabulary", (32000, 128256, 152064, 262144), 32000),
        t=steps("t", "ranks", (1, 2, 4, 8), 1),
        layers=choice("the layers recompute", ["none", "elementwise", "full"], "full"),
    ),
    v=v,
)

# %% [markdown]
# **You need** [chapter 2](02_counting_bytes.ipynb), [chapter 3](03_tensor_parallelism.ipynb) and [chapter
# 5](05_recomputation.ipynb).
#
# **Letters:** $s$ tokens, $b$ sequences, $h$ hidden size, $v$ size of the vocabulary, $t$ ranks that share a layer, $p$
# pipeline stages, $u$ tokens in a chunk. *Elementwise*, in the figure, recomputes all that needs no matmul ([chapter
# 8](08_todays_layer.ipynb)).
#
# ## What the loss saves
#
# The output layer computes $v$ logits $z$ for each token. With $P = \mathrm{softmax}(z)$ and the target $y$,
#
# $$\ell = \log \sum_j e^{z_j} - z_y$$
# $$dz = (P - \mathrm{onehot}_y)\, d\ell$$
#
# Ask chapter 2's question: which tensors does $dz$ read? Only $P$; or $z$ and one number per token, to recompute $P$.
# So **$2v$ bytes per token** are enough in 16 bits. `F.cross_entropy` saves $\log P$ in the dtype of the logits: $2v$
# bytes, or $4v$ after the `logits.float()` of most libraries.
#
# But the peak comes in the backward pass, when three tensors of $v$ numbers per token are alive: $\log P$; its
# gradient, $-1$ at the target and $v - 1$ zeros; and the gradient of the logits, made from both. Add the output layer's
# input, $2h$, and a 64-bit target: **$6v + 2h + 8$ bytes per token**, $12v$ instead of $6v$ with float32 logits.
#
# Megatron's `vocab_parallel_cross_entropy` turns one float32 copy of the logits into $P$, in place: $4v$ for $P$, and
# $2v$ for the logits or their gradient (*softmax in place* in the figure). On $t$ ranks it needs $v/t$ logits, as DTensor's
# `loss_parallel` does. Plain `F.cross_entropy` needs all, so its bars stay.
#
# Watch the step with 16-bit logits on fake tensors, 8,192 tokens:

# %% jupyter={"source_hidden": true}
import torch
import torch.nn.functional as F
from torch import nn

from actmem.parallel.groups import TensorParallel
from actmem.parallel.vocab import VocabParallelCrossEntropy
from actmem.torch_private import fake_tensors
from actmem_more.chunked_loss import LinearCrossEntropy


def loss_step(loss, s=8192, chunk=1024, returned=False):
    """One step of output layer and loss; returned: whoever calls the model holds its logits."""
    with fake_tensors():
        linear = nn.Linear(h, v, bias=False, dtype=torch.bfloat16)
        x, ids = (
            torch.zeros(s, 1, h, dtype=torch.bfloat16, requires_grad=True),
            torch.zeros(s, 1, dtype=torch.long),
        )
        with am.watch_step(linear, batch=(x, ids)) as bill:
            if loss == "in chunks":
                value = LinearCrossEntropy(TensorParallel(), chunk)(x, linear.weight, ids).mean()
            elif loss == "in place":
                value = VocabParallelCrossEntropy(TensorParallel())(linear(x), ids)
            else:
                logits = linear(x).flatten(0, 1)
                value = F.cross_entropy(logits.float() if loss == "float32" else logits, ids.flatten())
                logits = logits if returned else None
            value.backward()
    return bill


LiveFigure(show.loss_timeline(loss_step("16 bits"), v, "the loss of 16-bit logits<br>with the output layer's weight"))

# %% [markdown]
# **Now write it:** [exercise 9.1](../labs/lab9_the_ends.py), `cross_entropy`: `python my/labs/lab9_the_ends.py --only
# 9.1`.
#
# ## A chunk at a time
#
# A token's loss reads the logits of no other token. So take $u$ tokens: compute their logits, save $\log\sum e^z$, one
# number per token, and drop the logits. Backward recomputes them: one more matmul, $2sbhv$ FLOPs. The output layer's
# input, $2sbh$, stays, with 8 bytes per token: that number in float32, and the target in 32 bits. (From 2.13 on torch has a
# chunked loss too: `F.linear_cross_entropy` with `options`.)

# %%
torch.manual_seed(0)
linear = nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16)
x = torch.randn(48, 2, 64, dtype=torch.bfloat16, requires_grad=True)
ids = torch.randint(0, 1000, (48, 2))
ids[1, 0] = ids[0, 0]  # one id comes twice
with am.record(linear) as ledger:
    losses = LinearCrossEntropy(TensorParallel(), chunk=16)(x, linear.weight, ids)
checks.add("saved by the loss in chunks", [(2 * 48 * 2 * 64 + 8 * 48 * 2, ledger.total_bytes)])
checks.show()

# %% jupyter={"source_hidden": true}
def loss_and_gradients(compute):
    """In float64, where only rounding is left between two ways to compute one thing."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, linear.weight)]
    losses = compute(*leaves)
    return losses.detach(), *torch.autograd.grad(
        losses, leaves, torch.arange(96.0, dtype=torch.float64).view(48, 2)
    )


ways = (
    lambda x, weight: LinearCrossEntropy(TensorParallel(), chunk=16)(x, weight, ids),
    lambda x, weight: F.cross_entropy(
        F.linear(x, weight).flatten(0, 1), ids.flatten(), reduction="none"
    ).view(48, 2),
)
pairs = zip(*map(loss_and_gradients, ways))
apart = [int((one - other).abs().gt(1e-9 * other.abs().max()).sum()) for one, other in pairs]
checks.add(
    "losses and gradients in chunks",
    [(0, count) for count in apart],
    "numbers that differ by more than rounding",
)
checks.show()

# %% [markdown]
# The peak now has three parts: the input and its gradient, $4sbh$; the weight's gradient, a float32 sum over the
# chunks, $4vh$; and the larger of two things of one chunk: $6uv$ (its logits, in float32 and in 16 bits), or $2uv + 2vh$
# (their gradient, and the chunk's part of the weight's gradient):

# %% jupyter={"source_hidden": true}
LiveFigure(show.loss_timeline(loss_step("in chunks"), v, "the loss in chunks of 1,024<br>with the output layer's weight"))

# %% jupyter={"source_hidden": true}
weight = 2 * v * h
for loss in loss_peak.LOSSES:
    predicted = total(loss_peak.loss_peak_rows(loss, 8192, h, v))
    checks.add(f"peak, {loss}", [(predicted, loss_step(loss).peak_bytes - weight)])
for u in (256, 4096):
    predicted = total(loss_peak.loss_peak_rows("in chunks", 8192, h, v, chunk=u))
    checks.add(
        f"peak in chunks of {u:,}", [(predicted, loss_step("in chunks", chunk=u).peak_bytes - weight)]
    )
longer = loss_step("16 bits", returned=True).peak_bytes - loss_step("16 bits").peak_bytes
checks.add(
    "peak with 16-bit logits that the model returns, beyond the same without", [(2 * 8192 * v, longer)]
)
checks.show()

# %% [markdown]
# > **Why do this?** The logits no longer grow with $s$, and results change only by rounding. **Why not?** You pay one
# > more matmul of the output layer. (Liger's kernel avoids it: its forward pass computes both gradients at once, and
# > saves them instead of $x$, $2vh$ bytes more.)
#
# **Now write it:** [exercise 9.2](../labs/lab9_the_ends.py), `linear_cross_entropy`: `python my/labs/lab9_the_ends.py
# --only 9.2`.
#
# ## The last stage
#
# Tensor parallelism gives each of $t$ ranks $v/t$ logits of a token. The ranks all-reduce three numbers per token: the
# largest logit, the sum of the exponentials, the target's logit. Backward sums the gradient of $x$ over the ranks; that
# of the weight is each rank's own.
#
# In a pipeline ([chapter 6](06_pipeline.ipynb)) the output layer is on the last stage, and all others wait for it.
# **Guess:** how many times the others' FLOPs does that stage of Llama 3 8B have, at 8,192 tokens, with 8 stages of four layers? (A layer's forward pass has
# $4.67 \cdot 10^{12}$ FLOPs, with all $s^2$ scores; the output layer $2sbhv$, with $h$ = 4,096.)

# %%
layer_flops = sum(llama_terms.llama_matmuls(LLAMA).values())
output_layers = 2 * LLAMA.seq_length * LLAMA.micro_batch_size * h * v / layer_flops
print(
    f"at {LLAMA.seq_length:,} tokens a layer has {layer_flops / 1e12:.2f}·10¹² FLOPs, "
    f"and the output layer those of {output_layers:.2f} layers"
)
for p in (4, 8, 16):
    print(
        f"{p} stages: the last one has {1 + output_layers * p / LLAMA.num_layers:.2f} times the FLOPs of the others"
    )

# %% [markdown]
# *Vocabulary parallelism* gives each of the $p$ stages $v/p$ rows of the output layer. The last layer's output is
# broadcast to all, and they all-reduce the numbers above. Compute, weights and logits are balanced.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# A model has $v$ = 262,144, $h$ = 2,560 and 34 layers. It reads 32,768 tokens, all layers are recomputed, and 30 GiB
# are left after weights and states. Which of the four losses fits? (Chunks have 1,024 tokens.)

# %% jupyter={"source_hidden": true}
s, width, entries, layers = 32768, 2560, 262144, 34
inputs = 2 * s * width * layers
found = {loss: total(loss_peak.loss_peak_rows(loss, s, width, entries)) for loss in loss_peak.LOSSES}
lines = [f"the {layers} layers save 2sbh each: {size_text(inputs)}"]
for loss, size in found.items():
    verdict = ", fits" if size + inputs < 30 * 2**30 else ""
    lines.append(f"{loss}: {size_text(size)}, with the layers {size_text(size + inputs)}{verdict}")
lines.append(
    "in chunks it is 4sbh for the input and its gradient, 4vh for the weight's gradient, and 2uv + 2vh for a chunk"
)
worked(*lines)

# %% [markdown]
# <details><summary><b>Question:</b> does a smaller chunk always lower the peak?</summary>
#
# Yes, with diminishing returns: below $u = h/2$ the peak is $4sbh + 6vh + 2uv$, and only $2uv$ shrinks. Small matmuls are
# slow, too.
# </details>
#
# > **Take away**
# > 1. The loss is one number, but backward holds three tensors as large as the logits.
# > 2. "Full recomputation solves long sequences" is wrong: it leaves $2sbh$ per layer, and all of the loss.
# > 3. In chunks, a token costs $4h$ bytes instead of $6v$ or $12v$, beside a constant $6vh + 2uv$.
# >
# > **At work tomorrow:** see whether your model returns its logits. If it does, it holds $2v$ bytes per token more
# > through all of backward.
#
# **Lab 9** has this chapter's two losses: `python my/labs/lab9_the_ends.py`. Next, [chapter 11](11_adapters.ipynb):
# you freeze the weights. What is saved then?
#
# **Sources.** 2205.05198 section 4.3 · Liger Kernel, 2410.10989 · *Cut Your Losses*, 2411.09009 · *Balancing Pipeline
# Parallelism with Vocabulary Parallelism*, 2411.05288 · code: `src/actmem_more/chunked_loss.py`,
# `src/actmem_more/loss_peak.py`.
