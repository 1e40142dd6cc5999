"""Table 5 and the FLOPs behind it: equations 7 and 8, what the text says, what torch counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actmem import paper
from actmem.formulas.flops import eq7, eq8, hardware_flops, text_selective, utilisation
from actmem.formulas.table5 import data_parallel_530b_mfu_percent
from actmem.lab.paper.entries import Entry
from actmem.lab.paper.flops import count_iteration
from actmem.lab.paper.jobs import Job, Results
from actmem.models import PAPER_MODELS


@dataclass(frozen=True)
class _Way:
    """One way to run an iteration.  full: it is timed by table 5's other column, full recomputation."""

    recompute: str
    flops: str
    use: str
    full: bool = False


_WAYS = (
    _Way("none", "model, eq. 7", "MFU"),
    _Way("paper-selective", "selective, text: eq. 7 + 4BLs²h", "HFU, selective by the text"),
    _Way("selective", "selective, ours: eq. 7 + 2BLs²h", "HFU, selective, ours"),
    _Way("paper-full", "full, to the end: layers × 4/3", "HFU, full recomputation", full=True),
    _Way("full", "full, ours: without the last 4h→h", "", full=True),
)


def count_job(name: str, recompute: str) -> Job:
    """The job whose result is the counted FLOPs of an iteration, by operator."""
    return Job(count_iteration, (name, recompute), f"{name}, FLOPs, {recompute}")


def percent(model_name: str, flops: int, seconds: float) -> float:
    """Share of the A100s' highest rate."""
    return 100 * utilisation(flops, seconds, PAPER_MODELS[model_name].num_devices, paper.A100_FLOPS_PER_SECOND)


def table5_jobs(models: Sequence[str]) -> list[Job]:
    return [count_job(name, "none") for name in models]


def table5(models: Sequence[str], results: Results) -> list[Entry]:
    """Gain, MFU and HFU as printed and from the printed times; MFU also from counted FLOPs."""
    entries = []
    for name in models:
        model, time = PAPER_MODELS[name], paper.TABLE5[name]
        shape, batch = model.shape, model.global_batch_size
        counted = sum(results[count_job(name, "none")].values())
        full, both = time.full_recompute_seconds, time.seconds
        entries += [
            Entry("table5", name, "gain in throughput", "%", time.gain_percent, 100 * (full / both - 1)),
            Entry(
                "table5", name, "MFU, eq. 7", "%", time.mfu_percent, percent(name, eq7(shape, batch), both),
                measured=percent(name, counted, both),
            ),
            Entry("table5", name, "HFU, eq. 8", "%", time.hfu_percent, percent(name, eq8(shape, batch), both)),
            Entry(
                "table5", name, "MFU with full recomputation", "%", None, percent(name, eq7(shape, batch), full),
                measured=percent(name, counted, full),
            ),
        ]
        if name == "530B":
            run = paper.DATA_PARALLEL_530B
            label = f"MFU, {run.num_devices} GPUs, {run.data_parallel_size}-way data parallel"
            entries.append(Entry("table5", name, label, "%", run.mfu_percent, data_parallel_530b_mfu_percent()))
            label = "the same with full recomputation"
            entries.append(Entry("table5", name, label, "%", run.full_recompute_mfu_percent))
    return entries


def flops_jobs(models: Sequence[str]) -> list[Job]:
    return [count_job(name, way.recompute) for name in models for way in _WAYS]


def flops(models: Sequence[str], results: Results) -> list[Entry]:
    """FLOPs of one iteration in every mode, then the MFU and HFU that they give."""
    entries = []
    for name in models:
        model, time = PAPER_MODELS[name], paper.TABLE5[name]
        shape, batch = model.shape, model.global_batch_size
        printed = {"none": eq7(shape, batch), "selective": eq8(shape, batch), "paper-selective": eq8(shape, batch)}
        counts, uses = [], []
        for way in _WAYS:
            predicted = text_selective(shape, batch) if way.recompute == "paper-selective" else hardware_flops(shape, batch, way.recompute)
            operators = results[count_job(name, way.recompute)]
            counted = sum(operators.values())
            counts.append(
                Entry(
                    "flops", name, way.flops, "FLOPs", printed.get(way.recompute), predicted, measured=counted,
                    note=", ".join(f"{operator} {count:,}" for operator, count in operators.items()),
                )
            )
            if way.use:
                seconds = time.full_recompute_seconds if way.full else time.seconds
                share = {"none": time.mfu_percent}.get(way.recompute, None if way.full else time.hfu_percent)
                uses.append(
                    Entry(
                        "flops", name, way.use, "%", share, percent(name, predicted, seconds),
                        measured=percent(name, counted, seconds),
                    )
                )
        eq8_use = Entry("flops", name, "HFU, selective by eq. 8", "%", time.hfu_percent, percent(name, eq8(shape, batch), time.seconds))
        entries += [*counts, uses[0], eq8_use, *uses[1:]]
    return entries
