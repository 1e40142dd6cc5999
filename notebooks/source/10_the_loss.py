# %% [markdown]
# # 11 · The ends
#
# You recompute the layers, you shard the weights, and training runs out of memory at the last line: the loss. Why, and what
# must the two ends of the model keep?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.rows import total
from actmem_course.figures import (
    Checks, GuessLine, Panel, Prediction, Reveal, choice, kept_text, size_text, steps, worked,
)
from actmem_course.figures import ch10_the_loss as show
from actmem_more.llama_shape import llama_shape
from actmem_more.loss_peak import loss_peak_rows

checks = Checks()
LLAMA = llama_shape("llama3-8b")
tokens, h, v = 131072, LLAMA.hidden_size, LLAMA.vocab_size

question = Prediction(
    f"The figure has a vocabulary of 32,000; Llama 3 8B has {v:,}. It reads {tokens:,} tokens on one "
    f"GPU. All {LLAMA.num_layers} layers are recomputed, so each keeps its input alone: "
    f"{size_text(2 * tokens * h * LLAMA.num_layers)} together. How much does F.cross_entropy of the "
    "16-bit logits take at its peak?",
    answer=total(loss_peak_rows("16 bits", tokens, h, v)) / 2**30,
    unit="GiB",
    because=(
        f"Each token has {v:,} logits where a layer keeps {h:,} numbers, and at the peak three tensors of "
        "the logits' size are alive."
    ),
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
# *30 minutes.* **You need:** [02 Counting bytes](02_counting_bytes.ipynb) and [03 Tensor
# parallelism](03_tensor_parallelism.ipynb). **You will** derive what the loss keeps and what it takes at its peak, compute it
# a chunk at a time, share its vocabulary among ranks, and do the same for log-probabilities and the embedding.
#
# **Letters used:** $s$ tokens, $b$ sequences, $h$ hidden size, $v$ size of the vocabulary, $t$ ranks that share a
# layer, $p$ pipeline stages, $u$ tokens in a chunk.

# %% [markdown]
# ## What the loss keeps
#
# The output layer makes $v$ logits $z$ of a token. With $P = \mathrm{softmax}(z)$ and the target $y$,
#
# $$\ell = \log \sum_j e^{z_j} - z_y, \qquad dz = (P - \mathrm{onehot}_y)\, d\ell$$
#
# Ask chapter 2's question: which tensors does $dz$ read? Only $P$; or $z$ and one number per token, to recompute $P$. So
# **$2v$ bytes per token** are enough in 16 bits. `F.cross_entropy` keeps $\log P$, in the dtype of the logits: $2v$ bytes if
# these have 16 bits, $4v$ after the `logits.float()` of most libraries.
#
# But the peak comes in backward. This is alive then, for each token:
#
# | what | bytes in 16 bits |
# |---|---|
# | $\log P$, kept by forward | $2v$ |
# | its gradient: $-1$ at the target, $v - 1$ zeros | $2v$ |
# | the gradient of the logits, made from both | $2v$ |
# | the output layer's input | $2h$ |
# | the input's gradient, kept from the last run | $2h$ |
# | the target, a 64-bit number | $8$ |
#
# Together **$6v + 4h + 8$ bytes per token**, and $12v$ instead of $6v$ with float32 logits. (The figure at the top is of a first
# run: $2h$ less. *Softmax in place* overwrites its own input, $4v$ in float32; the 16-bit logits, $2v$, stay. `F.cross_entropy`
# needs all logits of a token, so $t$ divides only the last two losses.)
#
# **Now write it:** [exercise 9.1](../labs/lab9_the_ends.py), `cross_entropy`: `python my/labs/lab9_the_ends.py --only 9.1`.

# %% [markdown]
# ## A chunk at a time
#
# A token's loss reads the logits of that token and of no other. So take $u$ tokens. Compute their logits, sum the exponentials,
# keep $\log\sum e^z$, one number per token, and drop the logits. Backward computes them again. That is recomputation, and a good
# trade: one more product, $2sbhv$ FLOPs, frees $v$ numbers per token. What stays is the output layer's input, $2sbh$:

# %%
import torch
from torch import nn

from actmem.parallel.groups import TensorParallel
from actmem_more.chunked_loss import LinearCrossEntropy

torch.manual_seed(0)
linear = nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16)
x = torch.randn(48, 2, 64, dtype=torch.bfloat16, requires_grad=True)
ids = torch.randint(0, 1000, (48, 2))
with am.record(linear) as ledger:
    losses = LinearCrossEntropy(TensorParallel(), chunk=16)(x, linear.weight, ids)
print(kept_text(ledger.saved))

# %% jupyter={"source_hidden": true}
import torch.nn.functional as F


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
# What is alive at the peak?
#
# - the input and its gradient, $4sbh$;
# - the weight's gradient, a float32 sum over the chunks, $4vh$;
# - of one chunk either its logits in float32 and in 16 bits, $6uv$, or their gradient and a part of the weight's, $2uv + 2vh$.
#
# A step on fake tensors counts the four ways at the model's size.

# %% jupyter={"source_hidden": true}
from actmem.parallel.vocab import VocabParallelCrossEntropy
from actmem.torch_private import fake_tensors
from actmem_more.loss_peak import LOSSES


def peak(loss, s=8192, chunk=1024, returned=False):
    """Bytes alive at the peak of the loss, beside the weight; returned: whoever calls the model holds its logits."""
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
    return bill.peak_bytes - 2 * v * h


for loss in LOSSES:
    checks.add(f"peak, {loss}", [(total(loss_peak_rows(loss, 8192, h, v)), peak(loss))])
for u in (256, 4096):
    checks.add(
        f"peak in chunks of {u:,}",
        [(total(loss_peak_rows("in chunks", 8192, h, v, chunk=u)), peak("in chunks", chunk=u))],
    )
checks.add(
    "peak with 16-bit logits that the model returns, beyond the same without",
    [(2 * 8192 * v, peak("16 bits", returned=True) - peak("16 bits"))],
)
checks.show()

# %% [markdown]
# Chunking changes results only by rounding: the weight's gradient is a sum over all tokens, now chunk by chunk. Liger goes
# further. Its forward knows that $d\ell$ will be the same for all tokens, so it runs this part of backward at once, and keeps
# both gradients instead of $x$. It reruns no product, and keeps $2vh$ more bytes from forward to backward.
#
# **Now write it:** [exercise 9.2](../labs/lab9_the_ends.py), `linear_cross_entropy`: `python my/labs/lab9_the_ends.py --only
# 9.2`.

# %% [markdown]
# ## The last stage
#
# Tensor parallelism gives each of $t$ ranks $v/t$ logits of a token (chapter 3, exercise 2.8). For each token the ranks
# exchange three numbers: the largest logit, the sum of the exponentials, the target's logit. In chunks each rank first reduces its
# logits to two numbers per token, $\log\sum e^z$ and the target's logit; these are exchanged once, at the end. Backward sums
# the gradient of $x$ over the ranks; that of the weight is each rank's own.
#
# A pipeline has another reason to share the vocabulary. The output layer is on the last stage, and it takes time: for Llama 3
# 8B almost as much as two layers. All other stages wait for the slowest:

# %%
Panel(
    lambda v, p, where: show.stage_work(LLAMA.with_sizes(vocab_size=v), p, where == "all stages"),
    v=steps("v", "size of the vocabulary", (32000, 128256, 152064, 262144), LLAMA.vocab_size),
    p=steps("p", "pipeline stages", (2, 4, 8, 16), 8),
    where=choice("the vocabulary is on", ["the last stage", "all stages"], "the last stage"),
)

# %% [markdown]
# *Vocabulary parallelism* gives each of the $p$ stages $v/p$ rows of the output layer. The last layer's output is broadcast
# to all of them, they exchange the few numbers above, and each stage computes its part of the gradient. So compute, weight states
# (18 bytes per parameter) and logits are balanced. The function is the same as for tensor parallelism, with the pipeline as its
# group.
#
# **Now write it:** [exercise 9.3](../labs/lab9_the_ends.py), `parallel_linear_cross_entropy`: `python my/labs/lab9_the_ends.py
# --only 9.3`.

# %% [markdown]
# ## Reinforcement learning
#
# Reinforcement learning needs no cross-entropy. Its loss reads $\log P_y$ of the tokens that were generated, and often the
# entropy $H = -\sum_j P_j \log P_j$. Written with torch's operators in float32, it keeps two tensors of $v$ numbers per token,
# $8v$ bytes:


# %%
class LogProbs(nn.Module):
    def forward(self, logits, tokens):
        log_p = logits.float().log_softmax(-1)
        return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


module, logits = LogProbs(), torch.randn(48, 2, 1000, dtype=torch.bfloat16, requires_grad=True)
with am.record(module) as ledger:
    found = module(logits, ids)
wide = [saved for saved in ledger.saved if saved.shape[-1] == 1000]
checks.add("tensors of v numbers a token", [(8 * logits.numel(), sum(saved.bytes for saved in wide))])
checks.show()

# %% jupyter={"source_hidden": true}

z = torch.randn(5, 1000, dtype=torch.float64, requires_grad=True)
given = torch.tensor([[0], [999], [3], [3], [500]])
log_p = z.log_softmax(-1)
p, entropy = log_p.exp(), -(log_p.exp() * log_p).sum(-1, keepdim=True)
formulas = torch.zeros_like(z).scatter_(-1, given, 1) - p, -p * (log_p + entropy)
by_autograd = [
    torch.autograd.grad(one.sum(), z, retain_graph=True)[0] for one in (log_p.gather(-1, given), entropy)
]
apart = [int((one - other).abs().gt(1e-12).sum()) for one, other in zip(formulas, by_autograd)]
checks.add(
    "gradients of log-probabilities and entropies",
    [(0, count) for count in apart],
    "numbers that differ from the formulas",
)
checks.show()

# %% [markdown]
# But what do the gradients read? Only the logits, and a number or two per token:
#
# $$\frac{\partial \log P_y}{\partial z} = \mathrm{onehot}_y - P, \qquad \frac{\partial H}{\partial z} = -P\,(\log P + H)$$
#
# So keep the 16-bit logits, $\log\sum e^z$ and $H$, and widen a
# chunk of tokens at a time: $2v$ bytes per token, and no float32 copy of all. If you start from $x$ instead of the logits, the
# same chunks keep $2h$.
#
# **Now write it:** [exercise 9.4](../labs/lab9_the_ends.py), `log_probs_and_entropy`: `python my/labs/lab9_the_ends.py --only
# 9.4`.

# %% [markdown]
# ## The other end
#
# The embedding looks up rows, so it keeps nothing but the ids. Its gradient is another matter. At most $sb$ of $v$ rows have
# one, yet torch's backward makes all $v$: $2vh$ bytes of mostly zeros, in every microbatch, only to add them to the sum of the
# microbatches before. So add the $sb$ rows straight to that sum, in float32. (If the output layer shares the weight, its dense
# gradient goes to the same sum.) One trap: a token that comes twice must be added twice.
#
# **Now write it:** [exercise 9.5](../labs/lab9_the_ends.py), `embedding`: `python my/labs/lab9_the_ends.py --only 9.5`.

# %% jupyter={"source_hidden": true}
lookup = nn.Embedding(1000, 64, dtype=torch.bfloat16)
with am.record(lookup) as ledger:
    rows = lookup(ids)
rows.backward(torch.ones_like(rows))
dense = lookup.weight.grad
checks.add("what a lookup keeps: the ids", [(8 * ids.numel(), ledger.total_bytes)])
checks.add("the embedding's gradient", [(2 * 1000 * 64, dense.numel() * dense.element_size())])
checks.add(
    "rows of it that are not zero: the ids that came", [(len(ids.unique()), int(dense.any(-1).sum()))], "rows"
)
checks.show()

# %% [markdown]
# ## Work it out
#
# A model has a vocabulary of $v$ = 262,144, $h$ = 2,560 and 34 layers. It reads one sequence of 32,768 tokens, all layers are
# recomputed, and the GPU has 30 GiB left after weights and states. Which of the four ways to compute the loss fits? (Chunks have
# 1,024 tokens. The softmax in place takes $6v$ bytes per token, as with 16-bit logits.)

# %% jupyter={"source_hidden": true}
s, width, words, layers = 32768, 2560, 262144, 34
kept = 2 * s * width * layers
found = {loss: total(loss_peak_rows(loss, s, width, words)) for loss in LOSSES}
lines = [f"the {layers} layers keep 2sbh each: {size_text(kept)}"]
for loss, size in found.items():
    lines.append(
        f"{loss}: {size_text(size)}, with the layers {size_text(size + kept)}"
        + (", fits" if size + kept < 30 * 2**30 else "")
    )
lines.append(
    "in chunks it is 4sbh for the input and its gradient, 4vh for the weight's gradient, and 2uv + 2vh for a chunk"
)
worked(*lines)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Check yourself
#
# <details><summary><b>1.</b> Does a smaller chunk always lower the peak?</summary>
#
# It does, but by less and less. With $u < h/2$ most of it is the weight's gradient: its float32 sum, $4vh$, and one chunk's
# part, $2vh$. Of the chunk only $2uv$ is left to save, and small products are slow. With 4,096 tokens chunks of 1,024 can take
# more than another loss: try $v$ = 262,144.
# </details>
#
# <details><summary><b>2.</b> Tensor parallelism divides the logits among the ranks. Is that enough at 131,072 tokens?</summary>
#
# Set $t$ = 8 and $v$ = 128,256 in the figure at the top: the softmax in place is divided, and still takes about three times what
# the layers keep. In chunks only the output layer's input and its gradient, $4sbh$, grow with $s$; the logits don't.
# </details>
#
# <details><summary><b>3.</b> Why does a pipeline's last stage hold logits of one microbatch only?</summary>
#
# Under 1F1B its backward comes right after its forward, so it has one microbatch in flight (chapter 6).
# </details>
#
# ## What people get wrong here
#
# - **"The loss is one number."** It is. But forward keeps $\log P$, as large as the logits, and backward makes two more of that size.
# - **"Full recomputation solves long sequences."** It leaves $2sbh$ per layer, and all of the loss.
# - **Returning the logits.** A model that returns them holds $2v$ bytes per token more, through all of backward.
#
# **Sources.** 2205.05198 section 4.3 · Liger Kernel, 2410.10989 · *Cut Your Losses*, 2411.09009 ·
# *Balancing Pipeline Parallelism with Vocabulary Parallelism*, 2411.05288 · code: `src/actmem_more/chunked_loss.py`,
# `src/actmem_more/loss_peak.py`.
#
# ## Now fit your model
#
# Which way does your code compute the loss? `actmem record` on your own model shows what its loss keeps, and
# `actmem.step` what is alive at the peak. **Lab 9** has the functions of this chapter:
# `python my/labs/lab9_the_ends.py`.
#
# Next, [chapter 11](11_adapters.ipynb): you freeze the weights. What is kept then?
