"""Table 5, recomputed from equations 7 and 8 and the printed times."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.formulas.flops import A100_FLOPS_PER_SECOND, eq7, eq8, hardware_flops, text_selective, utilisation
from actmem.models import PAPER_MODELS
from actmem_course.others import paper


@dataclass(frozen=True)
class Utilisation:
    """One model of table 5, in percent of 312 TFLOP/s a device; the printed values are in ``paper.TABLE5``.

    mfu_percent: equation 7.  hfu_eq8_percent: equation 8, as printed.  hfu_text_percent: with the core
    attention run once more, as the text says.  hfu_stopped_percent: without its second product.
    full_recompute_mfu_percent: equation 7 at the other time, which table 5 leaves out.
    """

    model: str
    mfu_percent: float
    hfu_eq8_percent: float
    hfu_text_percent: float
    hfu_stopped_percent: float
    full_recompute_mfu_percent: float


def table5() -> list[Utilisation]:
    """All four models."""
    return [_row(name) for name in PAPER_MODELS]


def _row(name: str) -> Utilisation:
    model, time = PAPER_MODELS[name], paper.TABLE5[name]
    shape, batch = model.shape, model.global_batch_size

    def percent(flops: int, seconds: float) -> float:
        return 100 * utilisation(flops, seconds, model.num_devices, A100_FLOPS_PER_SECOND)

    return Utilisation(
        name,
        percent(eq7(shape, batch), time.seconds),
        percent(eq8(shape, batch), time.seconds),
        percent(text_selective(shape, batch), time.seconds),
        percent(hardware_flops(shape, batch, "selective"), time.seconds),
        percent(eq7(shape, batch), time.full_recompute_seconds),
    )


def data_parallel_530b_mfu_percent() -> float:
    """MFU of the 530B model with 8-way data parallelism: 8 global batches on 8 times the devices."""
    run, model = paper.DATA_PARALLEL_530B, PAPER_MODELS["530B"]
    flops = eq7(model.shape, model.global_batch_size * run.data_parallel_size)
    return 100 * utilisation(flops, run.seconds, run.num_devices, A100_FLOPS_PER_SECOND)
