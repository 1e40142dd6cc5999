# %% [markdown]
# # 9 · Your model
#
# So far you counted models that this course wrote. Now take one that it did not write. What does it keep, which of
# that is waste, and what fills memory at the worst moment of a step?

# %%
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import nn

import actmem
from actmem.__main__ import main
from actmem.config import ModelShape
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LLAMA_MODELS, LlamaShape
from actmem.measure.diagnosis import findings
from actmem.measure.ledger_tables import readable_size
from actmem.measure.parts import layer_input, run_between_others
from actmem.measure.record_command import as_dict
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import total
from actmem.layers.llama_parts import rms_norm, swiglu
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel
from actmem.tape.evaluate import formula_text, moments
from actmem.tape.record import recorded_run
from actmem.tape.solver import solve, solve_rows
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.controls import choice, slider
from actmem_course.show.folded import Agreement, Fold, worked
from actmem_course.show.live import LiveFigure
from actmem_course.show.marks import GuessLine
from actmem_course.show.today import llama_bars
from actmem_course.show.widgets import Panel, Prediction, Reveal

qwen = LLAMA_MODELS["qwen3-32b"]
agree = Agreement()

question = Prediction(
    "Chapter 8's Llama keeps 17 times its input. A layer of Qwen3 32B norms Q and K, its heads together are 1.6 times as wide as the layer, "
    "and its MLP five times. Fully recomputed it keeps its input alone, as the figure shows. With nothing run again and nothing kept twice, "
    "how many times its own input must it keep for backward?",
    answer=total(llama_rows(qwen)) / (2 * qwen.seq_length * qwen.micro_batch_size * qwen.hidden_size),
    unit="times",
    because="No tensor of s² is left, and still the layer keeps many times what goes in: most of it in the MLP.",
    line=GuessLine(),
)
Reveal(
    question,
    Panel(
        lambda s, recompute: llama_bars(qwen.with_sizes(seq_length=s), recompute),
        s=slider("s", "tokens", 1024, 32768, 1024, start=qwen.seq_length),
        recompute=choice("recomputed", ["full", "elementwise", "none"], "full"),
    ),
    recompute="none",
)

# %% [markdown]
# *30 minutes.* **You need:** [02 Counting bytes](02_counting_bytes.ipynb) and [05 Recomputation](05_recomputation.ipynb).
# **You will** record a Llama layer, fit its formula automatically, find what it wastes, remove it, and read the bill of a whole
# training step.
#
# **Letters used:** $s$ tokens, $b$ sequences, $h$ hidden size, $a$ heads, $k$ key/value heads, $f$ width of the MLP,
# $d$ elements of a head: $h/a$ here, but more in Qwen3 32B.
#
# ## A layer as many libraries write it
#
# The norm computes in float32. Keys and values have fewer heads than queries, and are copied for each query head. The MLP
# multiplies `silu(gate)` by `up`. This is the form of Hugging Face's Llama, with the biases, the rotary positions and the cache
# left out. (The copies are those of its eager attention, which stores the scores as well; its `sdpa` makes none: chapter 8.)

# %%
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
        q, k, v = self.heads(self.q(x), self.a), self.heads(self.keys(x), self.k), self.heads(self.values(x), self.k)
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
# The figure at the top is a floor. What does this form of the layer keep? Put `actmem.record` around any forward pass. It lists
# each tensor that autograd stores, with the module and the operation that saved it.

# %%
model, x = layer()
with actmem.record(model) as ledger:
    y = model(x)

floor = total(llama_rows(LlamaShape(s, b, h, a, k, f)))
ledger

# %% [markdown]
# ## The formula, fitted automatically
#
# Run the layer at a dozen tiny sizes without common factors, and fit each row's bytes to one product of powers. The fit is
# exact, because every count is. If a row has no such formula, the solver refuses it by name.

# %%
def count(sizes):
    model, x = layer(**sizes)
    with actmem.record(model) as seen:
        y = model(x)
    assert y.requires_grad
    return seen.rows()


found = solve_rows(count, "sbhf", {"h": (2 * a, ())})  # h is a multiple of 2a
print(formula_text(found, "sbhf"), f"bytes, with a = {a} heads and k = {k}")

# %% [markdown]
# Compare it with chapter 2's layer, which keeps $34sbh + 5as^2b$ with $f = 4h$, dropout and biases. Each letter says where to look:
# the MLP is all of the $sbf$, and the term without $h$ and $f$ holds what each token needs once: statistics and the
# log-sum-exp of each head.
#
# ## What could be dropped
#
# The ledger recognises a few kinds of waste by their operations, shapes and dtypes.

# %%
known = findings(ledger.tensors)
Fold(
    f"{len(known)} kinds of waste, {sum(finding.bytes for finding in known) / ledger.total_bytes:.0%} of the layer: {', '.join(finding.waste for finding in known)}",
    "\n".join(f"{finding.waste}: {finding.bytes:,} B could go, {finding.floor:,} B stay\n   {finding.text}" for finding in known),
)

# %% [markdown]
# ## The fix
#
# Three changes, none of which repeats a matrix product. They save $4sbh$ bytes more than the list says: the normalised `x`,
# which each norm kept in 16 bits for its weight's gradient.
#
# - **Norm.** A function that keeps `x` in 16 bits and one float32 number a token, and computes the rest again in backward.
# - **Attention.** `enable_gqa=True` lets the kernel read each key head for several query heads.
# - **MLP.** A function that keeps `gate` and `up`, and makes `silu(gate)` again.
#
# `actmem.layers.llama_parts` has these functions. In lab 7 you write them.

# %%
class LeanNorm(Norm):
    def forward(self, x):
        return rms_norm(x, self.weight, eps=1e-6)


class LeanAttention(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class LeanMLP(MLP):
    def product(self, gate, up):
        return swiglu(gate, up)

# %% jupyter={"source_hidden": true}
lean = {"norm": LeanNorm, "attention": LeanAttention, "mlp": LeanMLP}
lean_model, _ = layer(**lean)
with actmem.record(lean_model) as lean_ledger:
    lean_y = lean_model(x)

agree.add("the lean layer, and the floor by formula", [(floor, lean_ledger.total_bytes)])
beyond = ledger.total_bytes - lean_ledger.total_bytes - sum(finding.bytes for finding in known)
agree.add("4sbh bytes saved beyond the list", [(4 * s * b * h, beyond)])
left = [finding.waste for finding in findings(lean_ledger.tensors)]
LiveFigure(bar_chart(
    f"{1 - lean_ledger.total_bytes / ledger.total_bytes:.0%} less: the floor, and no waste left" if not left else f"left: {left}",
    {"kept": {"as it came": ledger.total_bytes, "with three changes": lean_ledger.total_bytes}}, "kept by the layer",
))

# %% [markdown]
# Never trust a smaller number before you have compared the gradients. In float64 the two layers agree to rounding.

# %% jupyter={"source_hidden": true}
def gradients(**parts):
    model, x = layer(**parts)
    model, x = model.double(), x.detach().double().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for _, p in sorted(model.named_parameters()))]


class WideNorm(Norm):  # float64 all the way, as rms_norm computes it there
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


worst = max(((p - q).abs().max() / q.abs().max()).item() for p, q in zip(
    gradients(**lean), gradients(norm=WideNorm)))
agree.add("gradients of the two layers in float64: relative difference below 1e-12", [(worst < 1e-12, True)], "")

# %% [markdown]
# ## The diff
#
# The command line does all of this for a model in a file, without a notebook. Name a function that returns the model and
# its inputs: `python -m actmem record my_model.py:factory --json before.json`. Add `--fake` for sizes that no machine here could
# hold, `--html page.html` for a page with a treemap. Then `python -m actmem diff before.json after.json` names what came, went and
# stayed.

# %% jupyter={"source_hidden": true}
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
# You run out at the peak, the most that is alive at any moment, not after forward. `actmem.step` runs one training step,
# notes each storage's birth and death, and bills the highest point. The lines add up to it, to the byte.

# %%
optimizer = torch.optim.AdamW(model.parameters())
actmem.step(model, x, optimizer=optimizer)  # from now on the optimizer's states are there
optimizer.zero_grad()
bill = actmem.step(model, x, optimizer=optimizer)
assert sum(row.bytes for row in bill.peak) == bill.peak_bytes
LiveFigure(bar_chart(f"Peak {readable_size(bill.peak_bytes)}, in {bill.peak_phase}", {"alive": bill.by_kind()}, "at the peak of one step"))

# %% [markdown]
# Can the peak be predicted too? Run the layer at tiny sizes again. A *tape* lists what each operation of forward and backward
# allocates and frees, each size solved as a formula. Put in any sizes, and read off the peak. Here it equals the
# real peak of the paper's layer (chapters 2 to 5) in every mode. **Predict:** which modes lower the peak of this one layer?

# %% jupyter={"source_hidden": true}
paper = ModelShape(seq_length=64, micro_batch_size=2, hidden_size=32, num_attention_heads=4)


def events(sizes, mode):
    shape = ModelShape(sizes["s"], sizes["b"], sizes["a"] * sizes["d"], sizes["a"])
    one = TransformerLayer(shape, recompute=mode, dtype=torch.bfloat16)
    x = layer_input(shape, TensorParallel(), "cpu", torch.bfloat16)
    return recorded_run(one, lambda _: run_between_others(one, x), [x])


peaks = {}
there = 2 * sum(p.numel() for p in TransformerLayer(paper).parameters()) + 2 * paper.seq_length * paper.micro_batch_size * paper.hidden_size  # weights, input
at = {"s": paper.seq_length, "b": paper.micro_batch_size, "a": paper.num_attention_heads, "d": paper.head_size}
for mode in RECOMPUTE_MODES:
    # Dropout on a CPU draws four numbers at once: s in fours, or sizes are rounded up.
    tape = solve(lambda sizes: events(sizes, mode), list(at), {"s": (4, ())}, may_be_one=())
    alive = [(live, event.where, event.op) for event, live, _ in moments(tape.events(at)) if hasattr(event, "op")]
    peak, node, op = max(alive, key=lambda moment: moment[0])
    one = TransformerLayer(paper, recompute=mode, dtype=torch.bfloat16)
    one_x = layer_input(paper, TensorParallel(), "cpu", torch.bfloat16)
    with actmem.watch_step(one, None, one_x) as one_bill:
        run_between_others(one, one_x)
    agree.add(f"peak with {mode}, by a tape solved at tiny sizes", [(there + peak, one_bill.peak_bytes)])
    peaks[f"{mode}: in {node}"] = one_bill.peak_bytes
LiveFigure(bar_chart("The peak of one layer of the paper, by what is recomputed", {"peak": peaks}, "measured; after the colon, where"))

# %% [markdown]
# `selective` and `full` stop the second run early; `paper-selective` and `paper-full` run it to its end, as the paper does. Full
# recomputation makes everything again before the layer's backward begins, so the peak of a single layer does not fall; it is
# even a little higher. It pays off with many layers. The selective modes and `elementwise` recompute the core only after the
# MLP's tensors are gone.
#
# The Llama layer is small, so weights and optimizer states outweigh activations. At which sequence length do activations win?

# %%
parts = {"activations": {}, "the rest": {}}
for length in (64, 256, 1024):
    long_model, long_x = layer(s=length)
    long_optimizer = torch.optim.AdamW(long_model.parameters())
    actmem.step(long_model, long_x, optimizer=long_optimizer)  # its states are there from the second step on
    long_optimizer.zero_grad()
    long_bill = actmem.step(long_model, long_x, optimizer=long_optimizer)
    bar = f"s = {length:,}: in {long_bill.peak_phase}"
    parts["activations"][bar] = long_bill.by_kind().get("activation", 0)
    parts["the rest"][bar] = long_bill.peak_bytes - parts["activations"][bar]
half = next(bar.partition(":")[0] for bar, size in parts["activations"].items() if size >= parts["the rest"][bar])
LiveFigure(bar_chart(f"From {half} on activations are half of the peak or more", parts, "peak of one step"))

# %% [markdown]
# ## Yours
#
# Put your own model here: any module, and any arguments. If it has more parameters than your machine has memory, run the cell's
# contents under `with fake_tensors():` from `actmem.torch_private`, or use the command with `--fake`.

# %%
your_model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
your_inputs = (torch.randn(2, 16, 64),)

with actmem.record(your_model) as yours:
    output = your_model(*your_inputs)
print(f"{yours.total_bytes:,} B;", ", ".join(f"{finding.waste}: {finding.bytes:,} B" for finding in findings(yours.tensors)))

# %% jupyter={"source_hidden": true}
agree

# %% [markdown]
# ## Work it out
#
# The layer as written above keeps $8sbf + 24sbh$ bytes, and a little for each token. How many GiB is that for the 32
# layers of Llama 3 8B at 8,192 tokens, and how many above the floor, chapter 8's 17 inputs a layer?

# %% jupyter={"source_hidden": true}
llama = LLAMA_MODELS["llama3-8b"]
sb, layers = llama.seq_length * llama.micro_batch_size, llama.num_layers
once = 2 * sb * llama.hidden_size
written, floor = sb * (8 * llama.ffn_hidden_size + 24 * llama.hidden_size), total(llama_rows(llama))
worked(
    f"One layer: {sb:,} · (8 · {llama.ffn_hidden_size:,} + 24 · {llama.hidden_size:,}) = {readable_size(written)}, {written / once:.0f} times its input. The floor is {floor / once:.0f} times.",
    f"{layers} layers: {readable_size(layers * written)} in place of {readable_size(layers * floor)}. {readable_size(layers * (written - floor))} go to tensors that could be recomputed without a product, or need no copy.",
)

# %% [markdown]
# ## Questions
#
# <details><summary><b>1.</b> A tensor is alive but autograd did not save it. Who can hold it?</summary>
#
# An attribute of `ctx`, a hook's closure, a cache of a selective checkpoint, a module's attribute. Hooks see none of these.
# The ledger lists such tensors separately, and names the holder if it can find it.
# </details>
#
# <details><summary><b>2.</b> Recomputing the attention core saved little in your model. Why?</summary>
#
# With a flash kernel there is no core to drop: no tensor of $s^2$ is kept. Look at the diff: what stayed are the linears'
# inputs and what the flash kernel reads, and no recomputation of the core touches these.
# </details>
#
# <details><summary><b>3.</b> The peak lies in the optimizer's step. Does recomputing activations help?</summary>
#
# No. By then the activations are gone. The bill names what is there: weights, gradients, states, and what the update makes.
# </details>
#
# **Sources.** Touvron et al., *LLaMA*, 2302.13971 · code: `src/actmem/measure/ledger.py`, `src/actmem/measure/origins.py`,
# `src/actmem/measure/whole_step.py`, `src/actmem/measure/diagnosis.py`.
#
# ## Now fit your model
#
# You know what one layer of it keeps. How many GPUs does the whole model need, and how is it split? Next, [chapter
# 10](10_plan_a_model.ipynb) finds the layouts that fit, and checks the fullest GPU's bill.
