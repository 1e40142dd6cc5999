# %% [markdown]
# # 9 · Your model: does it fit?
#
# *45 minutes. In a notebook, press Shift+Enter below and write your guess.*
#
# Llama 3 8B reads 8,192 tokens. Its layers are written in plain PyTorch operators, as in many libraries. You change
# the norms, the copies of keys and values and the gate, and recompute no matmul. **How many GiB do the layers still save for backward?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem_course.figures import Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal
from actmem_course.figures import bar_chart, choice, size_text, slider, text_table
from actmem_course.figures import ch09_your_model as show
from actmem_more.llama_shape import LlamaShape, llama_shape

LLAMA = llama_shape("llama3-8b")
checks = Checks()

in_operators = LLAMA.num_layers * show.saved_bytes(LLAMA, show.WRITTEN)
question = Prediction(
    f"The {LLAMA.num_layers} layers of Llama 3 8B read {LLAMA.seq_length:,} tokens. In plain PyTorch operators "
    f"they save {size_text(in_operators)} for backward. Change three things, and recompute no matmul. "
    "How many GiB do they save then?",
    answer=LLAMA.num_layers * show.saved_bytes(LLAMA, show.CHANGED) / 2**30,
    unit="GiB",
    because="The norms, the copies of K and V, and silu(gate) made up the difference. You find all three below.",
    line=GuessLine(2**30),
)
Reveal(
    question,
    Panel(
        lambda s, shown: show.code_bars(LLAMA.with_sizes(seq_length=s), shown),
        s=slider("s", "tokens", 1024, 16384, 1024, start=LLAMA.seq_length),
        shown=choice("show", [show.WRITTEN, show.CHANGED], show.WRITTEN),
    ),
    shown=show.CHANGED,
)

# %% [markdown]
# **You need** [chapter 2](02_counting_bytes.ipynb) and [chapter 5](05_recomputation.ipynb). **You will**
# record a layer, find what it needn't save, predict a step's peak, and plan a whole model.
#
# **Letters:** $s$ tokens, $b$ sequences, $h$ hidden size, $a$ heads, $k$ key and value heads, $d = h/a$, $f$ width of the
# MLP, $v$ size of the vocabulary, $l$ layers.
#
# ## A layer as many libraries write it
#
# This is Llama's layer without its rotary positions (open the code below). Three lines of it matter:
#
# - The **norm** computes in float32: `wide = x.float()`.
# - In **attention** $a/k$ query heads share one key head, so `copied` copies keys and values for each query head.
# - The **MLP** multiplies `F.silu(gate) * up`.

# %% jupyter={"source_hidden": true}
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

    def copied(self, x):  # [b, k, s, d] to [b, a, s, d]
        b, k, s, d = x.shape
        return x[:, :, None].expand(b, k, self.a // k, s, d).reshape(b, self.a, s, d)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, self.copied(k), self.copied(v), is_causal=True)

    def forward(self, x):
        q = self.heads(self.q(x), self.a)
        k, v = self.heads(self.keys(x), self.k), self.heads(self.values(x), self.k)
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, h, f):
        super().__init__()
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def gated(self, gate, up):
        return F.silu(gate) * up

    def forward(self, x):
        return self.down(self.gated(self.gate(x), self.up(x)))


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
    """A layer with its input; ``norm``, ``attention`` and ``mlp`` replace its parts."""
    torch.manual_seed(0)
    model = Layer(h, a, k, f, **parts).to(torch.bfloat16)
    return model, torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)


print(f"a layer of h = {h}: {sum(weight.numel() for weight in layer()[0].parameters()):,} parameters")

# %% [markdown]
# ## Record it
#
# `actmem.record` lists every tensor that autograd saves, with the module and the operation that saved it. `layer()`
# returns a small layer and its input:

# %%
model, x = layer()
with am.record(model) as ledger:
    y = model(x)

small = LlamaShape(s, b, h, a, k, f)
checks.add("the layer in plain operators", [(show.saved_bytes(small, show.WRITTEN), ledger.total_bytes)])
display(checks.show())
ledger

# %% [markdown]
# ## What needn't it save?
#
# `findings` knows some tensors that a layer needn't save, by their operations, shapes and dtypes. Open the line to read
# what to do about each:

# %%
from actmem_tools.diagnosis import findings

known = findings(ledger.tensors)
wasted = sum(finding.bytes for finding in known)
Fold(
    f"{len(known)} findings, {wasted / ledger.total_bytes:.0%} of the layer: "
    f"{', '.join(finding.waste for finding in known)}",
    "\n".join(
        f"{finding.waste}: {finding.bytes:,} B can be freed, {finding.floor:,} B are needed\n{finding.text}"
        for finding in known
    ),
    prose=True,
)

# %% [markdown]
# ## Change three things
#
# - **Norm.** A function of your own saves `x` in 16 bits and one float32 number per token. Backward recomputes the
#   rest.
# - **Attention.** With `enable_gqa=True` the kernel reads each key head for several query heads: no copies.
# - **MLP.** A function of your own saves `gate` and `up`. Backward recomputes `silu(gate)`.
#
# `actmem_more.llama_modules` has both functions; you write them in lab 7:

# %%
from actmem_more.llama_modules import rms_norm, swiglu


class ChangedNorm(Norm):
    def forward(self, x):
        return rms_norm(x, self.weight, eps=1e-6)


class ChangedAttention(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class ChangedMLP(MLP):
    def gated(self, gate, up):
        return swiglu(gate, up)


changed = {"norm": ChangedNorm, "attention": ChangedAttention, "mlp": ChangedMLP}
changed_model, _ = layer(**changed)
with am.record(changed_model) as changed_ledger:
    changed_y = changed_model(x)
checks.add("with three changes", [(show.saved_bytes(small, show.CHANGED), changed_ledger.total_bytes)])
display(checks.show())
print(f"{1 - changed_ledger.total_bytes / ledger.total_bytes:.0%} less")

# %% [markdown]
# You free more than `findings` named, because the new norm doesn't save its normalised input either. Compare gradients
# before you trust a smaller number:

# %% jupyter={"source_hidden": true}
class WideNorm(Norm):  # float64 all the way, as rms_norm computes it there
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def gradients(**parts):
    model, x = layer(**parts)
    model, x = model.double(), x.detach().double().requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for _, p in sorted(model.named_parameters()))]


pairs = zip(gradients(**changed), gradients(norm=WideNorm))
worst = max(((p - q).abs().max() / q.abs().max()).item() for p, q in pairs)
checks.add(
    "gradients of both layers in float64: relative difference below 1e-12", [(worst < 1e-12, True)]
)
checks.show()

# %% [markdown]
# At Llama 3 8B's size:

# %%
Panel(
    lambda code: show.code_picture(LLAMA, code),
    code=choice("Llama 3 8B's layer", [show.WRITTEN, show.CHANGED], show.CHANGED),
)

# %% [markdown]
# > **Why do this?** You free a third of the layer, and backward recomputes only elementwise operations. **Why not?**
# > Each function is code that you maintain. `torch.compile` finds some of it for you. And on a GPU without a flash
# > kernel for `enable_gqa`, torch before 2.14 stores the scores instead: check with `actmem record --fake --device
# > cuda`.
#
# ## The peak
#
# You run out of memory at the *peak*, the moment when most is alive. `actmem.step` watches one training step. Does this
# layer's peak come in the forward pass, the backward pass or the optimizer's step?

# %%
from actmem_course.figures.step_timeline import step_timeline

model, x = layer(s=256)
optimizer = torch.optim.AdamW(model.parameters())
am.step(model, x, optimizer=optimizer)  # from now on the optimizer's states are there
optimizer.zero_grad()
bill = am.step(model, x, optimizer=optimizer)
LiveFigure(step_timeline(bill, "one layer's step"))

# %% [markdown]
# Backward frees what it has used. But the activations' gradients that it makes are alive at the same time as what the
# layer saved.
#
# The same holds for other people's models on a GPU. Here is one step with AdamW of Hugging Face's Llama, and of a larger
# one with adapters. `actmem record --step --fake --device cuda` predicted each peak without a GPU. The workspaces of
# cuBLAS, NVIDIA's library of matmuls, were measured and added.

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import newest, strangers_bars

LiveFigure(strangers_bars(newest("strangers")))

# %% [markdown]
# ## Yours
#
# Put your own model here: any module, any arguments. If it's too large, use `--fake`.

# %%
your_model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
your_inputs = (torch.randn(2, 16, 64),)

with am.record(your_model) as yours:
    output = your_model(*your_inputs)
found_in_yours = ", ".join(f"{finding.waste}: {finding.bytes:,} B" for finding in findings(yours.tensors))
print(f"{yours.total_bytes:,} B saved; {found_in_yours or 'no findings'}")

# %% [markdown]
# ## Plan it
#
# Now plan the whole model: embedding, layers, norm, and a loss of float32 logits. You write a function that returns
# the model and its inputs for any sizes. The planner runs it at tiny sizes with one to five layers. From these runs it
# computes the *bill* at any size: each tensor that is alive at the peak. First check it on six layers, with a real step
# in 16 bits. Then plan Llama 3 8B on 8 GPUs of 80 GiB: PyTorch's FSDP2 shards weights, gradients and
# optimizer states over them, all in float32, and gathers a layer at a time in 16 bits. Each GPU reads a sequence of its
# own. The planner leaves 4 GiB of each GPU to CUDA, NCCL and the allocator.

# %% jupyter={"source_hidden": true}
from actmem_tools.plan.own_model import OwnModel, Way, outcome
from actmem_tools.plan.step_time import GIBIBYTE, Cluster
from actmem_tools.tape.model_tape import solved_blocks
from actmem_tools.tape.solver import parsed_letters


class Model(nn.Module):
    def __init__(self, h, a, k, f, v, l, **parts):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(v, h), parts.get("norm", Norm)(h)
        self.layers = nn.ModuleList(Layer(h, a, k, f, **parts) for _ in range(l))
        self.output = nn.Linear(h, v, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), ids.flatten())}


def factory(parts):
    def made(s, b, h, a, k, f, v, l):
        return Model(h, a, k, f, v, l, **parts), {"ids": torch.randint(0, v, (b, s))}

    return made


# The factory's letters: h is a multiple of 2a, a of k.
letters, rules, _ = parsed_letters("s,b,h:2a,a:k,k,f,v", "")
codes = {"in plain operators": {}, "with three changes": changed}
solved = {
    name: solved_blocks(factory(parts), letters, rules, "bfloat16") for name, parts in codes.items()
}
tiny = {"s": 256, "h": h, "a": a, "k": k, "f": f, "v": 1000}
for name, parts in codes.items():
    planned = OwnModel(solved[name], tiny, 6, Cluster(1, 80 * GIBIBYTE), b)  # six layers, one GPU, b sequences a step
    model, inputs = factory(parts)(**tiny, b=b, l=6)
    optimizer = torch.optim.AdamW(model.bfloat16().parameters())
    am.step(model, inputs, optimizer=optimizer)
    optimizer.zero_grad()
    counters = 4 * len(list(model.parameters()))  # Adam's count of steps, in each parameter's state
    way = Way(micro_batch_size=b, again=0, sharded=False)  # no layer recomputed
    predicted = planned.bytes(way) + 8 * inputs["ids"].numel() + counters
    checks.add(
        f"peak of six layers {name}",
        [(predicted, am.step(model, inputs, optimizer=optimizer).peak_bytes)],
    )
display(checks.show())

sizes = {"s": LLAMA.seq_length, "h": LLAMA.hidden_size, "a": LLAMA.num_attention_heads}
sizes |= {"k": LLAMA.num_key_value_heads, "f": LLAMA.ffn_hidden_size, "v": LLAMA.vocab_size}
gpus = Cluster(8, 80 * GIBIBYTE)
for name in codes:
    planned = OwnModel(solved[name], sizes, LLAMA.num_layers, gpus, gpus.gpus)
    plan = outcome(planned, Way(micro_batch_size=1, again=0, sharded=True), "bfloat16")
    again = f"recompute {plan['ways'][0]['blocks_again']} of {LLAMA.num_layers} layers"
    verdict = "it fits" if plan["fits"] else f"it doesn't fit: {again}"
    print(f"{name}: {size_text(plan['asked']['bytes'])} of {size_text(gpus.usable_bytes)}, {verdict}")
# %% [markdown]
# The same on the command line, which also prints the code to paste:
#
# ```
# actmem plan my_model.py:factory --at s=8192,b=1,h=4096,a=32,k=8,f=14336,v=128256,l=32 --gpus 8 --memory 80
# ```
#
# How near does it come to what others measured? `reserved` and `nvidia-smi` count the allocator's free pieces too:

# %% jupyter={"source_hidden": true}
LiveFigure(show.published_bars())

# %% jupyter={"source_hidden": true}
show.published_causes()

# %% [markdown]
# ## What fits
#
# With more GPUs you choose a layout: tensor (TP), pipeline (PP) and data parallelism (DP), which gives each replica its
# own sequences. ZeRO shards what the replicas would hold twice, and context-parallel ranks, which hold the same weights:
#
# | | each rank holds a shard of |
# |---|---|
# | ZeRO-1 | optimizer states |
# | ZeRO-2 | gradients too |
# | ZeRO-3 (FSDP) | weights too, all-gathered in every pass |
# | context parallelism (CP) | each sequence ([chapter 12](12_long_sequences.ipynb)) |
#
# The planner counts the bytes of every layout on its fullest rank, with the 18 bytes per parameter of [chapter
# 1](01_memory_wall.ipynb), and keeps those that Megatron-LM, torchtitan or Hugging Face can run. Here are Llama 3 70B, 64
# GPUs of 80 GiB, 128 sequences a step. *b 1* is one sequence in a microbatch; *chunks 5* are the groups of layers of an
# interleaved stage ([chapter 6](06_pipeline.ipynb)):

# %%
from actmem_tools.plan.plan_report import layout_text
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Request, bill_of, find_plans
from actmem_tools.plan.step_time import MODEL_ERROR

model, cluster = planned_model_of("llama3-70b"), Cluster(64, 80 * GIBIBYTE)
plans = Request(model, cluster, 128).search(3)
print(
    f"{plans.fitting:,} of {plans.counted:,} layouts fit; "
    f"the estimated times of {plans.near} are within {MODEL_ERROR:.0%}\n"
)
shown = [(layout_text(plan.layout), plan.recompute, size_text(plan.bytes)) for plan in plans.plans]
print(text_table(("layout", "recomputes", "on the fullest rank"), shown, "  r"))

# %% [markdown]
# Their estimated times are too close to call. So the planner puts first what can go wrong least: the plan that relies
# less on overlap, has a lower ZeRO stage, fewer kinds of parallelism, more memory left.
#
# **Now write it:** [exercise 8.1](../labs/lab8_plan.py), `rank_state_bytes`: `python my/labs/lab8_plan.py --only 8.1`.
#
# ## The bill, line by line
#
# The most loaded rank decides, so this bill is that rank's, at the moment when it holds most. Point at a bar for its
# lines:

# %% jupyter={"source_hidden": true}
from actmem_course.figures.style import FILLS

bill = bill_of(model, plans.plans[0])
lines = {
    part: "<br>".join(f"{row.term}: {size_text(row.bytes)}" for row in rows) for part, rows in bill.parts.items()
}
left = {"left for CUDA, NCCL and the allocator": cluster.memory_bytes - bill.bytes}
title = f"{size_text(bill.bytes)} of {size_text(cluster.memory_bytes)}: {bill.moment}"
held = {part: {part: size} for part, size in bill.by_part().items()}
fills = [FILLS[part] for part in (*held, "freed")]
LiveFigure(bar_chart(title, {**held, "left": left}, "on the fullest rank", fills=fills, about=lines))

# %% [markdown]
# Check it: run the fullest rank on fake tensors, which have no storage, with the real layers, every microbatch in
# flight and one step of Adam. `actmem plan … --verify` does that for large models. Here are three plans of a small one,
# and 18 runs of nanotron that others logged on real GPUs:

# %% jupyter={"source_hidden": true}
from actmem.config import TINY
from actmem_course.others.nanotron import nanotron_runs
from actmem_tools.plan.planned_models import PlannedGPT
from actmem_tools.verify import verify_plan

small_model = PlannedGPT("tiny", TINY)
fitting = find_plans(small_model, Cluster(8, 5 * GIBIBYTE), 16, 10_000).plans
for pipeline in (1, 2, 4):
    sharded = [
        plan for plan in fitting if plan.layout.tensor_parallel_size > 1 and plan.layout.zero_stage <= 1
    ]
    plan = next(plan for plan in sharded if plan.layout.pipeline_parallel_size == pipeline)
    pairs = [
        (term.predicted or 0, term.measured or 0) for term in verify_plan(small_model, plan).matches
    ]
    checks.add(layout_text(plan.layout), pairs)
runs = nanotron_runs()
farthest = max(abs(run.difference_percent) for run in runs)
print(f"{len(runs)} logged runs: the farthest is {farthest:.2f}% from its bill")
checks.show()

# %% [markdown]
# **Now write it:** [exercise 8.2](../labs/lab8_plan.py), `largest_micro_batch_size`: `python my/labs/lab8_plan.py
# --only 8.2`.
#
# ## It doesn't fit: what do you change first?
#
# Ask in this order, what costs least time first:
#
# 1. **Is sequence parallelism off?** Switch it on wherever you use TP.
# 2. **Are the bytes activations?** Recompute what needs no matmul (`elementwise`). If your attention stores its scores,
#    get a fused kernel.
# 3. **Do you have more than one sequence in a microbatch?** Take one, unless the matmuls get too small for the GPU.
# 4. **Are the bytes weights and states?** If you have replicas, turn half of them into pipeline stages, or shard more
#    (ZeRO-2, ZeRO-3; without a pipeline).
# 5. **Does it still not fit?** Turn replicas into context-parallel ranks, then recompute everything.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# <details><summary><b>Question:</b> the peak is in the optimizer's step. Does recomputing activations help?</summary>
#
# No. By then the activations are gone. The bill lists weights, gradients, states, and what the update makes.
# </details>
#
# > **Take away**
# > 1. The same layer saves about 1.5 times as much in plain operators: record it before you buy GPUs.
# > 2. The peak decides, on the fullest rank.
# > 3. Change what's cheapest first: sequence parallelism, elementwise recomputation, the microbatch.
# >
# > **At work tomorrow:** run `actmem record my_model.py:factory --step --html page.html` on your model, and read its
# > largest five lines.
#
# **Lab 8**: `python my/labs/lab8_plan.py`. The bill's logits and
# loss don't shrink when you recompute layers: [chapter 10](10_the_loss.ipynb) takes them apart.
#
# **Sources.** Touvron et al., *LLaMA*, 2302.13971 · Rajbhandari et al., *ZeRO*, 1910.02054 · huggingface/nanotron and
# its published logs · code: `src/actmem/ledger/`, `src/actmem_tools/`.
