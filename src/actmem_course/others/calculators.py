"""What public memory calculators print for activations, before rounding, restated from what their code computes.

Each is asked in the way that suits it best: 16-bit activations and norms, GeLU, dropout on, attention scores
stored unless the row recomputes them.  Megatron-LM: its line for one layer; to the sum without sequence
parallelism it adds 5%.  Their weights and optimizer states are not compared here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actmem.config import ModelShape, check_layer, check_sizes
from actmem.formulas.activations import Configuration
from actmem.recipes import Recompute
from actmem_more.llama_shape import LlamaShape


@dataclass(frozen=True)
class Calculator:
    """One calculator.  source: repository and file, as of November 2026.

    layer: bytes of one layer in one row of table 2, given its sizes and t.  llama: what one more sequence of s tokens
    takes in a Llama under tensor and sequence parallelism with flash attention, as coefficients of Lsh, Lsf, Las, s, sh
    and sv, all divided by t.  why: the reason for what is wrong in table 2; why_llama: for what is missing in the Llama.
    """

    name: str
    source: str
    layer: Callable[[Configuration, ModelShape, int], int]
    why: str
    llama: tuple[int, int, int, int, int, int]
    why_llama: str


def _sizes(row: Configuration, shape: ModelShape, t: int) -> tuple[int, int, int]:
    """sbh, the scores 5as²b if the row stores them, and what divides the ten undivided sbh."""
    a, b, h, s = shape.letters()
    scores = 5 * a * s * s * b if Recompute.of(row.recompute).region == "none" else 0
    return s * b * h, scores, t if row.sequence_parallel else 1


def _playbook(row: Configuration, shape: ModelShape, t: int) -> int:
    sbh, scores, whole = _sizes(row, shape, t)
    if Recompute.of(row.recompute).region == "layer":
        return 2 * sbh
    return 10 * sbh // whole + 24 * sbh // t + (scores if row.sequence_parallel else scores // t)


def _cookbook(row: Configuration, shape: ModelShape, t: int) -> int:
    # Its one switch for checkpointing drops the scores; its one for partitioning divides all by t.
    sbh, scores, whole = _sizes(row, shape, t)
    return (34 * sbh + scores) // whole


def _megatron(row: Configuration, shape: ModelShape, t: int) -> int:
    sbh, _, _ = _sizes(row, shape, t)
    both = row.sequence_parallel and Recompute.of(row.recompute).region == "core"
    return 34 * sbh // t if both else 10 * sbh + 24 * sbh // t


def _llm_analysis(row: Configuration, shape: ModelShape, t: int) -> int:
    sbh, scores, whole = _sizes(row, shape, t)
    if Recompute.of(row.recompute).region == "layer":
        return 2 * sbh // t
    return 9 * sbh // whole + 24 * sbh // t + scores // t


_TWO_OF_FOUR = "counts two tensors of the gated MLP, which keeps four; lacks the gathered inputs"

CALCULATORS = (
    Calculator(
        "playbook",
        "nanotron/ultrascale-playbook, src/memory.js (the Ultra-Scale Playbook's memory widget)",
        _playbook,
        "with sequence parallelism on, it forgets that the attention scores are divided by t",
        (18, 8, 0, 0, 5, 4),
        "lacks the gathered inputs, and one of two float32 copies of the logits",
    ),
    Calculator(
        "cookbook",
        "EleutherAI/cookbook, calc/calc_transformer_mem.py",
        _cookbook,
        "t divides everything or nothing, and its checkpointing is the selective case, 34sbh",
        (34, 0, 0, 0, 0, 0),
        "takes every MLP for the paper's; lacks the gathered inputs and the logits",
    ),
    Calculator(
        "Megatron-LM",
        "NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py",
        _megatron,
        "assumes selective recomputation always, and sequence parallelism only together with it",
        (18, 4, 0, 8, 5, 4),
        _TWO_OF_FOUR,
    ),
    Calculator(
        "llm-analysis",
        "cli99/llm-analysis, llm_analysis/analysis.py",
        _llm_analysis,
        "leaves out the MLP's dropout mask; divides full recomputation's input by t, which nothing scatters",
        (21, 4, 8, 0, 0, 2),
        _TWO_OF_FOUR,
    ),
)


def calculator_bytes(
    calculator: Calculator, configuration: Configuration, shape: ModelShape, tensor_parallel_size: int
) -> int:
    """What it prints for one layer on one of t ranks, in bytes, 16-bit.  Raises ConfigError if t ranks can't share the layer."""
    parallel = configuration.parallel(tensor_parallel_size)
    check_layer(shape, parallel)
    return calculator.layer(configuration, shape, parallel.tensor_parallel_size)


def calculator_sequence_bytes(
    calculator: Calculator, decoder: LlamaShape, seq_length: int, tensor_parallel_size: int
) -> int:
    """What it adds for one more sequence of a Llama on one of t ranks, without a pipeline."""
    check_sizes(seq_length=seq_length, tensor_parallel_size=tensor_parallel_size)
    h, layers, s = decoder.hidden_size, decoder.num_layers, seq_length
    sizes = (
        layers * h,
        layers * decoder.ffn_hidden_size,
        layers * decoder.num_attention_heads,
        1,
        h,
        decoder.vocab_size,
    )
    return s * sum(count * size for count, size in zip(calculator.llama, sizes, strict=True)) // tensor_parallel_size
