"""What every command refuses, and how: one line, exit code 2; Ctrl-C is one line and 130."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem_more.store import HostMemory
from actmem_tools.__main__ import main


def said(capsys, *arguments):
    code = main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return code, lines[0]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "has a quantization_config"),
        ({"num_key_value_heads": 3}, "has 4 query heads and 3 key heads"),
    ],
)
def test_a_configuration_that_has_no_bill(change, rule, tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **sizes, **change}))
    code, line = said(capsys, "plan", str(config), "--memory", "80", "--at", "s=128,b=1")
    assert code == 2 and rule in line


def test_a_full_disk_has_its_name():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    command = [sys.executable, "-m", "actmem_tools", "plan", "22b", "--gpus", "8", "--memory", "80"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr.startswith("actmem plan: cannot use standard output: No space left") and done.returncode == 2


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["record", "plan", "tape"])
def test_ctrl_c_is_one_line(word, tmp_path):
    slow = "import sys, time\ndef factory(s=1, b=1, l=1):\n    print('here', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(slow)
    more = {"record": [], "plan": ["--memory", "80", "--at", "s=8,b=1,l=2"], "tape": ["--letters", "s,b", "--out", "x"]}
    command = [sys.executable, "-m", "actmem_tools", word, "slow.py:factory", *more[word]]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    while run.stderr.readline() not in ("here\n", ""):
        pass
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (130, f"actmem {word}: interrupted\n")


def test_a_layer_that_offloads_runs_without_data():
    with torch.device("meta"):
        shape = ModelShape(8, 1, 16, 4)
        layer = TransformerLayer(shape, recompute={"GeLU input": "offload"}, stores={"offload": HostMemory()})
        layer(torch.empty(8, 1, 16, requires_grad=True)).sum().backward()
    assert all(parameter.grad.is_meta for parameter in layer.parameters())
