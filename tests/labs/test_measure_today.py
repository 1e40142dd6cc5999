"""Today's layer as a user measures it: torchrun or --emulate, JSON, and bad input in one line."""

import json

import pytest
from measure_today import CONTEXT_WORDS, configurations

from tests.labs.in_process import lab_results, shown_in_80_columns
from tests.tiers import at_night

SCRIPT = "measure_today.py"


def test_on_two_ranks(pools):
    results = lab_results(pools[2], SCRIPT)
    assert len(results) == 2 * len({c.name for c in configurations()}) == 24
    for result in results:
        assert result["measured_bytes"] == result["predicted_bytes"] + result["extra_bytes"] > 0
        assert result["tensor_parallel_size"] == (2 if "tensor" in result["configuration"] else 1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "options",
    [
        ["--model", "llama3-405b"],
        ["--model", "qwen3-32b", "--dtype", "float32"],
        at_night(["--model", "qwen3-30b-a3b", "--routing", "one-sided"]),
        at_night(["--model", "deepseek-v3", "--seq-length", 4096]),
        ["--model", "llama3-405b", "--context", 4, "--context-kind", "ulysses"],
        ["--model", "qwen3-30b-a3b", "--context", 4, "--context-kind", "gather-plain", "--routing", "one-sided"],
        ["--seq-length", 64, "--micro-batch-size", 3, "--hidden-size", 48, "--num-attention-heads", 8,
         "--num-key-value-heads", 2, "--ffn-hidden-size", 88],
    ],
)  # fmt: skip
def test_emulated(options, tmp_path):
    path = tmp_path / "results.json"
    shown = shown_in_80_columns(SCRIPT, "--emulate", 8, *options, "--json", path)
    assert "12 of 12 measurements agree with the formulas to the byte" in shown
    results = {result["configuration"]: result for result in json.loads(path.read_text())}
    names = configurations(CONTEXT_WORDS[options[5]]) if "--context" in options else configurations()
    assert results.keys() == {one.name for one in names} and all(
        result["difference_bytes"] == 0 for result in results.values()
    )


def test_context_parallel_on_real_ranks(pools):
    results = lab_results(pools[4], SCRIPT, "--context", 2)
    assert len(results) == 4 * 12
    wanted = {one.name: 2 if one.tensor_parallel else 1 for one in configurations(CONTEXT_WORDS["gather"])}
    assert {result["configuration"]: result["tensor_parallel_size"] for result in results} == wanted
    assert all(result["measured_bytes"] == result["predicted_bytes"] > 0 for result in results)
