# %% [markdown]
# # Start here
#
# Training a large transformer, you run out of memory long before you run out of patience. Most of what fills a
# GPU is neither the weights nor the optimizer: it is **activations**, the tensors that the forward pass leaves behind
# because the backward pass will read them. *Reducing Activation Recomputation in Large Transformer Models*
# ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198)) counts them, and removes most of them at almost no cost in time.
#
# In this course you redo that count yourself. Every number you see is worked out by the cell above it, and
# nearly every one is then **measured**, by counting what PyTorch really keeps. The two agree to the byte.
#
# **What you will be able to do:**
#
# - say of any operation which tensors its backward pass needs, and why;
# - predict the activation bytes of a transformer layer on a sheet of paper, and check yourself to the byte;
# - say what tensor, sequence and pipeline parallelism each divide, what they leave whole, and what they send;
# - tell what recomputation is worth its FLOPs, and write a checkpoint function;
# - find out what keeps memory alive in a module of your own.
#
# You need to know PyTorch's `nn.Module` and what `backward()` does. A laptop without a GPU is enough.

# %% [markdown]
# ## How to use these notebooks
#
# Run a cell with <kbd>Shift</kbd> + <kbd>Enter</kbd>, or all with *Run → Run All Cells*. What is stored
# below a cell is what it printed when this notebook was made; it comes to life once you run it. Sliders move with the mouse or
# with the arrow keys.
#
# First, a guess. Nobody gets this one right the first time, and that is why the paper exists.

# %%
from actmem.config import ModelShape
from actmem.formulas.activations import eq1, layer_rows
from actmem.formulas.table2 import TABLE2, closed_form
from actmem.models import PAPER_MODELS
from actmem.rows import total
from actmem.show.choices import steps
from actmem.show.panel import Panel, slider
from actmem.show.predict import Prediction
from actmem.show.style import size_text
from actmem.show.table2_bars import table2_bars
from actmem.show.text import table2_text, text_table
from actmem.show.varies import Varies

gpt3 = PAPER_MODELS["175B"].shape
a, b, h, s = gpt3.letters()
weights_bytes = 2 * (4 * h * h + 8 * h * h)  # attention and MLP, two bytes each

Prediction(
    f"One layer of GPT-3 reads one sequence of {s:,} tokens. Its weights take {size_text(weights_bytes)} in 16 bits. "
    "How much must it keep for its backward pass, beside the weights?",
    answer=eq1(gpt3) / 2**30,
    unit="GiB",
    because=f"The text itself is {s:,} tokens, {size_text(2 * s * h)} as one 16-bit tensor of s × h. The layer keeps "
    f"{eq1(gpt3) / (2 * s * h):.0f} times as much, and the model has {gpt3.num_layers} such layers.",
)

# %% [markdown]
# ## Map of the course
#
# | notebook | what it is about | minutes | its lab |
# |---|---|---|---|
# | **00 Start here** (this one) | the question, the letters, Table 2 measured on this machine | 10 | |
# | [01 The memory wall](01_memory_wall.ipynb) | what fills a GPU: four models against 80 GB, two lines that cross | 25 | |
# | [02 Counting bytes](02_counting_bytes.ipynb) | the 15 tensors that a layer keeps: derive each, predict, measure, compare | 30 | [1](../labs/lab1_count_bytes.py) |
# | [03 Tensor parallelism](03_tensor_parallelism.ipynb) | columns, then rows, whole heads; the part that never divides | 35 | [2](../labs/lab2_tensor_parallel.py) |
# | [04 Sequence parallelism](04_sequence_parallelism.ipynb) | the other cut, an all-reduce taken apart, the input that plain autograd keeps | 40 | [3](../labs/lab3_sequence_parallel.py) |
# | [05 Recomputation](05_recomputation.ipynb) | a checkpoint function in four steps, what to recompute, what it really costs | 30 | [4](../labs/lab4_recompute.py) |
# | [06 The pipeline](06_pipeline.ipynb) | schedules with the memory they hold, measured on four processes | 30 | [5](../labs/lab5_pipeline.py) |
# | [07 Time](07_time.ipynb) | FLOPs, utilisation, and why the attention core is cheap to redo | 30 | [6](../labs/lab6_train.py) |
#
# A lab is a file in which you write the functions of its chapter; a judge runs them on real processes and says in a sentence what
# is wrong. The first line of each file is the command that starts it.

# %% [markdown]
# ## Letters
#
# Formulas use the paper's letters, code uses long names.
#
# | letter | in code | what it is |
# |---|---|---|
# | $s$ | `seq_length` | tokens in one sequence |
# | $b$ | `micro_batch_size` | sequences that go through the layer together |
# | $h$ | `hidden_size` | width of a token's vector between layers |
# | $a$ | `num_attention_heads` | attention heads; each has $h/a$ of the width |
# | $L$ | `num_layers` | transformer layers |
# | $v$ | `vocab_size` | words that the model knows |
# | $t$ | `tensor_parallel_size` | devices that share each layer (tensor and sequence parallelism) |
# | $p$ | `pipeline_parallel_size` | stages that the layers are spread over |
# | $m$ | `num_model_chunks` | pieces of the model on each stage, when stages are interleaved |
#
# A **rank** is one process with one device: the $t$ ranks of a layer are the devices that share it.
#
# Read other papers with care: some use $m$ for the number of microbatches, or $v$ for these chunks. Here each letter means one thing.
# A product such as $sbh$ counts elements; with a number in front, as in $2sbh$, it counts **bytes**, here at two bytes an element.
# One sequence between two layers is a tensor of shape $[s, b, h]$, so $2sbh$ bytes.

# %% [markdown]
# ## What this machine has

# %%
import os
import platform

import torch

devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
Varies(
    {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory": size_text(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "GPUs": ", ".join(devices) or "none, and none is needed",
    }
)

# %% [markdown]
# ## The paper in one table
#
# Table 2 of the paper says how many bytes one layer keeps on one device, for six ways to train:
#
# - **none**: one device, nothing done about memory.
# - **tensor**: $t$ devices share the layer's matrices, and with them most of its activations, but not all.
# - **tensor+sequence**: what they did not share, they now cut along the sequence.
# - **…+selective**: the inside of attention is thrown away and computed again in backward. At the sizes of large models it
#   is the largest part, and cheap to redo.
# - **full**: only the layer's input is kept, and the whole layer runs twice. This is what most people called "checkpointing".
#
# Move the sliders. At which $s$ does *tensor+selective* need less than *tensor+sequence*? What does $b$ change?

# %%
Panel(
    lambda s, b, t: table2_bars(gpt3.with_sizes(seq_length=s, micro_batch_size=b), t),
    s=slider("s", "tokens", 256, 8192, 256, start=s),
    b=slider("b", "sequences", 1, 8, 1, start=b),
    t=steps("t", "devices", [1, 2, 4, 8, 16, 32], start=8),
)

# %% [markdown]
# The same in bytes, at $t$ = 8: each formula, and beside it the sum over the tensors that chapter 2 will name one by one.

# %%
lines = []
for row in TABLE2:
    tensors = layer_rows(gpt3, row.parallel(8), row.recompute)
    lines.append((row.name, row.formula(), closed_form(row, gpt3, 8), len(tensors), total(tensors)))
print(text_table(("configuration", "formula, × sbh", "bytes by the formula", "tensors", "their bytes"), lines, "  rrr"))

# %% [markdown]
# ## Table 2, measured on this machine
#
# A formula is a claim. The next cell checks it: it starts `labs/measure_table2.py` with two processes, which
# share a small layer as two devices would. Each runs the six configurations and counts the tensors that
# autograd holds when the forward pass is over. It takes some ten seconds, most of it to start.
#
# *predicted* is the paper's formula. *extra* is what the paper leaves out as too small and PyTorch keeps all the
# same (two numbers a token for each layer norm, the causal mask, random-number states); it is predicted too, by formulas of its own.
# *difference* is measured − predicted − extra.

# %%
from actmem.lab.launch import results

measured = results("measure_table2.py", "--device", "cpu", processes=2)
print(table2_text(result for result in measured if result["rank"] == 0))
print()
exact = sum(result["exact"] for result in measured)
ranks = len({result["rank"] for result in measured})
print(f"{exact} of {len(measured)} measurements agree with the formulas to the byte, on {ranks} ranks")

# %% [markdown]
# The zeros in the last column are the point of this course. To see it in a terminal, with other sizes or other numbers of processes:
#
# ```
# make measure
# make measure PROCESSES=4 ARGS="--dtype float32"
# python labs/measure_table2.py --emulate 8 --model 1T
# ```
#
# The last one plays one of eight devices with a layer of the trillion-parameter model, without its memory: a laptop does it in seconds.
#
# ## Check yourself
#
# **1.** Below which $s$ does *tensor+sequence* need less than *tensor+selective*? Work it out from the two formulas, then compare.
#
# <details><summary>Answer</summary>
#
# Set $34/t + 5as/(ht)$ equal to $10 + 24/t$. What is left is $5as/(ht) = 10(1 - 1/t)$, so $s = 2h(t-1)/a$. Below it the attention core
# is smaller than what tensor parallelism leaves whole. The next cell has the number.
# </details>
#
# **2.** What does doubling $b$ change in the figure?
#
# <details><summary>Answer</summary>
#
# The scale of the axis and nothing else: $b$ is in every term once.
# </details>

# %%
for ranks in (2, 8):
    print(f"GPT-3, t = {ranks}: equal at s = {2 * h * (ranks - 1) // a:,}")

# %% [markdown]
# ## What people get wrong here
#
# * **"Activations are the outputs of the layers."** They are what backward reads, mostly inputs: chapter 2.
# * **"34 + 5as/h is a number of elements."** It is bytes already, for 16-bit numbers.
# * **GB and GiB.** An "80 GB" card has 80 GiB. This course writes GiB where it divides by $2^{30}$, and bytes where it can.
#
# **Source.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198), table 2.
#
# ## Where to go next
#
# [**01 The memory wall**](01_memory_wall.ipynb) shows why it matters. [**02 Counting bytes**](02_counting_bytes.ipynb) opens up the
# first line of the table: where do its 34 and its 5 come from?
