# %% [markdown]
# # 1 · The memory wall
#
# You take enough GPUs for the parameters to fit. Yet with tensor parallelism alone, and nothing recomputed, none of the paper's
# four models (22B to 1T) fits. Would more GPUs help?

# %%
# Setup: imports, and the numbers of the question
from dataclasses import replace

import actmem as am
from actmem.config import PAPER_MODELS
from actmem_course.figures import (
    Checks, Fold, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, choice, size_text, slider,
    text_table, worked,
)
from actmem_course.figures import ch01_memory_wall as show

checks = Checks()
largest = PAPER_MODELS["1T"]
layers, stages = largest.shape.num_layers, largest.parallel.pipeline_parallel_size
deeper = replace(largest, parallel=replace(largest.parallel, pipeline_parallel_size=2 * stages))
parts, then = show.gpu_bytes(largest), show.gpu_bytes(deeper)
for_parameters = [sum(each.values()) - each["activations"] for each in (parts, then)]
TWICE = f"and the 1T on {deeper.num_devices:,} GPUs"
question = Prediction(
    f"The 1T model runs on {largest.num_devices} GPUs: each group of "
    f"{largest.parallel.tensor_parallel_size} shares {layers // stages} of its {layers} layers. A GPU "
    f"of the first holds {size_text(for_parameters[0])} of "
    f"parameters, gradients and optimizer states, and {size_text(parts['activations'])} of "
    "activations. You take twice as many GPUs "
    "for a pipeline twice as long, so each group has half the layers. How much do activations take "
    "on that GPU now?",
    then["activations"] / 2**30,
    "GiB",
    "Half the layers, but twice as many microbatches in flight: this chapter says why. Each one more "
    "also brings a dropout mask of the embedding.",
    GuessLine(per=2**30, start=for_parameters[1]),
)
Reveal(
    question,
    Panel(
        lambda shown: show.memory_wall(
            "tensor", {f"1T, {deeper.num_devices:,} GPUs": deeper} if shown == TWICE else {}
        ),
        shown=choice("the bars are", ["the paper's four models", TWICE], "the paper's four models"),
    ),
    shown=TWICE,
)

# %% [markdown]
# **In this chapter** you find out what fills a GPU that trains a large model. You take the paper's four models, move the
# inputs of their formulas, and run real layers to check them. About 25 minutes. You need to know nothing about parallel
# training: chapters 3, 4 and 6 introduce it.
#
# [Chapter 1](01_memory_wall.ipynb) lists the letters. Tensor parallelism lets $t$ ranks share each layer; pipeline stages are
# groups of ranks that hold different layers.
#
# An **activation** here is a tensor that forward makes and backward reads. Weights and gradients are not activations; a
# dropout mask is one. Sizes are in bytes, for 16-bit training: two bytes per number, one per element of a mask.

# %% [markdown]
# ## The four models
#
# The paper trains four models on A100s. $t$ GPUs share each layer, the layers are divided among $p$ stages, and there
# is no data parallelism: $t \cdot p$ GPUs hold one copy of the model.

# %% jupyter={"source_hidden": true}
lines = []
for name, model in PAPER_MODELS.items():
    shape, parallel = model.shape, model.parallel
    gpus = f"{parallel.tensor_parallel_size} · {parallel.pipeline_parallel_size} = {model.num_devices}"
    lines.append(
        (name, shape.num_attention_heads, shape.hidden_size, shape.num_layers, shape.micro_batch_size, gpus)
    )
print(text_table(("model", "a", "h", "L", "b", "t · p, GPUs"), lines, " rrrrr"))

# %% [markdown]
# All four read sequences of 2,048 tokens. The number of GPUs grows with the model, so that parameters, gradients and
# optimizer states fit on each with room to spare.
#
# How many bytes is that for each parameter? Parameters have 16 bits. Gradients of many microbatches are added up in float32.
# Adam's updates are too small for 16 bits, so it updates a float32 copy of the parameters, and keeps two moments for each. The
# paper does not say how many bytes it counts. Several recipes are in use; the course takes the first:

# %% jupyter={"source_hidden": true}
from actmem.formulas.states import ADAM

recipes = {name: {state.term: state.bytes_per_parameter for state in states} for name, states in ADAM.items()}
taken = next(iter(recipes.values()))
Fold(
    f"{sum(taken.values())} bytes a parameter: "
    + ", ".join(f"{term} {size}" for term, size in taken.items()),
    "\n".join(
        f"{name}: {', '.join(f'{term} {size}' for term, size in states.items())}: "
        f"{sum(states.values())} bytes a parameter"
        for name, states in recipes.items()
    ),
)

# %% [markdown]
# So parameters are not what stops you: activations are the larger part of all four bars. They are also the part that you can
# choose. The model fixes its parameters and optimizer states; an activation can be dropped and recomputed, or sharded, or
# never stored at all.
#
# ## Two parts that grow differently
#
# Chapter 2 counts the tensors of one layer one by one. Here you need only the sum (the paper's equation 1):
#
# $$\text{bytes of one layer} = 34\,sbh + 5\,as^2b$$
#
# * $34\,sbh$: tensors with one vector per token: the inputs of linears, layer norms and GeLU; Q, K and V; dropout masks.
#   Twice the tokens, twice the bytes.
# * $5\,as^2b$: tensors with one number per *pair* of tokens, in each head: the softmax output, its dropout mask, and the
#   dropout output. This is the **attention core**. Twice the tokens, four times the bytes.
#
# Set the two equal and cancel $sb$: from $s = 34h/(5a)$ on, the core is the larger part. All four models train at two to
# three times that length. (Fused attention, in wide use since the paper, never stores the core: [chapter 5](05_recomputation.ipynb).)
#
# On logarithmic axes a power is a straight line, and its exponent is the slope: the core's line is twice as steep. **Before
# you move the slider:** at what $s$ does the core of the 175B model hold ten times as much as the rest?

# %%
GPT3 = PAPER_MODELS["175B"].shape
Panel(
    lambda s, b: show.crossover_lines(GPT3.with_sizes(seq_length=s, micro_batch_size=b)),
    s=slider("s", "tokens", 128, 32768, 128, 2048),
    b=slider("b", "sequences", 1, 8, 1, 1),
)

# %% [markdown]
# Ten times the rest needs ten times the crossover length, $s$ = 8,704: the *ratio* of the two, $5as/(34h)$, is proportional to $s$. Move
# $b$ as well. Both lines rise together and the crossover stays where it is, because both terms have one factor $b$.
#
# ## Measured: double the tokens
#
# So far nothing has run. Now a real layer of the 175B model runs at three lengths, and a *ledger* lists each tensor that
# autograd keeps. The tensors have shapes but no storage, so this fits on a laptop. The code is the same as on a GPU.

# %%
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_extra_rows
from actmem.ledger.layer_rows import measure_layer
from actmem.rows import total

sizes = {}
with am.emulated_rank(1):
    for length in (1024, 2048, 4096):
        shape = GPT3.with_sizes(seq_length=length)
        measured = measure_layer(shape)
        checks.add_rows(
            f"GPT-3's layer, s = {length:,}", am.layer_rows(shape) + layer_extra_rows(shape), measured
        )
        core = sum(row.bytes for row in measured if row.term in CORE_ATTENTION_TERMS)
        sizes[f"s = {length:,}"] = {"core": core, "rest": total(measured) - core}
display(checks.show())
LiveFigure(
    bar_chart(
        "Twice the tokens: the rest doubles, the core is four times as large",
        {
            "the rest": {length: size["rest"] for length, size in sizes.items()},
            "attention core": {length: size["core"] for length, size in sizes.items()},
        },
        "measured, one GPT-3 layer",
        fills=[show.FILLS["activations"], show.FILLS["softmax"]],
    )
)

# %% [markdown]
# Equation 1 leaves out two numbers per token for each layer norm, on purpose. Here they are counted too, and every term is
# compared to the byte.
#
# ## Measured: one layer of the fullest GPU
#
# The bars at the top are formulas for a whole stage, and rest on the bytes of one layer. Here one layer of each model runs on
# one of its $t$ ranks, and is compared term by term.

# %%
for name, model in PAPER_MODELS.items():
    t = model.parallel.tensor_parallel_size
    with am.emulated_rank(t):
        measured = measure_layer(model.shape, am.tensor_parallel())
    predicted = am.layer_rows(model.shape, am.Parallel(t)) + layer_extra_rows(model.shape, am.Parallel(t))
    checks.add_rows(f"{name}, a layer on one of {t} ranks", predicted, measured)
checks.show()

# %% [markdown]
# The parameters can be counted too. These are the modules of the 1T model's first stage:

# %%
from actmem.formulas.states import parameter_counts

with am.emulated_rank(largest.parallel.tensor_parallel_size):
    first_layers = range(largest.shape.num_layers // largest.parallel.pipeline_parallel_size)
    stage = am.GPT(largest.shape, am.tensor_parallel(sequence_parallel=True), layers=first_layers)
    counted = sum(parameter.numel() for parameter in stage.parameters())
checks.add(
    "1T, layers and embedding of the first stage, on one rank",
    [(sum(parameter_counts(largest.shape, largest.parallel).values()), counted)],
    "parameters",
)
checks.show()

# %% [markdown]
# ## More pipeline stages leave the activations as they are
#
# *"Use more pipeline stages, then each GPU has fewer layers."* True, but the activations stay. The first stage has $L/p$
# layers, and starts $p$ microbatches before the first one comes back. So it holds $p \cdot L/p = L$ layers' worth of
# activations, whatever $p$ is (equation 5). Chapter 6 shows this on a schedule.

# %% jupyter={"source_hidden": true}
from actmem.formulas.first_stage import stage_rows

held = {"activations of its layers": {}, "parameters, gradients, optimizer": {}}
for stages in (1, 2, 4, 8, 16, 32):
    parallel = am.Parallel(8, pipeline_parallel_size=stages)
    bar = f"p = {stages}: {GPT3.num_layers // stages} layers"
    held["activations of its layers"][bar] = sum(
        row.bytes
        for row in stage_rows(GPT3, parallel)
        if row.term in {row.term for row in am.layer_rows(GPT3)}
    )
    held["parameters, gradients, optimizer"][bar] = sum(parameter_counts(GPT3, parallel).values()) * sum(
        taken.values()
    )
LiveFigure(
    bar_chart(
        "More stages: fewer parameters on a GPU, the same activations",
        held,
        "GPT-3's first stage, one GPU",
        fills=[show.PART_FILLS["activations"], show.PART_FILLS["parameters"]],
    )
)

# %% [markdown]
# With enough stages GPT-3 fits all the same, because the other part shrinks. The price is more GPUs, idle for longer while the
# pipeline fills and empties. (The bar 175B at the top has more activations than these: each of its GPUs holds several separate groups of
# layers, chapter 6.)
#
# *"Use a smaller batch."* Three of the four models already run with $b = 1$. *"Use more tensor parallelism."* It leaves a
# part of the activations undivided: chapter 3.
#
# ## What the rest of the course does about it
#
# Two methods, each a few dozen lines of code. **Sequence parallelism** (chapter 4) divides what tensor parallelism does not.
# **Selective recomputation** (chapter 5) drops the attention core and computes it again. Choose a method; what it frees is
# dotted.

# %%
Panel(
    show.memory_wall,
    method=choice("method", show.METHODS, "tensor+sequence+selective"),
)

# %% [markdown]
# Try the methods one by one. Which of the two, added to tensor parallelism, makes a model fit, and which model?
#
# <details><summary>Answer</summary>
#
# With sequence parallelism no model fits; with selective recomputation only the smallest does. With both, all four
# fit. Full recomputation frees even more, but runs most of the forward pass twice; chapters 5 and 7 show what that
# costs.
# </details>

# %% [markdown]
# ## The wall, measured
#
# Is the wall there on a real GPU? Below, one rank of the 22B model takes a training step, with all its layers and Adam's
# states, on a newer GPU that lets it have no more memory than an A100. The rows add one method after the other;
# *elementwise* (chapter 8) and *full* replace *selective*. The prediction adds weights, gradients, optimizer states,
# activations, the loss, and what backward makes for a moment.

# %% jupyter={"source_hidden": true}
from actmem_course.figures.gpu_results import conditions, newest, step_curve, wall_bars, wall_remainder

wall = newest("wall")
print(conditions(wall))
LiveFigure(wall_bars(wall))

# %% [markdown]
# Measured is the most that torch's allocator had handed out. Where memory ran out, the step ran once more with the whole
# card. The other chapters' results of this GPU have the same conditions.

# %% jupyter={"source_hidden": true}
wall_remainder(wall)

# %% [markdown]
# This is the step with selective recomputation. Forward fills the memory, layer by layer; backward empties it. Each tooth in
# backward is a layer whose attention core is computed again.

# %% jupyter={"source_hidden": true}
LiveFigure(step_curve(wall))

# %% [markdown]
# All comparisons of this chapter:

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# The 22B model trains on 8 GPUs with four sequences in a microbatch, and its bar is above the line. You take one sequence
# instead. Does it fit, and how much room is left or missing? Read the sizes off its bar in the first figure (point at it, or tap).

# %% jupyter={"source_hidden": true}
from actmem_course.others.paper import A100_BYTES

small = PAPER_MODELS["22B"]
held = show.gpu_bytes(small)
states, four = held["parameters"] + held["gradients and optimizer"], held["activations"]
worked(
    f"Every term of the activations has one factor b, so one sequence keeps {size_text(four)} / "
    f"{small.shape.micro_batch_size} = {size_text(four // small.shape.micro_batch_size)}.",
    f"Parameters, gradients and optimizer don't depend on b: {size_text(states)}.",
    f"Together {size_text(states + four // small.shape.micro_batch_size)} of {size_text(A100_BYTES)}: "
    f"it fits, with {size_text(A100_BYTES - states - four // small.shape.micro_batch_size)} to spare. "
    "The price: each product has a quarter of the rows, and runs less efficiently.",
)

# %% [markdown]
# ## Questions
#
# **1.** You double $h$ and $a$ together, as larger models do, and keep $s$. What happens to the share of the attention core?
#
# <details><summary>Answer</summary>
#
# Nothing. The share depends on $5as/h$ against $34$, and $a/h$ has not changed: only the size of a head, $h/a$, matters.
# Models of very different sizes have the same crossover if their heads have the same size, as the two largest do.
# </details>
#
# **2.** The 22B model is far smaller than the 175B model. Why is its bar nearly as high?
#
# <details><summary>Answer</summary>
#
# It runs on only $t$ GPUs, with $p = 1$, so every GPU holds $1/t$ of all its parameters; the larger models spread theirs
# over $p$ times as many. And its microbatch has $b = 4$ sequences, which multiplies all activations; with $b = 1$ it would
# fit.
# </details>
#
# **3.** A colleague trains the 175B model on sequences that are 8 times as long, and finds that 8 times the GPUs, used as
# data-parallel replicas with the same microbatch, do not help. Why not, and by what factor does one layer grow?
#
# <details><summary>Answer</summary>
#
# A data-parallel replica is a full copy of everything in this chapter: it changes how many sequences run in parallel, not
# what one GPU holds. The layer grows by more than 8, because the core grows by 64. With $x = 5as/h$ it is
# $(8 \cdot 34 + 64x)/(34 + x)$ times as large: 47 times, since $x$ = 80.
# </details>
#
# ## What people get wrong here
#
# * **"Parameters × 16 or 18 bytes tells me how many GPUs I need."** In the first figure that is the smaller part of each bar.
# * **"The core is quadratic, so it always dominates."** Only from $s = 34h/(5a)$ on; below it the linear part is the larger.
#
# **Sources.** Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, [arXiv
# 2205.05198](https://arxiv.org/abs/2205.05198): figure 1, table 3, sections 4.1 and 4.2.3 (equations 1 and 5). The paper
# gives no bytes for the optimizer; 18 per parameter is Megatron's count with float32 gradients, and
# `actmem.formulas.states.ADAM` has two others, one of them from Rajbhandari et al., [arXiv
# 1910.02054](https://arxiv.org/abs/1910.02054).
#
# ## Now fit your model
#
# What fills the GPUs that you have? This lists the fullest one's bill, line by line:
#
# ```
# actmem plan llama3-8b --gpus 8 --memory 80 --global-batch 64
# ```
#
# Next, [chapter 2](02_counting_bytes.ipynb): where the 34 and the 5 come from.
