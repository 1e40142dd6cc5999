"""GPU runs that others published, as printed: only to compare with, nothing here goes into a prediction."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TypeVar

from actmem.llama_shape import LlamaShape
from actmem_course.others import table_rows

_Run = TypeVar("_Run")


def _runs(kind: type[_Run], file: str) -> tuple[_Run, ...]:
    """A run a row; what is no number is text."""
    number = re.compile(r"\d+(\.\d+)?")
    return tuple(
        kind(**{name: json.loads(value) if number.fullmatch(value) else value for name, value in row.items()})
        for row in table_rows(file)
    )


@dataclass(frozen=True)
class NanotronRun:
    """One run of the 1.1B Llama on H100s: sizes, and the peak of ``torch.cuda.max_memory_allocated`` on rank 0, in MiB."""

    gpus: int
    dp: int
    tp: int
    pp: int
    mbz: int
    peak_allocated_mib: float


#: What huggingface/bench_cluster trained in July 2024 (bench_cluster/template/base_config.py).
NANOTRON_SEQ_LENGTH = 4096
NANOTRON_MODEL = LlamaShape(
    NANOTRON_SEQ_LENGTH, 1, 2048, 32, 32, 4096, num_layers=24, vocab_size=50257, tied_embeddings=True
)
#: Sequences of one step.
NANOTRON_GLOBAL_BATCH = 1024

#: Data sets nanotron/old_bench and nanotron/bench_cluster, llama-1B/…/log_metrics.csv: 18 rows drawn at random.
NANOTRON_RUNS = _runs(NanotronRun, "nanotron_runs.tsv")


@dataclass(frozen=True)
class TitanRun:
    """One line of torchtitan's tables.  reserved_gib: by the allocator, the most of all ranks.

    recompute: "selective", "full".  changed: "" for eager 16-bit training, else what else was on.
    """

    model: str
    gpus: int
    local_batch_size: int
    seq_length: int
    recompute: str
    changed: str
    reserved_gib: float
    tokens_per_second: float
    data_parallel_size: int
    context_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int


#: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100s with 96 GB; s is its default where none is given.
TITAN_RUNS = _runs(TitanRun, "titan_runs.tsv")


@dataclass(frozen=True)
class Llama3Run:
    """One line of the Llama 3 report's table 4, 405B on H100s: layout, and TFLOP/s of each GPU."""

    gpus: int
    context_parallel_size: int
    data_parallel_size: int
    seq_length: int
    batch_per_data_rank: int
    tflops: float


#: 2407.21783 table 4; TP 8 and PP 16 in all lines.
LLAMA3_RUNS = (
    Llama3Run(8192, 1, 64, 8192, 32, 430),
    Llama3Run(16384, 1, 128, 8192, 16, 400),
    Llama3Run(16384, 16, 8, 131072, 16, 380),
)
