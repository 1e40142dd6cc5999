"""What public calculators print, beside bytes that were counted: table 2's rows, and one more sequence of a GPU run."""

from __future__ import annotations

from dataclasses import replace

import torch

from actmem.config import padded_vocab_size
from actmem.formulas.activations import TABLE2
from actmem.measure.emulate import emulated_rank
from actmem.models import PAPER_MODELS
from actmem_course.bench.layer_table import LayerTable
from actmem_course.bench.measure_runs import MIB, predict_nanotron
from actmem_course.others.calculators import CALCULATORS, calculator_bytes, calculator_sequence_bytes
from actmem_course.others.published import NANOTRON_MODEL, NANOTRON_RUNS, NANOTRON_SEQ_LENGTH, NanotronRun
from actmem_course.ranks import Ranks
from actmem_course.results import CalculatorResult


def measure_calculators() -> list[CalculatorResult]:
    """Each calculator's print for each row of table 2, one layer of the 22B model on one of its t ranks.

    Counted on an emulated rank, without what the paper leaves out: no calculator counts those bytes.
    """
    paper = PAPER_MODELS["22B"]
    t = paper.parallel.tensor_parallel_size
    with emulated_rank(t):
        rows = LayerTable(paper.shape).measure(Ranks(0, t, "cpu", emulated=True), torch.bfloat16)
    return [
        CalculatorResult(
            calculator.name,
            calculator.source,
            row.name,
            calculator_bytes(calculator, row, paper.shape, t),
            result.measured_bytes - result.extra_bytes,
            calculator.why,
        )
        for calculator in CALCULATORS
        for row, result in zip(TABLE2, rows)
    ]


def runs_of_two_sizes() -> tuple[NanotronRun, NanotronRun]:
    """Two published runs without a pipeline that differ only in their microbatch: what one more sequence takes on a GPU."""
    pairs = [
        (small, large)
        for small in NANOTRON_RUNS
        for large in NANOTRON_RUNS
        if small.pp == 1 and small.mbz < large.mbz
        and (small.gpus, small.dp, small.tp, small.pp) == (large.gpus, large.dp, large.tp, large.pp)
    ]  # fmt: skip
    return pairs[0]


def sequence_results() -> list[CalculatorResult]:
    """The same for one more sequence in the microbatch of a Llama, as GPUs measured it; the last line is ours."""
    small, large = runs_of_two_sizes()
    more = large.mbz - small.mbz
    counted = round((large.peak_allocated_mib - small.peak_allocated_mib) * MIB / more)
    what = f"1.1B Llama, tp {small.tp}, {small.gpus} GPUs"
    llama = replace(NANOTRON_MODEL, vocab_size=padded_vocab_size(NANOTRON_MODEL.vocab_size, small.tp, multiple=1))
    ours = [predict_nanotron(run.gpus, run.dp, run.tp, run.pp, run.mbz).bytes for run in (small, large)]
    lines = [
        CalculatorResult(
            calculator.name,
            calculator.source,
            what,
            calculator_sequence_bytes(calculator, llama, NANOTRON_SEQ_LENGTH, small.tp),
            counted,
            calculator.why_llama,
        )
        for calculator in CALCULATORS
    ]
    why = "counted row by row from that code"
    difference = (ours[1] - ours[0]) // more
    return [*lines, CalculatorResult("ours", "src/actmem_course/others/nanotron.py", what, difference, counted, why)]
