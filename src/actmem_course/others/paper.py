"""Numbers printed in 2205.05198, and the model FLOPs utilization (MFU) that follows from its times.

Our results are compared with them; no prediction uses them.

Table 3 (sizes) is in ``actmem.config``, because the models are built from it; table 2 is a set of formulas, in
``actmem.formulas.activations``. Numbers are as printed, rounded as printed.
"""

from dataclasses import dataclass

from actmem.config import PAPER_MODELS
from actmem.formulas.flops import A100_FLOPS_PER_SECOND, eq7, utilisation

#: Table 3, number of GPUs, without data parallelism.
TABLE3_DEVICES = {"22B": 8, "175B": 64, "530B": 280, "1T": 512}

#: Memory of one A100, the dashed line of figure 1; read as GiB, which is what such a card has.
A100_BYTES = 80 * 2**30


@dataclass(frozen=True)
class LayerTime:
    """One row of table 4: times of one layer of the 22B model.

    Attributes:
        forward_ms: Milliseconds of forward.
        backward_ms: Milliseconds of backward, with recomputation.
        combined_ms: Milliseconds of both.
        overhead_percent: How much longer both take than in the row "baseline, no recompute", in percent; None there.
    """

    forward_ms: float
    backward_ms: float
    combined_ms: float
    overhead_percent: int | None


TABLE4 = {
    "baseline, no recompute": LayerTime(7.7, 11.9, 19.6, None),
    "sequence parallel": LayerTime(7.2, 11.8, 19.0, -3),
    "full recompute": LayerTime(7.7, 19.5, 27.2, 39),
    "selective": LayerTime(7.7, 13.2, 20.9, 7),
    "selective + sequence parallel": LayerTime(7.2, 13.1, 20.3, 4),
}


@dataclass(frozen=True)
class IterationTime:
    """One row of table 5: one iteration of a model with full recomputation, and with the paper's methods.

    Attributes:
        full_recompute_seconds: Seconds with full recomputation.
        seconds: Seconds with sequence parallelism and selective recomputation.
        gain_percent: How much higher the throughput is than with full recomputation, in percent.
        mfu_percent: Model FLOPs utilization, in percent.
        hfu_percent: Hardware FLOPs utilization, which counts recomputation, in percent.
    """

    full_recompute_seconds: float
    seconds: float
    gain_percent: float
    mfu_percent: float
    hfu_percent: float


TABLE5 = {
    "22B": IterationTime(1.42, 1.10, 29.0, 41.5, 43.7),
    "175B": IterationTime(18.13, 13.75, 31.8, 51.4, 52.8),
    "530B": IterationTime(49.05, 37.83, 29.7, 56.0, 57.0),
    "1T": IterationTime(94.42, 71.49, 32.1, 56.3, 57.0),
}


@dataclass(frozen=True)
class DataParallelRun:
    """A run of the 530B model with data parallelism (section 6.3).

    Each replica trains on a batch as large as that of the run without data parallelism.

    Attributes:
        data_parallel_size: How many replicas of the model there are.
        num_devices: GPUs of all replicas together.
        seconds: Seconds of one training step with selective recomputation.
        mfu_percent: Model FLOPs utilization with selective recomputation, in percent.
        full_recompute_mfu_percent: Model FLOPs utilization with full recomputation, in percent.
    """

    data_parallel_size: int
    num_devices: int
    seconds: float
    mfu_percent: float
    full_recompute_mfu_percent: float


DATA_PARALLEL_530B = DataParallelRun(8, 2240, 39.15, 54.2, 42.1)

#: Figure 7 as section 6.1 reads it: bytes left, in percent of the tensor-parallel baseline.
FIGURE7_BOTH_PERCENT_BELOW = 20
FIGURE7_FULL_PERCENT = 10

#: Figure 9 and appendix B: saved on rank 0 of the 530B model by freeing outputs; printed as "GB".
FIGURE9_SAVED_GB = 2.73

#: Section 5: the FLOPs that selective recomputation adds, in percent.
SECTION5_ADDED_FLOPS_PERCENT = {"175B": 2.7, "530B": 1.6}


@dataclass(frozen=True)
class MicrobatchLevel:
    """One result of appendix C: microbatch-level recomputation.

    Attributes:
        mfu_percent: Model FLOPs utilization with microbatch-level recomputation, in percent.
        gain_points: By how many percentage points that is more than without it, as printed.
    """

    mfu_percent: float
    gain_points: float


APPENDIX_C = {"175B": MicrobatchLevel(52.3, 0.7), "530B": MicrobatchLevel(56.4, 0.4)}


def percent_of_peak(model_name: str, flops: int, seconds: float) -> float:
    """Return the FLOPs per second of an iteration in percent of the peak rate of the model's A100s, 312 TFLOP/s each.

    Args:
        model_name: a key of PAPER_MODELS, such as "175B"; it determines how many GPUs there are.
        flops: FLOPs of one iteration on all GPUs together.
        seconds: seconds of the iteration.
    """
    return 100 * utilisation(flops, seconds, PAPER_MODELS[model_name].parallel.num_devices, A100_FLOPS_PER_SECOND)


def mfu_percent(model_name: str, seconds: float) -> float:
    """Return an iteration's model FLOPs utilization (MFU) in percent, with the FLOPs of the paper's equation 7.

    Args:
        model_name: a key of PAPER_MODELS, such as "175B".
        seconds: seconds of one iteration.
    """
    model = PAPER_MODELS[model_name]
    return percent_of_peak(model_name, eq7(model.shape, model.global_batch_size), seconds)
