# %% [markdown]
# # 11 · Adapters
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# You fine-tune Llama 3 8B with LoRA: all weights are frozen, and adapters of rank 16 train on all seven linears of
# each layer. **What percentage of full training's activation bytes do the layers still save?**

# %%
# Setup: imports, and the numbers of the question
from actmem.rows import total
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, choice, size_text, steps, text_table,
    worked,
)
from actmem_course.figures import ch11_adapters as show
from actmem_course.predicted.adapters import ADAPTERS, IN_16_BITS, PLACES, lora_rows
from actmem_more.llama_shape import llama_shape
from actmem_more.llama_terms import llama_rows

checks = Checks()
LLAMA = llama_shape("llama3-8b")
full = total(llama_rows(LLAMA))

question = Prediction(
    "The figure has adapters of rank 16 on q and v only. Put them on all seven linears. What percentage of "
    "full training's activation bytes do the layers save then?",
    answer=100 * total(lora_rows(LLAMA)) / full,
    unit="%",
    because=(
        "The gradient of an adapter's A reads the input of its linear, so every input is saved again. XA "
        "is saved too, but it is narrow."
    ),
    line=GuessLine(LLAMA.num_layers * full / 100),
)
Reveal(
    question,
    Panel(
        lambda where, r, adapters, dropout: show.adapter_bars(LLAMA, where, r, adapters, dropout == "yes"),
        where=choice("adapters on", list(PLACES), "q and v"),
        r=steps("r", "adapter rank", (4, 8, 16, 32, 64, 128, 256), 16),
        adapters=choice("adapters compute in", list(ADAPTERS), IN_16_BITS),
        dropout=choice("adapters' dropout", ["no", "yes"], "no"),
    ),
    where="all linears",
)

# %% [markdown]
# *An elective: chapters 1 to 5 are enough.* The layer is Llama's, and its MLP is fused: the backward pass computes `silu(gate)`
# again, so it isn't saved ([chapter 8](08_todays_layer.ipynb)).
#
# **Letters:** $s$ tokens, $b$ sequences, $h$ hidden size, $o$ outputs of a linear, $r$ an adapter's rank (*rank* always means
# this; we call the processes *GPUs*), $a$ query heads, $k$ key and value heads of $d$ elements, $f$ width of the MLP.
#
# ## A frozen weight
#
# Save a tensor only if a gradient reads it. A linear $Y = XW$ has two:
#
# $$dX = dY\, W^\top, \qquad dW = X^\top dY$$
#
# Only $dW$ reads $X$, and a frozen $W$ needs no $dW$. So a frozen linear saves **nothing**:

# %%
import torch
from torch import nn

import actmem as am

torch.manual_seed(0)
s, b, h, o = 24, 2, 64, 96
x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
trains = nn.Linear(h, o, bias=False, dtype=torch.bfloat16)
frozen = nn.Linear(h, o, bias=False, dtype=torch.bfloat16).requires_grad_(False)
frozen.load_state_dict(trains.state_dict())
with am.record(frozen) as ledger:
    y = frozen(x)
checks.add("a frozen linear", [(0, ledger.total_bytes)])
checks.show()


# %% jupyter={"source_hidden": true}
def counted(module, x):
    """Bytes that a module saves for backward."""
    with am.record(module) as ledger:
        y = module(x)
    del y
    return ledger.total_bytes


checks.add("the same linear, if its weight trains: 2sbh", [(2 * s * b * h, counted(trains, x))])
(ours,), (torchs,) = (torch.autograd.grad(linear(x).sum(), x) for linear in (frozen, trains))
checks.add("the gradient of x, bit-identical", [(True, torch.equal(ours, torchs))])
checks.show()

# %% [markdown]
# QLoRA stores frozen weights in 4 bits and dequantizes them for each matmul. Plain operators then save *the dequantized
# weight*: `F.linear(x, codes * scale)` holds $2oh$ bytes until backward, in all a 16-bit copy of the model. So drop
# it after the forward pass, and dequantize again in the backward pass.
#
# **Write it:** [exercise 10.1](../labs/lab10_keep_less.py), `frozen_linear`:
# `python my/labs/lab10_keep_less.py --only 10.1`.
#
# For a year, bitsandbytes held $X$ in `ctx`, though nothing read it
# ([bitsandbytes#1270](https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1270)). This class does the same.
# A saved-tensor hook can't see `ctx.x`, but `record` can:

# %%
import torch.nn.functional as F
from torch.autograd import Function


class KeepsX(Function):
    @staticmethod
    def forward(ctx, x, codes, scale):
        ctx.x, ctx.codes, ctx.scale = x, codes, scale  # nothing reads ctx.x
        return F.linear(x, codes * scale)

    @staticmethod
    def backward(ctx, grad):
        return grad @ (ctx.codes * ctx.scale), None, None


class Careless(nn.Module):
    def forward(self, x):
        return KeepsX.apply(2 * x, codes, scale)


codes, scale = (
    torch.randint(-127, 128, (o, h), dtype=torch.int8),
    torch.full((o, 1), 2**-10, dtype=torch.bfloat16),
)
checks.add("x in ctx: 2sbh", [(2 * s * b * h, counted(Careless(), x))])
checks.show()

# %% [markdown]
# ## An adapter
#
# LoRA adds a narrow path beside the frozen weight. $A$ has $r$ columns, $B$ has $r$ rows, and only they train:
#
# $$Y = XW + \tfrac{\alpha}{r} (XA)B$$
# $$dB = \tfrac{\alpha}{r}\, (XA)^\top dY$$
# $$dA = \tfrac{\alpha}{r}\, X^\top dY\, B^\top$$
#
# $dB$ reads $XA$. And $dA$ reads $X$, so $X$ is saved after all. A linear with an adapter saves **$2sbh + 2sbr$**
# bytes.
#
# **Write it:** [exercise 10.2](../labs/lab10_keep_less.py), `lora_linear`:
# `python my/labs/lab10_keep_less.py --only 10.2`.
#
# peft 0.21 computes it like this, by default with $A$ and $B$ in float32, so `x.to(...)` is a copy:


# %%
class Adapted(nn.Module):
    def __init__(self, inputs, outputs, rank, adapters=IN_16_BITS, dropout=False):
        super().__init__()
        dtype = torch.bfloat16 if adapters == IN_16_BITS else torch.float32
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.b = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(0.1) if dropout else nn.Identity()

    def forward(self, x):
        y = self.base(x)
        # 2.0 is alpha / r
        return (y + 2.0 * self.b(self.a(self.dropout(x.to(self.a.weight.dtype))))).to(y.dtype)


r = 8
checks.add("in 16 bits: 2sbh + 2sbr", [(2 * s * b * (h + r), counted(Adapted(h, o, r), x))])
checks.show()

# %% jupyter={"source_hidden": true}
from actmem_course.predicted.adapters import UNDER_AUTOCAST, adapter_rows

FORMS = [(adapters, dropout) for adapters in ADAPTERS for dropout in (False, True)]


def in_each_form(predict, make, x):
    """Pairs; on a CPU dropout's mask is as wide as what it falls on."""
    for form in FORMS:
        with torch.autocast("cpu", torch.bfloat16, enabled=form[0] == UNDER_AUTOCAST):
            yield total(predict(*form, 2 if form[0] == IN_16_BITS else 4)), counted(make(form), x)


checks.add(
    "an adapter in each configuration",
    in_each_form(
        lambda *form: adapter_rows(s * b, (h, o), r, *form), lambda form: Adapted(h, o, r, *form), x
    ),
)
lines = []
for form in ADAPTERS:
    shares = (total(lora_rows(LLAMA, adapters=form, dropout=dropout)) / full for dropout in (False, True))
    lines.append((form, *(f"{share:.0%}" for share in shares)))
print("Llama 3 8B, adapters on all linears")
print(text_table(("of full training's bytes", "saved", "with dropout"), lines, " rr"))
checks.show()

# %% [markdown]
# Two things make an adapter save more:
#
# - **float32.** $A$ multiplies a float32 copy of $X$: $4sbh$. Under autocast the matmul casts it back and saves that
#   copy: $2sbh$.
# - **Dropout.** $A$ multiplies dropout's *output*, a new tensor of $2sbh$. Its gradient reads a mask: $sbh$ on a
#   GPU. (A CPU's mask is as wide as $X$.)
#
# Then nothing is shared either: q, k and v read one $X$, but each adapter makes its own float32 copy or dropout output, and
# its own mask. With either of the two on all linears, LoRA's activations take more memory than full training's. When AgileRL left out the
# copies under autocast, its peak on an A100 fell by 20% (0.5B parameters) and 24% (1.5B)
# ([AgileRL#623](https://github.com/AgileRL/AgileRL/pull/623)).
#
# ## A whole frozen layer
#
# Freeze a whole Llama layer: RMSNorms, attention in a flash kernel, which saves one number per query and head instead
# of the scores, and a gated MLP, $\mathrm{down}(\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up})$. A gradient must
# still pass through to adapters below. So which tensors does $dX$ read?

# %% jupyter={"source_hidden": true}
Panel(
    lambda weights: show.frozen_layer(LLAMA, weights),
    weights=choice("weights", list(show.UNREAD), "all train"),
)

# %% [markdown]
# Still saved:
#
# - of two **RMSNorms** their input and a number per token, $4sbh + 8sb$
# - of **attention** Q, K, V, its output and that number, $4sbh + 4sbkd + 4asb$
# - **gate and up**, $4sbf$
#
# The seven **linears** save nothing. That's two thirds of full training. Adapters on all linears bring the last third back.

# %% jupyter={"source_hidden": true}
from actmem_course.predicted.adapters import linear_sizes
from actmem_more.llama import attend
from actmem_more.llama_modules import rms_norm, swiglu
from actmem_more.llama_shape import LlamaShape

TINY = LlamaShape(24, 1, 64, 4, 2, 160)


class Layer(nn.Module):
    """Adapters at places beside frozen weights; without places all weights train.

    Not rotated by position: that saves nothing.
    """

    def __init__(self, places=None, form=(IN_16_BITS, False)):
        super().__init__()
        trains = places is None
        self.norms = nn.Parameter(torch.ones(2, TINY.hidden_size, dtype=torch.bfloat16), trains)
        self.linears = nn.ModuleDict()
        for name, sizes in linear_sizes(TINY).items():
            plain = nn.Linear(*sizes, bias=False, dtype=torch.bfloat16).requires_grad_(trains)
            self.linears[name] = Adapted(*sizes, r, *form) if name in (places or ()) else plain

    def forward(self, x):
        y = rms_norm(x, self.norms[0])
        x = x + self.linears["o"](
            attend(*(self.linears[name](y).unflatten(-1, (-1, TINY.d)).permute(1, 2, 0, 3) for name in "qkv"))
        )
        y = rms_norm(x, self.norms[1])
        return x + self.linears["down"](swiglu(self.linears["gate"](y), self.linears["up"](y)))


def layer_input(needs_gradient=True):
    return torch.randn(
        TINY.seq_length, 1, TINY.hidden_size, dtype=torch.bfloat16, requires_grad=needs_gradient
    )


checks.add("a layer whose weights all train", [(total(llama_rows(TINY)), counted(Layer(), layer_input()))])
checks.add("a frozen layer", [(total(lora_rows(TINY, ())), counted(Layer(()), layer_input()))])
for where, places in PLACES.items():
    pairs = in_each_form(
        lambda *form: lora_rows(TINY, places, r, *form), lambda form: Layer(places, form), layer_input()
    )
    checks.add(f"a frozen layer with adapters on {where}, in each configuration", pairs)
checks.show()

# %% [markdown]
# ## Where gradients begin
#
# The backward pass stops at the first adapter. Layers below it save **nothing**. If the embedding below the first layer
# is frozen, that layer's first norm needs no gradient either, and saves $2sbh + 4sb$ less.
#
# Here's a trap. The output of a reentrant checkpoint needs a gradient only if one of its *inputs* does. Weights don't
# count. Behind that embedding no input does, so **no adapter trains**, and torch only warns
# ([open-unlearning#178](https://github.com/locuslab/open-unlearning/issues/178)). Try two fixes:

# %%
from functools import partial
import warnings

from torch.utils.checkpoint import checkpoint

from actmem_course.predicted.adapters import ALL_LINEARS


def adapter_gradients(run, needs_gradient=False):
    """Of a layer with adapters, behind a frozen embedding.

    needs_gradient: what enable_input_require_grads() does.
    """
    warnings.simplefilter("ignore")  # "None of the inputs have requires_grad=True. Gradients will be None"
    torch.manual_seed(1)
    layer, x = Layer(ALL_LINEARS), layer_input(needs_gradient)
    y = run(layer, x)
    if y.requires_grad:
        y.sum().backward()
    return [p.grad for p in layer.parameters() if p.requires_grad]


ways = {
    "reentrant": adapter_gradients(partial(checkpoint, use_reentrant=True)),
    "not reentrant": adapter_gradients(partial(checkpoint, use_reentrant=False)),
    "reentrant, with input gradients": adapter_gradients(partial(checkpoint, use_reentrant=True), True),
}
print(
    "gradients: "
    + ", ".join(
        f"{way} {sum(grad is not None for grad in found)} of {len(found)}" for way, found in ways.items()
    )
)

# %% jupyter={"source_hidden": true}
first, later = (counted(Layer(ALL_LINEARS), layer_input(needs)) for needs in (False, True))
tokens = TINY.seq_length
checks.add(
    "frozen layers below the first adapter",
    [(0, counted(nn.Sequential(Layer(()), Layer(())), layer_input(False)))],
)
checks.add(
    "the first layer saves less: 2sbh + 4sb",
    [(2 * tokens * TINY.hidden_size + 4 * tokens, later - first)],
)
wanted, (lost, *fixed) = adapter_gradients(lambda layer, x: layer(x)), ways.values()
checks.add("adapters' weights without a gradient, reentrant", [(len(wanted), lost.count(None))], "weights")
checks.add(
    "gradients with either fix and without checkpointing, bit-identical",
    [(True, torch.equal(one, other)) for found in fixed for one, other in zip(found, wanted, strict=True)],
)
checks.show()

# %% [markdown]
# Prefer `use_reentrant=False`. The other fix, `model.enable_input_require_grads()`, computes a gradient that nothing
# uses.
#
# ## What LoRA frees
#
# Gradients and optimizer states: a weight that trains takes 18 bytes with them, a frozen one 2. In QLoRA a linear's weight takes
# $\frac12 + \frac1{64} + \frac4{64 \cdot 256}$: half a byte, an 8-bit scale for 64 weights, a 32-bit one for 256 scales. Embedding and output layer
# stay in 16 bits. Activations are left, so recomputation matters more now, not less:

# %% jupyter={"source_hidden": true}
from actmem.formulas.states import ADAM
from actmem_course.predicted.adapters import adapter_parameters

layers, states = LLAMA.num_layers, sum(state.bytes_per_parameter for state in ADAM["float32 gradients"]) - 2
linears = layers * (LLAMA.attention_weights + LLAMA.mlp_weights)
others = 2 * LLAMA.vocab_size * LLAMA.hidden_size + (2 * layers + 1) * LLAMA.hidden_size
adapters = layers * adapter_parameters(LLAMA, ALL_LINEARS, 16)
four_bits = int((1 / 2 + 1 / 64 + 4 / (64 * 256)) * linears) + 2 * (others + adapters)
lora, inputs = total(lora_rows(LLAMA)), layers * 2 * LLAMA.seq_length * LLAMA.hidden_size
bars = {
    "full training": (2 * (linears + others), states * (linears + others), layers * full),
    "LoRA": (2 * (linears + others + adapters), states * adapters, layers * lora),
    "QLoRA": (four_bits, states * adapters, layers * lora),
    "QLoRA, layers recomputed": (four_bits, states * adapters, inputs + lora),
}
parts = zip(("weights", "gradients and optimizer states", "activations"), zip(*bars.values()))
title = (
    f"QLoRA: {size_text(sum(bars['QLoRA']))}, of which {100 * layers * lora / sum(bars['QLoRA']):.0f}% "
    "are activations"
)
LiveFigure(
    bar_chart(
        title,
        {part: dict(zip(bars, sizes)) for part, sizes in parts},
        "Llama 3 8B on one GPU, 8,192 tokens, without the loss",
        fills=[show.FILLS[part] for part in ("weights", "gradients", "activations")],
    )
)

# %% jupyter={"source_hidden": true}
from actmem_more.loss_peak import loss_peak_rows

at_the_loss = total(loss_peak_rows("16 bits", LLAMA.seq_length, LLAMA.hidden_size, LLAMA.vocab_size))
peak = four_bits + states * adapters + inputs + at_the_loss
print(f"The loss takes {size_text(at_the_loss)}. So QLoRA with recomputed layers peaks there, at {size_text(peak)}.")

# %% [markdown]
# ## Work it out
#
# You train the same model by QLoRA on one GPU of 80 GiB, with 32,768 tokens, four times the figure's. At its peak the
# loss takes $6v + 2h + 8$ bytes per token ($v$ = 128,256, $h$ = 4,096). Does it fit? Do narrower adapters help?

# %% jupyter={"source_hidden": true}
loss = 4 * LLAMA.seq_length * (6 * LLAMA.vocab_size + 2 * LLAMA.hidden_size + 8)
held, kept, recomputed = four_bits + states * adapters, 4 * layers * lora, 4 * (inputs + lora)
worked(
    f"Weights and states take {size_text(held)}, the layers {size_text(kept)}, four times those of "
    "the figure: too much. Only "
    f"{size_text(kept - 4 * layers * total(lora_rows(LLAMA, rank=0)))} depend on r, so narrower adapters don't help.",
    f"Recomputed layers save their inputs, and one layer is whole at a time: {size_text(recomputed)}.",
    f"The loss takes {size_text(loss)}, once the layers have run: "
    f"{size_text(held + 4 * inputs + loss)} at its peak. It fits.",
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# > **Why do this?** Almost no gradients and optimizer states. **Why not?** It frees few activations, and on all
# > linears, with float32 adapters or dropout, they take more than in full training.
#
# > **Take away**
# > 1. A frozen linear saves nothing. An adapter brings its whole input back, at any $r$ and any weight precision.
# > 2. float32 copies and dropout masks come on top. Avoid both.
# > 3. Nothing is saved below the first adapter. Above it, norms, attention, gate and up save as always.
# >
# > **At work tomorrow:** `actmem record` your model: it names each copy and mask.
#
# **Sources.** *LoRA*, 2106.09685 · *QLoRA*, 2305.14314 · peft 0.21.2 and bitsandbytes 0.50.2, counted on a CPU.
#
# **Lab 10** has this chapter's exercises 10.1 and 10.2. Next: [chapter 12](12_long_sequences.ipynb), a million
# tokens.
