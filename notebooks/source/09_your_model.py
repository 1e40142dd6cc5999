# %% [markdown]
# # 9 · Your model
#
# So far you counted layers that this course wrote. Now take one that it did not write. What does it keep, how much of that is
# waste, and what fills memory at the worst moment of a step?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.rows import total
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, choice, slider, worked,
)
from actmem_course.figures import ch08_todays_layer as show
from actmem_more.llama_shape import LLAMA_MODELS
from actmem_more.llama_terms import llama_rows

qwen = LLAMA_MODELS["qwen3-32b"]
checks = Checks()

times = lambda mode: (
    total(llama_rows(qwen, recompute=mode)) / (2 * qwen.seq_length * qwen.micro_batch_size * qwen.hidden_size)
)
question = Prediction(
    "A layer of Qwen3 32B has heads that are together 1.6 times as wide as the layer, and an MLP "
    "five times as wide. If all that needs no product is "
    f"recomputed, it keeps {times('elementwise'):.1f} times its input, as the figure shows. With "
    "nothing recomputed, how many times its input does it keep?",
    answer=times("none"),
    unit="times",
    because=(
        "It also keeps the outputs of both norms, Q and K after their own norms, and the down product's "
        "input (as wide as the MLP)."
    ),
    line=GuessLine(),
)
Reveal(
    question,
    Panel(
        lambda s, recompute: show.llama_bars(qwen.with_sizes(seq_length=s), recompute),
        s=slider("s", "tokens", 1024, 32768, 1024, start=qwen.seq_length),
        recompute=choice("recomputed", ["full", "elementwise", "none"], "elementwise"),
    ),
    recompute="none",
)

# %% [markdown]
# *30 minutes.* **You need:** [02 Counting bytes](02_counting_bytes.ipynb) and [05 Recomputation](05_recomputation.ipynb).
# **You will** record a Llama layer, fit its formula automatically, find what it wastes, remove it, and read the bill of a whole
# training step.
#
# **Letters used:** $s$ tokens, $b$ sequences, $h$ hidden size, $a$ heads, $k$ key and value heads,
# $f$ width of the MLP, $d$ elements of a head. Here $d = h/a$; in Qwen3 32B it is more.
#
# ## A layer as many libraries write it
#
# The norm computes in float32. Keys and values have fewer heads than queries, and are copied for each query head. The MLP
# multiplies `silu(gate)` by `up`. Hugging Face's Llama has rotary positions and a cache as well, and differs in one thing: its
# `sdpa` copies keys and values only if a batch is padded (then it keeps an $s \times s$ mask, too). Its eager attention always
# copies them, and stores the scores.

# %%
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(h))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, h, a, k):
        super().__init__()
        self.a, self.k, d = a, k, h // a
        self.q, self.out = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.keys, self.values = nn.Linear(h, k * d, bias=False), nn.Linear(h, k * d, bias=False)

    def heads(self, x, count):
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def repeat(self, x):  # [b, k, s, d] to [b, a, s, d]
        b, k, s, d = x.shape
        return x[:, :, None].expand(b, k, self.a // k, s, d).reshape(b, self.a, s, d)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)

    def forward(self, x):
        q, k, v = (
            self.heads(self.q(x), self.a),
            self.heads(self.keys(x), self.k),
            self.heads(self.values(x), self.k),
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, h, f):
        super().__init__()
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def product(self, gate, up):
        return F.silu(gate) * up

    def forward(self, x):
        return self.down(self.product(self.gate(x), self.up(x)))


norm, x = Norm(128).to(torch.bfloat16), torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
with am.record(norm) as ledger:
    y = norm(x)
print(
    f"the norm alone saves {ledger.total_bytes / x.numel():.1f} bytes for each element of its input, which has 2"
)

# %% [markdown]
# Norm, attention, norm, MLP make a layer; `layer()` makes one with its input, `layer(norm=…)` one with another part.


# %% jupyter={"source_hidden": true}
class Layer(nn.Module):
    def __init__(self, h, a, k, f, norm=Norm, attention=Attention, mlp=MLP):
        super().__init__()
        self.norm1, self.norm2 = norm(h), norm(h)
        self.attention, self.mlp = attention(h, a, k), mlp(h, f)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


s, b, h, a, k, f = 64, 2, 128, 4, 2, 448


def layer(s=s, b=b, h=h, a=a, k=k, f=f, **parts):
    torch.manual_seed(0)
    model = Layer(h, a, k, f, **parts).to(torch.bfloat16)
    return model, torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)


# %% [markdown]
# ## Record it
#
# The layer in the figure at the top keeps nothing twice. What does this one keep? Put `actmem.record` around a forward pass.
# It lists each tensor that autograd stores, with the module and the operation that saved it.

# %%
from actmem_more.llama_shape import LlamaShape

model, x = layer()
with am.record(model) as ledger:
    y = model(x)

least = total(llama_rows(LlamaShape(s, b, h, a, k, f)))
ledger

# %% [markdown]
# ## The formula, fitted automatically
#
# Run the layer at a dozen tiny sizes without common factors, and fit each row's bytes to a product of powers of the letters.
# The fit is exact because every count is exact. If a row has no such formula, the solver says which.

# %%
from actmem_tools.tape.evaluate import formula_text
from actmem_tools.tape.solver import solve_rows


def count(sizes):
    model, x = layer(**sizes)
    with am.record(model) as seen:
        y = model(x)
    assert y.requires_grad
    return seen.rows()


found = solve_rows(count, "sbhf", {"h": (2 * a, ())})  # the letters; sizes to try for h are multiples of 2a
print(formula_text(found, "sbhf"), f"bytes, with a = {a} heads and k = {k}")

# %% [markdown]
# With $f = 4h$ this is $56sbh$, where chapter 2's layer keeps $34sbh$ beside its scores. Each letter says where to look. The $sbf$ are all in the MLP. The term without $h$ and $f$ is a few numbers for each token: $8sb$ of the norms' statistics,
# and $4asb$ of the heads' log-sum-exps.
#
# ## What could be dropped
#
# The ledger recognises a few kinds of waste by their operations, shapes and dtypes.

# %%
from actmem_tools.diagnosis import findings

known = findings(ledger.tensors)
Fold(
    f"{len(known)} kinds of waste, {sum(finding.bytes for finding in known) / ledger.total_bytes:.0%} "
    f"of the layer: {', '.join(finding.waste for finding in known)}",
    "\n".join(
        f"{finding.waste}: {finding.bytes:,} B could go, {finding.floor:,} B stay\n{finding.text}"
        for finding in known
    ),
    prose=True,
)

# %% [markdown]
# ## The fix
#
# Change three things. None of them reruns a matrix product:
#
# - **Norm.** Use a function that keeps `x` in 16 bits and one float32 number per token, and recomputes the rest in backward.
# - **Attention.** `enable_gqa=True` lets a flash kernel read each key head for several query heads. In float32, or on a GPU
#   without flash, torch before 2.14 stores the scores instead: check with `record --fake --device cuda`.
# - **MLP.** Use a function that keeps `gate` and `up`, and recomputes `silu(gate)`.
#
# `actmem_more.llama_modules` has these functions; you write them in lab 7. They save $4sbh$ bytes more than the list says: the
# normalised `x`, which each norm kept in 16 bits for its weight's gradient.

# %%
from actmem_more.llama_modules import rms_norm, swiglu


class LeanNorm(Norm):
    def forward(self, x):
        return rms_norm(x, self.weight, eps=1e-6)


class LeanAttention(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class LeanMLP(MLP):
    def product(self, gate, up):
        return swiglu(gate, up)


lean = {"norm": LeanNorm, "attention": LeanAttention, "mlp": LeanMLP}
lean_model, _ = layer(**lean)
with am.record(lean_model) as lean_ledger:
    lean_y = lean_model(x)
checks.add("the lean layer, by chapter 8's formula", [(least, lean_ledger.total_bytes)])
checks.show()

# %% jupyter={"source_hidden": true}
beyond = ledger.total_bytes - lean_ledger.total_bytes - sum(finding.bytes for finding in known)
checks.add("4sbh bytes saved beyond the list", [(4 * s * b * h, beyond)])
left = [finding.waste for finding in findings(lean_ledger.tensors)]
display(checks.show())
LiveFigure(
    bar_chart(
        f"{1 - lean_ledger.total_bytes / ledger.total_bytes:.0%} less: the ledger knows no further waste"
        if not left
        else f"left: {left}",
        {"kept": {"as it came": ledger.total_bytes, "with three changes": lean_ledger.total_bytes}},
        "kept by the layer",
    )
)

# %% [markdown]
# Compare the gradients before you trust a smaller number. In float64 the two layers agree to rounding.


# %% jupyter={"source_hidden": true}
def gradients(**parts):
    model, x = layer(**parts)
    model, x = model.double(), x.detach().double().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for _, p in sorted(model.named_parameters()))]


class WideNorm(Norm):  # float64 all the way, as rms_norm computes it there
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


worst = max(
    ((p - q).abs().max() / q.abs().max()).item() for p, q in zip(gradients(**lean), gradients(norm=WideNorm))
)
checks.add(
    "gradients of the two layers in float64: relative difference below 1e-12", [(worst < 1e-12, True)], ""
)
checks.show()

# %% [markdown]
# ## The diff
#
# The command line does all of this without a notebook. Name a function that returns the model and its inputs:
# `actmem record my_model.py:factory --json before.json`. Then `actmem diff before.json after.json` says what
# came, went and stayed:

# %% jupyter={"source_hidden": true}
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
import json

from actmem_tools.__main__ import main
from actmem_tools.record_command import as_dict

with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
    files = [str(Path(folder) / name) for name in ("before.json", "after.json")]
    for file, seen in zip(files, (ledger, lean_ledger)):
        Path(file).write_text(json.dumps(as_dict(seen, None, {})))
    main(["diff", *files])
heads = [line for line in printed.getvalue().splitlines() if line.split(":")[0] in ("went", "came", "stayed")]
Fold("; ".join(line.partition(", still")[0].partition(": still")[0] for line in heads), printed.getvalue())

# %% [markdown]
# ## The peak
#
# You run out of memory at the *peak*, the moment when most is alive, and that needn't be the end of forward. `actmem.step` runs
# one training step, notes when each storage is made and freed, and lists what is alive at the peak. The lines add up to it, to
# the byte.

# %%
from actmem.ledger.ledger_tables import readable_size

optimizer = torch.optim.AdamW(model.parameters())
am.step(model, x, optimizer=optimizer)  # from now on the optimizer's states are there
optimizer.zero_grad()
bill = am.step(model, x, optimizer=optimizer)
assert sum(row.bytes for row in bill.peak) == bill.peak_bytes
LiveFigure(
    bar_chart(
        f"Peak {readable_size(bill.peak_bytes)}, in {bill.peak_phase}",
        {"alive": bill.by_kind()},
        "at the peak of one step",
    )
)

# %% [markdown]
# Can you predict the peak, too? Run a layer at tiny sizes again. A *tape* lists what each operation of forward and backward
# allocates and frees, and each size is solved as a formula. Put in any sizes, and read off the peak: `actmem tape` does
# it for your model. Try it on the paper's layer (chapters 2 to 5), where the tape's peak equals the real one in every mode.
# **Guess first:** which modes lower the peak of one layer?

# %% jupyter={"source_hidden": true}
from actmem.ledger.layer_rows import layer_input
from actmem.parallel.groups import TensorParallel
from actmem.recipes import RECOMPUTE_MODES
from actmem_tools.measured_parts import run_between_others
from actmem_tools.tape.evaluate import moments
from actmem_tools.tape.record import recorded_run
from actmem_tools.tape.solver import solve

paper = am.ModelShape(seq_length=64, micro_batch_size=2, hidden_size=32, num_attention_heads=4)


def events(sizes, mode):
    shape = am.ModelShape(sizes["s"], sizes["b"], sizes["a"] * sizes["d"], sizes["a"])
    one = am.TransformerLayer(shape, recompute=mode, dtype=torch.bfloat16)
    x = layer_input(shape, TensorParallel(), "cpu", torch.bfloat16)
    return recorded_run(one, lambda _: run_between_others(one, x), [x])


PRODUCTS = {"MmBackward0": "a linear", "BmmBackward0": "the core"}
peaks = {}
there = (
    2 * sum(p.numel() for p in am.TransformerLayer(paper).parameters())
    + 2 * paper.seq_length * paper.micro_batch_size * paper.hidden_size
)  # weights, input
at = {
    "s": paper.seq_length,
    "b": paper.micro_batch_size,
    "a": paper.num_attention_heads,
    "d": paper.head_size,
}
for mode in RECOMPUTE_MODES:
    # Dropout on a CPU draws four numbers at once: s in fours, or sizes are rounded up.
    tape = solve(lambda sizes: events(sizes, mode), list(at), {"s": (4, ())}, may_be_one=())
    alive = [
        (live, event.where, event.op) for event, live, _ in moments(tape.events(at)) if hasattr(event, "op")
    ]
    peak, node, op = max(alive, key=lambda moment: moment[0])
    one = am.TransformerLayer(paper, recompute=mode, dtype=torch.bfloat16)
    one_x = layer_input(paper, TensorParallel(), "cpu", torch.bfloat16)
    with am.watch_step(one, None, one_x) as one_bill:
        run_between_others(one, one_x)
    checks.add(f"peak with {mode}, by a tape solved at tiny sizes", [(there + peak, one_bill.peak_bytes)])
    peaks[f"{mode}: backward of {PRODUCTS[node]}"] = one_bill.peak_bytes
display(checks.show())
LiveFigure(
    bar_chart(
        "Peak of the paper's layer, by what is recomputed",
        {"peak": peaks},
        "measured; after the colon, where",
    )
)

# %% [markdown]
# (`selective` and `full` stop the second run early; `paper-selective` and `paper-full` run it to its end.) Full recomputation
# computes everything again before the layer's backward begins, so the peak of a single layer does not fall; here it even rises
# a little. It helps when there are many layers. The selective modes and `elementwise` recompute the core only after the MLP's
# tensors are gone.
#
# Now back to the Llama layer. At its small size weights and optimizer states outweigh activations. At which sequence length are
# they half of the peak?

# %%
parts = {"activations": {}, "the rest": {}}
for length in (64, 256, 1024):
    long_model, long_x = layer(s=length)
    long_optimizer = torch.optim.AdamW(long_model.parameters())
    am.step(long_model, long_x, optimizer=long_optimizer)  # its states are there from the second step on
    long_optimizer.zero_grad()
    long_bill = am.step(long_model, long_x, optimizer=long_optimizer)
    bar = f"s = {length:,}: in {long_bill.peak_phase}"
    parts["activations"][bar] = long_bill.by_kind().get("activation", 0)
    parts["the rest"][bar] = long_bill.peak_bytes - parts["activations"][bar]
share = {bar: size / (size + parts["the rest"][bar]) for bar, size in parts["activations"].items()}
half = min(share, key=lambda bar: abs(share[bar] - 1 / 2))
LiveFigure(
    bar_chart(
        f"At {half.partition(':')[0]} activations are {share[half]:.0%} of the peak",
        parts,
        "peak of one step",
    )
)

# %% [markdown]
# ### Predicted, then seen
#
# Does it hold for a whole model that others wrote, on a GPU? Here is one step with AdamW of Hugging Face's Llama, and of a
# larger one with PEFT's adapters. `record --step --fake --device cuda` predicts the peak without a GPU. It doesn't know the
# workspaces of cuBLAS, NVIDIA's library of matmuls; they were measured, and are added. Point at a bar to see how many bytes are missing.

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import newest, strangers_bars

LiveFigure(strangers_bars(newest("strangers")))

# %% [markdown]
# ## Yours
#
# Put your own model here: any module, and any arguments. If your machine has too little memory for it, use the command with
# `--fake`, or run the cell's contents under `with fake_tensors():` from `actmem.torch_private`.

# %%
your_model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
your_inputs = (torch.randn(2, 16, 64),)

with am.record(your_model) as yours:
    output = your_model(*your_inputs)
print(
    f"{yours.total_bytes:,} B;",
    ", ".join(f"{finding.waste}: {finding.bytes:,} B" for finding in findings(yours.tensors)),
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# The layer as written above keeps $8sbf + 24sbh$ bytes, and a little for each token. How many GiB is that for the 32
# layers of Llama 3 8B ($h$ = 4,096, $f$ = 14,336) at 8,192 tokens? How many more is it than chapter 8's 17 inputs a layer?

# %% jupyter={"source_hidden": true}
llama = LLAMA_MODELS["llama3-8b"]
sb, layers = llama.seq_length * llama.micro_batch_size, llama.num_layers
once = 2 * sb * llama.hidden_size
written, least = sb * (8 * llama.ffn_hidden_size + 24 * llama.hidden_size), total(llama_rows(llama))
worked(
    f"One layer: {sb:,} · (8 · {llama.ffn_hidden_size:,} + 24 · {llama.hidden_size:,}) = "
    f"{readable_size(written)}, {written / once:.0f} times its input. Chapter 8's layer keeps "
    f"{least / once:.0f} times.",
    f"{layers} layers: {readable_size(layers * written)} instead of {readable_size(layers * least)}. "
    f"{readable_size(layers * (written - least))} go to tensors that could be recomputed without a "
    "product, or need no copy.",
)

# %% [markdown]
# ## Questions
#
# <details><summary><b>1.</b> A tensor is alive but autograd did not save it. Who can hold it?</summary>
#
# An attribute of `ctx` or of a module, a hook's closure, a selective checkpoint's cache. Hooks see none of these. The ledger
# lists such tensors separately, and names what holds them if it can find out.
# </details>
#
# <details><summary><b>2.</b> The peak is in the optimizer's step. Does recomputing activations help?</summary>
#
# No. By then the activations are gone. The bill lists what is there: weights, gradients, states, and what the update makes.
# </details>
#
# **Sources.** Touvron et al., *LLaMA*, 2302.13971 · code: `src/actmem/ledger/recorder.py`, `src/actmem/ledger/provenance.py`,
# `src/actmem/ledger/whole_step.py`, `src/actmem_tools/diagnosis.py`.
#
# ## Now fit your model
#
# You know what one layer of your model keeps. How many GPUs does the whole model need, and how do you split it? Next, [chapter
# 10](09_your_model.ipynb) finds the layouts that fit, and checks the fullest GPU's bill.
