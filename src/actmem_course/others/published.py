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
    """One line of torchtitan's tables: Llama 3 8B, FSDP, eager in 16 bits, selective recomputation; tokens/s of each GPU."""

    gpus: int
    local_batch_size: int
    seq_length: int
    tokens_per_second: float


#: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100s with 96 GB; s is its default.
TITAN_RUNS = (TitanRun(8, 2, 8192, 5762), TitanRun(128, 2, 8192, 5605))


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
