# %% [markdown]
# # 8 · Today's layer
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# Llama 3 8B reads 8,192 tokens. Its attention kernel stores no scores, so selective recomputation frees next to
# nothing. Recompute everything that needs no matmul instead: norms and activation functions. **What percentage of
# a layer's bytes goes?**

# %% jupyter={"source_hidden": true}
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.rows import total
from actmem_course.figures import Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal
from actmem_course.figures import bar_chart, choice, size_text, steps, text_table, worked
from actmem_more import llama_shape as shapes, llama_terms as llama

LLAMA = shapes.llama_shape("llama3-8b")
checks = Checks()

saved = total(llama.llama_rows(LLAMA))
freed = lambda mode: 100 * (1 - total(llama.llama_rows(LLAMA, recompute=mode)) / saved)
question = Prediction(
    f"A layer of Llama 3 8B: {LLAMA.seq_length:,} tokens, hidden size h = {LLAMA.hidden_size:,}, a gated MLP of width "
    f"f = {LLAMA.ffn_hidden_size:,}. Norms and gate are fused, so each saves only its inputs. A flash kernel never stores the scores, so selective "
    f"recomputation frees {freed('selective'):.1f}%. What percentage of the layer's bytes goes if you recompute "
    "everything that needs no matmul?",
    freed("elementwise"),
    "%",
    "The outputs of both norms go, 4sbh bytes, and the product of the MLP's gate, silu(gate) · up, 2sbf bytes.",
    GuessLine(-saved / 100, saved),
)
MODES = ("none", "selective", "elementwise", "full")


def bars(s, k, f, shown):
    """What the layer saves in each mode that is shown."""
    shape = shapes.LlamaShape(s, 1, 4096, 32, k, f)
    sizes = {mode: total(llama.llama_rows(shape, recompute=mode)) for mode in MODES}
    title = f"A Llama layer saves {size_text(sizes['none'])}"
    if shown == "each way":
        title = f"Of {size_text(sizes['none'])}, {1 - sizes['elementwise'] / sizes['none']:.0%} goes without a matmul"
    saved = {mode: size if mode == "none" or shown == "each way" else None for mode, size in sizes.items()}
    hidden = {mode: "?" for mode, size in saved.items() if size is None}
    return bar_chart(title, {"saved": saved}, "saved by one layer", notes=hidden)


Reveal(
    question,
    Panel(
        bars,
        s=steps("s", "tokens", (1024, 2048, 4096, 8192, 16384, 32768), 8192),
        k=steps("k", "key and value heads", (1, 2, 4, 8, 16, 32), 8),
        f=steps("f", "width of the MLP", (8192, 11008, 14336, 16384), 14336),
        shown=choice("recompute", ["nothing", "each way"], "nothing"),
    ),
    shown="each way",
)

# %% [markdown]
# **You need** [chapter 2](02_counting_bytes.ipynb) and [chapter 5](05_recomputation.ipynb).
#
# **Letters:** $s$ tokens, $b$ sequences, $h$ hidden size, $a$ heads, $k$ key and value heads, $d = h/a$ elements of a
# head, $f$ width of the MLP, $t$ tensor-parallel ranks.
#
# ## The layer changed
#
# After 2022 the layer norm lost its mean and biases (RMSNorm). Q and K are rotated by position (RoPE). Several query
# heads share a key and value head. The MLP has a gate (SwiGLU). Dropout is gone, and attention runs in one fused
# kernel. So $5as^2b$ and the masks are gone as well. What is left? Ask what each gradient reads, as in chapter 2:
#
# - **RMSNorm**: its input and one number per token, $2sbh + 4sb$.
# - **A linear**: its input. $2sbh$ for Q, K, V together and for gate and up together; $2sbh$ for the projection; $2sbf$
#   for down.
# - **A rotation**: only its tables. It's linear, and its gradient is the rotation backwards.
# - **Flash attention**: Q, K, V, its output and the log-sum-exp of each row, $2sbh + 4sbkd + 2sbh + 4asb$. The output
#   is the projection's input: one tensor, counted once.
# - **SwiGLU**, `silu(gate) · up`: gate and up, $4sbf$.
#
# The picture shows them all:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.layer_picture import layer_picture

LiveFigure(layer_picture(LLAMA))

# %% [markdown]
# The layer in `src/actmem_more/llama.py` saves exactly these. Count them on a small layer, then at Llama 3 70B's size
# on an emulated rank with tensor and sequence parallelism. By how much are K and V divided on 16 ranks, with
# $k = 8$?

# %%
from actmem_more.llama_measured import measure_llama_layer

checks.add_rows(
    "a small layer", llama.llama_rows(shapes.TINY_LLAMA), measure_llama_layer(shapes.TINY_LLAMA)
)
large = shapes.llama_shape("llama3-70b")
for ranks in (8, 16):
    with am.emulated_rank(ranks):
        measured = measure_llama_layer(large, am.tensor_parallel(sequence_parallel=True))
    predicted = llama.llama_rows(large, am.Parallel(ranks, True))
    checks.add_rows(f"Llama 3 70B, one of {ranks} ranks", predicted, measured)
    print(f"t = {ranks}: K is divided by {next(row.split_by for row in predicted if row.term == 'K')}")
checks.show()

# %% [markdown]
# ## More ranks than key heads
#
# TP does not split a head. So with $t > k$, $t/k$ neighbouring ranks need the same key and value head. In our layer
# they hold the same rows of the K and V weights, and rank $i$ reads head $\lfloor i\,k/t \rfloor$. (Megatron shards the
# QKV weight over all $t$ ranks, all-gathers its output, and slices.) With two key heads:

# %%
Panel(
    lambda t: layer_picture(LLAMA.with_sizes(num_key_value_heads=2), am.Parallel(t, t > 1)),
    t=steps("t", "ranks", (1, 2, 4, 8), 4),
)

# %% [markdown]
# Each rank's query heads give a part of the gradient of their key head. The collective at the block's entry sums the
# input's gradient anyway. But the head's weight is a replica on $t/k$ ranks, and each has only its own part of the
# gradient. Those ranks must add up their parts after backward. If you forget it, you train $t/k$ different copies of
# one head.
#
# **Now write it:** [exercises 7.1, 7.4 and 7.5](../labs/lab7_todays_layer.py), `llama_layer_bytes`,
# `split_grouped_heads` and `sum_shared_gradients`: `python my/labs/lab7_todays_layer.py --only 7.1,7.4,7.5`.
#
# ## What plain operators save instead
#
# Write the same norm and gate in plain PyTorch, as Hugging Face does, and autograd saves what each operator reads: the
# norm's input in float32, its normalised input, and `silu(gate)`:

# %% jupyter={"source_hidden": true}
import torch
from torch import nn

from actmem_more.llama_modules import rms_norm, swiglu


class Norm(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.weight, self.fused = nn.Parameter(torch.ones(128, dtype=torch.bfloat16)), fused

    def forward(self, x):
        if self.fused:
            return rms_norm(x, self.weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Gate(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, gate, up):
        return swiglu(gate, up) if self.fused else nn.functional.silu(gate) * up


def saved_by(module, inputs, s=64, b=2):
    """Bytes that a module saves, whose inputs are ``[s, b, 128]``."""
    tensors = [torch.randn(s, b, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(inputs)]
    with am.record(module) as ledger:
        y = module(*tensors)
    assert y.requires_grad  # it holds the graph, which holds the tensors
    return ledger.total_bytes


sb, sbh = 64 * 2, 64 * 2 * 128
plain = [(6 * sbh + 4 * sb, saved_by(Norm(False), 1)), (6 * sbh, saved_by(Gate(False), 2))]
fused = [(2 * sbh + 4 * sb, saved_by(Norm(True), 1)), (4 * sbh, saved_by(Gate(True), 2))]
checks.add("plain norm, 6sbh + 4sb, and gate, 6sbf", plain)
checks.add("fused norm, 2sbh + 4sb, and gate, 4sbf", fused)
checks.show()

# %% [markdown]
# **Now write it:** [exercises 7.2 and 7.3](../labs/lab7_todays_layer.py), `rms_norm` and `swiglu`: `python
# my/labs/lab7_todays_layer.py --only 7.2,7.3`.
#
# So one layer differs from library to library. (We read these bytes from their operators; $4sd$ are
# the rotation's tables.)

# %%
# As read from transformers 5.23 and torch 2.13.
OTHERS = {
    "Hugging Face Llama, sdpa": {"sbh": 20, "sbkd": 4, "sbf": 8, "asb": 4, "sb": 8, "sd": 4},
    "torchtitan, torch.compile": {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
    "ours": {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
    "ours, elementwise": {"sbh": 8, "sbkd": 4, "sbf": 4, "asb": 4, "sb": 8},
}
a, k, h, f = LLAMA.num_attention_heads, LLAMA.num_key_value_heads, LLAMA.hidden_size, LLAMA.ffn_hidden_size
s, sb, d = LLAMA.seq_length, LLAMA.seq_length * LLAMA.micro_batch_size, LLAMA.d
products = {"sbh": sb * h, "sbkd": sb * k * d, "sbf": sb * f, "asb": a * sb, "sb": sb, "sd": s * d}
for name, terms in OTHERS.items():
    formula = " + ".join(f"{count}{product}" for product, count in terms.items())
    size = sum(count * products[product] for product, count in terms.items())
    print(f"{name}: {size / products['sbh']:.1f} sbh bytes in Llama 3 8B\n    {formula}")

# %% [markdown]
# ## What needs no matmul
#
# You can compute a norm's output from its input, and `silu(gate) · up` from gate and up. Our mode `elementwise` drops
# both, and the core's three tensors where attention stores scores. (Megatron's nearest: `--recompute-granularity selective
# --recompute-modules layernorm`, where its norms aren't fused with a linear; with experts and `--moe-grouped-gemm` also `moe_act`.)

# %%
forward = sum(llama.llama_matmuls(LLAMA).values())
added = lambda mode: float(100 * llama.llama_recomputed_flops(LLAMA, mode) / (3 * forward))
lines = [
    (mode, f"{freed(mode):.1f}%", f"{added(mode):.2f}%") for mode in ("selective", "elementwise", "full")
]
print(text_table(("mode", "bytes freed", "matmul FLOPs added"), lines, " rr"))
core = sum(llama.llama_matmuls(LLAMA)[name] for name in ("QKᵀ", "attention over V"))
print(f"selective, causal kernel (half the scores): {100 * (core / 2) / (3 * (forward - core / 2)):.2f}%")

# %% [markdown]
# The FLOPs are in percent of forward and backward together, with all $s^2$ scores, as the paper counts. *Selective* runs the kernel again. Our `full` recomputes up to the last tensor that backward reads,
# so not `down`. Megatron's recomputes the whole layer: a third more FLOPs.

# %%
LiveFigure(layer_picture(LLAMA, recompute="elementwise"))

# %% [markdown]
# > **Why do this?** You get a third of the layer back, and no matmul is recomputed. **Why not?** Elementwise operations
# > are memory-bound. Where everything fits anyway, save it.
#
# Here each dropped tensor is a linear's input. So one function is enough: a linear that recomputes its input in
# backward.
#
# In the paper's layer `elementwise` drops the core attention (QKᵀ is recomputed), both norm outputs, the GeLU's output
# and two dropout masks, drawn again from a seed. Of $34sbh/t$ it leaves $20sbh/t$:

# %% jupyter={"source_hidden": true}
from actmem.config import PAPER_MODELS, model_shape
from actmem.formulas.activations import layer_bytes

gpt3 = model_shape("175B")
pairs = []
for model in PAPER_MODELS.values():
    sbh = model.shape.seq_length * model.shape.micro_batch_size * model.shape.hidden_size
    sizes = (
        20 * sbh // model.parallel.tensor_parallel_size,
        layer_bytes(model.shape, model.parallel, "elementwise"),
    )
    pairs.append(sizes)
checks.add("the paper's four models, elementwise", pairs, sides=("20sbh/t", "sum of the tensors"))
checks.show()

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# All 32 layers of Llama 3 8B read one sequence of 8,192 tokens on one GPU. What do they save with a flash kernel, and
# what with `elementwise`? What would they save if attention still stored its scores, $2as^2b$ per layer?

# %% jupyter={"source_hidden": true}
layers = LLAMA.num_layers
fewer = total(llama.llama_rows(LLAMA, recompute="elementwise"))
scores = 2 * LLAMA.num_attention_heads * LLAMA.seq_length**2 * LLAMA.micro_batch_size
worked(
    f"A layer saves {size_text(saved)}; {layers} of them {size_text(layers * saved)}.",
    f"Elementwise drops the outputs of norms and of the gate: {size_text(fewer)} per layer, "
    f"{size_text(layers * fewer)} in all, and no matmul is recomputed.",
    f"The scores would add {size_text(scores)} per layer, {scores / saved:.1f} times all the rest, "
    f"{size_text(layers * scores)} in all. That is why long sequences are trained with fused kernels.",
)

# %% [markdown]
# <details><summary><b>Question:</b> why is full recomputation of this layer a worse trade than of the paper's?</summary>
#
# The layer saves less to begin with, so the same FLOPs free fewer bytes.
# </details>
#
# > **Take away**
# > 1. With a fused kernel the scores are gone, and selective recomputation with them.
# > 2. A third of what a fused Llama layer saves can be recomputed without a matmul: do that first.
# > 3. The code decides: plain operators save about 1.5 times as much as fused ones.
# >
# > **At work tomorrow:** count what *your* layer saves, `actmem record my_model.py:factory --fake` ([chapter
# > 9](09_your_model.ipynb)). Compare the course's: `python labs/measure_today.py --emulate 8 --model llama3-8b`.
#
# **Lab 7**: `python my/labs/lab7_todays_layer.py`. Next, [chapter 9](09_your_model.ipynb): a model that this course
# didn't write. Experts and latent attention are in [chapter 13](13_experts.ipynb).
#
# **Sources.** Llama 3, 2407.21783, table 3, and the models' published config.json · grouped queries, 2305.13245 · flash
# attention, 2205.14135 · code: `src/actmem_more/llama.py`, `src/actmem/recipes.py`, `src/actmem/drop.py`,
# `src/actmem_more/store.py`.
