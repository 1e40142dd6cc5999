# %% [markdown]
# # 1 · The memory wall
#
# *30 minutes. Write your guess below (in a notebook: Shift+Enter first).*
#
# You spread GPT-3's 175 billion parameters over 64 GPUs. Each GPU holds its share of the parameters, gradients and
# optimizer states, and has room left. Then you train, and in the forward pass autograd saves tensors for the backward
# pass. **How much memory do these saved tensors take on the GPU that holds most?**

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal, choice, size_text, text_table, worked,
)
from actmem_course.figures import ch01_memory_wall as show
from actmem_course.figures.layer_picture import layer_picture
from actmem_course.others.paper import A100_BYTES

checks = Checks()
gpt3 = PAPER_MODELS["175B"]
held = show.gpu_bytes(gpt3)
without_activations = sum(held.values()) - held["activations"]
question = Prediction(
    f"GPT-3 (175B in the figure) trains on {gpt3.parallel.num_devices} GPUs of {size_text(A100_BYTES)}. Parameters, gradients and "
    f"optimizer states take {size_text(without_activations)} of the one that holds most. How much do the saved "
    "tensors take there?",
    answer=held["activations"] / 2**30,
    unit="GiB",
    because=(
        "That is more than all the rest together, and all four models of the figure run out of memory. This chapter "
        "says what these tensors are, and why more GPUs don't shrink them."
    ),
    line=GuessLine(per=2**30, start=without_activations),
)
Reveal(
    question,
    Panel(
        lambda saved_tensors: show.memory_wall(with_activations=saved_tensors == "counted"),
        saved_tensors=choice("saved tensors", ["left out", "counted"], "left out"),
    ),
    saved_tensors="counted",
)

# %% [markdown]
# The saved tensors are **activations**: the forward pass computes them, the backward pass reads them. A dropout mask
# is one; weights and gradients aren't. With your guess the figure adds them: they are the larger part of every bar.
# That's the **memory wall** of this course: the parameters fit, and training still runs out of memory.
#
# *Reducing Activation Recomputation in Large Transformer Models* ([arXiv
# 2205.05198](https://arxiv.org/abs/2205.05198)) counts activations, and removes most of them at little cost in time.
# You do the same: you **predict** each number with a formula, PyTorch runs the layer, and you
# **count** the bytes that autograd holds. The two agree to the byte.
#
# After chapters 1 to 7 you can predict a transformer layer's activations with a pencil, say what tensor, sequence and
# pipeline parallelism shard and send, and tell which recomputation is worth its time. You need to
# know PyTorch's `nn.Module` and roughly what `backward()` does. You don't need a GPU, and you needn't know Megatron.
#
# <details><summary>How to use notebooks and labs</summary>
#
# *Run → Run All Cells* runs a whole notebook. Sliders also move with the arrow keys.
#
# In a lab you write the functions of its chapter, and a judge says what is wrong. `make labs` puts your copies into
# `my/labs`; the first line of each is the command that runs it.
#
# A GiB is $2^{30}$ bytes.
# </details>

# %% [markdown]
# ## Map of the course
#
# | chapter | question | minutes, without its lab | lab |
# |---|---|---|---|
# | [1 The memory wall](01_memory_wall.ipynb) | What fills a GPU? | 30 | |
# | [2 Counting bytes](02_counting_bytes.ipynb) | Which 15 tensors does a layer save? | 45 | [1](../labs/lab1_count_bytes.py) |
# | [3 Tensor parallelism](03_tensor_parallelism.ipynb) | Which of them does it shard? | 35 | [2](../labs/lab2_tensor_parallel.py) |
# | [4 Sequence parallelism](04_sequence_parallelism.ipynb) | How do you shard the rest? | 35 | [3](../labs/lab3_sequence_parallel.py) |
# | [5 Recomputation](05_recomputation.ipynb) | What is worth recomputing? | 50 | [4](../labs/lab4_recompute.py) |
# | [6 The pipeline](06_pipeline.ipynb) | What does each stage hold, and when? | 40 | [5](../labs/lab5_pipeline.py) |
# | [7 Time](07_time.ipynb) | What does it cost? | 40 | [6](../labs/lab6_train.py) |
# | **Electives**, in any order after 5 | | | |
# | [8 Today's layer](08_todays_layer.ipynb) | What helps a Llama? | 35 | [7](../labs/lab7_todays_layer.py) |
# | [9 Your model](09_your_model.ipynb) | What does your model save, and does it fit? | 35 | [8](../labs/lab8_plan.py) |
# | [10 The loss](10_the_loss.ipynb) | What does a vocabulary of 128k cost? | 35 | [9](../labs/lab9_the_ends.py) |
# | [11 Adapters](11_adapters.ipynb) | What do frozen weights free? | 35 | [10](../labs/lab10_keep_less.py) |
# | [12 Long sequences](12_long_sequences.ipynb) | How do a million tokens fit? | 35 | [10](../labs/lab10_keep_less.py) |
# | [13 Experts](13_experts.ipynb) | What do experts and latent attention save? | 35 | |
# | [14 The allocator and eight bits](14_allocator_and_eight_bits.ipynb) | What do they add? | 25 | |

# %% [markdown]
# ## How the four models are spread
#
# The paper trains its models on A100s. **Tensor parallelism** lets $t$ GPUs share each layer. **Pipeline
# parallelism** divides the $L$ layers into $p$ **stages**, each on a group of $t$ GPUs. Together $t \cdot p$ GPUs
# hold one copy of the model; each is a **rank**, one process with one device. A batch goes through the stages in
# **microbatches** of $b$ sequences. Each sequence has $s$ = 2,048 tokens, each token a vector of $h$ numbers (the
# hidden size), and each layer $a$ attention heads:

# %% jupyter={"source_hidden": true}
lines = []
for name, model in PAPER_MODELS.items():
    shape, parallel = model.shape, model.parallel
    gpus = f"{parallel.tensor_parallel_size} · {parallel.pipeline_parallel_size}"
    *states, activations = show.gpu_bytes(model).values()
    sizes = shape.num_attention_heads, shape.hidden_size, shape.num_layers, shape.micro_batch_size
    lines.append((name, *sizes, gpus, f"{sum(states) / 2**30:.3g}", f"{activations / 2**30:.3g}"))
print(text_table(("model", "a", "h", "L", "b", "t · p", "states", "activations"), lines, " rrrrrrr"))

# %% [markdown]
# The last two columns are the bars above, in GiB. *States* are parameters, gradients and optimizer states.
#
# Larger models get more GPUs, so that their parameters fit. How many bytes does each parameter take? Matmuls run in 16
# bits. Gradients are added up in float32. Adam's steps are too small for 16 bits, so it updates a float32 copy, and
# holds two moments. The paper doesn't say what it counts; of three common recipes we take the first:

# %% jupyter={"source_hidden": true}
from actmem.formulas.states import ADAM

recipes = {name: {state.term: state.bytes_per_parameter for state in states} for name, states in ADAM.items()}
taken = next(iter(recipes.values()))
Fold(
    f"{sum(taken.values())} bytes per parameter: "
    + ", ".join(f"{term} {size}" for term, size in taken.items()),
    "\n".join(
        f"{name}: {', '.join(f'{term} {size}' for term, size in states.items())}: "
        f"{sum(states.values())} bytes per parameter"
        for name, states in recipes.items()
    ),
    prose=True,
)

# %% [markdown]
# ## One layer: predict, then count
#
# A transformer layer on one device saves 15 tensors. Here each is a box as wide as its bytes, at GPT-3's size:

# %%
LiveFigure(layer_picture(gpt3.shape))

# %% [markdown]
# Chapter 2 derives them. Their sum is the paper's equation 1:
#
# $$\text{bytes of one layer} = 34\,sbh + 5\,as^2b$$
#
# * $34\,sbh$: tensors with a vector for each token. A microbatch has the shape $[s, b, h]$, which takes $2sbh$ bytes
#   in 16 bits; a dropout mask takes $sbh$, one byte per element.
# * $5\,as^2b$: tensors with a number for each *pair* of tokens in each head: the softmax output, its dropout mask and
#   the dropout output. They are made in the **core attention** (`core_attention` in Megatron).
#
# Test it: PyTorch runs a small layer in bfloat16, and `record` lists what autograd saves:

# %%
import torch

from actmem.config import TINY
from actmem.formulas.activations import eq1, layer_extra_rows
from actmem.rows import by_term, total

layer = am.TransformerLayer(TINY, dtype=torch.bfloat16)
s, b, h = TINY.seq_length, TINY.micro_batch_size, TINY.hidden_size
x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
with am.record(layer) as ledger:
    y = layer(x)

extra = total(layer_extra_rows(TINY))
checks.add(f"one layer, {extra:,} bytes of them extra", [(eq1(TINY) + extra, ledger.total_bytes)])
checks.show()

# %% [markdown]
# *0 apart* means equal to the byte. That zero is the point of this course. (*Extra* is what the paper leaves out as
# small: two numbers per token for each layer norm.)
#
# GPT-3's layer reads twice as many tokens. Does it save twice as many bytes? Its tensors have shapes here but no
# storage, so it runs on a laptop (17 tensors: the 15, and each norm's *extra*):

# %%
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.ledger.measure_layer import measure_layer

core, rest = [], []
with am.emulated_rank(1):
    for length in (1024, 2048, 4096):
        shape = gpt3.shape.with_sizes(seq_length=length)
        rows = measure_layer(shape)
        predicted = am.layer_rows(shape) + layer_extra_rows(shape)
        checks.add_rows(f"GPT-3's layer, s = {length:,}", predicted, rows)
        core.append(sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS))
        rest.append(total(rows) - core[-1])
display(checks.show())
worked(f"With twice the tokens, the core attention takes {core[1] / core[0]:.0f} times as much, the rest {rest[1] / rest[0]:.0f} times.")

# %% [markdown]
# So where does the core take over? Set the two terms equal and cancel $sb$. You get the *crossover*, $s = 34h/(5a)$:

# %% jupyter={"source_hidden": true}
from actmem.formulas.activations import crossover_seq_length

for name, model in PAPER_MODELS.items():
    crossover = crossover_seq_length(model.shape.hidden_size, model.shape.num_attention_heads)
    print(f"{name:>4}: the core attention takes over at s = {crossover:,.0f}")

# %% [markdown]
# All four models read 2,048 tokens, beyond their crossover. The ratio of the two terms, $5as/(34h)$, grows with $s$: at
# ten times the crossover the core takes ten times as much as the rest. (Fused attention, in wide use since the paper,
# never saves the core: [chapter 5](05_recomputation.ipynb).)
#
# The bars at the top add up such layers, on one of $t$ ranks, and the parameters of a stage. Count both on real
# modules:

# %%
from actmem.formulas.states import parameter_counts

pairs = []
for model in PAPER_MODELS.values():
    shape, parallel = model.shape, am.Parallel(model.parallel.tensor_parallel_size)
    predicted = by_term(am.layer_rows(shape, parallel) + layer_extra_rows(shape, parallel))
    with am.emulated_rank(parallel.tensor_parallel_size):
        counted = by_term(measure_layer(shape, am.tensor_parallel()))
    for term in predicted | counted:
        pairs.append((predicted.get(term, 0), counted.get(term, 0)))
checks.add("a layer of each model, on one of its ranks", pairs)

shape, parallel = PAPER_MODELS["1T"].shape, PAPER_MODELS["1T"].parallel
layers = range(shape.num_layers // parallel.pipeline_parallel_size)
with am.emulated_rank(parallel.tensor_parallel_size):
    stage = am.GPT(shape, am.tensor_parallel(sequence_parallel=True), layers=layers)
predicted = sum(parameter_counts(shape, parallel).values())
counted = sum(parameter.numel() for parameter in stage.parameters())
checks.add("first stage of the 1T model, on one rank", [(predicted, counted)], "parameters")
checks.show()

# %% [markdown]
# ## Why more GPUs don't shrink activations
#
# Suppose you use twice as many stages. Each GPU has half as many layers. Does it need half as much memory for
# activations?

# %% jupyter={"source_hidden": true}
from actmem.formulas.stages import EMBEDDING_TERM, embeddings_in_flight, interleave_factor, stage_rows

layer_terms = {row.term for row in am.layer_rows(gpt3.shape)}
for stages in (8, 16):
    parallel = am.Parallel(8, pipeline_parallel_size=stages)
    of_layers = sum(row.bytes for row in stage_rows(gpt3.shape, parallel) if row.term in layer_terms)
    states = sum(parameter_counts(gpt3.shape, parallel).values()) * sum(taken.values())
    print(
        f"GPT-3, p = {stages}: {gpt3.shape.num_layers // stages} layers save {size_text(of_layers)} for {stages} "
        f"microbatches; parameters, gradients and optimizer states take {size_text(states)}."
    )
p, m = gpt3.parallel.pipeline_parallel_size, gpt3.parallel.num_model_chunks
factor = float(interleave_factor(p, m))
rows = stage_rows(gpt3.shape, am.Parallel(8, pipeline_parallel_size=p, num_model_chunks=m))
masks = sum(row.bytes for row in rows if row.term == EMBEDDING_TERM)
print(
    f"The bar 175B above: p = {p}, and each GPU has its {gpt3.shape.num_layers // p} layers in {m} chunks, so "
    f"{factor:.2f} times the activations, {size_text(total(rows) - masks)}; "
    f"{embeddings_in_flight(gpt3.parallel)} dropout masks of the embedding (chapter 6: why so many) take {size_text(masks)} more."
)

# %% [markdown]
# It needs just as much. Under the usual schedule (1F1B: one forward, one backward) the first stage runs $p$ forward
# passes before its first backward pass. With at least $p$ microbatches it holds $p$ times the activations of $L/p$
# layers: those of $L$ layers, whatever $p$ is (the paper's equation 5; [chapter 6](06_pipeline.ipynb)). GPT-3's bar,
# 175B, is longer: in its interleaved schedule each GPU has several chunks of layers, so more passes start before the
# first backward pass.
#
# > **More pipeline stages. Why do this?** Parameters, gradients and optimizer states shrink with $p$. **Why not?**
# > Activations don't, and more GPUs wait longer while the pipeline fills and empties.
#
# You can't take a smaller microbatch: three of the models already run with $b = 1$. More copies of the model (data
# parallelism) don't help: each saves the same activations for its own sequences. ZeRO shards states over the copies:
# ZeRO-1 (Megatron's distributed optimizer) the optimizer's, ZeRO-2 the gradients too, ZeRO-3 (FSDP) the parameters too.
# Suppose so many copies that a GPU's shard is almost nothing:

# %% jupyter={"source_hidden": true}
whole = {
    "ZeRO-1": taken["parameters"] + taken["gradients"],
    "ZeRO-2": taken["parameters"],
    "ZeRO-3": 0,
}
lines = []
for name, model in PAPER_MODELS.items():
    count = sum(parameter_counts(model.shape, model.parallel).values())
    activations = show.gpu_bytes(model, "tensor")["activations"]
    sizes = [activations + each * count for each in whole.values()]
    lines.append((name, *(f"{size_text(size)}{' fits' if size <= A100_BYTES else ''}" for size in sizes)))
print(text_table(("model", *whole), lines, " rrr"))

# %% [markdown]
# The two largest don't fit even with ZeRO-3, which also gathers each layer's parameters to use them. More tensor
# parallelism leaves a part of the activations whole on every rank (chapter 3).
#
# ## What does help
#
# Two methods help, each a few dozen lines of code. **Sequence parallelism** (chapter 4) shards what tensor
# parallelism doesn't. **Selective recomputation** (chapter 5) drops the core attention and recomputes it in the
# backward pass. Which of the two, added to tensor parallelism, makes a model fit, and which model? What a method
# frees is dotted:

# %%
Panel(show.memory_wall, method=choice("method", show.METHODS, "tensor"))

# %% jupyter={"source_hidden": true}
lines = []
for method in show.METHODS:
    sizes = {name: sum(show.gpu_bytes(model, method).values()) for name, model in PAPER_MODELS.items()}
    fit = [name for name, size in sizes.items() if size <= A100_BYTES]
    lines.append(f"{method:<26}fits: {', '.join(fit) or 'no model'}")
Fold("Which models fit with each method", "\n".join(lines))

# %% [markdown]
# Short of full recomputation, only both together make all four fit. Full recomputation frees even more, but runs most
# of the forward pass twice: chapters 5 and 7 show what that costs.
#
# ## The wall on a real GPU
#
# One rank of the 22B model takes a training step, with all layers and Adam's states, on a newer GPU that may use no
# more memory than an A100. The prediction adds weights, gradients, optimizer states, activations, the loss, and the
# backward pass's tensors at the peak. (*Elementwise* recomputes all that needs no linear layer: norms, GeLU, dropout,
# the core: [chapter 8](08_todays_layer.ipynb).)

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import conditions, newest, step_curve, wall_bars, wall_remainder

wall = newest("wall")
print(conditions(wall))
LiveFigure(wall_bars(wall))

# %% [markdown]
# Measured is `max_memory_allocated()`. Adam's states appear at the end of step 1, so step 2 needs more. Where memory
# ran out, the step ran again with the whole card.

# %% jupyter={"source_hidden": true}
wall_remainder(wall)

# %% [markdown]
# In the step with selective recomputation, the forward pass fills the memory, layer by layer. The backward pass
# empties it; each spike is a layer that recomputes its core attention:

# %% jupyter={"source_hidden": true}
LiveFigure(step_curve(wall))

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Check yourself
#
# The 22B model runs with four sequences in a microbatch, and doesn't fit. You take one sequence instead. Does it fit,
# and how much room is left? The table of the four models has its sizes.

# %% jupyter={"source_hidden": true}
small, b = show.gpu_bytes(PAPER_MODELS["22B"]), PAPER_MODELS["22B"].shape.micro_batch_size
states, four = small["parameters"] + small["gradients and optimizer"], small["activations"]
worked(
    f"Every term of the activations has one factor b, so one sequence saves {size_text(four)} / {b} = "
    f"{size_text(four // b)}.",
    f"Parameters, gradients and optimizer states don't depend on b: {size_text(states)}.",
    f"Together {size_text(states + four // b)} of {size_text(A100_BYTES)}: it fits, with "
    f"{size_text(A100_BYTES - states - four // b)} free. The price: each matmul has a quarter of the rows, and is "
    "less efficient.",
)

# %% [markdown]
# > **Take away**
# >
# > 1. Activations are what the forward pass saves for the backward pass. In all four models they take more memory
# >    than parameters, gradients and optimizer states together.
# > 2. A layer saves $34sbh + 5as^2b$ bytes. The second part, the core attention, grows with $s^2$ and is the larger
# >    from $s = 34h/(5a)$ on.
# > 3. More stages and more copies of the model leave a GPU's activations as they are. You have to shard or recompute
# >    them.
# >
# > **At work tomorrow:** read `torch.cuda.memory_allocated()` before and after the forward pass of your own training
# > step. The difference is an upper bound of your activations (it also has logits, outputs that you hold, and
# > autocast's copies of weights). Is it larger than 18 bytes per parameter on that GPU?
#
# **Sources.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): figure 1, table 3, equations
# 1 and 5. The 18 bytes are Megatron's count with float32 gradients; one of the other recipes is from Rajbhandari et
# al., [arXiv 1910.02054](https://arxiv.org/abs/1910.02054).
#
# This chapter has no lab. Next, [chapter 2](02_counting_bytes.ipynb): where the 34 and the 5 come from.
