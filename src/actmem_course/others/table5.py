"""Table 5, recomputed from equations 7 and 8 and the printed times."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.formulas.flops import A100_FLOPS_PER_SECOND, eq7, text_selective, utilisation
from actmem.models import PAPER_MODELS
from actmem_course.others import paper


@dataclass(frozen=True)
class Utilisation:
    """One model of table 5, in percent of 312 TFLOP/s a device; the printed values are in ``paper.TABLE5``.

    mfu_percent: equation 7.  hfu_text_percent: with the core attention run once more, as the text says.
    full_recompute_mfu_percent: equation 7 at the other time, which table 5 leaves out.
    """

    model: str
    mfu_percent: float
    hfu_text_percent: float
    full_recompute_mfu_percent: float


def table5() -> list[Utilisation]:
    """All four models."""
    rows = []
    for name, model in PAPER_MODELS.items():
        time, sizes = paper.TABLE5[name], (model.shape, model.global_batch_size)
        useful, text = eq7(*sizes), text_selective(*sizes)
        full_percent = percent_of_peak(name, useful, time.full_recompute_seconds)
        percents = percent_of_peak(name, useful, time.seconds), percent_of_peak(name, text, time.seconds)
        rows.append(Utilisation(name, *percents, full_percent))
    return rows


def percent_of_peak(model_name: str, flops: int, seconds: float) -> float:
    """FLOPs of an iteration as a share of the highest rate of the model's A100s."""
    return 100 * utilisation(flops, seconds, PAPER_MODELS[model_name].num_devices, A100_FLOPS_PER_SECOND)


def data_parallel_530b_mfu_percent() -> float:
    """MFU of the 530B model with 8-way data parallelism: 8 global batches on 8 times the devices."""
    run, model = paper.DATA_PARALLEL_530B, PAPER_MODELS["530B"]
    flops = eq7(model.shape, model.global_batch_size * run.data_parallel_size)
    return 100 * utilisation(flops, run.seconds, run.num_devices, A100_FLOPS_PER_SECOND)
