"""GPU runs that others published, as printed: only to compare with, nothing here goes into a prediction."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.plan.decoder import Decoder


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
NANOTRON_MODEL = Decoder(2048, 4096, 24, 32, 32, 50257, tied_embeddings=True)
NANOTRON_SEQ_LENGTH = 4096
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
