"""GPU runs that others published, as printed: only to compare with, nothing here goes into a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.llama_shape import LlamaShape


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
NANOTRON_RUNS = tuple(
    NanotronRun(*row)
    for row in (
        (16, 16, 1, 1, 1, 15785.37),
        (8, 2, 1, 4, 4, 39056.83),
        (16, 2, 1, 8, 2, 22834.67),
        (16, 2, 1, 8, 4, 42485.19),
        (16, 1, 1, 16, 2, 22941.07),
        (8, 4, 2, 1, 8, 43650.72),
        (64, 32, 2, 1, 8, 42258.96),
        (8, 1, 2, 4, 4, 22492.98),
        (16, 1, 2, 8, 2, 13251.43),
        (8, 2, 4, 1, 8, 25808.34),
        (64, 16, 4, 1, 2, 7519.63),
        (64, 16, 4, 1, 16, 46946.91),
        (8, 1, 4, 2, 8, 25707.36),
        (16, 1, 4, 4, 4, 13109.32),
        (16, 1, 4, 4, 16, 47092.10),
        (8, 1, 8, 1, 32, 60095.72),
        (16, 1, 8, 2, 8, 16549.94),
        (64, 1, 8, 8, 16, 34839.89),
    )
)


@dataclass(frozen=True)
class TitanRun:
    """One line of torchtitan's tables: peak memory that the allocator reserved, in GiB, the most of all ranks.

    recompute: "selective", "full".  changed: "" for eager 16-bit training, else what else was on.
    pipeline_parallel_size above 1: the file doesn't say which rank it is.
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
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


_ALL = "compile, Float8"
#: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100s with 96 GB; s is its default where none is given.
TITAN_RUNS = (
    TitanRun("llama3-8b", 8, 2, 8192, "selective", "", 82.4, 5762, 8),
    TitanRun("llama3-8b", 8, 2, 8192, "selective", "compile", 77.0, 6667, 8),
    TitanRun("llama3-8b", 8, 2, 8192, "selective", _ALL, 76.8, 8532, 8),
    TitanRun("llama3-8b", 128, 2, 8192, "selective", "", 67.0, 5605, 128),
    TitanRun("llama3-8b", 128, 2, 8192, "selective", "compile", 62.0, 6514, 128),
    TitanRun("llama3-8b", 128, 2, 8192, "selective", _ALL, 61.8, 8380, 128),
    TitanRun("llama3-8b", 8, 1, 32768, "full", _ALL, 83.9, 3890, 8),
    TitanRun("llama3-8b", 8, 1, 65536, "full", _ALL, 84.2, 2540, 4, 2),
    TitanRun("llama3-8b", 8, 1, 131072, "full", _ALL, 84.0, 1071, 2, 4),
    TitanRun("llama3-8b", 8, 1, 262144, "full", _ALL, 84.5, 548, 1, 8),
    TitanRun("llama3-70b", 256, 16, 8192, "full", _ALL, 71.9, 829, 32, 1, 8),
    TitanRun("llama3-405b", 512, 32, 8192, "full", "compile, Float8, async TP", 82.5, 100, 8, 1, 8, 8),
)


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
