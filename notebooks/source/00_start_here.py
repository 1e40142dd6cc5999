# %% [markdown]
# # Start here
#
# What fills a GPU that trains a large transformer, and how much of it can you avoid? Guess before you read on.

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.config import PAPER_MODELS
from actmem_course.figures import Checks, GuessLine, Panel, Prediction, Reveal, Varies, size_text
from actmem_course.figures import ch01_memory_wall as show

model = PAPER_MODELS["175B"]
before, after = show.gpu_bytes(model), show.gpu_bytes(model, "tensor + sequence", "selective")
question = Prediction(
    f"GPT-3 (the bar 175B) is spread over {model.num_devices} GPUs. With tensor parallelism alone the "
    f"fullest needs {size_text(sum(before.values()))}, "
    f"{size_text(before['activations'])} of it activations. The paper's two methods shrink these. How "
    "much is left of them with both?",
    answer=after["activations"] / 2**30,
    unit="GiB",
    because=(
        "Sequence parallelism divides what every GPU had whole (chapter 4). Selective recomputation "
        "drops the three largest tensors of each layer, and computes them again (chapter 5). Now choose the "
        "methods yourself, and see which models fit."
    ),
    line=GuessLine(per=2**30, start=sum(before.values()) - before["activations"]),
)
Reveal(
    question,
    Panel(show.front_door, **show.front_door_controls()),
    parallelism="tensor + sequence",
    recompute="selective",
)

# %% [markdown]
# The figure shows one GPU of each of the paper's four models. The line is the memory of an A100.
#
# When you train a large transformer, memory runs out first. Most of what fills these GPUs is neither weights nor optimizer
# states. It is **activations**: the tensors that forward leaves behind because backward will read them. *Reducing
# Activation Recomputation in Large Transformer Models* ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198)) counts them,
# and removes most of them at little cost in time.
#
# In this course you redo that count. First you predict each number with a formula. Then PyTorch runs the layer, and you
# **measure** the bytes that it keeps. The two agree to the byte.
#
# *Measured* means: what autograd holds. A GPU reports more: the allocator's blocks, workspaces, CUDA's context, NCCL's buffers
# ([chapter 12](12_long_sequences.ipynb)). [Chapter 1](01_memory_wall.ipynb) ends with what a GPU of ours measured. Where no
# chapter says so, GPU numbers are others', and ° marks what nothing here checks.
#
# **What you will be able to do:**
#
# - say which tensors the backward pass of any operation needs, and why;
# - predict the activation bytes of a transformer layer with a pencil, and check them to the byte;
# - say what tensor, sequence and pipeline parallelism each divide, what they replicate, and what they send;
# - judge which recomputation is worth its FLOPs, and write a checkpoint function;
# - find out what keeps memory alive in a module of your own.
#
# You need to know PyTorch's `nn.Module` and what `backward()` does. A laptop without a GPU is enough.

# %% [markdown]
# ## How to use these notebooks
#
# On a web page the figures work at once, and no code runs. In a notebook run a cell with <kbd>Shift</kbd> + <kbd>Enter</kbd>, or
# all with *Run → Run All Cells*; until then you see stored outputs, and pictures. Sliders also move with the arrow keys.
#
# Under each cell that compares a prediction with a count stands one line: both numbers, and how far they are apart. Near the
# end of each chapter *predicted = counted* sums them up. Open it for the list.

# %% [markdown]
# ## Map of the course
#
# | notebook | what it is about | minutes | its lab |
# |---|---|---|---|
# | **00 Start here** (this one) | the question, the letters, one layer measured on this machine | 10 | |
# | [01 The memory wall](01_memory_wall.ipynb) | what fills a GPU: four models against 80 GB, two lines that cross | 25 | |
# | [02 Counting bytes](02_counting_bytes.ipynb) | the 15 tensors that a layer keeps: derive each, predict, measure, compare | 45 | [1](../labs/lab1_count_bytes.py) |
# | [03 Tensor parallelism](03_tensor_parallelism.ipynb) | columns, then rows; whole heads; the memory that it does not divide | 35 | [2](../labs/lab2_tensor_parallel.py) |
# | [04 Sequence parallelism](04_sequence_parallelism.ipynb) | the cut along the sequence, an all-reduce taken apart, the input that plain autograd keeps | 50 | [3](../labs/lab3_sequence_parallel.py) |
# | [05 Recomputation](05_recomputation.ipynb) | a checkpoint function in four steps, what to recompute, what it really costs, Table 2 measured | 60 | [4](../labs/lab4_recompute.py) |
# | [06 The pipeline](06_pipeline.ipynb) | schedules and the memory that each rank holds, measured on four processes | 50 | [5](../labs/lab5_pipeline.py) |
# | [07 Time](07_time.ipynb) | FLOPs, utilisation, and why the attention core is cheap to recompute | 30 | [6](../labs/lab6_train.py) |
# | [08 After the paper](08_todays_layer.ipynb) | today's layer, why selective recomputation no longer helps, and what does | 30 | [7](../labs/lab7_todays_layer.py) |
# | [09 Your model](09_your_model.ipynb) | record a model that the course didn't write: its formula, what it wastes, an itemised peak | 30 | |
# | [10 Plan a model](09_your_model.ipynb) | layouts that fit, the fullest GPU's bill, and the count that checks it | 30 | [8](../labs/lab8_plan.py) |
# | [11 The ends](10_the_loss.ipynb) | the loss at its peak, in chunks, with a shared vocabulary; log-probabilities; the embedding | 30 | [9](../labs/lab9_the_ends.py) |
# | [12 Adapters](11_adapters.ipynb) | what frozen weights keep, LoRA and QLoRA, where gradients begin, adapters under sequence parallelism | 25 | [10](../labs/lab10_keep_less.py) |
# | [13 Long sequences](12_long_sequences.ipynb) | five steps to a million tokens, one bottleneck after the other; eight bits; reserved and allocated | 30 | [10](../labs/lab10_keep_less.py) |
# | [14 Experts, latents, states, long contexts](13_experts.ipynb) | what routers, latent attention, recurrent states and a sequence shared by ranks keep | 30 | |
#
# The chapters take 8.5 hours, the labs 10 more. Chapters 0 to 5 are the core; then read what you need.
#
# In a lab you write the functions of its chapter. A judge says in a sentence what is wrong, and checks what passes again on
# real processes. `make labs` puts your own copies into `my/labs`; the first line of each is the command that runs it.

# %% [markdown]
# ## Letters
#
# Formulas use the paper's letters; code uses full names.
#
# | letter | in code | what it is |
# |---|---|---|
# | $s$ | `seq_length` | tokens in one sequence |
# | $b$ | `micro_batch_size` | sequences in a microbatch, which go through the layer together |
# | $h$ | `hidden_size` | hidden size: the width of a token's vector between layers |
# | $a$ | `num_attention_heads` | heads of attention; each has $h/a$ of the width |
# | $L$ | `num_layers` | layers |
# | $v$ | `vocab_size` | size of the vocabulary |
# | $t$ | `tensor_parallel_size` | ranks that share a layer (tensor and sequence parallelism) |
# | $p$ | `pipeline_parallel_size` | pipeline stages that the layers are divided among |
# | $m$ | `num_model_chunks` | chunks of the model on a stage, if stages are interleaved |
#
# A **rank** is one process with one device.
#
# Other papers use $m$ for the number of microbatches, or $v$ for these chunks. If a letter changes meaning, the chapter says so.
#
# Formulas count **bytes**. Between two layers a microbatch is a tensor of shape $[s, b, h]$: in 16 bits, $2sbh$ bytes. A
# dropout mask with as many elements takes $sbh$, one byte for each. A GiB is $2^{30}$ bytes; an "80 GB" card has nearly 80 of
# them.

# %% [markdown]
# ## One layer, measured on this machine
#
# A formula is a claim. The paper says that a layer on one device keeps $34sbh + 5as^2b$ bytes for its backward pass. Here
# PyTorch runs a small layer, and `record` lists the tensors that autograd holds after forward. *Extra* is what PyTorch keeps
# and the paper leaves out as small: two numbers per token for each layer norm. First, your machine:

# %% jupyter={"source_hidden": true}
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

# %%
from actmem.config import TINY
from actmem.formulas.activations import eq1, layer_extra_rows
from actmem.rows import total

layer = am.TransformerLayer(TINY, dtype=torch.bfloat16)
x = torch.randn(
    TINY.seq_length, TINY.micro_batch_size, TINY.hidden_size, dtype=torch.bfloat16, requires_grad=True
)
with am.record(layer) as ledger:
    y = layer(x)

extra = total(layer_extra_rows(TINY))
checks = Checks()
checks.add(f"one layer, {extra:,} bytes of them extra", [(eq1(TINY) + extra, ledger.total_bytes)])
checks.show()

# %% [markdown]
# That zero is the point of this course. In chapter 5
# you measure all six ways of the paper's table 2 on real processes, with the same zero. To see that table now, in a terminal:
#
# ```
# make measure
# python labs/measure_table2.py --emulate 8 --model 1T
# ```
#
# The second command emulates one of eight ranks with a layer of the trillion-parameter model. Its tensors have no storage, so
# this takes seconds on a laptop.
#
# ## Check yourself
#
# **1.** What does doubling $b$ change in the bars of the figure at the top? (Look at the formula above.)
#
# <details><summary>Answer</summary>
#
# All activations double: every term has one factor $b$. The other parts stay.
# </details>
#
# **2.** You double $s$. Does a layer of GPT-3 keep twice as much?
#
# <details><summary>Answer</summary>
#
# More: $34sbh$ doubles and $5as^2b$ grows fourfold. [Chapter 1](01_memory_wall.ipynb) draws both.
# </details>
#
# **Source.** Korthikanti et al., [arXiv 2205.05198](https://arxiv.org/abs/2205.05198), equation 1.
#
# ## Now fit your model
#
# After [chapter 9](09_your_model.ipynb) you can say, for a model and a number of GPUs, what fits and why. If you can't wait:
#
# ```
# actmem plan llama3-70b --gpus 64 --memory 80 --global-batch 512
# ```
#
# Next, [01 The memory wall](01_memory_wall.ipynb) shows why this matters, and [02 Counting bytes](02_counting_bytes.ipynb)
# where the 34 and the 5 come from.
