"""The table of attention kernels: which one runs."""

import json
from pathlib import Path

import pytest
from gpu_steps.kernels import CALLS

from actmem_course.lab_tools.gpu_kernel import attention_rows
from actmem_more.attention_kernels import AttentionCall, Gpu, attention_kernel

H100, A100, T4 = Gpu(), Gpu((8, 0)), Gpu((7, 5))
LLAMA = dict(head_size=128, value_size=128, num_heads=8, num_key_value_heads=2)
LLAMA |= dict(num_queries=64, num_keys=64, causal=True)
EQUAL = LLAMA | {"num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("gpu", "dtype", "call", "kernel"),
    [
        (H100, "bfloat16", LLAMA, "cuDNN"),
        (Gpu(cudnn=91500), "bfloat16", LLAMA, "flash"),
        (Gpu((12, 0)), "bfloat16", LLAMA, "flash"),
        (A100, "float16", LLAMA, "flash"),
        (H100, "bfloat16", LLAMA | {"dropout": 0.1}, "flash"),
        (H100, "bfloat16", LLAMA | {"dropout": 0.125}, "cuDNN"),
        (H100, "bfloat16", LLAMA | {"head_size": 12, "value_size": 12}, "flash"),
        (H100, "bfloat16", LLAMA | {"head_size": 192, "value_size": 192}, "flash"),
        (H100, "bfloat16", EQUAL | {"head_size": 192}, "cuDNN"),
        (A100, "bfloat16", EQUAL | {"head_size": 192}, "memory-efficient"),
        (H100, "bfloat16", EQUAL | {"head_size": 256, "value_size": 256}, "flash"),
        # As an H200 with torch 2.11 chose.
        (Gpu(torch=(2, 11)), "bfloat16", EQUAL | {"head_size": 256, "value_size": 256}, "cuDNN"),
        (Gpu(torch=(2, 11)), "bfloat16", LLAMA | {"dropout": 0.1}, "cuDNN"),
        (Gpu(cudnn=92300, torch=(2, 14)), "bfloat16", EQUAL | {"head_size": 256, "value_size": 256}, "cuDNN"),
        (Gpu((8, 9)), "bfloat16", EQUAL | {"head_size": 224, "value_size": 224}, "memory-efficient"),
        (A100, "bfloat16", EQUAL | {"masked": True}, "memory-efficient"),
        (H100, "bfloat16", LLAMA | {"masked": True}, "cuDNN"),
        (A100, "bfloat16", LLAMA | {"masked": True}, "math"),
        (Gpu((8, 0), torch=(2, 14)), "bfloat16", LLAMA | {"masked": True}, "memory-efficient"),
        (A100, "bfloat16", EQUAL | {"num_keys": 65}, "memory-efficient"),
        (A100, "float32", EQUAL, "memory-efficient"),
        (A100, "float32", EQUAL | {"head_size": 6, "value_size": 6}, "math"),
        (T4, "float32", EQUAL | {"head_size": 6, "value_size": 6}, "memory-efficient"),
        (T4, "float16", EQUAL, "memory-efficient"),
        (T4, "float16", LLAMA, "math"),
        (T4, "bfloat16", EQUAL, "math"),
        (A100, "float64", EQUAL, "math"),
    ],
)
def test_which_kernel_runs(gpu, dtype, call, kernel):
    assert attention_kernel(gpu, AttentionCall(dtype, **call)) == kernel


def test_what_is_kept_besides():
    kernels = "flash", "cuDNN", "memory-efficient"
    kept = {kernel: [row.bytes for row in attention_rows(kernel, 3, 4, 40)] for kernel in kernels}
    assert kept == {"flash": [24], "cuDNN": [16], "memory-efficient": [16, 4 * 3 * 4 * 24]}
    assert [row.bytes for row in attention_rows("memory-efficient", 3, 4, 64)] == [16]
    with pytest.raises(ValueError, match="keeps the scores"):
        attention_rows("math", 1, 1, 1)


def results_of_gpus():
    """The attention calls of every result in labs/results: the GPU's choice and what its kernels kept."""
    for path in sorted((Path(__file__).parents[1] / "labs" / "results").glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        machine = results["machine"]
        for entry in results.get("kernels", []):
            yield machine, entry


def test_gpus_chose_and_kept_what_the_table_says():
    seen = 0
    for machine, entry in results_of_gpus():
        major, minor = map(int, machine["compute_capability"].split("."))
        release = map(int, machine["torch"].split(".")[:2])
        call = next(call for call in CALLS if call.name == entry["name"])
        gpu = Gpu((major, minor), machine["cudnn"], (next(release), next(release)))
        assert attention_kernel(gpu, call.described("bfloat16")) == entry["chosen"], entry["name"]
        for kernel, kept in entry["kernels"].items():
            if "predicted_bytes" in kept:
                assert kept["saved_bytes"] == kept["predicted_bytes"], (entry["name"], kernel)
        seen += 1
    assert seen >= len(CALLS)
