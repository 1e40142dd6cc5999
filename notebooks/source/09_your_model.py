# %% [markdown]
# # 9 · Your model: does it fit?
#
# *35 minutes without the lab. Write your guess below (in a notebook: Shift+Enter first).*
#
# Llama 3 8B reads 8,192 tokens. Its layers are written in plain PyTorch operators, as in many libraries. You change
# the norms, the copies of keys and values and the gate, and recompute no matmul. **How many GiB do the layers still save for backward?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal, choice, size_text, slider,
)
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
# **You need** [chapter 2](02_counting_bytes.ipynb) and [chapter 5](05_recomputation.ipynb).
#
# **Letters:** $s$ tokens, $b$ sequences, $h$ hidden size, $a$ heads, $k$ key and value heads, $d = h/a$, $f$ width of the
# MLP, $v$ size of the vocabulary, $L$ layers (`l` in commands).
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
# returns a small layer and its input. In the list, *mul 1* is argument 1 of a `mul`; an operation without a number saved
# its output:

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
# `findings` recognises some tensors that a layer needn't save. Open the line to read what to do about each:

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
# - **Norm.** An autograd function saves `x` in 16 bits and one float32 number per token. Backward recomputes the rest.
# - **Attention.** With `enable_gqa=True` the kernel reads each key head for several query heads: no copies.
# - **MLP.** An autograd function saves `gate` and `up`. Backward recomputes `silu(gate)`.
#
# You write both functions in lab 7; here they are imported:

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
# > Each function is code that you maintain. And on a GPU without a flash kernel for `enable_gqa`, torch before 2.14
# > stores the scores instead: check with `actmem record --fake --device cuda`.
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
peak = am.step(model, x, optimizer=optimizer)
LiveFigure(step_timeline(peak, "one layer's step"))

# %% [markdown]
# Backward frees what it has used. But the activations' gradients that it makes are alive at the same time as what the
# layer saved.
#
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
# the model and its inputs for any sizes. The planner runs it at tiny sizes with one to five layers, and computes from
# these runs which tensors are alive at the peak, at any size. Check it on six layers, with a real step in 16 bits.
#
# Then plan Llama 3 8B on 8 GPUs of 80 GiB, each with a sequence of its own. PyTorch's FSDP2 shards weights, gradients
# and optimizer states over them, all in float32, and gathers one layer at a time in 16 bits. The planner leaves 4 GiB of
# each GPU to CUDA, NCCL and the allocator.

# %% jupyter={"source_hidden": true}
from actmem_tools.plan.own_model import OwnModel, StepOptions, outcome
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
    options = StepOptions(micro_batch_size=b, recomputed=0, sharded=False)  # no layer recomputed
    predicted = planned.bytes(options) + 8 * inputs["ids"].numel() + counters
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
    plan = outcome(planned, StepOptions(micro_batch_size=1, recomputed=0, sharded=True), "bfloat16")
    again = f"recompute {plan['ways'][0]['blocks_again']} of {LLAMA.num_layers} layers"
    verdict = "it fits" if plan["fits"] else f"it doesn't fit: {again}"
    print(f"{name}: {size_text(plan['asked']['bytes'])} of {size_text(gpus.usable_bytes)}, {verdict}")
    of_layers = sum(line["bytes"] for line in plan["bill"] if line["term"].startswith("layers."))
    kept = sum(line["bytes"] for line in plan["bill"] if line["term"].startswith(("weights", "Adam", "gathered")))
    rest = size_text(plan["asked"]["bytes"] - of_layers - kept)
    print(f"  saved by the layers {size_text(of_layers)}, weights and moments {size_text(kept)}, loss and rest {rest}")
# %% [markdown]
# On the command line, with the code to paste:
#
# ```
# actmem plan my_model.py:factory --at s=8192,b=1,h=4096,a=32,k=8,f=14336,v=128256,l=32 --gpus 8 --memory 80
# ```
#
# How near does it come to what others measured? torchtitan's runs recompute (its policy is `--again every-second-matmul`;
# where it says *recomputed*, everything), so Llama 3 8B takes less than above. In some runs of 2024 the logits lived
# through backward, so we count them there. `reserved` and `nvidia-smi` count free pieces
# too, which [chapter 14](14_allocator_and_eight_bits.ipynb)'s allocator predicts:

# %% jupyter={"source_hidden": true}
LiveFigure(show.published_bars())

# %% jupyter={"source_hidden": true}
from actmem_course.others.published_runs import published_runs

run = {run.name: run for run in published_runs()}
held, reserved = (run[f"torchtitan, Llama 3 8B, 8 H100s, b 1, {kind}"] for kind in ("allocated", "reserved"))
more, predicted = reserved.published_bytes - held.published_bytes, reserved.predicted_bytes - held.predicted_bytes
print(f"The first run reserved {size_text(more)} more than its tensors took; predicted: {size_text(predicted)}.")
show.published_causes()

# %% [markdown]
# We ran one step of Hugging Face models with AdamW on a GPU. `actmem record --step --fake --device cuda` had predicted each
# peak without one (cuBLAS's workspaces were measured, and added):

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import newest, strangers_bars

LiveFigure(strangers_bars(newest("strangers")))

# %% [markdown]
# "It fits" counts tensors. Torch takes memory from CUDA in *segments*, and cuts tensors from them. Before it runs out, it
# gives back wholly free segments, but no free pieces beside tensors ([chapter 14](14_allocator_and_eight_bits.ipynb)). If a
# plan leaves little room, set `PYTORCH_ALLOC_CONF=expandable_segments:True` (older torch: `PYTORCH_CUDA_ALLOC_CONF`).
#
# ## What fits
#
# With more GPUs you choose a layout: tensor (TP), pipeline (PP), data (DP) and context parallelism (CP, which shards each
# sequence: [chapter 12](12_long_sequences.ipynb)). Data- and context-parallel ranks hold the same weights, so ZeRO shards
# over both: ZeRO-1 the optimizer states, ZeRO-2 the gradients too, ZeRO-3 (FSDP) the weights too.
#
# The planner counts the bytes of every layout on its most loaded rank, with the 18 bytes per parameter of [chapter
# 1](01_memory_wall.ipynb). Here are Llama 3 70B, 64 GPUs of 80 GiB, 128 sequences per step. *b 1* is one sequence in a
# microbatch. *Chunks 5*: a pipeline rank's layers are five groups from different depths of the model, so that it idles less
# ([chapter 6](06_pipeline.ipynb)):

# %%
from actmem_tools.plan.plan_report import layout_text
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Request
from actmem_tools.plan.step_time import MODEL_ERROR

model, cluster = planned_model_of("llama3-70b"), Cluster(64, 80 * GIBIBYTE)
plans = Request(model, cluster, 128).search(100)
print(
    f"{plans.fitting:,} of {plans.counted:,} layouts fit; "
    f"the estimated times of {plans.near} are within {MODEL_ERROR:.0%}\n"
)
fastest = min(plan.seconds.total for plan in plans.plans)
of_replicas = next(
    plan for plan in plans.plans
    if plan.layout.tensor_parallel_size == 4 and plan.layout.data_parallel_size == 2 and plan.layout.context_parallel_size == 1
)
for plan in (*plans.plans[:3], of_replicas):
    slower = plan.seconds.total / fastest - 1
    print(f"{size_text(plan.bytes)}, {slower:.1%} above the fastest time: {layout_text(plan.layout)}, recompute {plan.recompute}")

# %% [markdown]
# Times within 10% of the fastest can't be told apart. Among these the planner puts first what relies
# less on overlap, has a lower ZeRO stage, fewer kinds of parallelism, more memory left. So CP 2 stands above DP 2 with ZeRO-1 (the
# last line): the DP 2 layout is more than 10% slower and needs ZeRO-1.
#
# **Now write it:** exercises 8.1 and 8.2, `rank_state_bytes` and `largest_micro_batch_size`, in
# [lab 8](../labs/lab8_plan.py): `python my/labs/lab8_plan.py`.
#
# ## It doesn't fit: what do you change first?
#
# Ask in this order, what costs least time first:
#
# 1. **Is sequence parallelism off?** Switch it on wherever you use TP.
# 2. **Do you have replicas without ZeRO-1?** Shard the optimizer's states over them (Megatron:
#    `--use-distributed-optimizer`): a reduce-scatter and an all-gather send what the all-reduce sent.
# 3. **Are the bytes activations?** Recompute what needs no matmul (`elementwise`). If your attention stores its scores,
#    get a fused kernel.
# 4. **Do you have more than one sequence in a microbatch?** Take one, unless the matmuls get too small for the GPU.
# 5. **Are the bytes weights and states?** If you have replicas, turn half of them into pipeline stages, or shard more
#    (ZeRO-2, ZeRO-3: DeepSpeed and this planner want no pipeline with them; torchtitan's FSDP2 runs with one).
# 6. **Does it still not fit?** Turn replicas into context-parallel ranks, then recompute everything.

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# > **Take away**
# > 1. The same layer saves about 1.5 times as much in plain operators: record it before you buy GPUs.
# > 2. The peak decides, on the most loaded rank.
# > 3. Change what's cheapest first: sequence parallelism, ZeRO-1, elementwise recomputation, the microbatch.
# >
# > **At work tomorrow:** run `actmem record my_model.py:factory --step --html page.html` on your model, and read its
# > largest five lines.
#
# **Next:** logits and loss don't shrink when you recompute layers. [Chapter 10](10_the_loss.ipynb) takes them apart.
#
# **Sources.** Touvron et al., *LLaMA*, 2302.13971 · Rajbhandari et al., *ZeRO*, 1910.02054 · code:
# `src/actmem/ledger/`, `src/actmem_tools/`.
