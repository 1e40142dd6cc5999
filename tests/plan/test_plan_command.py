"""``actmem plan`` as a user types it: text, JSON, a page, exit codes, bad input in one line."""

import json
import subprocess
import sys

import pytest

from actmem_tools.__main__ import main as command

REQUEST = ["175b", "--gpus", "64", "--memory", "80", "--per-node", "8", "--seq-length", "2048", "--global-batch", "64"]


def main(options):
    return command(["plan", *options])


def test_json_has_the_bill_line_by_line(capsys):
    assert main([*REQUEST, "--device", "a100", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    bill, chosen = out["bill"], out["plans"][0]
    assert sum(line["bytes"] for line in bill["lines"]) == bill["bytes"] == chosen["bytes"]
    assert bill["bytes"] + bill["allowance_bytes"] + bill["free_bytes"] == 80 * 2**30
    parts = {line["part"] for line in bill["lines"]}
    assert {"weights", "gradients", "optimizer states", "activations", "transient"} <= parts
    assert sum(value for name, value in chosen["seconds"].items() if name not in ("total", "hidden")) == pytest.approx(
        chosen["seconds"]["total"]
    )
    usable = 80 * 2**30 - bill["allowance_bytes"]
    assert out["refused"] and all(r["over_bytes"] == r["bytes"] - usable > 0 for r in out["refused"])
    assert out["counted"] > 1000
    assert set(out["settings"]) == {"Megatron-LM", "torchtitan", "Hugging Face"}


def test_text_fits_80_columns_and_names_the_flags(tmp_path, capsys):
    data = tmp_path / "plan.json"
    assert main([*REQUEST, "--tensor", "8", "--json", str(data)]) == 0
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["plans"] and all("TP 8" in plan["text"] for plan in found["plans"])
    out = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())
    for words in (
        "hidden",
        "Times within 10% of the fastest's",
        "Without the sizes asked for",
        "optimizer states",
        "allowance",
        "--tensor-model-parallel-size",
    ):
        assert words in out


def test_the_nearest_layout_fits_with_what_it_lacks(capsys):
    request = ["1T", "--gpus", "64", "--global-batch", "512", "--json", "--memory"]
    assert main([*request, "80"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert out["plans"] == [] and out["bill"] is None and out["refused"]
    over = out["refused"][0]["over_bytes"]
    for more, code in ((over, 0), (over - 1, 1)):
        assert main([*request, str(80 + more / 2**30)]) == code
        capsys.readouterr()


@pytest.mark.slow
def test_the_same_answer_in_every_process():
    command = [sys.executable, "-m", "actmem_tools", "plan", *REQUEST, "--json"]
    seeds = ({"PYTHONHASHSEED": seed, "PYTHONPATH": "src"} for seed in "12")
    runs = [subprocess.run(command, capture_output=True, env=env, check=True) for env in seeds]
    assert runs[0].stdout == runs[1].stdout and runs[0].stderr == b""


BAD = {
    "no mode of the paper's": (["22b", "--gpus", "8", "--recompute", "offload"], "one of none, selective, elementwise"),
    "unknown model": (["lama3-70b", "--gpus", "8"], "did you mean llama3-70b or"),
    "gpus that don't divide": (["22b", "--gpus", "12"], "gpus: 12 must be divisible by per_node = 8"),
    "no memory": (["22b", "--gpus", "8", "--memory", "0"], "memory: must be at least 1, got 0"),
    "too little for anything": (["22b", "--gpus", "8", "--memory", "3"], "leaves nothing for the model"),
    "no such device": (["22b", "--gpus", "8", "--device", "cpu"], "device: must be one of a100, h100, h200, b200"),
    "letters of a named model's configuration": (["llama3-8b", "--framework", "hugging-face", "--letters", "h:8"], "letters: is for code of your own"),
    "no such layout": (["22b", "--gpus", "8", "--tensor", "3"], "gpus: no layout of 8 has a global batch of 64"),
    "another unit": (["22b", "--gpus", "8", "--memory", "80GB"], "--memory: must be a number of GiB above 0, as 80 or 80GiB"),
    "one replica": (["22b", "--gpus", "8", "--tensor", "8", "--zero", "1"], "plan: zero: 1 divides states among data · context ranks, and these sizes leave one"),
    "what nothing runs": (["llama3-8b", "--gpus", "8", "--recompute", "elementwise"], "no framework whose settings are printed runs this; --all"),
    "no tensor ranks": (["22b", "--gpus", "8", "--tensor", "0"], "plan: tensor: must be at least 1, got 0"),
    "no context ranks": (["22b", "--gpus", "8", "--context", "2"], "plan: context: 22B's layer has no context parallelism"),
    "no gpus": (["22b"], "gpus: must be given"),
    "for layouts only": (["llama3-8b", "--lora", "8", "--tensor", "2"], "tensor: is for a named model's layouts, not for --lora"),
    "an optimizer that isn't run": (["22b", "--gpus", "8", "--optimizer", "sgd", "--verify"], "verify: only adamw's mixed step is run here, not that of sgd"),
    "a precision that isn't run": (["22b", "--gpus", "8", "--precision", "bf16-states", "--verify"], "not that of adamw, bf16-states"),
    "no such optimizer": (["22b", "--gpus", "8", "--optimizer", "lion"], "optimizer: must be one of adamw, adamw-fused, adamw8bit, momentum, sgd, got 'lion'"),
    "no such precision": (["22b", "--gpus", "8", "--precision", "fp4"], "precision: must be one of mixed, bf16-gradients, bf16-states, bf16, fp8,"),
    "fp8 of experts": (["mixtral-8x7b", "--gpus", "8", "--precision", "fp8"], "for layers like Llama's, without experts, not mixtral-8x7b's"),
    "fp8 on Blackwell": (["llama3-8b", "--gpus", "8", "--precision", "fp8", "--device", "b200"], "precision: fp8's rule is Megatron-LM's on Hopper, h100"),
    "fp8 of no framework": (["llama3-8b", "--gpus", "8", "--precision", "fp8", "--all"], "and not of --all"),
    "fp8 and FSDP": (["llama3-8b", "--gpus", "8", "--precision", "fp8", "--zero", "3"], "settings are printed runs this\n"),
    "a file behind options": (["--gpus", "8", "model.py:make", "--verify"], "verify: is for a named model's layouts, not for model.py:make"),
    "for code only": (["llama3-8b", "--gpus", "8", "--at", "s=9"], "at: is for --framework, --loss, --lora or a file's model"),
    "full disk": (["22b", "--gpus", "8", "--json", "/dev/full"], "cannot write /dev/full: No space left on device"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, capsys):
    arguments, expected = BAD[case]
    if "--memory" not in arguments:
        arguments = [*arguments, "--memory", "80"]
    assert main([*arguments, "--global-batch", "64"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("actmem plan: ") and expected in output.err
