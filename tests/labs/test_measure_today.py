"""Today's layer as a user measures it: torchrun or --emulate, JSON, and bad input in one line."""

import json

import pytest

from actmem.config import ConfigError, ModelShape
from actmem.llama_shape import TINY_LLAMA
from actmem_course import launch
from actmem_course.bench.measure_today import CONFIGURATIONS, check_room
from tests.labs.in_process import lab_exit

SCRIPT = "measure_today.py"
NAMES = {
    "none", "selective", "elementwise", "full",
    "tensor", "tensor+selective", "tensor+elementwise", "tensor+full",
    "tensor+sequence", "tensor+sequence+selective", "tensor+sequence+elementwise", "tensor+sequence+full",
}  # fmt: skip


def test_under_torchrun():
    results = launch.results(SCRIPT, "--dtype", "float32", processes=2)
    assert {c.name for c in CONFIGURATIONS} == NAMES and len(results) == 2 * len(NAMES)
    for result in results:
        assert result["measured_bytes"] == result["predicted_bytes"] + result["extra_bytes"] > 0
        assert result["tensor_parallel_size"] == (2 if "tensor" in result["configuration"] else 1)


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "llama3-405b"],
        ["--model", "qwen3-32b", "--dtype", "float32"],
        ["--model", "qwen3-30b-a3b", "--routing", "one-sided"],
        ["--paper-layer", "--model", "1T", "--dtype", "float32"],
        ["--seq-length", 64, "--micro-batch-size", 3, "--hidden-size", 48, "--num-attention-heads", 8,
         "--num-key-value-heads", 2, "--ffn-hidden-size", 88],
    ],
)  # fmt: skip
def test_emulated(options, tmp_path):
    path = tmp_path / "results.json"
    done = launch.run(SCRIPT, "--emulate", 8, *options, "--json", path)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 measurements agree with the formulas to the byte" in done.stdout
    # The paper's formula leaves bytes out, and the table says why they are kept; today's leaves out none.
    reasons = ("layer-norm 1 statistics", "causal mask", "random-number state")
    assert [f"\n {term} " in done.stdout for term in reasons] == 3 * ["--paper-layer" in options]
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines()) and "…" not in done.stdout
    results = {result["configuration"]: result for result in json.loads(path.read_text())}
    assert results.keys() == NAMES and all(result["difference_bytes"] == 0 for result in results.values())


BAD: dict[str, tuple[list, str]] = {
    "unknown model": (["--model", "llama9"], "--model: must be one of tiny-llama, llama3-8b"),
    "a paper's model without its layer": (["--model", "175B"], "--model: must be one of tiny-llama"),
    "k in the paper's layer": (
        ["--paper-layer", "--num-key-value-heads", 4],
        "--num-key-value-heads: the paper's layer has none",
    ),
    "k does not divide a": (["--num-key-value-heads", 3], "--num-attention-heads: 8 must be divisible by"),
    "zero": (["--ffn-hidden-size", 0], "--ffn-hidden-size: must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, monkeypatch, capsys):
    options, rule = BAD[case]
    code, out, (line,) = lab_exit(SCRIPT, ["--emulate", 2, *options], monkeypatch, capsys)
    assert (code, out) == (2, "") and rule in line


def test_room_counts_the_scores_that_the_papers_layer_needs_for_a_moment():
    shape = ModelShape(4096, 1, 64, 8, vocab_size=1)
    scores = 8 * 4096**2
    kept = 34 * 4096 * 64 + 5 * scores + 2 * 12 * 64**2
    check_room(shape, 2, 1, kept + 4 * scores)
    with pytest.raises(ConfigError, match="^model shape: 1 ranks need about 1.1 GiB"):
        check_room(shape, 2, 1, kept + 4 * scores - 1)


def test_room_of_todays_layer_is_what_it_keeps_and_its_weights():
    s, b, h, a, k, f = 64, 2, 128, 8, 4, 352
    kept = 12 * s * b * h + 4 * s * b * k * 16 + 6 * s * b * f + 4 * a * s * b + 8 * s * b
    weights = 2 * h * (2 * (a + k) * 16 + 3 * f)
    check_room(TINY_LLAMA, 2, 3, 3 * (kept + weights))
    with pytest.raises(ConfigError, match="^model shape: 3 ranks need"):
        check_room(TINY_LLAMA, 2, 3, 3 * (kept + weights) - 1)
