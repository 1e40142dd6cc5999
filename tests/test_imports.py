"""What importing the packages loads.  Which may import which is in pyproject.toml: import-linter's contracts."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_front_door_loads_nothing_until_a_name_is_asked_for():
    """All that needs no torch works without it, and a ledger without torch's compiler; every name of a front door is there."""
    program = """
import sys, actmem, actmem_more, actmem_tools
loaded = [name for name in sys.modules if name.startswith(("torch", "numpy", "actmem.", "actmem_more.", "actmem_tools."))]
assert not loaded, loaded
from actmem import ModelShape, Parallel, compare, layer_rows
from actmem_more import LlamaShape
from actmem_tools import plan, tape
assert len(layer_rows(ModelShape(8, 2, 16, 4), Parallel(2))) == len(actmem.rows.LAYER_TERMS)
assert "torch" not in sys.modules
from actmem import *
from actmem_more import *
for package in (actmem, actmem_more):
    assert set(package.__all__) <= set(dir(package)) & set(globals()), package
import torch
layer, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()), torch.ones(2, 2)
def saved(run):
    with record(layer) as ledger:
        run(x)
    return ledger.total_bytes
saved(layer)
assert "torch._dynamo" not in sys.modules, "torch's compiler takes as long to load as torch"
first, second = (saved(lambda x: torch.compile(layer, backend="aot_eager")(x)) for _ in range(2))
assert first == second > 0, "it makes no difference that the first loads it under the ledger's modes"
print(record.__module__, GPT.__module__, LlamaLayer.__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["actmem.ledger.recorder", "actmem.layers.gpt", "actmem_more.llama"]
