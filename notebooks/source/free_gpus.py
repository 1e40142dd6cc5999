# %% [markdown]
# # On a free GPU
#
# Kaggle lends you two T4 (*Settings → Accelerator*), Colab one. Open this notebook there, put the repository's address into the
# next cell, and run all cells. On your own machine the first cell does nothing.

# %%
REPOSITORY = ""  # such as https://…/actmem.git

import importlib.util
import subprocess
import sys

if importlib.util.find_spec("actmem_course") is None:
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY, "actmem"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--editable", "actmem"], check=True)
    sys.path.insert(0, "actmem/src")  # this kernel started before the installation

# %% [markdown]
# Which GPUs are there? Each rank needs a GPU of its own. With one GPU, one process emulates one rank of two: its kernels and
# its memory are real, and its collectives send nothing. Without a GPU, two ranks run on the CPU.

# %%
import torch

from actmem_course.figures import Varies, size_text, speed_facts
from actmem_course.lab_tools.machine import device_name, usual_dtype
from actmem_course.launch import results

gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
device = "cuda" if gpus else "cpu"
dtype = usual_dtype(device)
if gpus == 1:
    ranks, where = None, ("--emulate", 2, "--device", "cuda")
else:
    ranks, where = max(2, gpus), ("--device", device)
Varies({"device": device_name(device), "GPUs": gpus, "torch": torch.__version__, "dtype": dtype, "ranks": ranks or "one, emulated"})

# %% [markdown]
# **Table 2 of the paper**: what one layer saves for its backward pass, by formula and counted.

# %%
rows = results("measure_table2.py", "--dtype", dtype, *where, processes=ranks)
names = list(dict.fromkeys(row["configuration"] for row in rows))
exact = [all(row["exact"] for row in rows if row["configuration"] == name) for name in names]
print(f"{sum(exact)} of {len(names)} rows of table 2 agree with what autograd saves on every rank, to the byte")
Varies({row["configuration"]: size_text(row["measured_bytes"]) for row in rows})

# %% [markdown]
# **Table 4**: what recomputation costs in time. If the GPU has room for it, this is a layer of the paper's 22B model. If not, it
# is a tiny one, which spends most of its time starting kernels.

# %%
times = results("measure_speed.py", "--rounds", 8, *where, processes=ranks)
print(f"{sum(line['held_bytes'] == line['predicted_bytes'] for line in times)} of {len(times)} layers hold what their formulas say, to the byte")
Varies(speed_facts(times))

# %% [markdown]
# If you rent an H100 or more, `python labs/measure_gpu.py` measures everything in under nine minutes and writes it to
# `labs/results`: please send that file.
#
# The exercises run here too: `!cd actmem && python labs/lab2_tensor_parallel.py`. Then begin with `01_memory_wall.ipynb`.
